"""``minivllm chat`` as a person meets it: a real terminal, keys, Ctrl-C."""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import scripted_engine

pexpect = pytest.importorskip("pexpect")
pyte = pytest.importorskip("pyte")

CTRL_C, CTRL_D, ESCAPE = "\x03", "\x04", "\x1b"
STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """``minivllm chat`` on a scripted engine inside a pseudo-terminal of 120 columns."""

    def __init__(self, home: Path, *arguments: str, **environment: str) -> None:
        self.process = pexpect.spawn(
            sys.executable,
            [scripted_engine.__file__, "chat", *arguments],
            # NO_CPR: a pseudo-terminal does not answer the question where the cursor is.
            env={
                **os.environ,
                "TERM": "xterm",
                "PROMPT_TOOLKIT_NO_CPR": "1",
                "MINIVLLM_HOME": str(home),
                **environment,
            },
            dimensions=(40, 120),
            encoding="utf-8",
            timeout=20,
        )

    def expect(self, text: str) -> None:
        """Wait for ``text`` (a regular expression)."""
        self.process.expect(text)

    def expect_prompt(self) -> None:
        """Wait until the next message can be typed:
        bracketed paste is turned on, then the cursor is shown."""
        self.process.expect(re.escape("\x1b[?2004h"))
        self.process.expect(re.escape("\x1b[?25h"))

    def type(self, text: str) -> None:
        self.process.send(text)

    def exit_code(self) -> int:
        self.process.expect(pexpect.EOF)
        self.process.close()
        assert self.process.signalstatus is None
        return int(self.process.exitstatus)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """An interactive chat, ready for the first message."""
    chat = Terminal(tmp_path)
    chat.expect_prompt()
    yield chat
    chat.process.close(force=True)


def test_a_typed_message_is_answered_with_statistics_and_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.type("hello there\r")
    terminal.expect("HELLO THERE")
    terminal.expect(r"TTFT \d+ ms · prefill .* \(0 cached\) · decode .* · ctx \d+/512 · stop: eos")
    terminal.expect_prompt()
    terminal.type("again\r")
    terminal.expect("AGAIN")
    terminal.expect(r"\([1-9]\d* cached\)")
    terminal.expect_prompt()
    terminal.type(CTRL_D)
    assert terminal.exit_code() == 0


def test_a_bracketed_paste_of_several_lines_is_one_message(terminal: Terminal) -> None:
    terminal.type(f"{ESCAPE}[200~first line\r\nsecond line{ESCAPE}[201~")
    terminal.expect("second line")
    terminal.type("\r")
    terminal.expect("FIRST LINE\r\nSECOND LINE\r\n")
    terminal.expect("stop: eos")
    terminal.expect_prompt()


def test_alt_enter_starts_a_new_line(terminal: Terminal) -> None:
    terminal.type(f"one{ESCAPE}\rtwo")
    terminal.expect("two")
    terminal.type("\r")
    terminal.expect("ONE\r\nTWO\r\n")


