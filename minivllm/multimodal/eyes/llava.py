"""LLaVA 1.5 (Liu et al. 2023): the features of one layer of a CLIP or SigLIP encoder,
through two linear layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.multimodal.eyes.pixtral import pixtral_parts


def llava_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: a LlavaConfig."""
    if config.vision_config.model_type == "pixtral":
        return pixtral_parts(config)
    from transformers import AutoModel
    from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

    tower, projector = AutoModel.from_config(config.vision_config), LlavaMultiModalProjector(config)
    layers = config.vision_feature_layer
    layers = [layers] if isinstance(layers, int) else list(layers)
    first = (
        1 if config.vision_feature_select_strategy == "default" else 0
    )  # without the token of the whole image

    def encode(pixels: Tensor) -> Tensor:
        hidden = tower(pixels, output_hidden_states=True).hidden_states
        features: Tensor = projector(torch.cat([hidden[layer][:, first:] for layer in layers], dim=-1))
        return features

    return {"vision_tower": tower, "multi_modal_projector": projector}, encode
