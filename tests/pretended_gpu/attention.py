"""FlexAttention by its definition: all scores over the blocks that are listed, changed and masked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **_: Any,
) -> Tensor:
    """query [tiles, heads, rows, D]; key, value [1 or tiles, heads, slots, D]."""
    tiles, heads, rows, size = query.shape
    block_size, device = block_mask.BLOCK_SIZE[1], query.device
    blocks, is_listed, is_whole = _blocks_of(block_mask)
    width = blocks.shape[1]
    slot = (blocks[..., None] * block_size + torch.arange(block_size, device=device)).view(tiles, -1)
    lists = torch.arange(len(key), device=device)[:, None, None], torch.arange(heads, device=device)[:, None]
    key, value = (x[lists[0], lists[1], slot[:, None]] for x in (key, value))
    index = [
        torch.arange(count, dtype=torch.int32, device=device).view([-1 if d == axis else 1 for d in range(4)])
        for axis, count in enumerate((tiles, heads, rows))
    ] + [slot.int()[:, None, None]]
    scores = (query.float() @ key.float().transpose(2, 3)) * (size**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, *index)
    each = (is_listed[..., None].expand(-1, -1, block_size), is_whole[..., None].expand(-1, -1, block_size))
    is_listed, is_whole = (mask.reshape(tiles, 1, 1, width * block_size) for mask in each)
    seen = is_listed & (is_whole | block_mask.mask_mod(*index))
    weights = torch.where(seen, scores, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ value.float()).to(query.dtype)


def _blocks_of(mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks that are listed for each tile, int64 [tiles, width], and, bool, which of these places count,
    and which need no mask. Past the counts stands block 0."""
    lists = [(mask.kv_num_blocks, mask.kv_indices, False)]
    if mask.full_kv_num_blocks is not None:
        lists.append((mask.full_kv_num_blocks, mask.full_kv_indices, True))
    places, counted, whole = [], [], []
    for count, blocks, is_whole in lists:
        counts = torch.arange(blocks.shape[-1], device=blocks.device) < count[:, 0, 0, None]
        places.append(torch.where(counts, blocks[:, 0, 0], 0).long())
        counted.append(counts)
        whole.append(torch.full_like(counts, is_whole))
    return torch.cat(places, 1), torch.cat(counted, 1), torch.cat(whole, 1)
