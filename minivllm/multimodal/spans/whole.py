"""Spans of families that encode an image as a whole, in nearly its size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minivllm.errors import RequestError
from minivllm.multimodal.spans.span import Encode, Options, Plain, Span, image_token, markers

MOST_SQUARES = 4096
"""Embeddings of an image of a family that would take many more: it is resized to these."""
MOST_RATIO = 200
"""Of the longer side of an image to the shorter one; others are refused before they come here."""


class Grid(Plain):
    """Qwen2-VL, Qwen2.5-VL: an image is resized to whole squares of patches, encoded as a whole, and gives
    one run, an embedding for each square, which are rotated by row and column."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self._square = int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2))
        size = processor.get("size") or {}
        self._least = int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
        most = int(processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
        self._most = min(most, MOST_SQUARES * self._square**2)
        self.resizing: Mapping[str, Any] = {
            "size": {"shortest_edge": self._least, "longest_edge": self._most}
        }
        # A narrow image has more squares than its area says: each side is one of them at least.
        most, least = self._most // self._square**2, -(-self._least // self._square**2)
        narrow = math.isqrt(most * MOST_RATIO) + 1, least + math.isqrt(least * MOST_RATIO) + 3
        self.unit_embeds = self.most_embeds = max(most, *narrow)
        side = max(1, math.isqrt(self.unit_embeds)) * self._square
        self.unit_shape = 3, side, side
        self.least_unit_shape = 3, self._square, self._square
        self.placeholder = image_token(config)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of squares."""
        square = self._square
        rows, columns = round(height / square), round(width / square)
        if rows * columns * square**2 > self._most:
            factor = math.sqrt(width * height / self._most)
            return max(1, math.floor(height / factor / square)), max(1, math.floor(width / factor / square))
        if rows * columns * square**2 < self._least:
            factor = math.sqrt(self._least / (width * height))
            return math.ceil(height * factor / square), math.ceil(width * factor / square)
        return rows, columns

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        rows, columns = self.grid(width, height)
        count = rows * columns
        shape = 3, rows * self._square, columns * self._square
        return Span([self.placeholder] * count, [(0, count)], 1, count, shape, (rows, columns))


class Lines(Plain):
    """Pixtral, Mistral 3: an image is resized to whole patches, encoded as a whole, and gives a run for each
    line of patches, with a marker after it."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        merged = config.get("spatial_merge_size", 2) if config.get("model_type") == "mistral3" else 1
        self._patch = int(config["vision_config"]["patch_size"]) * int(merged)
        size = processor["size"]
        self._most_height = int(size.get("longest_edge") or size["height"])
        self._most_width = int(size.get("longest_edge") or size["width"])
        self.resizing: Mapping[str, Any] = {"patch_size": {"height": self._patch, "width": self._patch}}
        rows, columns = self.grid(self._most_width, self._most_height)
        self.unit_embeds = self.most_embeds = rows * columns
        self.unit_shape = 3, rows * self._patch, columns * self._patch
        self.least_unit_shape = 3, self._patch, self._patch
        self.placeholder = image_token(config)
        self._markers: tuple[int, int] | None = None

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Lines of patches, and patches of each."""
        ratio = max(height / self._most_height, width / self._most_width)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return (height - 1) // self._patch + 1, (width - 1) // self._patch + 1

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        if self._markers is None:
            self._markers = markers(encode, "[IMG_BREAK]", "[IMG_END]")
        rows, columns = self.grid(width, height)
        if rows * columns == 0:
            raise RequestError(
                f"An image of {width} × {height} pixels is too narrow: in {self._most_width} × "
                f"{self._most_height}, one of its sides has no pixel left."
            )
        line = [self.placeholder] * columns
        token_ids = [*line, self._markers[0]] * rows
        token_ids[-1] = self._markers[1]
        runs = [(row * (columns + 1), columns) for row in range(rows)]
        return Span(token_ids, runs, 1, rows * columns, (3, rows * self._patch, columns * self._patch))


class Squares(Plain):
    """Gemma 4: an image is resized to whole squares of patches, as many as it may have, and gives one run, an
    embedding for each square, between two markers. In larger models it sees itself."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self._square = int(processor.get("patch_size", 16)) * int(processor.get("pooling_kernel_size", 3))
        self.unit_embeds = self.most_embeds = int(processor.get("max_soft_tokens", 280))
        self.unit_shape = 3, self._square, self._square * self.most_embeds
        self.least_unit_shape = 3, self._square, self._square
        self.placeholder = int(config.get("image_token_id", 258880))
        self._markers = int(config.get("boi_token_id", 255999)), int(config.get("eoi_token_id", 258882))
        self.sees_itself = config["text_config"].get("use_bidirectional_attention") == "vision"

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of squares: all that are allowed, but for what whole squares leave of them."""
        factor = math.sqrt(self.most_embeds * self._square**2 / (height * width))
        rows, columns = (math.floor(factor * side / self._square) for side in (height, width))
        if rows == 0:
            return 1, min(width // height, self.most_embeds)
        if columns == 0:
            return min(height // width, self.most_embeds), 1
        return rows, columns

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        rows, columns = self.grid(width, height)
        count = rows * columns
        token_ids = [self._markers[0], *[self.placeholder] * count, self._markers[1]]
        shape = 3, rows * self._square, columns * self._square
        return Span(token_ids, [(1, count)], 1, count, shape)
