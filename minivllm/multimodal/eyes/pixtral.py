"""Pixtral (Agrawal et al. 2024) and Mistral 3: patches of a whole image, with positions in two dimensions.
Pixtral projects each of them; Mistral 3 merges squares of them first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def pixtral_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: a Mistral3Config, or a LlavaConfig with Pixtral's encoder."""
    from transformers import AutoModel
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
    from transformers.models.mistral3.modeling_mistral3 import Mistral3MultiModalProjector

    merges = config.model_type == "mistral3"
    tower = AutoModel.from_config(config.vision_config)
    projector = (Mistral3MultiModalProjector if merges else LlavaMultiModalProjector)(config)
    layers = config.vision_feature_layer
    layers = [layers] if isinstance(layers, int) else list(layers)

    def features(image: Tensor) -> Tensor:
        size = torch.tensor([image.shape[-2:]])
        hidden = tower(image[None], image_sizes=size, output_hidden_states=True).hidden_states
        patches = torch.cat([hidden[layer] for layer in layers], dim=-1).squeeze(0)
        found: Tensor = projector(patches, size) if merges else projector(patches)
        return found

    def encode(pixels: Tensor) -> Tensor:
        # One image at a time: the encoder would compare the patches of all of them.
        return torch.stack([features(image) for image in pixels])

    return {"vision_tower": tower, "multi_modal_projector": projector}, encode
