"""Which spans the images of a family have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from minivllm.errors import ModelError
from minivllm.multimodal.spans.any_resolution import AnyResolution
from minivllm.multimodal.spans.by_processor import ByProcessor
from minivllm.multimodal.spans.one_size import MarkedRun, OneRun
from minivllm.multimodal.spans.span import Expansion
from minivllm.multimodal.spans.tiles import Canvas, Tiles
from minivllm.multimodal.spans.whole import Grid, Lines, Squares

Make = Callable[[Mapping[str, Any], Mapping[str, Any]], Expansion]
"""From the entries of config.json, and those of the image processor's file."""


def _llava(config: Mapping[str, Any], processor: Mapping[str, Any]) -> Expansion:
    """LLaVA 1.5, or Pixtral, which is published as one."""
    is_pixtral = config["vision_config"].get("model_type") == "pixtral"
    return Lines(config, processor) if is_pixtral else OneRun(config, processor)


_FAMILIES: Mapping[str, Make] = {
    "llava": _llava,
    "llava_next": AnyResolution,
    "llava_onevision": AnyResolution,
    "mistral3": Lines,
    "internvl": Canvas,
    "qwen2_vl": Grid,
    "qwen2_5_vl": Grid,
    "qwen3_vl": Grid,
    "qwen3_vl_moe": Grid,
    "qwen3_5": Grid,
    "qwen3_5_moe": Grid,
    "idefics3": Tiles,
    "smolvlm": Tiles,
    "gemma3": MarkedRun,
    "gemma4": Squares,
}
FAMILIES = tuple(_FAMILIES)
"""By model_type. The images of other families are served as their processors say."""
IN_SPACE = tuple(family for family, make in _FAMILIES.items() if make is Grid)
"""Those whose images are rotated by row and column."""
_DEEPER_DEFAULTS: Mapping[str, Any] = {"depth": 27, "deepstack_visual_indexes": (8, 16, 24)}
"""What transformers assumes of Qwen3-VL."""


def make_expansion(
    family: str, config: Mapping[str, Any], processor: Mapping[str, Any], source: str
) -> Expansion:
    """What a model of the family makes of images. config, processor: the entries of config.json and of the
    processor's file in the directory ``source``. Raises ModelError where they do not say enough."""
    if family not in _FAMILIES:
        return ByProcessor(config, source)
    try:
        return _FAMILIES[family](config, processor)
    except ModelError as error:
        reason = str(error)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        reason = (
            f"The sizes of images do not follow from config.json and the image processor's file ({error!r})."
        )
    raise ModelError(
        f'{source}: {reason} Start with limit_mm_per_prompt={{"image": 0}} to serve the model without images.'
    )


def deeper_levels(config: Mapping[str, Any], source: str) -> int:
    """Levels of an image's features that are added after the first layers of the language model (Qwen3-VL).

    config: the entries of config.json in the directory ``source``. Raises ModelError where they do not say.
    """
    if config.get("model_type") not in ("qwen3_vl", "qwen3_vl_moe"):
        return 0
    vision = {**_DEEPER_DEFAULTS, **(config.get("vision_config") or {})}
    layers, depth = vision["deepstack_visual_indexes"], vision["depth"]
    are_numbers = isinstance(layers, list | tuple) and all(type(number) is int for number in (depth, *layers))
    if not are_numbers or not set(layers) <= set(range(depth)) or len(set(layers)) < len(layers):
        raise ModelError(
            f"{source}/config.json: vision_config.deepstack_visual_indexes is {layers!r}, but must list "
            f"different layers of the image encoder, of which there are {depth}."
        )
    return len(layers)
