"""Pixels on their way to the engine core, and positions inside spans."""

from __future__ import annotations

import msgspec

from minivllm.messages import ImageItem


class PixelTensors(msgspec.Struct, frozen=True, tag="pixels"):
    """All units of an image, resized and cut, neither scaled nor normalised."""

    digest: bytes
    shape: tuple[int, ...] = ()
    """[units, channels, height, width]."""
    data: bytes = b""
    """uint8, in C order."""
    error: str | None = None
    """Why there are none, for the senders of the requests that wait for them."""


def units_before(item: ImageItem, position: int) -> int:
    """Units whose placeholders all come before a position of the prompt: what follows reads none of them. 0
    for an image whose embeddings become lines, since all units are needed for one."""
    if item.lines is not None:
        return 0
    inside = position - item.offset
    num_embeds = sum(min(max(inside - first, 0), count) for first, count in item.runs)
    return num_embeds // item.unit_embeds


def place_of(item: ImageItem, num_embeds: int) -> int:
    """The position in the prompt of the first placeholder that cannot be read after so many embeddings;
    of the span's end after all."""
    if num_embeds >= item.num_embeds:
        return item.offset + item.length
    if item.lines is not None:
        num_embeds = 0
    for first, count in item.runs:
        if num_embeds < count:
            return item.offset + first + num_embeds
        num_embeds -= count
    return item.offset + item.length
