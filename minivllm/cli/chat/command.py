"""``minivllm chat``: talk with a model, or have one prompt answered:
the command, its input and its output."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.cli.conversation.chat_session import ChatSession
from minivllm.cli.conversation.slash_commands import (
    COMMANDS,
    FILE_COMMANDS,
    SETTINGS,
    Next,
    is_command,
    run_command,
)
from minivllm.cli.engine.engine_start import EngineHost, Generation, ProgressHandler, engine_log
from minivllm.cli.engine.options import (
    SamplingOptions,
    TextArgument,
    model_defaults,
    with_options,
)
from minivllm.cli.terminal.answer_view import answer_view
from minivllm.cli.terminal.live_text import window_size, wrap
from minivllm.cli.terminal.terminal_text import counted, dim, printable, styles
from minivllm.cli.terminal.typed import check_text, prompt_text, read_standard_input
from minivllm.cli.trace.command import folded, has_colours, heat_strip
from minivllm.config import EngineArgs
from minivllm.errors import EngineDeadError, MinivllmError, RequestError
from minivllm.messages import FinishReason

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import CompleteEvent, Completion
    from prompt_toolkit.document import Document
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.sampling_params import SamplingParams


QUOTES = '"""'
NEARLY_FULL = 0.9
"""Part of the context from which on the user is told."""


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
    """Tell the user something that is not the model's:
    dim, on stderr, on a terminal wrapped between words."""
    if not text:
        return
    lines = printable(text).split("\n")
    if sys.stderr.isatty():
        columns = window_size(sys.stderr).columns
        lines = [row.rstrip() for line in lines for row in wrap(line, columns)]
    print(dim("\n".join(lines), sys.stderr), file=sys.stderr, flush=True)


Generate = Callable[[Callable[[str], None], Callable[[], bool]], Generation]
"""Takes the callback for new text and the question whether to stop."""


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keep keys that are typed during an answer from showing in it: the next prompt gets them."""
    import termios

    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield
        return
    silent = [*before]
    silent[0] &= ~termios.ICRNL
    silent[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(descriptor, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def held_back(log: ProgressHandler) -> Iterator[None]:
    """Hold log lines back until the answer has ended, since a line in the middle would split it."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    log.addFilter(hold)
    try:
        yield
    finally:
        log.removeFilter(hold)
        for record in held:
            log.handle(record)


def stream_answer(generate: Generate, log: ProgressHandler, waiting: str, raw: bool) -> Generation:
    """Print an answer as it comes. Ctrl-C ends it and keeps what was said.
    waiting: shown until the first text."""
    view = answer_view(sys.stdout, raw)
    with (
        InterruptFlag() as interrupt,
        silent_keyboard(),
        ExitStack() as until_end,
        ExitStack() as until_first_text,
    ):
        until_first_text.enter_context(log.status(waiting))
        is_begun = False

        def show(text: str) -> None:
            nonlocal is_begun
            if text and not is_begun:
                is_begun = True
                until_first_text.close()
                until_end.enter_context(held_back(log))
            view.feed(text)

        try:
            return generate(show, lambda: interrupt.is_set)
        finally:
            until_first_text.close()
            view.finish()


def limit_notice(session: ChatSession, generation: Generation) -> str:
    """The notice for an answer that ended at a limit or came near the end of the context; otherwise empty."""
    used, size = generation.num_context_tokens, session.max_model_len
    if generation.finish_reason != FinishReason.LENGTH:
        if used < NEARLY_FULL * size:
            return ""
        return f"The context is nearly full ({used:,} of {size:,} tokens): /drop or /compact make room."
    if used >= size:
        return (
            f"The context is full ({used:,} of {size:,} tokens) and the answer was cut: /drop forgets the "
            "oldest "
            "exchange, /compact puts a summary in place of all but the last."
        )
    return (
        f"The answer was cut at max_tokens = {session.params.max_tokens}; /set max_tokens=none lifts the "
        "limit."
    )


def is_open_block(text: str) -> bool:
    """True for a text that begins with three quotes and does not end with three others."""
    text = text.strip()
    return text.startswith(QUOTES) and not (text.endswith(QUOTES) and len(text) >= 2 * len(QUOTES))


