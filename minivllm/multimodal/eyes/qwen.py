"""Qwen2-VL (Wang et al. 2024) and Qwen2.5-VL: patches of a whole image, with positions in two dimensions, of
which squares are merged. Qwen2.5-VL attends within windows in most layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def qwen_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: a Qwen2VLConfig or a Qwen2_5_VLConfig."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    vision, is_first = config.vision_config, config.model_type == "qwen2_vl"
    kind = Qwen2VisionTransformerPretrainedModel if is_first else Qwen2_5_VisionTransformerPretrainedModel
    tower = kind._from_config(vision)
    size, square, moments = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size

    def features(image: Tensor) -> Tensor:
        rows, columns = (side // (size * square) for side in image.shape[1:])
        cut = image.reshape(3, rows, square, size, columns, square, size).permute(1, 4, 2, 5, 0, 3, 6)
        # The same picture at every moment that a patch of a video spans.
        patches = cut.unsqueeze(5).expand(*cut.shape[:5], moments, *cut.shape[5:])
        grid = torch.tensor([[1, rows * square, columns * square]], device=image.device)
        found = tower(patches.reshape(rows * columns * square**2, -1), grid_thw=grid)
        merged: Tensor = found if isinstance(found, Tensor) else found.pooler_output
        return merged

    def encode(pixels: Tensor) -> Tensor:
        return torch.stack([features(image) for image in pixels])

    return {"visual": tower}, encode
