"""Decode attention on a paged cache of random numbers: what is timed, and what it must read and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.attention import TileLists, gathered_sdpa_attention, paged_flex_attention
from minivllm.bench.parts.bounds import seconds_per_call

Options = Mapping[str, int]
"""FlexAttention's kernel options."""


@dataclass(frozen=True)
class Heads:
    """Shape of one layer's attention. group: query heads per KV head. dtype: of the queries, and of K and V unless
    these have a cache_dtype of their own."""

    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class DecodeCase:
    """``batch`` requests of ``context`` tokens that compute one more, over pages in random order.

    q [batch, kv_heads, group, D]. k_cache, v_cache [pages, page_size, kv_heads, D]. tables int32 [batch, n]: pages of
    each request. position: of the query.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: Tensor
    context: int

    @property
    def bytes_read(self) -> int:
        """K and V of every request."""
        batch, kv_heads, _, dim = self.q.shape
        return 2 * batch * self.context * kv_heads * dim * self.k_cache.element_size()


def make_case(heads: Heads, batch: int, context: int, page_size: int, device: torch.device) -> DecodeCase:
    """Seeded. Page 0 is the null page."""
    generator = torch.Generator().manual_seed(0)
    per_request = -(-context // page_size)
    order = torch.randperm(batch * per_request, generator=generator).to(torch.int32) + 1
    shape = (batch * per_request + 1, page_size, heads.kv_heads, heads.head_dim)
    q = torch.randn(batch, heads.kv_heads, heads.group, heads.head_dim, generator=generator)
    on_device = torch.Generator(device).manual_seed(0)
    dtype = heads.cache_dtype or heads.dtype
    k, v = (torch.randn(shape, generator=on_device, device=device).to(dtype) for _ in range(2))
    return DecodeCase(q.to(device, heads.dtype), k, v, order.view(batch, per_request).to(device), context)


def attention_arguments(case: DecodeCase) -> tuple[Any, ...]:
    """What paged_flex_attention takes, as the engine builds it: at least two tiles, full pages listed on a CPU only."""
    batch, device = len(case.q), case.q.device
    pages, page_size = case.k_cache.shape[:2]
    padded = max(batch, 2)
    needed = case.tables.shape[1]
    on_cpu = device.type == "cpu"
    num_full = case.context // page_size if on_cpu else 0

    def lists(first: int, last: int) -> tuple[Tensor, Tensor]:
        count = torch.zeros(padded, 1, 1, dtype=torch.int32, device=device)
        indices = torch.zeros(padded, 1, 1, pages if on_cpu else needed + 1, dtype=torch.int32, device=device)
        count[:batch] = last - first
        indices[:batch, 0, 0, : last - first] = case.tables[:, first:last]
        return count, indices

    full = lists(0, num_full) if on_cpu else (None, None)
    q = torch.zeros(padded, *case.q.shape[1:], dtype=case.q.dtype, device=device)
    q[:batch] = case.q
    q_position = torch.full((max(64, padded), 1), -1, dtype=torch.int32, device=device)
    q_position[:batch] = case.context - 1
    kv_position = torch.zeros(pages, page_size, dtype=torch.int32, device=device)
    span = torch.arange(needed * page_size, dtype=torch.int32, device=device).view(needed, page_size)
    for table in case.tables:
        kv_position[table.long()] = span
    return q, case.k_cache, case.v_cache, TileLists(*lists(num_full, needed), *full), q_position, kv_position.view(-1)


def compiled_attention(case: DecodeCase, options: Options) -> Callable[[], Tensor]:
    """paged_flex_attention on the case, compiled for its shape, with these kernel options."""
    torch._dynamo.reset()
    scale = case.q.shape[-1] ** -0.5
    bound = partial(paged_flex_attention, scale=scale, kernel_options=dict(options) or None)  # type: ignore[arg-type]
    return partial(torch.compile(bound, fullgraph=True, dynamic=False), *attention_arguments(case))


def gathered_attention(case: DecodeCase, dtype: torch.dtype | None = None) -> Callable[[], Tensor]:
    """The same by gathering each request's pages for scaled dot-product attention; in ``dtype``, or the case's own."""

    def attend() -> Tensor:
        rows = []
        for q, table in zip(case.q.to(dtype or case.q.dtype), case.tables):
            k, v = case.k_cache[table], case.v_cache[table]
            pages = torch.arange(len(table), device=q.device)
            scale = q.shape[-1] ** -0.5
            rows.append(gathered_sdpa_attention(q[None], k, v, pages, case.context - 1, scale=scale))
        return torch.cat(rows)

    return attend


def largest_error(case: DecodeCase, out: Tensor) -> float:
    """Against the same in float64."""
    reference = gathered_attention(case, torch.float64)()
    return float((out[: len(case.q)].double() - reference).abs().max())


def time_attention(case: DecodeCase, attend: Callable[[], Tensor], calls: int) -> list[float]:
    """Of each call [seconds]."""
    with torch.inference_mode():
        return seconds_per_call(attend, case.q.device, calls)
