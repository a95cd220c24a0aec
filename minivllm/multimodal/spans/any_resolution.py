"""Spans of families that cut an image into tiles, and lay the features of these side by side again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm.errors import ModelError, RequestError
from minivllm.messages import FeatureLines
from minivllm.multimodal.spans.span import Encode, Options, Plain, Span, image_token

_STRATEGIES: Mapping[str, str] = {"clip_vision_model": "default", "siglip_vision_model": "full"}
"""Image encoder -> the strategy that selects its patches alone. CLIP has a token of the whole image first."""
_MAX_TILES = "anyres_max_"
_MOST_RATIO = 1.1
"""Of a side of an image's features to that which they should have; above, they are resized."""


class AnyResolution(Plain):
    """LLaVA-NeXT, LLaVA-OneVision: an image is resized to the listed size that suits it best, padded there,
    and cut into tiles. The whole image is the first unit. All are one run, without the features of padding,
    and with a newline after each line of features. OneVision resizes features where there are too many."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        is_next = config["model_type"] == "llava_next"
        size = processor.get("crop_size") or processor["size"]
        self._edge = int(size.get("height") or size["shortest_edge"])
        _check_encoder(config, self._edge, "clip_vision_model" if is_next else "siglip_vision_model")
        self._side = self._edge // int(config["vision_config"]["patch_size"])
        self._most_tiles = math.inf if is_next else _most_tiles(config)
        self._sizes = _tile_sizes(processor["image_grid_pinpoints"], self._edge)
        self.unit_embeds = self._side**2 + 1  # the last one is the newline
        self.unit_shape = self.least_unit_shape = 3, self._edge, self._edge
        self.most_embeds = max(map(self._most_room, self._sizes))
        self.placeholder = image_token(config)

    def _most_room(self, tiles: tuple[int, int]) -> int:
        """Embeddings of an image of so many tiles, as they are encoded or in lines."""
        rows, columns = tiles
        shown = min(rows * columns, self._most_tiles * _MOST_RATIO**2)
        in_lines = self._side**2 * (1 + shown) + self._side * rows
        return max(self.unit_embeds * (1 + rows * columns), math.floor(in_lines))

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles: those that show most of the image's pixels, and of these the fewest."""

        def suits(size: tuple[int, int]) -> tuple[int, int]:
            rows, columns = size[0] * self._edge, size[1] * self._edge
            scale = min(columns / width, rows / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return shown, shown - rows * columns

        return max(self._sizes, key=suits)

    def lines(self, width: int, height: int) -> FeatureLines:
        """Raises RequestError where none of an image's lines is left."""
        tiles = self.tiles(width, height)
        rows, columns = tiles[0] * self._side, tiles[1] * self._side
        top = left = 0
        if width / height > columns / rows:
            top = (rows - int(round(height * (columns / width), 7))) // 2
        else:
            left = (columns - int(round(width * (rows / height), 7))) // 2
        rows, columns = rows - 2 * top, columns - 2 * left
        ratio = math.sqrt(rows * columns / (self._most_tiles * self._side**2))
        if ratio > _MOST_RATIO:
            rows, columns = int(rows // ratio), int(columns // ratio)
            if rows * columns == 0:
                raise RequestError(
                    f"An image of {width} × {height} pixels is too narrow: no line of features is left."
                )
        return FeatureLines(tiles, (top, left), (rows, columns))

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        lines = self.lines(width, height)
        count = self._side**2 + lines.size[0] * (lines.size[1] + 1)
        num_units = 1 + lines.tiles[0] * lines.tiles[1]
        run = [self.placeholder] * count
        return Span(run, [(0, count)], num_units, self.unit_embeds, self.unit_shape, lines=lines)


def _check_encoder(config: Mapping[str, Any], edge: int, default: str) -> None:
    """Raises ModelError where features of a tile of this edge [pixels] would not be a square of patches."""
    vision = config["vision_config"]
    kind, size = vision.get("model_type", default), vision.get("image_size", edge)
    strategy = config.get("vision_feature_select_strategy", _STRATEGIES[default])
    if _STRATEGIES.get(kind) != strategy:
        allowed = ", ".join(f"{selected!r} with {encoder!r}" for encoder, selected in _STRATEGIES.items())
        raise ModelError(
            f"vision_feature_select_strategy is {strategy!r} with the image encoder {kind!r}, but served are "
            f"{allowed}."
        )
    if size != edge:
        raise ModelError(f"Tiles have {edge} pixels, but vision_config.image_size is {size!r}.")


def _most_tiles(config: Mapping[str, Any]) -> int:
    """How many tiles' features an image of OneVision has besides those of the whole. Raises ModelError."""
    given = str(config.get("vision_aspect_ratio", f"{_MAX_TILES}9"))
    number = given.removeprefix(_MAX_TILES)
    if not (given.startswith(_MAX_TILES) and number.isdecimal() and int(number) > 0):
        raise ModelError(
            f"vision_aspect_ratio is {given!r}, but must be {_MAX_TILES!r} and a number of tiles."
        )
    return int(number)


def _tile_sizes(sizes: Sequence[Sequence[int]], edge: int) -> list[tuple[int, int]]:
    """Rows and columns of tiles of the listed sizes [pixels: height, width]. Raises ModelError."""
    if not sizes or any(side <= 0 or side % edge for size in sizes for side in size):
        raise ModelError(
            f"image_grid_pinpoints is {sizes!r}, but must list heights and widths of whole tiles of {edge} "
            "pixels."
        )
    return [(height // edge, width // edge) for height, width in sizes]
