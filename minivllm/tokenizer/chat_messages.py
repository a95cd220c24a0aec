"""Messages of a conversation as a chat template needs them. They are checked before: a template says what is
wrong in the words of Jinja."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import RequestError
from minivllm.tokenizer.chat_template import REASONING_FIELDS
from minivllm.tokenizer.valid_text import check_text, shown


def checked_messages(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The messages, each with a role and a content. Parts that are all texts have become one text, joined by
    newlines, which every template can write; a content with images stays a list of parts.

    Raises RequestError that names the message or the part.
    """
    return [_checked(f"messages.{index}", message) for index, message in enumerate(messages)]


def _checked(name: str, message: Any) -> Mapping[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name} is {shown(message)}, but must be a dictionary with a role and a content.")
    _check_strings_inside(name, message)
    content = message.get("content")
    if isinstance(content, str):
        return message
    if content is None:
        if any(message.get(field) for field in ("tool_calls", *REASONING_FIELDS)):
            return message
        raise RequestError(f"{name} has no content: give a text, or a list of parts.")
    if not isinstance(content, (list, tuple)) or not content:
        raise RequestError(
            f"{name}.content is {shown(content)}, but must be a text, or a list of at least one part."
        )
    parts = [_part(f"{name}.content.{number}", part) for number, part in enumerate(content)]
    if all("text" in part for part in parts):
        return {**message, "content": "\n".join(part["text"] for part in parts)}
    return {**message, "content": parts}


def _part(name: str, part: Any) -> Mapping[str, Any]:
    """A part as templates know it: ``{"type": "text", "text": …}`` or ``{"type": "image"}``."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, Mapping) and part.get("type") == "image":
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part
    raise RequestError(
        f'{name} is {shown(part)}, but must be an image, or a text: {{"type": "text", "text": "Hello"}}.'
    )


def with_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text as a part, for templates that read nothing else."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def ending_with(message: Mapping[str, Any], end: str) -> Mapping[str, Any]:
    """The message with ``end`` after its last text."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": content + end}
    *parts, last = content
    if last.get("type") != "text":
        return {**message, "content": [*content, {"type": "text", "text": end}]}
    return {**message, "content": [*parts, {**last, "text": last["text"] + end}]}


def _check_strings_inside(name: str, value: Any) -> None:
    """Every string in a message, however deep, can be written as UTF-8."""
    if isinstance(value, str):
        check_text(name, value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _check_strings_inside(name, key)
            _check_strings_inside(f"{name}.{key}", inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_strings_inside(f"{name}.{index}", inner)
