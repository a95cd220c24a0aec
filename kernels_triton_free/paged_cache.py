"""The paged KV cache as two tensors per layer, each [num_pages, page_size, kv_heads, head_dim].

Page-major, so that copying, offloading or sending a page is one slice. Page 0 is the null page: padding is written
there and nothing reads it. Caches start as zeros: a masked probability of 0 times NaN would still be NaN.
"""

import torch
from torch import Tensor


def write_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [tokens, kv_heads, head_dim] in place at slot_mapping [tokens] = page * page_size + offset."""
    rows = k_cache.shape[0] * k_cache.shape[1]
    k_cache.view(rows, *k_cache.shape[2:])[slot_mapping] = rounded(k, k_cache.dtype)
    v_cache.view(rows, *v_cache.shape[2:])[slot_mapping] = rounded(v, v_cache.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype; what an 8-bit float cannot hold becomes the largest it can, where a plain conversion gives NaN."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def copy_pages(cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copy pages source [n] onto pages destination [n] in place; no page may be in both lists."""
    cache[destination] = cache[source]


def gather_pages(cache: Tensor, pages: Tensor) -> Tensor:
    """The pages [n] of one request, in order, as a contiguous [n * page_size, kv_heads, head_dim]."""
    return cache[pages].flatten(0, 1)
