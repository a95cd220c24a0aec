"""A conversation's state: what is sent, what is kept, what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.conversation.slash_commands import COMMANDS, SETTINGS, Next, is_command, run_command
from minivllm.cli.engine.engine_start import Generation
from minivllm.errors import RequestError
from minivllm.messages import SchedulerStats
from minivllm.processing.outputs import RequestMetrics, RequestOutput
from minivllm.sampling_params import SamplingParams
from tests.cli.scripted_engine import ScriptedEngine


def session_with(engine: ScriptedEngine | None = None, **params: object) -> ChatSession:
    return ChatSession(
        engine or ScriptedEngine(), "scripted", SamplingParams(**{"max_tokens": None, **params})
    )


def ask(session: ChatSession, text: str, interrupt_after: int | None = None) -> Generation:
    pieces: list[str] = []
    enough = (lambda: len(pieces) >= interrupt_after) if interrupt_after is not None else lambda: False
    generation = session.ask(text, pieces.append, enough)
    assert "".join(pieces) == generation.text
    return generation


def test_every_turn_sends_the_whole_conversation_and_finds_it_in_the_prefix_cache() -> None:
    session = session_with()
    first = ask(session, "first question")
    second = ask(session, "second question")
    assert first.text == "FIRST QUESTION"
    assert session.engine.prompts[1] == (
        "<user>first question\n<assistant>FIRST QUESTION\n<user>second question\n<assistant>"
    )
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= first.num_prompt_tokens
    assert f"({second.num_cached_tokens} cached)" in second.statistics_line(512)


def test_system_prompt_comes_first_and_only_if_set() -> None:
    session = session_with()
    ask(session, "a")
    run_command(session, "/system Be brief.")
    ask(session, "b")
    run_command(session, "/system -")
    ask(session, "c")
    assert [prompt.startswith("<system>Be brief.\n") for prompt in session.engine.prompts] == [
        False,
        True,
        False,
    ]


def test_an_interrupted_answer_is_aborted_and_its_part_stays_in_the_conversation() -> None:
    session = session_with()
    generation = ask(session, "forever", interrupt_after=7)
    assert generation.interrupted
    assert session.engine.aborted == ["chat-0"]
    assert session.messages[-1].content == "on and "
    assert session.messages[-1].interrupted
    assert "stop: interrupted" in generation.statistics_line(512)
    assert ask(session, "go on").text == "GO ON"


def test_an_answer_that_the_engine_gives_up_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, num_steps = ScriptedEngine(), 0
    step = engine.step

    def give_up() -> list[RequestOutput]:
        outputs = step()
        if engine.num_steps == num_steps:
            return [replace(output, error="Its grammar broke.", finished=True) for output in outputs]
        return outputs

    monkeypatch.setattr(engine, "step", give_up)
    session, num_steps = session_with(engine), 4
    generation = ask(session, "forever")
    assert (generation.text, generation.failure) == ("on a", "Its grammar broke.")
    assert session.messages[-1].interrupted and session.messages[-1].content == "on a"


def test_an_answer_may_fill_the_rest_of_the_context_and_no_more() -> None:
    session = session_with(ScriptedEngine(max_model_len=64))
    generation = ask(session, "forever")
    assert generation.finish_reason == "length"
    assert generation.num_context_tokens == 64
    assert "ctx 64/64" in generation.statistics_line(64)


def test_a_full_context_is_refused_with_numbers_and_changes_nothing() -> None:
    session = session_with(ScriptedEngine(max_model_len=64))
    ask(session, "forever")
    before = list(session.messages)
    with pytest.raises(RequestError, match=r"takes \d+ of the context's 64 tokens.*/drop.*/compact"):
        ask(session, "more")
    assert session.messages == before
    run_command(session, "/drop")
    assert ask(session, "more").text == "MORE"


def test_a_first_message_that_cannot_fit_is_not_blamed_on_the_conversation() -> None:
    with pytest.raises(
        RequestError, match=r"The message takes .* shorten it, or start with a larger --max-model-len"
    ):
        ask(session_with(ScriptedEngine(max_model_len=16)), "x" * 100)


def test_without_chat_template_texts_follow_each_other() -> None:
    session = session_with(ScriptedEngine(has_chat_template=False, answer=str.upper))
    ask(session, "once")
    ask(session, "upon")
    assert session.engine.prompts == ["once", "once\nONCE\nupon"]


def test_regenerating_asks_the_same_question_again() -> None:
    session = session_with()
    ask(session, "one")
    ask(session, "two")
    session.regenerate(lambda text: None, lambda: False)
    assert session.engine.prompts[2] == session.engine.prompts[1]
    assert [message.content for message in session.messages] == ["one", "ONE", "two", "TWO"]


def test_a_failed_regeneration_keeps_the_old_answer() -> None:
    session = session_with()
    ask(session, "one")
    before = list(session.messages)
    session.system = "s" * 600
    with pytest.raises(RequestError):
        session.regenerate(lambda text: None, lambda: False)
    assert session.messages == before


def test_undo_drop_and_clear_forget_whole_exchanges() -> None:
    session = session_with()
    for text in ("one", "two", "three"):
        ask(session, text)
    run_command(session, "/undo")
    run_command(session, "/drop 1")
    assert [message.content for message in session.messages] == ["two", "TWO"]
    run_command(session, "/clear")
    assert session.messages == []
    for line in ("/undo", "/drop", "/regen"):
        message = "there is nothing|has 0|Nothing was asked"
        with pytest.raises(RequestError, match=message):
            if run_command(session, line)[1] is Next.REGENERATE:
                session.regenerate(lambda text: None, lambda: False)


def test_a_saved_conversation_loads_as_it_was(tmp_path: Path) -> None:
    session = session_with(temperature=0.3, stop=["x"])
    session.system = "Ünicode"
    ask(session, "forever", interrupt_after=3)
    run_command(session, f"/save {tmp_path / 'chat.json'}")
    other = session_with()
    run_command(other, f"/load {tmp_path / 'chat.json'}")
    assert (other.messages, other.system, other.params) == (session.messages, session.system, session.params)
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": "minivllm-chat-1"}',
        b'{"format":"minivllm-chat-1","model":"m","system":null,"sampling":{"temperature":-1},"messages":[]}',
        b'{"format":"minivllm-chat-1","model":"m","system":null,"sampling":{},"messages":'
        b'[{"role":"assistant","content":"x"}]}',
        b'{"format":"minivllm-chat-1","model":"m","system":null,"sampling":{},"messages":[{"role":"root","content":1}]}',
    ],
)
def test_a_file_that_is_no_saved_chat_is_refused_and_the_session_stays(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    session = session_with()
    ask(session, "one")
    before = list(session.messages)
    with pytest.raises(RequestError, match="is not a saved chat"):
        run_command(session, f"/load {path}")
    with pytest.raises(RequestError, match="is not a saved chat, so it is left alone"):
        run_command(session, f"/save {path}")
    assert session.messages == before
    assert path.read_bytes() == content


def test_unreadable_and_unwritable_files_are_reported(tmp_path: Path) -> None:
    session = session_with()
    with pytest.raises(RequestError, match=r"Cannot read .*No such file"):
        run_command(session, f"/load {tmp_path / 'none.json'}")
    with pytest.raises(RequestError, match=r"Cannot read .*directory"):
        run_command(session, f"/load {tmp_path}")
    with pytest.raises(RequestError, match=r"Cannot write .*No such file"):
        run_command(session, f"/save {tmp_path / 'none' / 'chat.json'}")
    with pytest.raises(RequestError, match="needs a file name"):
        run_command(session, "/save")


def test_set_takes_values_and_reports_wrong_ones() -> None:
    session = session_with()
    for line, name, value in (
        ("/set temperature=0", "temperature", 0.0),
        ("/set top_k = 5", "top_k", 5),
        ("/set stop=END", "stop", ["END"]),
        ('/set stop=["a", "b"]', "stop", ["a", "b"]),
        ("/set stop=none", "stop", []),
        ("/set max_tokens=9", "max_tokens", 9),
        ("/set max_tokens=none", "max_tokens", None),
        ("/set seed=7", "seed", 7),
        ("/set ignore_eos=true", "ignore_eos", True),
        ('/set logit_bias={"5": -3}', "logit_bias", {5: -3.0}),
    ):
        run_command(session, line)
        assert getattr(session.params, name) == value, line
    for line, message in (
        ("/set temperature=-1", "temperature is -1"),
        ("/set temperature=NaN", "finite number"),
        ("/set temperature=warm", "temperature"),
        ("/set temprature=1", "did you mean temperature"),
        ("/set max_tokens=0", "max_tokens is 0"),
        ("/set n=3", "no setting 'n'"),
        ("/set", "Write /set name=value"),
    ):
        before = session.params
        with pytest.raises(RequestError, match=message):
            run_command(session, line)
        assert session.params == before


def test_a_typo_gets_the_nearest_command() -> None:
    session = session_with()
    with pytest.raises(RequestError, match="There is no command /halp; did you mean /help"):
        run_command(session, "/halp")
    with pytest.raises(RequestError, match="/help lists the commands"):
        run_command(session, "/xyzzy")


def test_what_is_a_command_and_what_a_message() -> None:
    assert is_command("/help")
    assert is_command("/set temperature=1")
    assert not is_command("/usr/bin holds what?")
    assert not is_command(" /help")
    assert not is_command("/help me\nwith two lines")
    assert not is_command("/")
    assert not is_command("")


def test_every_command_shows_in_help_and_the_showing_ones_answer() -> None:
    session = session_with(top_p=0.5)
    help_text, _ = run_command(session, "/help")
    assert all(command.usage in help_text for command in COMMANDS.values())
    ask(session, "one")
    assert "top_p" in run_command(session, "/show")[0]
    assert "ONE" in run_command(session, "/tokens")[0]
    assert "prefix cache" in run_command(session, "/stats")[0]
    assert run_command(session, "/bye")[1] is Next.LEAVE
    assert run_command(session, "/quit")[1] is Next.LEAVE


def test_nothing_is_offered_that_no_model_here_can_do() -> None:
    session = session_with()
    assert "video" not in run_command(session, "/help")[0]
    with pytest.raises(RequestError, match="There is no command /video; /help lists the commands"):
        run_command(session, "/video cat.mp4")


def test_stats_tell_how_many_drafts_were_accepted_where_there_are_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine()
    session = session_with(engine)
    assert "speculation" not in run_command(session, "/stats")[0]
    monkeypatch.setattr(engine, "stats", lambda: SchedulerStats(num_draft_tokens=40, num_accepted_tokens=30))
    assert "speculation   30 of 40 drafted tokens accepted (75%)" in run_command(session, "/stats")[0]


def test_a_generation_record_is_plain_json() -> None:
    session = session_with()
    record = json.loads(json.dumps(ask(session, "hello").record()))
    assert record["text"] == "HELLO"
    assert record["finish_reason"] == "stop"
    assert record["stop_reason"] is None
    assert record["num_prompt_tokens"] == len(session.engine.prompts[0])
    assert record["metrics"]["ttft"] >= 0


def thinker(prompt: str) -> str:
    return "so</think>yes" if prompt.endswith("<think>") else "yes"


def test_thinking_is_switched_where_the_template_can_and_an_opened_thought_is_shown_as_one() -> None:
    with pytest.raises(RequestError, match="cannot switch thinking"):
        run_command(session_with(), "/think on")
    session = session_with(ScriptedEngine(can_think=True, answer=thinker))
    assert run_command(session, "/think")[0] == "Thinking is left to the chat template."
    pieces: list[str] = []
    run_command(session, "/think on")
    session.ask("why", pieces.append, lambda: False)
    assert "".join(pieces) == "<think>so</think>yes"
    run_command(session, "/think off")
    assert session.regenerate(lambda text: None, lambda: False).text == "yes"
    with pytest.raises(RequestError, match="on or off"):
        run_command(session, "/think perhaps")


def summarizing(prompt: str) -> str:
    question = prompt.rpartition("<user>")[2]
    if question.startswith("Summarize our conversation"):
        return "short"
    return "long " * (120 if "two" in question else 60)


def test_compacting_puts_a_summary_in_place_of_all_but_the_last_exchange() -> None:
    session = session_with(ScriptedEngine(max_model_len=4000, answer=summarizing))
    for text in ("one", "two", "three"):
        ask(session, text)
    before = session.num_context_tokens()
    session.compact(lambda text: None, lambda: False)
    assert [message.content.split(" ")[0] for message in session.messages] == [
        "Summarize",
        "short",
        "three",
        "long",
    ]
    assert session.num_context_tokens() < before
    assert session.engine.params[-1].max_tokens == 500


def test_of_a_conversation_too_long_to_be_summarized_the_oldest_part_is() -> None:
    session = session_with(ScriptedEngine(max_model_len=1200, answer=summarizing))
    for text in ("one", "two", "three"):
        ask(session, text)
    session.compact(lambda text: None, lambda: False)
    assert [message.content.split(" ")[0] for message in session.messages] == [
        "Summarize", "short", "two", "long", "three", "long",
    ]  # fmt: skip


def test_a_compaction_that_is_interrupted_or_gains_nothing_changes_nothing() -> None:
    session = session_with(ScriptedEngine(max_model_len=4000, answer=lambda prompt: "long " * 40))
    with pytest.raises(RequestError, match="nothing to compact"):
        session.compact(lambda text: None, lambda: False)
    ask(session, "one")
    before = list(session.messages)
    assert session.compact(lambda text: None, lambda: True).interrupted
    assert session.messages == before
    with pytest.raises(RequestError, match="no shorter"):
        session.compact(lambda text: None, lambda: False)
    assert session.messages == before


def test_a_file_goes_with_the_next_message_once_and_only_if_it_can_fit(tmp_path: Path) -> None:
    session = session_with()
    path = tmp_path / "a.md"
    path.write_text("```\ncode\n```\n")
    run_command(session, f"/read {path}")
    ask(session, "explain")
    assert session.messages[0].content == "a.md:\n````\n```\ncode\n```\n````\n\nexplain"
    assert ask(session, "more").text == "MORE"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RequestError, match="not UTF-8 text"):
        run_command(session, f"/read {path}")
    path.write_text("x" * 600)
    with pytest.raises(
        RequestError, match=r"has 600 tokens, but of the context's 512 only \d+ are free: /drop or"
    ):
        run_command(session, f"/read {path}")
    with pytest.raises(RequestError, match="only 512 are free: start with a larger --max-model-len"):
        run_command(session_with(), f"/read {path}")
    with pytest.raises(RequestError, match="Cannot read"):
        run_command(session, f"/read {tmp_path}")


def test_an_export_is_markdown_and_overwrites_only_exports(tmp_path: Path) -> None:
    session = session_with()
    session.system = "Be brief."
    ask(session, "hello")
    path = tmp_path / "chat.md"
    for _ in range(2):
        run_command(session, f"/export {path}")
    assert path.read_text() == (
        "# Chat with scripted\n\n**System:** Be brief.\n\n## You\n\nhello\n\n## scripted\n\nHELLO\n"
    )
    path.write_text("mine")
    with pytest.raises(RequestError, match="is not an exported chat, so it is left alone"):
        run_command(session, f"/export {path}")
    assert path.read_text() == "mine"


def test_cached_tokens_show_where_a_server_does_not_tell_its_prefill_speed() -> None:
    metrics = RequestMetrics(arrival_time=1.0, num_prompt_tokens=100)
    metrics.first_token_time = 1.25
    generation = Generation(
        metrics=metrics, num_prompt_tokens=100, num_cached_tokens=64, finish_reason="stop"
    )
    assert generation.statistics_line(512) == "TTFT 250 ms · 64 cached · ctx 100/512 · stop: eos"


@pytest.fixture
def strange_files(tmp_path: Path) -> dict[str, str]:
    """What is no file to read, and the sentence about it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "giant").touch()
    os.truncate(tmp_path / "giant", 2**40)
    (tmp_path / "link").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(tmp_path):
        listener.bind("socket")
    tells_size_0 = {"/proc/kallsyms": "it has more than"} if os.path.exists("/proc/kallsyms") else {}
    return tells_size_0 | {
        "/dev/zero": "it is a device",
        "/dev/null": "it is a device",
        f"{tmp_path}/link": "it is a device",
        f"{tmp_path}/pipe": "it is a pipe",
        f"{tmp_path}/directory": "it is a directory",
        f"{tmp_path}/socket": "it is a socket",
        f"{tmp_path}/giant": "it has more than",
        f"{tmp_path}/none": "No such file or directory",
        "/proc/self/mem": "Cannot read",
        "x" * 300: "File name too long",
        "~nobody-of-this-name/x": "user who does not exist",
        "a\0b": "null character",
    }


