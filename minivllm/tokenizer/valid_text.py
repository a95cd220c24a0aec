"""Texts from outside: whether UTF-8 can write them, and how an error message shows any value."""

from __future__ import annotations

import reprlib
from typing import Any

from minivllm.errors import RequestError


def check_text(name: str, text: Any, max_length: int | None = None) -> None:
    """Raises RequestError for what is no text, or none that UTF-8 can write. max_length: in characters."""
    if not isinstance(text, str):
        raise RequestError(f"{name} is {shown(text)}, but must be a text.")
    if max_length is not None and len(text) > max_length:
        raise RequestError(f"{name} has {len(text)} characters, but may have at most {max_length}.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has half a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}, "
            "but must be text that UTF-8 can write."
        ) from None


def shown(value: Any) -> str:
    """A value for an error message: short, and always printable."""
    return reprlib.repr(value)
