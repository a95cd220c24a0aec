"""InternVL 3 (Zhu et al. 2025): tiles of an image, each encoded by a vision transformer,
squares of patches side by side through a norm and two linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def internvl_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: an InternVLConfig."""
    from transformers import AutoModel
    from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

    tower, projector = AutoModel.from_config(config.vision_config), InternVLMultiModalProjector(config)
    # The first one is of the whole image.
    first = 1 if config.vision_feature_select_strategy == "default" else 0
    layer, factor = config.vision_feature_layer, int(1 / config.downsample_ratio)

    def encode(pixels: Tensor) -> Tensor:
        found = tower(pixel_values=pixels, output_hidden_states=True)
        patches = (found.last_hidden_state if layer == -1 else found.hidden_states[layer])[:, first:]
        size = int(patches.shape[1] ** 0.5) // factor
        squares = patches.unflatten(1, (size, factor, size, factor)).transpose(2, 3)
        features: Tensor = projector(squares.reshape(len(pixels), size * size, -1))
        return features

    return {"vision_tower": tower, "multi_modal_projector": projector}, encode