def test_ctrl_c_while_streaming_keeps_the_session_and_the_part_that_was_said(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--max-model-len", "20000", SCRIPTED_SECONDS_PER_STEP="0.01")
    terminal.expect_prompt()
    terminal.type("forever\r")
    terminal.expect("on and on and")
    terminal.type(CTRL_C)
    terminal.expect("interrupted; the partial answer is kept")
    terminal.expect("stop: interrupted")
    terminal.expect_prompt()
    terminal.type("/tokens\r")
    terminal.expect(r"on and on and .* \[interrupted\]")
    terminal.expect_prompt()
    terminal.type("still there\r")
    terminal.expect("STILL THERE")
    terminal.expect_prompt()
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0


def test_idle_ctrl_c_clears_the_line_and_twice_leaves(terminal: Terminal) -> None:
    terminal.type("never sent")
    terminal.expect("never sent")
    terminal.type(CTRL_C)
    terminal.expect("Ctrl-C again, Ctrl-D or /bye leaves")
    terminal.expect_prompt()
    terminal.type("sent\r")
    terminal.expect("SENT\r\n")
    terminal.expect_prompt()
    terminal.type(CTRL_C)
    terminal.expect("Ctrl-C again")
    terminal.expect_prompt()
    terminal.type(CTRL_C)
    assert terminal.exit_code() == 0


def test_a_mistyped_command_gets_a_suggestion_and_nothing_is_sent(terminal: Terminal) -> None:
    terminal.type("/sistem x\r")
    terminal.expect("There is no command /sistem; did you mean /system")
    terminal.expect_prompt()
    terminal.type("/regen\r")
    terminal.expect("Nothing was asked yet")
    terminal.expect_prompt()
    terminal.type("/load /nonexistent/chat.json\r")
    terminal.expect("Cannot read /nonexistent/chat.json: No such file or directory")
    terminal.expect_prompt()


def test_tab_completes_a_command(terminal: Terminal) -> None:
    terminal.type("/und")
    terminal.expect("forget the last exchange")
    terminal.type("\t\r")
    terminal.expect("nothing to undo")


def test_settings_and_regeneration_from_the_keyboard(terminal: Terminal) -> None:
    terminal.type("/set max_tokens=3\r")
    terminal.expect("max_tokens = 3")
    terminal.expect_prompt()
    terminal.type("abcdef\r")
    terminal.expect("ABC\r\n")
    terminal.expect("The answer was cut at max_tokens = 3")
    terminal.expect_prompt()
    terminal.type("/set max_tokens=none\r")
    terminal.expect("what is left of the context")
    terminal.expect_prompt()
    terminal.type("/regen\r")
    terminal.expect("ABCDEF\r\n")


def test_what_was_typed_is_remembered_in_a_file_only_the_user_can_read(tmp_path: Path) -> None:
    for _ in range(2):
        terminal = Terminal(tmp_path)
        terminal.expect_prompt()
        if (tmp_path / "chat_history").read_text():
            terminal.type(f"{ESCAPE}[A")
            terminal.expect("remember me")
            terminal.type("\r")
        else:
            terminal.type("remember me\r")
        terminal.expect("REMEMBER ME")
        terminal.expect_prompt()
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    assert stat.S_IMODE((tmp_path / "chat_history").stat().st_mode) == 0o600


def test_control_characters_of_the_model_are_not_sent_to_the_terminal(terminal: Terminal) -> None:
    terminal.type("escape\r")
    terminal.expect("stop: eos")
    shown = STYLES.sub("", terminal.process.before)
    assert "red plain" in shown
    assert "title" not in shown
    assert "\x07" not in shown


def test_without_colour_no_line_is_styled(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, NO_COLOR="1")
    terminal.expect_prompt()
    terminal.type("hello\r")
    terminal.expect("stop: eos")
    assert "\x1b[2m" not in terminal.process.before
    terminal.process.close(force=True)


def test_a_model_without_chat_template_is_announced(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "base")
    terminal.expect("base has no chat template")
    terminal.expect_prompt()
    terminal.process.close(force=True)


def test_ctrl_c_in_a_one_shot_answer_exits_with_130(tmp_path: Path) -> None:
    terminal = Terminal(
        tmp_path, "-p", "forever", "--max-model-len", "20000", SCRIPTED_SECONDS_PER_STEP="0.01", NO_COLOR="1"
    )
    terminal.expect("on and on")
    terminal.type(CTRL_C)
    terminal.expect("stop: interrupted")
    assert terminal.exit_code() == 130


def test_json_without_a_prompt_is_refused_on_a_terminal(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--json")
    terminal.expect("--json answers one prompt")
    assert terminal.exit_code() == 2


def test_a_second_ctrl_c_ends_a_step_that_does_not_come_back(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "-p", "slow", SCRIPTED_SECONDS_PER_STEP="60", NO_COLOR="1")
    terminal.expect("Answering")
    terminal.type(CTRL_C)
    time.sleep(0.3)
    terminal.type(CTRL_C)
    assert terminal.exit_code() == 130


def test_three_quotes_begin_and_end_a_text_of_several_lines(terminal: Terminal) -> None:
    terminal.type('"""first\r')
    terminal.type("/not a command\r")
    terminal.type('last"""\r')
    terminal.expect("FIRST\r\n/NOT A COMMAND\r\nLAST\r\n")


def test_ctrl_g_opens_the_editor(tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho " edited" >> "$1"\n')
    editor.chmod(0o700)
    terminal = Terminal(tmp_path, EDITOR=str(editor), VISUAL=str(editor))
    terminal.expect_prompt()
    terminal.type("typed\x07")
    terminal.expect("edited")
    terminal.type("\r")
    terminal.expect("EDITED\r\n")
    terminal.process.close(force=True)


def test_an_edited_message_is_answered_in_place_of_the_old_one(terminal: Terminal) -> None:
    terminal.type("wrong\r")
    terminal.expect("stop: eos")
    terminal.expect_prompt()
    terminal.type("/edit\r")
    terminal.expect("Change your last message")
    terminal.expect("> wrong")
    terminal.type(" no right\r")
    terminal.expect("WRONG NO RIGHT")
    terminal.expect_prompt()
    terminal.type("/show\r")
    terminal.expect("1 exchange\r")


def test_a_message_that_does_not_fit_is_there_to_be_changed(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--max-model-len", "40")
    terminal.expect_prompt()
    terminal.type("x" * 50 + "\r")
    terminal.expect("The message takes 68 of the context's 40 tokens")
    terminal.expect("> " + "x" * 50)
    terminal.type("\x7f" * 45 + "\r")
    terminal.expect("XXXXX\r\n")
    terminal.process.close(force=True)


def test_another_model_takes_over_and_a_missing_one_does_not(terminal: Terminal) -> None:
    terminal.type("hello\r")
    terminal.expect("stop: eos")
    terminal.expect_prompt()
    terminal.type("/model missing\r")
    terminal.expect("loading smollm2 again")
    terminal.expect("There is no model 'missing'")
    terminal.expect_prompt()
    terminal.type("/model base\r")
    terminal.expect("base takes over from smollm2.*it has no chat template")
    terminal.expect_prompt()
    terminal.type("again\r")
    terminal.expect("HELLO\r\nHELLO\r\nAGAIN")


def test_files_are_read_and_written(terminal: Terminal, tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("inside\n")
    terminal.type(f"/read {note}\r")
    terminal.expect(r"note.txt \(7 tokens\) goes with your next message")
    terminal.expect_prompt()
    terminal.type("what?\r")
    for part in ("NOTE.TXT:\r\n", "  .*INSIDE", r"WHAT\?\r\n"):
        terminal.expect(part)
    terminal.expect_prompt()
    terminal.type(f"/export {tmp_path}/out.md\r")
    terminal.expect("2 messages exported")
    assert "## You\n\nnote.txt:\n```\ninside\n```\n\nwhat?" in (tmp_path / "out.md").read_text()


def test_after_a_resize_answers_take_the_new_width_and_no_word_is_doubled_or_lost(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--max-model-len", "5000", NO_COLOR="1", SCRIPTED_SECONDS_PER_STEP="0.002")
    terminal.process.setwinsize(40, 60)
    terminal.expect_prompt()
    words = " ".join(f"w{number}" for number in range(100))
    terminal.type(f"{words} resize\r")
    terminal.expect("W3 W4")
    screen = pyte.HistoryScreen(60, 40)
    stream = pyte.Stream(screen)
    stream.feed("W0 W1 W2 W3 W4")
    terminal.process.setwinsize(40, 120)
    terminal.expect("TTFT")
    screen.resize(40, 120)
    stream.feed(terminal.process.before)
    lines = [line.rstrip() for line in screen.display if line.strip()]
    assert " ".join(lines).split() == [*words.upper().split(), "RESIZE"]
    assert 60 < max(map(len, lines)) <= 120
    terminal.process.close(force=True)


def test_what_is_typed_during_an_answer_waits_for_the_next_prompt(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, SCRIPTED_SECONDS_PER_STEP="0.02")
    terminal.expect_prompt()
    terminal.type("a long enough question\r")
    terminal.expect("A LONG")
    terminal.type("typed ahead\r")
    terminal.expect("stop: eos")
    assert "typed" not in terminal.process.before
    terminal.expect("TYPED AHEAD")
    terminal.process.close(force=True)


def test_raw_prints_the_answer_as_it_is(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, "--raw")
    terminal.expect_prompt()
    terminal.type("**bold**\r")
    terminal.expect(r"\*\*BOLD\*\*\r\n")
    terminal.process.close(force=True)


def test_wide_characters_are_typed_and_answered(terminal: Terminal) -> None:
    terminal.type("漢字 🎉 é\r")
    terminal.expect("漢字 🎉 É\r\n")


def test_every_command_answers_something_and_the_chat_goes_on(terminal: Terminal) -> None:
    terminal.type("one\r")
    terminal.expect("stop: eos")
    for line, answer in {
        "/help": "send a text file along",
        "/system": "the chat template's own",
        "/set top_q=1": "did you mean top_p",
        "/show": "1 exchange",
        "/read /dev/zero": "Cannot read /dev/zero: it is a device; give a regular file\\.",
        "/load /dev/zero": "Cannot read /dev/zero: it is a device",
        "/set stop=[1": r"stop is \[1, but must be a text as it is, or JSON",
        "/tokens": "2.*user",
        "/stats": "prefix cache",
        "/think on": "its chat template has no such switch",
        "/trace": "in another process",
        "/drop 9": "the conversation has 1",
        "/compact": "no shorter than what it stands for",
        "/model": "The model is smollm2",
        "/undo": "Last exchange forgotten",
        "/clear": "Conversation cleared",
        "/edit": "no message to edit",
        "/exprot": "did you mean /export",
    }.items():
        terminal.expect_prompt()
        terminal.type(line + "\r")
        terminal.expect(answer)
    terminal.expect_prompt()
    terminal.type("/bye\r")
    assert terminal.exit_code() == 0