def without_quotes(text: str) -> str:
    """The text inside three quotes at either end, or the text itself."""
    if text.startswith(QUOTES) and not is_open_block(text):
        return text[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


class ChatTerminal:
    """The read-answer loop. Notices and statistics go to stderr, answers to stdout."""

    def __init__(
        self, session: ChatSession, log: ProgressHandler, history_path: Path | None, raw: bool
    ) -> None:
        self._session = session
        self._log = log
        self._raw = raw
        self._cleared_text = False
        self._draft = ""
        self._replaces_last = False
        self._prompt = self._prompt_session(history_path)

    def run(self) -> None:
        """Talk until /bye, Ctrl-D, or Ctrl-C twice on an empty line."""
        leaving = False
        while True:
            draft, self._draft = self._draft, ""
            try:
                line = self._prompt.prompt("> ", default=draft)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._replaces_last = False
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
            except MinivllmError as error:
                if isinstance(error, EngineDeadError):
                    raise
                notice(str(error))

    def _handle(self, line: str) -> Next:
        session = self._session
        if not is_command(line):
            self._ask(line)
            return Next.PROMPT
        self._replaces_last = False
        message, following = run_command(session, line)
        notice(message)
        if following is Next.REGENERATE:
            self._answer(session.regenerate)
        elif following is Next.EDIT:
            self._draft = session.messages[-2].content
            self._replaces_last = True
        elif following is Next.COMPACT:
            self._compact()
        elif following is Next.TRACE:
            self._draw_trace()
        return following

    def _ask(self, line: str) -> None:
        session, before = self._session, list(self._session.messages)
        text = check_text(without_quotes(line.strip()), "The message")
        images: list[str] = []
        if self._replaces_last:
            images = session.messages[-2].images
            session.undo()
        try:
            self._answer(lambda on_text, is_interrupted: session.ask(text, on_text, is_interrupted, images))
        except RequestError:
            # Nothing is lost: what was typed is there to be changed, and a message that was edited stays.
            session.messages, self._draft = before, line
            raise
        self._replaces_last = False

    def _answer(self, generate: Generate) -> None:
        generation = stream_answer(generate, self._log, "Reading the conversation", self._raw)
        notice(generation.failure)
        if generation.interrupted:
            notice("[interrupted; the partial answer is kept, /undo forgets it]")
        notice(generation.statistics_line(self._session.max_model_len))
        notice(limit_notice(self._session, generation))

    def _compact(self) -> None:
        session, before = self._session, self._session.num_context_tokens()
        generation = stream_answer(session.compact, self._log, "Summarizing", self._raw)
        notice(generation.failure)
        if generation.interrupted:
            notice("[interrupted; the conversation stays as it was]")
            return
        if generation.finish_reason == FinishReason.LENGTH:
            notice(f"The summary was cut at {counted(len(generation.token_ids), 'token')}.")
        after, size = session.num_context_tokens(), session.max_model_len
        notice(f"The older exchanges became this summary: from {before:,} to {after:,} of {size:,} tokens.")

    def _draw_trace(self) -> None:
        from rich.console import Console

        generation = self._session.last_generation
        if generation is not None:
            console = Console(
                stderr=True, highlight=False, color_system="auto" if styles(sys.stderr) else None
            )
            steps = folded(self._session.insight.steps(generation))
            strip = heat_strip(steps, 1, console.width, has_colours(console))
            console.print(strip, no_wrap=True, crop=False, overflow="ignore")

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
            if is_open_block(event.current_buffer.text):
                event.current_buffer.insert_text("\n")
            else:
                event.current_buffer.validate_and_handle()

        @bindings.add("c-g")
        def edit(event: KeyPressEvent) -> None:
            event.current_buffer.open_in_editor()

        @bindings.add("escape", "enter")
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @bindings.add("c-c")
        def clear_or_leave(event: KeyPressEvent) -> None:
            self._cleared_text = event.current_buffer.text != ""
            event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        return bindings


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
        """Completes slash commands, the settings of /set, and paths."""

        def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
            line = document.text_before_cursor
            if not line.startswith("/") or "\n" in line:
                return
            name, space, argument = line.partition(" ")
            if not space:
                for command in COMMANDS.values():
                    if command.name.startswith(name):
                        yield Completion(
                            command.name, start_position=-len(name), display_meta=command.purpose
                        )
            elif name == "/set" and "=" not in argument:
                yield from _starting_with(argument, (f"{setting}=" for setting in SETTINGS))
            elif name == "/think":
                yield from _starting_with(argument, ("on", "off"))
            elif name in FILE_COMMANDS:
                yield from PathCompleter(expanduser=True).get_completions(Document(argument), complete_event)

    def _starting_with(beginning: str, words: Iterable[str]) -> Iterator[Completion]:
        for word in words:
            if word.startswith(beginning):
                yield Completion(word, start_position=-len(beginning))

    return CommandCompleter()


@with_options
def chat(
    sampling: SamplingOptions,
    args: EngineArgs,
    text: TextArgument = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Answer this one prompt and exit; - reads it from stdin."),
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print answers as they are instead of rendering Markdown.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With -p or a pipe: print one JSON object.")
    ] = False,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Talk to the model of a server, such as http://127.0.0.1:8000."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key of that server.", envvar="MINIVLLM_API_KEY")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show everything the engine logs.")
    ] = False,
) -> None:
    """Talk with a model, or have one prompt answered.

    Without MODEL it fetches a small default model the first time. Type /help inside for the commands. A
    prompt given by -p or a pipe is answered once. With --url the model is one that a server runs, by default
    its first.

    Example: minivllm chat "Why is the sky blue?" --temperature 0
    """
    if text is not None:
        if prompt is not None:
            raise RequestError("There are two prompts, one with -p and one without: give one of them.")
        prompt = text
    if url is not None:
        from minivllm.cli.chat.chat_remote import check_engine_args

        check_engine_args(args)
    sampling.params({"max_tokens": None})  # wrong values are reported before a model is loaded
    interactive = prompt is None and sys.stdin.isatty()
    if interactive and as_json:
        raise RequestError("--json answers one prompt: give it with -p, or pipe it in.")
    question = None if interactive else read_standard_input() if prompt is None else prompt_text(prompt)

    def params(started: LLMEngine) -> SamplingParams:
        return sampling.params({"max_tokens": None, **model_defaults(started)})

    if url is not None:
        from minivllm.cli.chat.chat_remote import RemoteSession

        with engine_log(verbose) as log:
            wanted = "" if args.model == EngineArgs.model else args.model
            session: ChatSession = RemoteSession(
                url,
                wanted,
                lambda defaults: sampling.params({"max_tokens": None, **defaults}),
                system,
                api_key=api_key,
                context_size=args.max_model_len,
            )
            _converse(session, question, raw, as_json, log)
        return
    with engine_log(verbose) as log, EngineHost(args, log, params) as host:
        session = ChatSession(host.engine, args.model, host.params(), system, host)
        _converse(session, question, raw, as_json, log)


