"""What a model's files say about its images: sizes, tokens, limits. Nothing here imports torch or PIL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minivllm.config import EngineArgs, ImagesConfig
from minivllm.errors import ModelError
from minivllm.multimodal.spans.families import FAMILIES, IN_SPACE, deeper_levels, make_expansion
from minivllm.multimodal.spans.span import Expansion

MOST_IMAGES = 8
"""In a prompt, if limit_mm_per_prompt does not say."""
_NO_VISION = "This model reads text only."


def read_config(path: Path) -> Mapping[str, Any]:
    """The entries of config.json, {} where there is none."""
    return _read_json(path / "config.json") if (path / "config.json").is_file() else {}


def read_processor(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entries of a model's image processor, {} where it has none. Raises ModelError for a broken file."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            entries = _read_json(path / name)
            found = entries.get("image_processor", entries)
            if isinstance(found, Mapping) and "image_processor_type" in found:
                return found
    return {}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable as JSON: {error}.") from None
    if not isinstance(entries, dict):
        raise ModelError(f"{path} holds a {type(entries).__name__}, but must hold a JSON object.")
    return entries


def find_eye(args: EngineArgs, model_path: Path) -> Path | None:
    """The directory of the image encoder that is joined to a model of text; None: none is.

    Raises ModelError if it is not there, or if the model at ``model_path`` sees without it.
    """
    if args.eye is None:
        return None
    directory = Path(args.eye).expanduser()
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"eye is {args.eye!r}, but must be a directory with config.json, preprocessor_config.json and "
            "the weights of an image encoder."
        )
    if model_path.is_dir() and _has_vision(read_config(model_path)):
        raise ModelError(f"eye is {args.eye!r}, but {args.model} has an image encoder: leave eye out.")
    return directory


def find_images(
    args: EngineArgs,
    path: str,
    *,
    implementation: str,
    hidden_size: int,
    vocab_size: int,
    dtype: str,
    budget: int,
    max_num_seqs: int,
) -> tuple[ImagesConfig | None, str]:
    """How a model sees images, or None and why it does not, in a sentence.

    path: of what sees, the model or the eye that is joined to it. implementation, vocab_size: of the model.
    hidden_size, dtype: of its embeddings. budget: tokens of a step, unless images need more. Raises
    ModelError for broken files, and for an eye that does not go with the model.
    """
    directory = Path(path)
    config = read_config(directory) if directory.is_dir() else {}
    family = config.get("model_type")
    most = (
        MOST_IMAGES
        if args.limit_mm_per_prompt is None
        else args.limit_mm_per_prompt.get("image", MOST_IMAGES)
    )
    reason = _reason_against(args, config, implementation, most)
    if args.eye is not None:
        reason = reason or _reason_against_joining(config, hidden_size)
    processor = {} if reason else read_processor(directory, config)
    if not reason and not processor:
        reason = (
            f"Its directory has no preprocessor_config.json, which says how images become pixels: {path}."
        )
    if reason:
        return _without_images(args, reason)
    try:
        expansion = make_expansion(str(family), config, processor, str(directory))
    except ModelError as error:
        if family in FAMILIES:
            raise
        return _without_images(args, str(error))
    least = _least_batched_tokens(args, expansion, max_num_seqs)
    if not 0 <= expansion.placeholder < vocab_size:
        reason = f"Images stand at token {expansion.placeholder}, but only {vocab_size} tokens are known."
    elif args.max_num_batched_tokens is not None and args.max_num_batched_tokens < least:
        reason = (
            f"An image of this model is computed in one step: max_num_batched_tokens is "
            f"{args.max_num_batched_tokens}, but must be at least {least}."
        )
    elif 0 < args.long_prefill_token_threshold < (expansion.unit_embeds if expansion.sees_itself else 0):
        reason = (
            "An image of this model is computed in one step: long_prefill_token_threshold is "
            f"{args.long_prefill_token_threshold}, but must be at least {expansion.unit_embeds}, or 0."
        )
    if reason:
        return _without_images(args, reason)
    unit_embeds, most_embeds = expansion.unit_embeds, expansion.most_embeds
    levels = deeper_levels(config, str(directory))
    bytes_per_embed = hidden_size * (1 + levels) * (4 if dtype == "float32" else 2)
    encoder_budget = max(args.max_num_batched_encoder_embeds or max(budget, least), unit_embeds)
    asked_bytes = args.encoder_cache_bytes or 2 * most_embeds * bytes_per_embed
    return (
        ImagesConfig(
            family=str(family),
            placeholder=expansion.placeholder,
            unit_embeds=unit_embeds,
            unit_shape=expansion.unit_shape,
            least_unit_shape=expansion.least_unit_shape,
            most_embeds=most_embeds,
            bytes_per_embed=bytes_per_embed,
            most_in_prompt=most,
            least_batched_tokens=least,
            max_num_batched_embeds=encoder_budget,
            encoder_cache_bytes=max(asked_bytes, most_embeds * bytes_per_embed),
            deeper_levels=levels,
        ),
        "",
    )


def _without_images(args: EngineArgs, reason: str) -> tuple[None, str]:
    """A model that sees is served without images as well; an eye is joined for nothing else."""
    if args.eye is not None:
        raise ModelError(f"The eye {args.eye} cannot be joined to {args.model}. {reason}")
    return None, reason


def _reason_against_joining(config: Mapping[str, Any], hidden_size: int) -> str:
    """config: of the eye. hidden_size: of the model's embeddings."""
    family, vision = config.get("model_type"), config.get("vision_config") or {}
    if family != "llava" or vision.get("model_type") == "pixtral":
        return f"It is of type {family!r}, but only LLaVA's images need no other tokens than placeholders."
    width = (config.get("text_config") or {}).get("hidden_size")
    if width != hidden_size:
        return (
            f"Its projector writes embeddings of {width} numbers (text_config.hidden_size), but those of the "
            f"model have {hidden_size}."
        )
    return ""


def _has_vision(config: Mapping[str, Any]) -> bool:
    return any(key in config for key in ("vision_config", "visual", "vision_tower"))


def _least_batched_tokens(args: EngineArgs, expansion: Expansion, max_num_seqs: int) -> int:
    """Tokens of a step in which a run fits beside all decodes: these would keep it waiting for ever."""
    if not expansion.sees_itself:
        return 0
    drafts = (args.speculative_config or {}).get("num_speculative_tokens") or 0
    return args.pipeline_parallel_size * expansion.unit_embeds + max_num_seqs * (1 + drafts)


def _reason_against(args: EngineArgs, config: Mapping[str, Any], implementation: str, most: int) -> str:
    family = config.get("model_type")
    if not _has_vision(config):
        return _NO_VISION
    if family not in FAMILIES and implementation == "minivllm":
        return f"Images of models of type {family!r} are not served yet, those of {', '.join(FAMILIES)} are."
    if implementation != "minivllm" and family in IN_SPACE:
        return "Tokens of its images are rotated by row and column, for which model_impl must be left out."
    if find_spec("PIL") is None:
        return "Images need Pillow: pip install 'minivllm[images]'."
    if most == 0:
        return "The engine was started with limit_mm_per_prompt={'image': 0}."
    return ""
