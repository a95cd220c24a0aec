"""Gemma 3 (Gemma Team 2025): SigLIP's patches, averaged over squares, through a norm and one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def gemma3_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: a Gemma3Config."""
    from transformers import AutoModel
    from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

    tower, projector = AutoModel.from_config(config.vision_config), Gemma3MultiModalProjector(config)

    def encode(pixels: Tensor) -> Tensor:
        features: Tensor = projector(tower(pixels).last_hidden_state)
        return features

    return {"vision_tower": tower, "multi_modal_projector": projector}, encode
