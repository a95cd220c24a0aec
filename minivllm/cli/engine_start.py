"""Starting an engine from the command line: progress on stderr while it loads, warnings always, silence otherwise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from minivllm.cli.terminal_text import dim, printable, styles
from minivllm.config import EngineArgs

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine


class ProgressHandler(logging.Handler):
    """Shows what the engine logs: the latest line as a status that disappears, warnings (``verbose``: all) to stay."""

    def __init__(self, verbose: bool) -> None:
        super().__init__(logging.INFO)
        self._verbose = verbose
        self._status: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = printable(record.getMessage())
            if record.levelno >= logging.WARNING or self._verbose:
                print(dim(message, sys.stderr), file=sys.stderr, flush=True)
            elif self._status is not None:
                self._show(message)
        except Exception:
            self.handleError(record)

    @contextmanager
    def status(self, message: str) -> Iterator[None]:
        """Show ``message``, then the latest log line, until the block ends; nothing where stderr is no terminal."""
        if self._verbose or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        # rich redirects what is printed to stderr meanwhile, so warnings appear above the status.
        console = Console(stderr=True, highlight=False)
        self._status = console.status("", spinner="dots")
        self._show(message)
        try:
            with self._status:
                yield
        finally:
            self._status = None

    def _show(self, message: str) -> None:
        from rich.text import Text

        self._status.update(Text(message, style="dim" if styles(sys.stderr) else "", overflow="ellipsis", no_wrap=True))


@contextmanager
def engine_log(verbose: bool) -> Iterator[ProgressHandler]:
    """Attach a ProgressHandler to the package's logger for the length of the block."""
    package = logging.getLogger("minivllm")
    handler = ProgressHandler(verbose)
    level, propagate = package.level, package.propagate
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        yield handler
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagate


def create_engine(args: EngineArgs) -> LLMEngine:
    """The in-process engine. torch is imported here, not earlier: help and usage errors stay quick."""
    from minivllm.frontend.llm_engine import LLMEngine

    return LLMEngine.from_args(args)


def fetch_model(args: EngineArgs) -> None:
    """Fetch the model if it is not there yet: a download draws its own progress bar, before the engine's status."""
    from minivllm.models.fetch import resolve_model

    resolve_model(args.model, args.revision, weights=args.load_format != "dummy")


@contextmanager
def running_engine(args: EngineArgs, log: ProgressHandler) -> Iterator[LLMEngine]:
    """Fetch the model, start the engine, close it at the end of the block. Raises MinivllmError."""
    fetch_model(args)
    with log.status(f"Loading {args.model}"):
        engine = create_engine(args)
    try:
        yield engine
    finally:
        engine.close()
