"""The paged KV cache as two tensors per layer, each [num_blocks, block_size, kv_heads, head_dim],
or in strips.

Block-major, so that copying, offloading or sending a block is one slice. Block 0 is the null block: padding
is written there and nothing reads it. Caches start as zeros: a masked probability of 0 times NaN would still
be NaN. What strips are, and when they pay, stands in ``strips.layout``.
"""

import torch
from torch import Tensor

from kernels_triton_free.strips.layout import has_strips, keys_of, values_of, write_strips


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [tokens, kv_heads,
    head_dim] in place at slot_mapping [tokens] = block * block_size + offset."""
    if has_strips(k_cache):
        write_strips(k_cache, v_cache, rounded(k, k_cache.dtype), rounded(v, v_cache.dtype), slot_mapping)
        return
    write_rows(k_cache, k, slot_mapping)
    write_rows(v_cache, v, slot_mapping)


def write_rows(cache: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    """The same for a single cache: values [tokens, kv_heads, head_dim].

    Not through a view of the cache as rows:
    compiled code would write to a copy of all of it and copy that back.
    """
    block_size = cache.shape[1]
    cache[slot_mapping // block_size, slot_mapping % block_size] = rounded(values, cache.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; what an 8-bit float cannot hold becomes the largest it can,
    where a plain conversion gives NaN."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def gather_blocks(cache: Tensor, blocks: Tensor) -> Tensor:
    """The blocks [n] of one request, in order, as a contiguous [n * block_size, kv_heads, head_dim].
    Not for strips."""
    return cache[blocks].flatten(0, 1)


def gather_keys(cache: Tensor, blocks: Tensor) -> Tensor:
    """K of the blocks [n], in order: [kv_heads, n * block_size, head_dim]."""
    return keys_of(cache[blocks]) if has_strips(cache) else gather_blocks(cache, blocks).transpose(0, 1)


def gather_values(cache: Tensor, blocks: Tensor) -> Tensor:
    """V of the blocks [n], in order: [kv_heads, n * block_size, head_dim]."""
    return values_of(cache[blocks]) if has_strips(cache) else gather_blocks(cache, blocks).transpose(0, 1)
