"""Prompts from the command line: an option, a pipe, or nothing acceptable."""

from __future__ import annotations

import sys

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
        raise RequestError(f"{what} is not valid UTF-8 text; convert it first (for example with iconv).") from None
    return text


def read_standard_input() -> str:
    """The whole of standard input, without the newline that ends it. Raises RequestError if it is empty or no UTF-8."""
    try:
        content = sys.stdin.buffer.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise RequestError(
                f"Standard input has more than {format_bytes(MOST_BYTES)}, too much for any model: shorten it."
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
