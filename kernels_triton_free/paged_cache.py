"""The paged KV cache as two tensors per layer, each [num_blocks, block_size, kv_heads, head_dim].

Block-major, so that copying, offloading or sending a block is one slice. Block 0 is the null block: padding is written
there and nothing reads it. Caches start as zeros: a masked probability of 0 times NaN would still be NaN.
"""

import torch
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [tokens, kv_heads, head_dim] in place at slot_mapping [tokens] = block * block_size + offset."""
    write_rows(k_cache, k, slot_mapping)
    write_rows(v_cache, v, slot_mapping)


def write_rows(cache: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """The same for a single cache: values [tokens, kv_heads, head_dim]."""
    rows = cache.shape[0] * cache.shape[1]
    cache.view(rows, *cache.shape[2:])[slot_mapping] = rounded(values, cache.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; what an 8-bit float cannot hold becomes the largest it can, where a plain conversion gives NaN."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def gather_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """The blocks [n] of one request, in order, as a contiguous [n * block_size, kv_heads, head_dim]."""
    return cache[blocks].flatten(0, 1)
