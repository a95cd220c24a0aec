"""Qwen2-VL (Wang et al. 2024) and its successors: patches of a whole image, with positions in two dimensions,
of which squares are merged. Qwen2.5-VL attends within windows in most layers. Qwen3-VL also merges the output
of some earlier layers, for the first layers of the language model (DeepStack: Meng et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def qwen_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: that of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5."""
    from transformers import AutoModel
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    vision = config.vision_config
    if config.model_type == "qwen2_vl":
        tower = Qwen2VisionTransformerPretrainedModel._from_config(vision)
    elif config.model_type == "qwen2_5_vl":
        tower = Qwen2_5_VisionTransformerPretrainedModel._from_config(vision)
    else:
        tower = AutoModel.from_config(vision)
    size, square, moments = vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size

    def features(image: Tensor) -> Tensor:
        rows, columns = (side // (size * square) for side in image.shape[1:])
        cut = image.reshape(3, rows, square, size, columns, square, size).permute(1, 4, 2, 5, 0, 3, 6)
        # The same picture at every moment that a patch of a video spans.
        patches = cut.unsqueeze(5).expand(*cut.shape[:5], moments, *cut.shape[5:])
        grid = torch.tensor([[1, rows * square, columns * square]], device=image.device)
        found = tower(patches.reshape(rows * columns * square**2, -1), grid_thw=grid)
        if isinstance(found, Tensor):
            return found
        return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=-1)

    def encode(pixels: Tensor) -> Tensor:
        return torch.stack([features(image) for image in pixels])

    return {"visual": tower}, encode
