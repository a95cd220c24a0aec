"""From the size of an image to the tokens that stand for it:
what the processors of transformers write, as data.

A prompt has one placeholder for each image. Its span takes that place: placeholders, one for each embedding,
and the markers of the family between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from minivllm.errors import ModelError, RequestError

Options = Mapping[str, bool]
"""What a caller may choose for an image; see ``Expansion.options``."""

Encode = Callable[[str], list[int]]
"""Token ids of a text in which special tokens count."""

MOST_SQUARES = 4096
"""Embeddings of an image of a family that would take many more: it is resized to these."""

LARGEST_SIDE = 4096
"""Images of tiles are never made larger than that; a constant of Idefics 3's processor."""


class Span(NamedTuple):
    """token_ids: of the span. runs, num_units, unit_embeds, unit_shape, grid: see ImageItem."""

    token_ids: list[int]
    runs: list[tuple[int, int]]
    num_units: int
    unit_embeds: int
    unit_shape: tuple[int, int, int]
    grid: tuple[int, int] = (0, 0)


class Expansion(Protocol):
    """What a family makes of an image."""

    @property
    def placeholder(self) -> int:
        """The token that stands for an image in a prompt."""

    @property
    def unit_embeds(self) -> int:
        """Embeddings of the largest unit."""

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Pixels of the largest unit, channels first."""

    @property
    def least_unit_shape(self) -> tuple[int, int, int]:
        """Pixels of the smallest unit."""

    @property
    def most_embeds(self) -> int:
        """Embeddings of the largest image."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the choices that a caller has. The first one: whether an image is cut into tiles."""

    @property
    def resizing(self) -> Mapping[str, Any]:
        """What the image processor is told besides them."""

    @property
    def sees_itself(self) -> bool:
        """Whether all placeholders of a run see each other."""

    @property
    def around(self) -> str:
        """What stands before and after a span as text, so that the tokenizer reads it with its neighbours."""

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """The span of an image of this size [pixels].
        Raises RequestError for one that cannot be resized."""


def image_token(config: Mapping[str, Any]) -> int:
    """The token for an embedding, by the entries of config.json. Raises KeyError."""
    found = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(found, int):
        raise KeyError("image_token_id")
    return found


