"""Which steps are captured as CUDA graphs: what the user asked for, and what a model and a device allow."""

from __future__ import annotations

from typing import cast

from minivllm.config import CudaGraphMode
from minivllm.errors import ConfigError
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.facts import ModelFacts
from minivllm.specs.layers import LatentSpec


def resolve_graph_mode(
    mode: str | None,
    device: str,
    enforce_eager: bool,
    facts: ModelFacts | None = None,
    *,
    attention: str = "flex",
    has_staged_images: bool = False,
) -> CudaGraphMode:
    """What cudagraph_mode means on this device. Raises ConfigError.

    Left open, models of transformers get no graphs: loops over the experts that are hit cannot be captured.
    Attention over latents stays outside graphs: what it gathers grows with the contexts. So does "sdpa",
    whose loop goes over the rows of a step, and, left open, any other backend. has_staged_images: only the
    first stage of a pipeline knows which steps read images, for which there are no graphs.
    """
    if device != "cuda":
        if mode not in (None, "none"):
            raise ConfigError(
                f"cudagraph_mode is {mode!r}, but graphs need a CUDA device and this engine runs on a "
                f"{device}."
            )
        return "none"
    has_latents = isinstance(facts, DecoderConfig) and any(
        isinstance(layer.mixer, LatentSpec) for layer in facts.layers
    )
    if has_staged_images and mode not in (None, "none"):
        raise ConfigError(
            f"cudagraph_mode is {mode!r}, but stages of a pipeline capture no graphs of a model that sees "
            "images: use 'none', or leave images out with limit_mm_per_prompt."
        )
    if mode is None:
        if (
            enforce_eager
            or has_staged_images
            or (facts is not None and facts.implementation == "transformers")
        ):
            return "none"
        is_captured = attention in ("flex", "flex-shared") and not has_latents
        return "full_and_piecewise" if is_captured else "piecewise"
    if attention == "sdpa" and mode not in ("none", "piecewise"):
        raise ConfigError(
            f"cudagraph_mode is {mode!r}, but attention_backend='sdpa' cannot be captured: use 'piecewise' "
            "or 'none'."
        )
    if has_latents and mode not in ("none", "piecewise"):
        raise ConfigError(
            f"cudagraph_mode is {mode!r}, but attention over latents cannot be captured: use 'piecewise' or "
            "'none'."
        )
    return cast(CudaGraphMode, mode)


def graph_mode_of_draft(mode: CudaGraphMode, facts: ModelFacts, attention: str = "flex") -> CudaGraphMode:
    """What is captured of a draft model: no more than of the target, whose mode is given, nor than can be."""
    possible = resolve_graph_mode(None, "cuda", False, facts, attention=attention)
    if possible == "full_and_piecewise":
        return mode
    return "piecewise" if possible == "piecewise" and mode in ("piecewise", "full_and_piecewise") else "none"
