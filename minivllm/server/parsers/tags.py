"""Finding a literal tag in text that arrives in pieces."""

from __future__ import annotations


def split_at_tag(text: str, tag: str) -> tuple[str, bool, str]:
    """(text before the tag, whether the tag is there, text behind it or what may still become the tag).

    What is held back is shorter than the tag, so scanning a text in pieces takes linear time.
    """
    position = text.find(tag)
    if position >= 0:
        return text[:position], True, text[position + len(tag) :]
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[len(text) - length :]):
            return text[: len(text) - length], False, text[len(text) - length :]
    return text, False, ""
