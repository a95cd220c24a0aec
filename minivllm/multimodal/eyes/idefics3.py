"""Idefics 3 (Laurençon et al. 2024) and SmolVLM: tiles of an image, each encoded by a SigLIP encoder, then
shuffled into fewer and wider vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def idefics3_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: an Idefics3Config or a SmolVLMConfig, whose encoders are the same."""
    from transformers.models.idefics3.modeling_idefics3 import Idefics3Connector, Idefics3VisionTransformer

    encoder = Idefics3VisionTransformer._from_config(config.vision_config)
    connector = Idefics3Connector(config)

    def encode(pixels: Tensor) -> Tensor:
        # Every tile is full: the processor resizes images to whole tiles.
        features: Tensor = connector(encoder(pixel_values=pixels).last_hidden_state)
        return features

    return {"vision_model": encoder, "connector": connector}, encode