def _converse(
    session: ChatSession, question: str | None, raw: bool, as_json: bool, log: ProgressHandler
) -> None:
    if question is None:
        _talk(session, raw, log)
    else:
        _answer_once(session, question, raw, as_json, log)


def _talk(session: ChatSession, raw: bool, log: ProgressHandler) -> None:
    from minivllm import __version__
    from minivllm.cli.machine.findings import default_history_path

    notice(
        f"minivllm {__version__} · {session.model} · {session.description} · "
        f"context {session.max_model_len:,} tokens · /help lists the commands"
    )
    _mention_missing_template(session)
    ChatTerminal(session, log, default_history_path(), raw=raw).run()


def _answer_once(session: ChatSession, question: str, raw: bool, as_json: bool, log: ProgressHandler) -> None:
    """Answer ``question`` on stdout, statistics on stderr.
    Ctrl-C exits with 130 after what was said so far."""
    _mention_missing_template(session)
    if as_json:
        with InterruptFlag() as interrupt, log.status("Answering"):
            generation = session.ask(question, lambda text: None, lambda: interrupt.is_set)
        print(json.dumps(generation.record()), flush=True)
    else:
        generation = stream_answer(
            lambda on_text, is_interrupted: session.ask(question, on_text, is_interrupted),
            log,
            waiting="Answering",
            raw=raw,
        )
        notice(generation.statistics_line(session.max_model_len))
        if (
            generation.finish_reason == FinishReason.LENGTH
            and generation.num_context_tokens >= session.max_model_len
        ):
            notice(
                f"The context is full ({generation.num_context_tokens:,} of {session.max_model_len:,} "
                "tokens) and the "
                "answer was cut; start with a larger --max-model-len."
            )
    if generation.failure:
        raise RequestError(generation.failure)
    if generation.interrupted:
        raise typer.Exit(130)


def _mention_missing_template(session: ChatSession) -> None:
    if not session.has_chat_template:
        notice(f"{session.model} has no chat template: it continues your text instead of answering it.")
