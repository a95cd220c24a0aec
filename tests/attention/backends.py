"""Attention backends over a made-up batch, choosing as a CPU or a GPU likes it,
and a kernel for uncompiled ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels_triton_free.attention
import minivllm.attention.tiles
from kernels_triton_free.attention import TileLists
from kernels_triton_free.strips.layout import strip_shapes, write_strips
from kernels_triton_free.strips.visibility import Bounds
from minivllm.attention import AttentionContext, BlockTables, FlexAttention
from minivllm.compilation.regions import Region, flatten
from minivllm.device.policy import DevicePolicy
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache
from tests.attention.random_batches import CPU, BatchShape

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
CPU_POLICY, CUDA_POLICY = DevicePolicy(type="cpu"), DevicePolicy(type="cuda", capability=(9, 0))


def choose_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """From now on, uncompiled engines on a CPU take the choices of a GPU with this attention backend, whose
    name is returned. It reads the lists of blocks as there: the usual reference loops over requests in Python,
    which no graph can repeat."""
    for module in (kernels_triton_free.attention, minivllm.attention.tiles):
        monkeypatch.setattr(module, "paged_flex_attention", listed_attention)
    monkeypatch.setattr(DevicePolicy, "of", lambda device: CUDA_POLICY)
    return f"{FlexAttention.__module__}:{FlexAttention.__name__}"


@dataclass(frozen=True, kw_only=True)
class SmallTiles(DevicePolicy):
    """Choices of a device whose prompt chunks are cut into small tiles,
    and read so many keys as one block."""

    tile_size: int
    together: int = 1

    def keys_together(self, dtype: torch.dtype) -> int:
        return self.together

    def query_tile_size(self, query_group: int, dtype: torch.dtype) -> int:
        return self.tile_size


def uncompiled(region: Region) -> Callable:
    """Takes the place of a compiler, and sees to it that the region is called with what it declares."""

    def run(*args: Any) -> Any:
        tensors: list[Tensor] = []
        flatten(args, tensors)
        region.check(tensors)
        return region.function(*args)

    return run


def specs_of(reaches: Sequence[Reach]) -> list[AttentionSpec]:
    """Layers that reach so far."""
    scale = HEAD_DIM**-0.5
    return [
        AttentionSpec(r.window, scale, GROUP, r.chunk, None, r.has_sinks, None, r.looks_ahead)
        for r in reaches
    ]


def new_context(
    tables: BlockTables, shape: BatchShape, specs: Sequence[AttentionSpec], **changes: Any
) -> AttentionContext:
    """What a backend is made from; ``changes`` replace its fields."""
    fields: dict[str, Any] = {
        "specs": tuple(specs),
        "kv_heads": KV_HEADS,
        "query_group": GROUP,
        "head_dim": HEAD_DIM,
        "dtype": torch.float32,
        "query_dtype": torch.float32,
        "cache_dtype": torch.float32,
        "tables": tables,
        "num_blocks": shape.num_blocks,
        "max_num_seqs": shape.max_num_seqs,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
        "few_tokens": 0,
        "compile_region": uncompiled,
        "compiles": True,
        "policy": CPU_POLICY,
        "device": CPU,
    }
    return AttentionContext(**(fields | changes))


def laid_in_strips(cache: LayerCache) -> LayerCache:
    """A copy of a plain cache of float32, in strips."""
    blocks, size, kv_heads, dim = cache.k.shape
    shapes = strip_shapes(size, kv_heads, dim, cache.k.dtype)
    k, v = (torch.empty(blocks, *shape, dtype=cache.k.dtype) for shape in shapes)
    slots = torch.arange(blocks * size, dtype=torch.int32)
    write_strips(k, v, cache.k.flatten(0, 1), cache.v.flatten(0, 1), slots)
    return LayerCache(k, v)


def listed_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lists: TileLists,
    bounds: Bounds,
    kv_position: Tensor | None,
    sinks: Tensor | None = None,
    *,
    scale: float,
    soft_cap: float | None = None,
    visibility: Callable[[Tensor, Tensor], Tensor] | None = None,
    score_change: Callable[..., Tensor] | None = None,
    kernel_options: object = None,
) -> Tensor:
    """What compiled FlexAttention computes, in plain operations: the listed blocks, and those in partial
    lists masked by position. (Uncompiled FlexAttention asks the mask alone and would look into the blocks of
    other requests.)"""
    tiles, heads, rows, _ = q.shape
    blocks, block_size = k_cache.shape[:2]
    group = rows // bounds.high.shape[1]
    low, high = (
        None if x is None else x[:tiles].repeat_interleave(group, 1)[:, :, None]
        for x in (bounds.low, bounds.high)
    )
    assert high is not None
    key = torch.arange(blocks * block_size)
    if kv_position is not None:
        key = kv_position[key] if kv_position.dim() == 1 else (key + kv_position[:tiles])[:, None]
    if visibility is not None:
        shown = visibility(high, key)
    else:
        shown = (key <= high) if low is None else (low <= key) & (key <= high)
    visible = torch.zeros_like(shown)
    for count, listed, mask in (
        (lists.partial_count, lists.partial_blocks, shown),
        (lists.full_count, lists.full_blocks, torch.ones_like(shown)),
    ):
        if count is None or listed is None:
            continue
        is_used = torch.arange(listed.shape[-1]) < count[:, :, 0]
        is_listed = torch.zeros(tiles, blocks, dtype=torch.int32).scatter_add(
            1, listed[:, 0, 0].long(), is_used.int()
        )
        assert bool((is_listed[:, 1:] < 2).all()), "a block that is listed twice counts twice"
        if sinks is not None:
            is_null = is_listed[:, 0] > 0  # more than once where made-up requests own nothing else
            assert torch.equal(is_null, (count[:, 0, 0] > 0) & (count is lists.partial_count))
            assert not v_cache[0, -1].any(), "a sink has no value"
            is_listed[:, 0] = 0
        visible = visible | ((is_listed > 0).repeat_interleave(block_size, 1)[:, None] & mask)
    k, v = (cache.reshape(-1, heads, q.shape[-1]).transpose(0, 1) for cache in (k_cache, v_cache))
    scores = q @ k.transpose(1, 2) * scale
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh() * soft_cap
    head = torch.arange(heads)[:, None] * group + torch.arange(rows) % group
    if score_change is not None:
        scores = score_change(
            scores, head[:, :, None], high[:, None], key if key.dim() == 1 else key[:, None]
        )
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[head].expand(tiles, -1, -1)[..., None]], dim=-1)
    weights = torch.nan_to_num(scores.softmax(-1))[..., : key.shape[-1]]
    return weights @ torch.nan_to_num(v)


def attend_to_listed_blocks(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, block_size: int, **options: Any
) -> Tensor:
    """``listed_attention`` over k, v [1, kv_heads, blocks * block_size, D]."""
    caches = (copy[0].transpose(0, 1).unflatten(0, (-1, block_size)) for copy in (k, v))
    return listed_attention(q, *caches, *args, **options)