def test_only_regular_files_of_bounded_size_are_read(strange_files: dict[str, str]) -> None:
    session = session_with()
    for path, said in strange_files.items():
        for command in ("/read", "/load"):
            if command == "/load" and path == "/proc/kallsyms":
                continue  # small enough to be looked at
            with pytest.raises(RequestError) as refusal:
                run_command(session, f"{command} {path}")
            assert said in str(refusal.value), path
            assert re.search(r"[^.]\.$", str(refusal.value)), "a sentence, with one period"
    assert ask(session, "go on").text == "GO ON"


def test_nothing_but_a_chat_of_ones_own_is_overwritten(strange_files: dict[str, str], tmp_path: Path) -> None:
    session = session_with()
    ask(session, "one")
    for path in [*strange_files, f"{tmp_path}/none/chat.json"]:
        if path.endswith("/none"):
            continue
        for command in ("/save", "/export"):
            with pytest.raises(
                RequestError, match=r"so it is left alone|Cannot write|no file name|does not exist"
            ):
                run_command(session, f"{command} {path}")
    assert not [path for path in tmp_path.rglob("*.part")]


def test_every_malformed_setting_is_refused_with_a_sentence_and_every_other_takes_effect() -> None:
    values = [
        "[1",
        "[1]",
        "{",
        '{"a": 1}',
        '"x',
        "1,5",
        "abc",
        "true",
        "1e400",
        "NaN",
        "-1",
        "5.5",
        "5",
        "[]",
        '["a", 1]',
        "[[",
        '""',
    ]
    for name in SETTINGS:
        for value in values:
            session = session_with()
            before = session.params
            try:
                run_command(session, f"/set {name}={value}")
            except RequestError as error:
                assert name in str(error) and re.search(r"[^.]$|[^.]\.$", str(error)), error
                assert "Expected" not in str(error) and session.params == before
            else:
                assert session.params != before or value in ("true", "[]", "5", "-1", "5.5")
    for name in ("stop", "stop_regex", "bad_words"):
        for value in ("[1", "{", '"x', "[1]", '["a", 1]', '{"a": 1'):
            with pytest.raises(RequestError, match=f"{name} is .* but must be a text as it is, or JSON"):
                run_command(session_with(), f"/set {name}={value}")
    session = session_with()
    run_command(session, '/set stop="[1"')
    assert session.params.stop == ["[1"]


def test_one_of_something_is_named_in_the_singular(tmp_path: Path) -> None:
    session = session_with()
    ask(session, "one")
    assert "1 exchange\n" in run_command(session, "/show")[0]
    (tmp_path / "a").write_text("a")
    assert "(1 token)" in run_command(session, f"/read {tmp_path / 'a'}")[0]
    with pytest.raises(RequestError, match=r"Cannot drop 2 exchanges: the conversation has 1\.$"):
        run_command(session, "/drop 2")
