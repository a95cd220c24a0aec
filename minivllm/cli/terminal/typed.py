"""Typed input: prompts, and the names of files."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

from minivllm.cli.terminal.terminal_text import format_bytes
from minivllm.errors import RequestError

MOST_BYTES = 16 * 2**20
"""Of a prompt on standard input."""


def check_text(text: str, what: str) -> str:
    """``text`` if the engine can take it. Raises RequestError if it is empty or no valid Unicode."""
    if text.strip() == "":
        raise RequestError(f"{what} is empty, but must hold at least one character that is no white space.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(
            f"{what} is not valid UTF-8 text; convert it first (for example with iconv)."
        ) from None
    return text


def read_standard_input() -> str:
    """The whole of standard input, without the newline that ends it.
    Raises RequestError if it is empty or no UTF-8."""
    try:
        content = sys.stdin.buffer.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RequestError(
                f"Standard input has more than {format_bytes(MOST_BYTES)}, too much for any model: shorten "
                "it."
            )
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(
            "Standard input is not valid UTF-8 text; convert it first (for example with iconv)."
        ) from None
    return check_text(text.removesuffix("\n").removesuffix("\r"), "The prompt on standard input")


def prompt_text(option: str) -> str:
    """The prompt that ``-p`` gave, where ``-`` stands for standard input."""
    return read_standard_input() if option == "-" else check_text(option, "The prompt")


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def typed_path(text: str) -> Path:
    """``text`` with ~ for the home directory. Raises RequestError if it can name no file."""
    if "\0" in text:
        raise RequestError(f"{text!r} is no file name: it holds a null character.")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise RequestError(
            f"{text} begins with the home directory of a user who does not exist here."
        ) from None


def read_typed_file(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises RequestError for anything else, and for more than ``most_bytes``.

    Nothing else is even opened: a pipe would wait for a writer for ever, a device may do something. The size
    that a file tells is not believed (those under /proc tell 0).
    """
    try:
        _check(path, os.stat(path), most_bytes)
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _check(path, os.fstat(file.fileno()), most_bytes)  # the name may stand for another file by now
            content = file.read(most_bytes + 1) or b""
    except OSError as error:
        raise RequestError(f"Cannot read {path}: {error.strerror or error}.") from None
    if len(content) > most_bytes:
        raise RequestError(_too_large(path, most_bytes))
    return content


def write_typed_file(path: Path, content: bytes) -> None:
    """The whole file or none. Raises RequestError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(unfinished, "xb") as file:
            try:
                file.write(content)
                file.flush()
                os.replace(unfinished, path)
            except BaseException:
                with suppress(OSError):
                    unfinished.unlink()
                raise
    except OSError as error:
        raise RequestError(f"Cannot write {path}: {error.strerror or error}.") from None


def _check(path: Path, status: os.stat_result, most_bytes: int) -> None:
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        raise RequestError(
            f"Cannot read {path}: it is {_KINDS.get(kind, 'no regular file')}; give a regular file."
        )
    if status.st_size > most_bytes:
        raise RequestError(_too_large(path, most_bytes))


def _too_large(path: Path, most_bytes: int) -> str:
    return f"Cannot read {path}: it has more than {format_bytes(most_bytes)}, the most that is read here."
