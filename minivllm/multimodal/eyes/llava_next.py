"""LLaVA-NeXT (Liu et al. 2024) and LLaVA-OneVision (Li et al. 2024): the encoder of LLaVA 1.5, for an image
and for its tiles. Features of the tiles are laid side by side, as they lie in the image. Each line of them
ends with a newline, an embedding that was learned."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from minivllm.messages import FeatureLines
from minivllm.multimodal.eyes.llava import llava_parts


class _Newline(nn.Module):
    """Under the name that checkpoints have for it."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.image_newline = nn.Parameter(torch.randn(hidden_size) * hidden_size**-0.5)


def llava_next_parts(config: Any) -> tuple[dict[str, nn.Module], Callable[[Tensor], Tensor]]:
    """config: a LlavaNextConfig or a LlavaOnevisionConfig. The newline is the last embedding of each unit."""
    parts, encode_unit = llava_parts(config)
    newline = _Newline(config.text_config.hidden_size)

    def encode(pixels: Tensor) -> Tensor:
        last = newline.image_newline.expand(len(pixels), 1, -1)
        return torch.cat([encode_unit(pixels), last], dim=1)

    return {**parts, "": newline}, encode


def in_lines(embeds: Tensor, lines: FeatureLines) -> Tensor:
    """embeds [units · (features of a unit + 1), hidden], as ``encode`` gives them -> [placeholders, hidden]:
    the features of the first unit, then the lines."""
    rows, columns = lines.tiles
    units = embeds.unflatten(0, (1 + rows * columns, -1))
    whole, newline = units[0, :-1], units[0, -1]
    side = math.isqrt(len(whole))
    tiles = units[1:, :-1].unflatten(1, (side, side)).unflatten(0, (rows, columns))
    grid = tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)
    top, left = lines.margin
    kept = grid[top : len(grid) - top, left : grid.shape[1] - left]
    if kept.shape[:2] != lines.size:
        kept = functional.interpolate(kept.permute(2, 0, 1)[None], lines.size, mode="bilinear")[0]
        kept = kept.permute(1, 2, 0)
    ends = newline.expand(len(kept), 1, -1)
    return torch.cat([whole, torch.cat([kept, ends], dim=1).flatten(0, 1)])
