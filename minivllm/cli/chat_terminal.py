"""The interactive side of ``minivllm chat``: input with prompt_toolkit, streamed output, Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from minivllm.cli.chat_session import ChatSession
from minivllm.cli.engine_start import ProgressHandler
from minivllm.cli.generation import Generation
from minivllm.cli.prompts import check_text
from minivllm.cli.slash_commands import COMMANDS, SETTINGS, Next, is_command, run_command
from minivllm.cli.terminal_text import ControlCharacterFilter, dim, printable
from minivllm.errors import RequestError
from minivllm.messages import FinishReason

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class InterruptFlag:
    """While entered, the first Ctrl-C is only noted, so that it can take effect between two engine steps.

    A second one raises KeyboardInterrupt at once, for a step that does not come back.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._previous: Any = None

    def __enter__(self) -> InterruptFlag:
        self.is_set = False
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, signal_number: int, frame: FrameType | None) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


def notice(text: str) -> None:
    """Tell the user something that is not the model's: dim, on stderr."""
    if text:
        print(dim(printable(text), sys.stderr), file=sys.stderr, flush=True)


def stream_answer(
    generate: Callable[[Callable[[str], None], Callable[[], bool]], Generation], log: ProgressHandler, waiting: str = ""
) -> Generation:
    """Print an answer as it comes, control characters removed. Ctrl-C ends it and keeps what was said.

    generate: takes the callback for new text and the question whether to stop. waiting: shown until the first text.
    """
    clean = ControlCharacterFilter()
    ends_line = True
    with InterruptFlag() as interrupt, ExitStack() as until_first_text:
        if waiting:
            until_first_text.enter_context(log.status(waiting))

        def show(text: str) -> None:
            nonlocal ends_line
            text = clean.feed(text)
            if text:
                until_first_text.close()
                sys.stdout.write(text)
                sys.stdout.flush()
                ends_line = text.endswith("\n")

        try:
            return generate(show, lambda: interrupt.is_set)
        finally:
            if not ends_line:
                print(flush=True)


def limit_notice(session: ChatSession, generation: Generation) -> str:
    """What to tell when an answer ended at a limit; empty if it did not."""
    if generation.finish_reason != FinishReason.LENGTH:
        return ""
    used, size = generation.num_context_tokens, session.max_model_len
    if used >= size:
        return (
            f"The context is full ({used:,} of {size:,} tokens) and the answer was cut: /drop forgets the oldest "
            "exchange, /clear all of them."
        )
    return f"The answer was cut at max_tokens = {session.params.max_tokens}; /set max_tokens=none lifts the limit."


class ChatTerminal:
    """The read-answer loop. Notices and statistics go to stderr, answers to stdout."""

    def __init__(self, session: ChatSession, log: ProgressHandler, history_path: Path | None) -> None:
        self._session = session
        self._log = log
        self._cleared_text = False
        self._prompt = self._prompt_session(history_path)

    def run(self) -> None:
        """Talk until /bye, Ctrl-D, or Ctrl-C twice on an empty line."""
        leaving = False
        while True:
            try:
                line = self._prompt.prompt("> ")
            except EOFError:
                return
            except KeyboardInterrupt:
                if leaving and not self._cleared_text:
                    return
                leaving = True
                notice("Ctrl-C again, Ctrl-D or /bye leaves.")
                continue
            leaving = False
            if line.strip() == "":
                continue
            try:
                if self._handle(line) is Next.LEAVE:
                    return
            except RequestError as error:
                notice(str(error))

    def _handle(self, line: str) -> Next:
        session = self._session
        if is_command(line):
            message, following = run_command(session, line)
            notice(message)
            if following is Next.REGENERATE:
                self._answer(session.regenerate)
            return following
        text = check_text(line.strip(), "The message")
        self._answer(lambda on_text, is_interrupted: session.ask(text, on_text, is_interrupted))
        return Next.PROMPT

    def _answer(self, generate: Callable[[Callable[[str], None], Callable[[], bool]], Generation]) -> None:
        generation = stream_answer(generate, self._log, waiting="Reading the conversation")
        if generation.interrupted:
            notice("[interrupted; the partial answer is kept, /undo forgets it]")
        notice(generation.statistics_line(self._session.max_model_len))
        notice(limit_notice(self._session, generation))

    def _prompt_session(self, history_path: Path | None) -> PromptSession[str]:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.output import ColorDepth, create_output

        return PromptSession(
            history=_history(history_path),
            completer=_completer(),
            key_bindings=self._key_bindings(),
            multiline=True,
            reserve_space_for_menu=5,
            prompt_continuation="  ",
            output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
            color_depth=ColorDepth.DEPTH_1_BIT if os.environ.get("NO_COLOR") else None,
        )

    def _key_bindings(self) -> KeyBindings:
        from prompt_toolkit.key_binding import KeyBindings

        bindings = KeyBindings()

        @bindings.add("enter")
        def send(event: KeyPressEvent) -> None:
            event.current_buffer.validate_and_handle()

        @bindings.add("escape", "enter")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("c-c")
        def clear_or_leave(event: KeyPressEvent) -> None:
            self._cleared_text = event.current_buffer.text != ""
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        return bindings


def default_history_path() -> Path:
    """Where messages typed earlier are kept: $MINIVLLM_HOME, else where the XDG base directories put state."""
    if home := os.environ.get("MINIVLLM_HOME"):
        return Path(home).expanduser() / "chat_history"
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "minivllm" / "chat_history"


def _history(path: Path | None) -> History:
    """A history file only the user can read, or none that lasts if it cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        return FileHistory(str(path))
    except OSError as error:
        notice(f"What you type is not remembered: cannot write {path} ({error.strerror or error}).")
        return InMemoryHistory()


def _completer() -> Any:
    from prompt_toolkit.completion import Completer, Completion, PathCompleter
    from prompt_toolkit.document import Document

    class CommandCompleter(Completer):
        """Completes slash commands, the settings of /set, and the files of /save and /load."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            line = document.text_before_cursor
            if not line.startswith("/") or "\n" in line:
                return
            name, space, argument = line.partition(" ")
            if not space:
                for command in COMMANDS.values():
                    if command.name.startswith(name):
                        yield Completion(command.name, start_position=-len(name), display_meta=command.purpose)
            elif name == "/set" and "=" not in argument:
                yield from _starting_with(argument, (f"{setting}=" for setting in SETTINGS))
            elif name in ("/save", "/load"):
                yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)

    def _starting_with(beginning: str, words: Iterable[str]) -> Iterator[Completion]:
        for word in words:
            if word.startswith(beginning):
                yield Completion(word, start_position=-len(beginning))

    return CommandCompleter()
