"""Spans of families that cut an image into tiles of one size, and add the whole image as one more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minivllm.errors import ModelError
from minivllm.multimodal.spans.span import Encode, Options, Plain, Span, image_token, markers

LARGEST_SIDE = 4096
"""Images of tiles are never made larger than that; a constant of Idefics 3's processor."""


class Tiles(Plain):
    """Idefics 3, SmolVLM: an image is cut into tiles, named by row and column,
    and is added as a small one."""

    options: tuple[str, ...] = ("do_image_splitting",)

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        vision = config["vision_config"]
        self._edge: int = processor["max_image_size"]["longest_edge"]
        self._longest: int | None = (
            processor["size"]["longest_edge"] if processor.get("do_resize", True) else None
        )
        self._splits = bool(processor.get("do_image_splitting", True))
        self.unit_embeds = (vision["image_size"] // vision["patch_size"]) ** 2 // config.get(
            "scale_factor", 2
        ) ** 2
        self.unit_shape = self.least_unit_shape = 3, self._edge, self._edge
        self.placeholder = image_token(config)
        most = math.ceil(min(self._longest or LARGEST_SIDE, LARGEST_SIDE) / self._edge)
        self.most_embeds = self.unit_embeds * (most * most + 1 if most > 1 else 1)
        self._known: dict[tuple[int, int], Span] = {}

    def grid(self, width: int, height: int, options: Options) -> tuple[int, int]:
        """Rows and columns of tiles; (0, 0) for an image that is not cut."""
        if not options.get("do_image_splitting", self._splits):
            return 0, 0
        edge = self._edge
        if self._longest is not None:
            width, height = self._resized(width, height, self._longest)
        ratio = width / height
        if width >= height:
            width = math.ceil(width / edge) * edge
            height = math.ceil(int(width / ratio) / edge) * edge
        else:
            height = math.ceil(height / edge) * edge
            width = math.ceil(int(height * ratio) / edge) * edge
        return (0, 0) if height <= edge and width <= edge else (height // edge, width // edge)

    @staticmethod
    def _resized(width: int, height: int, longest: int) -> tuple[int, int]:
        """With the longer side this long, and the other one even."""
        ratio = width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            width, height = int(longest * ratio), longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > LARGEST_SIDE:
            width, height = LARGEST_SIDE, int(LARGEST_SIDE / ratio)
        elif height > width and height > LARGEST_SIDE:
            width, height = int(LARGEST_SIDE * ratio), LARGEST_SIDE
        return max(width, 1), max(height, 1)

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        grid = self.grid(width, height, options)
        if grid not in self._known:
            self._known[grid] = self._span(*grid, encode)
        return self._known[grid]

    def _span(self, rows: int, columns: int, encode: Encode) -> Span:
        around, tile = "<fake_token_around_image>", "<image>" * self.unit_embeds
        parts = []
        for row in range(rows):
            parts += [f"{around}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)]
            parts.append("\n")
        parts.append("\n" if rows else "")
        token_ids = encode("".join(parts) + f"{around}<global-img>{tile}{around}")
        is_image = [token == self.placeholder for token in token_ids]
        starts = [
            place for place, now in enumerate(is_image) if now and (place == 0 or not is_image[place - 1])
        ]
        num_units = rows * columns + 1
        runs = [(start, self.unit_embeds) for start in starts]
        if len(runs) != num_units or sum(is_image) != num_units * self.unit_embeds:
            raise ModelError(
                f"The tokenizer makes {sum(is_image)} placeholders of {num_units} tiles with "
                f"{self.unit_embeds} each: "
                "it lacks the special tokens of the model's family."
            )
        return Span(token_ids, runs, num_units, self.unit_embeds, self.unit_shape)


class Canvas(Plain):
    """InternVL: an image is resized to the grid of tiles whose shape is nearest to its shape, and is added as
    one more tile. All of them are one run, between two markers."""

    options: tuple[str, ...] = ("crop_to_patches",)

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        size = processor["size"]
        self._edges: tuple[int, int] = int(size["height"]), int(size["width"])
        # Whatever the processor's file says, as transformers does.
        self.resizing: Mapping[str, Any] = {"crop_to_patches": True}
        least, most = int(processor.get("min_patches", 1)), int(processor.get("max_patches", 12))
        grids = [
            (rows, columns)
            for columns in range(1, most + 1)
            for rows in range(1, most + 1)
            if least <= rows * columns <= most
        ]
        self._grids = sorted(grids, key=lambda grid: grid[0] * grid[1]) if most > 1 else []
        self.unit_embeds = int(config.get("image_seq_length", 256))
        self.unit_shape = self.least_unit_shape = 3, *self._edges
        self.most_embeds = self.unit_embeds * max(1, 1 + max(map(math.prod, self._grids), default=0))
        self.placeholder = image_token(config)
        self._markers: tuple[int, int] | None = None

    def num_tiles(self, width: int, height: int, options: Options) -> int:
        """With the whole image among them, if there are several."""
        if not options.get("crop_to_patches", True) or not self._grids:
            return 1
        best, best_difference = (1, 1), math.inf
        for rows, columns in self._grids:
            difference = abs(width / height - columns / rows)
            covers = width * height > 0.5 * self._edges[0] * self._edges[1] * columns * rows
            if difference < best_difference or (difference == best_difference and covers):
                best, best_difference = (rows, columns), difference
        return math.prod(best) + (math.prod(best) > 1)

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        if self._markers is None:
            self._markers = markers(encode, "<img>", "</img>")
        num_tiles = self.num_tiles(width, height, options)
        count = num_tiles * self.unit_embeds
        token_ids = [self._markers[0], *[self.placeholder] * count, self._markers[1]]
        return Span(token_ids, [(1, count)], num_tiles, self.unit_embeds, self.unit_shape)
