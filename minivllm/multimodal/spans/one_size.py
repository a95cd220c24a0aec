"""Spans of families that resize every image to one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minivllm.errors import ModelError
from minivllm.multimodal.spans.span import Encode, Options, Span, image_token


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
