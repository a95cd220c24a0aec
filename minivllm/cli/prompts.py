"""Prompts from the command line: an option, a pipe, or nothing acceptable."""

from __future__ import annotations

import sys

from minivllm.errors import RequestError


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
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(
            "Standard input is not valid UTF-8 text; convert it first (for example with iconv)."
        ) from None
    return check_text(text.removesuffix("\n").removesuffix("\r"), "The prompt on standard input")


def prompt_text(option: str) -> str:
    """The prompt that ``-p`` gave, where ``-`` stands for standard input."""
    return read_standard_input() if option == "-" else check_text(option, "The prompt")
