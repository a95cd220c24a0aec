"""Gemma 4: patches of a whole image, with positions in two dimensions, averaged over squares, through a norm
and one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def gemma4_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: a Gemma4Config."""
    from transformers import AutoModel
    from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

    vision = config.vision_config
    tower, embedder = AutoModel.from_config(vision), Gemma4MultimodalEmbedder(vision, config.text_config)
    size = vision.patch_size

    def encode(pixels: Tensor) -> Tensor:
        count, rows, columns = len(pixels), *(side // size for side in pixels.shape[2:])
        cut = pixels.reshape(count, 3, rows, size, columns, size).permute(0, 2, 4, 3, 5, 1)
        places = torch.cartesian_prod(
            torch.arange(rows, device=pixels.device), torch.arange(columns, device=pixels.device)
        )
        found = tower(
            pixel_values=cut.reshape(count, rows * columns, -1),
            pixel_position_ids=places.flip(1).expand(count, -1, -1),  # column, row
        )
        features: Tensor = embedder(found.last_hidden_state)
        return features.unflatten(0, (count, -1))

    return {"vision_tower": tower, "embed_vision": embedder}, encode
