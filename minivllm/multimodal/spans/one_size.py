"""Spans of families that resize every image to one size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from minivllm.multimodal.spans.span import Encode, Options, Plain, Span, image_token

LEAST_CROP, MOST_CROPS, LEAST_RATIO = 256, 4, 1.2
"""Gemma 3: pixels of a crop's shorter side, crops of an image, and its longer side to the shorter one."""


class OneRun(Plain):
    """LLaVA 1.5: every image is resized to one size, and gives one run of embeddings."""

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


class MarkedRun(Plain):
    """Gemma 3: every image is resized to one size, and gives one run, which sees itself, between two markers.
    A narrow image may be cut into crops besides ("pan and scan"), each with a run of its own, in a sentence.
    Prompts have the first marker alone."""

    options: tuple[str, ...] = ("do_pan_and_scan",)
    sees_itself = True
    # Whatever the image processor's file says, as transformers does.
    resizing: Mapping[str, Any] = {
        "do_pan_and_scan": False,
        "pan_and_scan_min_crop_size": LEAST_CROP,
        "pan_and_scan_max_num_crops": MOST_CROPS,
        "pan_and_scan_min_ratio_to_activate": LEAST_RATIO,
    }

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.unit_embeds = int(config.get("mm_tokens_per_image", 256))
        self.most_embeds = self.unit_embeds * (1 + MOST_CROPS)
        self.unit_shape = 3, processor["size"]["height"], processor["size"]["width"]
        self.least_unit_shape = self.unit_shape
        self.placeholder = int(config.get("boi_token_index", 255999))
        run = [int(config.get("image_token_index", 262144))] * self.unit_embeds
        self._piece = [self.placeholder, *run, int(config.get("eoi_token_index", 256000))]
        self._known: dict[int, Span] = {}

    def num_crops(self, width: int, height: int, options: Options) -> int:
        """0 for an image that is not cut."""
        longer, shorter = max(width, height), min(width, height)
        if not options.get("do_pan_and_scan", False) or longer / shorter < LEAST_RATIO:
            return 0
        crops = min(longer // LEAST_CROP, math.floor(longer / shorter + 0.5))
        crops = min(max(crops, 2), MOST_CROPS)
        return 0 if min(math.ceil(longer / crops), shorter) < LEAST_CROP else crops

    def _texts(self, num_crops: int) -> list[str]:
        """What is written before each run, and after the last one."""
        if not num_crops:
            return ["\n\n", "\n\n"]
        first = "Here is the original image \n\n"
        second = "\n\n and here are some crops to help you see better \n\n"
        return [first, second, *["\n\n \n\n"] * (num_crops - 1), "\n\n"]

    def written(self, marker: str, width: int, height: int, options: Options) -> str:
        """See Expansion."""
        return marker.join(self._texts(self.num_crops(width, height, options)))

    def expand(self, width: int, height: int, options: Options, encode: Encode) -> Span:
        """See Expansion."""
        num_crops = self.num_crops(width, height, options)
        if num_crops not in self._known:
            self._known[num_crops] = self._span(num_crops, encode)
        return self._known[num_crops]

    def _span(self, num_crops: int, encode: Encode) -> Span:
        """In the place of a placeholder that stands in token ids, what is written is encoded by itself;
        around a single run, nothing is."""
        texts = self._texts(num_crops)[:-1] if num_crops else [""]
        token_ids: list[int] = []
        pieces = []
        for text in texts:
            token_ids += encode(text) if text else []
            pieces.append((len(token_ids), len(self._piece)))
            token_ids += self._piece
        token_ids += encode("\n\n") if num_crops else []
        runs = [(first + 1, self.unit_embeds) for first, _ in pieces]
        return Span(token_ids, runs, 1 + num_crops, self.unit_embeds, self.unit_shape, pieces=tuple(pieces))
