"""What a child process says of itself to the process that started it: log lines, errors, and how it ended."""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Callable

import msgspec

from minivllm import errors
from minivllm.errors import EngineDeadError, MinivllmError

FRONTEND_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""What they mean is for the frontend to decide, which may want to drain first;
child processes ignore them."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """An exception on its way to another process. kind: the name of its class."""

    kind: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, printable(str(error)), printable(text))

    def exception(self, origin: str = "engine core") -> MinivllmError:
        """The same error if its text is a sentence for the user; for every other one, EngineDeadError with
        the original traceback. origin: whose error it was."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, MinivllmError):
            return kind(self.message)
        return EngineDeadError(
            f"The {origin} died of {self.kind}: {self.message}\n\n"
            + f"Traceback of the {origin}:\n{self.traceback.rstrip()}"
        )


class Log(msgspec.Struct, frozen=True, tag="log"):
    """A line of another process's log, for the handlers of this one."""

    logger: str
    level: int
    message: str

    def handle(self) -> None:
        """Give it to the logger of that name here."""
        logging.getLogger(self.logger).log(self.level, "%s", self.message)


class LogSender(logging.Handler):
    """Hands every line of the log to ``send``, from the thread that logs."""

    def __init__(self, send: Callable[[Log], None]) -> None:
        super().__init__()
        self._send = send
        self.setFormatter(logging.Formatter())  # the message, and the traceback where there is one

    def emit(self, record: logging.LogRecord) -> None:
        self._send(Log(record.name, record.levelno, printable(self.format(record))))


def printable(text: str) -> str:
    """Text that UTF-8 can write: half surrogate pairs are escaped."""
    return text.encode(errors="backslashreplace").decode()


def describe_exit(what: str, status: int | None) -> str:
    """How a process ended that gave no reason. what: "engine process".
    status: as subprocess has it, None if the process goes on."""
    if status is None:
        return f"The {what} closed its pipe to this one."
    if status >= 0:
        return f"The {what} ended with status {status} and without a word; its stderr may say why."
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = ": the operating system does so when memory runs out" if name == "SIGKILL" else ""
    return f"The {what} was killed by {name}{hint}."