class OneRun:
    """LLaVA 1.5: every image is resized to one size, and gives one run of embeddings."""

    options: tuple[str, ...] = ()
    sees_itself = False
    around = ""
    resizing: Mapping[str, Any] = {}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        vision = config["vision_config"]
        size = processor["crop_size"] if processor.get("do_center_crop") else processor["size"]
        if isinstance(size, int):
            size = {"height": size, "width": size}
        height, width, patch = size["height"], size["width"], vision["patch_size"]
        # CLIP puts a token of the whole image before the patches; "default" drops the first one.
        has_whole = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
        drops_first = config.get("vision_feature_select_strategy", "default") == "default"
        self.unit_embeds = self.most_embeds = (height // patch) * (width // patch) + has_whole - drops_first
        self.unit_shape = self.least_unit_shape = 3, height, width
        self.placeholder = image_token(config)

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        run = [self.placeholder] * self.unit_embeds
        return Span(run, [(0, len(run))], 1, self.unit_embeds, self.unit_shape)


class MarkedRun:
    """Gemma 3: every image is resized to one size, and gives one run, which sees itself, between two markers.
    Prompts have the first marker alone."""

    options: tuple[str, ...] = ()
    sees_itself = True
    around = "\n\n"
    resizing: Mapping[str, Any] = {}

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        if processor.get("do_pan_and_scan"):
            raise ModelError("do_pan_and_scan cuts crops out of images, which is not served yet.")
        self.unit_embeds = self.most_embeds = int(config.get("mm_tokens_per_image", 256))
        self.unit_shape = 3, processor["size"]["height"], processor["size"]["width"]
        self.least_unit_shape = self.unit_shape
        self.placeholder = int(config.get("boi_token_index", 255999))
        run = [int(config.get("image_token_index", 262144))] * self.unit_embeds
        self._span = Span(
            [self.placeholder, *run, int(config.get("eoi_token_index", 256000))],
            [(1, len(run))],
            1,
            self.unit_embeds,
            self.unit_shape,
        )

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        return self._span


class Tiles:
    """Idefics 3, SmolVLM: an image is cut into tiles, named by row and column,
    and is added as a small one."""

    options = ("do_image_splitting",)
    sees_itself = False
    around = ""
    resizing: Mapping[str, Any] = {}

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


class Grid:
    """Qwen2-VL, Qwen2.5-VL: an image is resized to whole squares of patches, encoded as a whole, and gives
    one run, an embedding for each square, which are rotated by row and column."""

    options: tuple[str, ...] = ()
    sees_itself = False
    around = ""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self._square = int(processor.get("patch_size", 14)) * int(processor.get("merge_size", 2))
        size = processor.get("size") or {}
        self._least = int(processor.get("min_pixels") or size.get("shortest_edge") or 56 * 56)
        most = int(processor.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280)
        self._most = min(most, MOST_SQUARES * self._square**2)
        self.resizing: Mapping[str, Any] = {
            "size": {"shortest_edge": self._least, "longest_edge": self._most}
        }
        self.unit_embeds = self.most_embeds = self._most // self._square**2
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


class Canvas:
    """InternVL: an image is resized to the grid of tiles whose shape is nearest to its shape, and is added as
    one more tile. All of them are one run, between two markers."""

    options: tuple[str, ...] = ("crop_to_patches",)
    sees_itself = False
    around = ""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        size = processor["size"]
        self._edges: tuple[int, int] = int(size["height"]), int(size["width"])
        self._crops = True  # whatever the processor's file says, as transformers does
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
        if not options.get("crop_to_patches", self._crops) or not self._grids:
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
            self._markers = _markers(encode, "<img>", "</img>")
        num_tiles = self.num_tiles(width, height, options)
        count = num_tiles * self.unit_embeds
        token_ids = [self._markers[0], *[self.placeholder] * count, self._markers[1]]
        return Span(token_ids, [(1, count)], num_tiles, self.unit_embeds, self.unit_shape)


def _markers(encode: Encode, first: str, second: str) -> tuple[int, int]:
    """Two special tokens. Raises ModelError if the tokenizer has no such ones."""
    found = encode(first), encode(second)
    if [len(ids) for ids in found] != [1, 1]:
        raise ModelError(f"The tokenizer lacks {first} or {second}, the markers of images.")
    return found[0][0], found[1][0]


class Lines:
    """Pixtral, Mistral 3: an image is resized to whole patches, encoded as a whole, and gives a run for each
    line of patches, with a marker after it."""

    options: tuple[str, ...] = ()
    sees_itself = False
    around = ""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self._patch = int(config["vision_config"]["patch_size"]) * int(config.get("spatial_merge_size", 1))
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
            self._markers = _markers(encode, "[IMG_BREAK]", "[IMG_END]")
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


Make = Callable[[Mapping[str, Any], Mapping[str, Any]], Expansion]
"""From the entries of config.json, and those of the image processor's file."""


def _llava(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Expansion:
    """LLaVA 1.5, or Pixtral, which is published as one."""
    is_pixtral = config["vision_config"].get("model_type") == "pixtral"
    return Lines(config, processor) if is_pixtral else OneRun(config, processor)


_FAMILIES: Mapping[str, Make] = {
    "llava": _llava,
    "mistral3": Lines,
    "internvl": Canvas,
    "qwen2_vl": Grid,
    "qwen2_5_vl": Grid,
    "idefics3": Tiles,
    "smolvlm": Tiles,
    "gemma3": MarkedRun,
}
FAMILIES = tuple(_FAMILIES)
"""Whose images are served, by model_type."""


def make_expansion(
    family: str, config: Mapping[str, Any], processor: Mapping[str, Any], source: str
) -> Expansion:
    """What a model of the family makes of images. config, processor: the entries of config.json and of the
    processor's file in the directory ``source``. Raises ModelError where they do not say enough."""
    try:
        return _FAMILIES[family](config, processor)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(
            f"{source}: the sizes of images do not follow from config.json and the image processor's file "
            f"({error!r}): "
            'start with limit_mm_per_prompt={"image": 0} to serve the model without images.'
        ) from None
