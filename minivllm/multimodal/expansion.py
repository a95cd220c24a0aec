"""From the size of an image to the tokens that stand for it:
what the processors of transformers write, as data.

A prompt has one placeholder for each image. Its span takes that place: placeholders, one for each embedding,
and the markers of the family between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from minivllm.errors import ModelError

Options = Mapping[str, bool]
"""What a caller may choose for an image; see ``Expansion.options``."""

Encode = Callable[[str], list[int]]
"""Token ids of a text in which special tokens count."""

LARGEST_SIDE = 4096
"""Images of tiles are never made larger than that; a constant of Idefics 3's processor."""


class Span(NamedTuple):
    """token_ids: of the span. runs: see ImageItem. num_units: of the image."""

    token_ids: list[int]
    runs: list[tuple[int, int]]
    num_units: int


class Expansion(Protocol):
    """What a family makes of an image."""

    @property
    def placeholder(self) -> int:
        """The token that stands for an image in a prompt."""

    @property
    def unit_embeds(self) -> int:
        """Embeddings of a unit."""

    @property
    def unit_shape(self) -> tuple[int, int, int]:
        """Pixels of a unit, channels first."""

    @property
    def most_embeds(self) -> int:
        """Embeddings of the largest image."""

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the choices that a caller has."""

    @property
    def sees_itself(self) -> bool:
        """Whether all placeholders of a run see each other."""

    @property
    def around(self) -> str:
        """What stands before and after a span as text, so that the tokenizer reads it with its neighbours."""

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """The span of an image of this size [pixels]."""


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
        self.unit_shape = 3, height, width
        self.placeholder = image_token(config)

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        return Span([self.placeholder] * self.unit_embeds, [(0, self.unit_embeds)], 1)


class MarkedRun:
    """Gemma 3: every image is resized to one size, and gives one run, which sees itself, between two markers.
    Prompts have the first marker alone."""

    options: tuple[str, ...] = ()
    sees_itself = True
    around = "\n\n"

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        if processor.get("do_pan_and_scan"):
            raise ModelError("do_pan_and_scan cuts crops out of images, which is not served yet.")
        self.unit_embeds = self.most_embeds = int(config.get("mm_tokens_per_image", 256))
        self.unit_shape = 3, processor["size"]["height"], processor["size"]["width"]
        self.placeholder = int(config.get("boi_token_index", 255999))
        run = [int(config.get("image_token_index", 262144))] * self.unit_embeds
        self._span = Span(
            [self.placeholder, *run, int(config.get("eoi_token_index", 256000))], [(1, len(run))], 1
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
        self.unit_shape = 3, self._edge, self._edge
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
        return Span(token_ids, runs, num_units)


Make = Callable[[Mapping[str, Any], Mapping[str, Any]], Expansion]
"""From the entries of config.json, and those of the image processor's file."""

_FAMILIES: Mapping[str, Make] = {
    "llava": OneRun,
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
