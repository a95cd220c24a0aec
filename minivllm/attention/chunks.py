"""Prompt chunks as tiles whose scores are products of whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.chunks.attention import attend_by_products
from minivllm.attention.backend import AttentionContext, StepRows
from minivllm.attention.lists.chunk_tiles import Tile, cut_chunks
from minivllm.attention.lists.tile_lists import first_seen
from minivllm.attention.rules.rule import CAUSAL, AttentionRule
from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.device.buffers import to_device
from minivllm.models.decoder_config import AttentionSpec, Reach
from minivllm.models.model import LayerCache

MIN_SIZE = 2
"""Compiled code wants two of everything that varies."""


class ChunkCall(NamedTuple):
    """Tiles that are computed together: the tokens of the step from ``begin`` up to ``end``.

    blocks: reach of layers -> blocks int32 [tiles, width], position of the first key int32 [tiles]. q_position int32
    [tiles, QT]. tokens: of the step, behind each query, int64 [tiles * QT]. places: where those of ``begin`` to ``end``
    are among the queries, int64. Both are None for a tile without padding.
    """

    begin: int
    end: int
    blocks: dict[Reach, tuple[Tensor, Tensor]]
    q_position: Tensor
    tokens: Tensor | None = None
    places: Tensor | None = None


class ChunkProducts:
    """Prompt chunks over a cache whose dtype is that of the queries. One kernel for each spec. ``attend_by_products``
    says how it computes, ``serves`` where."""

    @staticmethod
    def serves(context: AttentionContext, rule: AttentionRule) -> bool:
        """Whether all layers attend in a way that this can compute, on a device where it is the fastest."""
        is_plain = all(spec.soft_cap is None and not spec.has_sinks for spec in context.specs)
        has_dtype = context.query_dtype == context.cache_dtype == torch.bfloat16
        return is_plain and has_dtype and rule == CAUSAL and context.policy.multiplies_chunks

    def __init__(self, context: AttentionContext) -> None:
        self._context = context
        self._kernels = {spec: self._compile(spec) for spec in context.specs}

    def _compile(self, spec: AttentionSpec) -> Callable:
        function = partial(attend_by_products, scale=spec.scale, window=spec.window, chunk=spec.chunk)
        return self._context.compile_region(Region("prompt attention by products", function, self._inputs(), spec))

    def _inputs(self) -> dict[str, Any]:
        context, tiles, queries = self._context, Size("tiles", 3, single=1), Size("queries", 11)

        def numbers(*shape: int | Size) -> TensorSpec:
            return TensorSpec(shape, torch.int32, context.device)

        shape = tiles, queries, context.kv_heads, context.query_group, context.head_dim
        blocks = Size("blocks", min(64, context.num_blocks))
        cache = context.cache_spec.declare(blocks, context.tables.block_size, context.device)
        return {
            "q": TensorSpec(shape, context.query_dtype, context.device),
            "k_cache": cache.k,
            "v_cache": cache.v,
            "blocks": numbers(tiles, Size("blocks of a tile", 5)),
            "first": numbers(tiles),
            "q_position": numbers(tiles, queries),
        }

    def prepare(self, rows: StepRows, first_token: int, least: int) -> tuple[ChunkCall, ...]:
        """The calls of these rows, whose tokens begin with token ``first_token`` of the step."""
        context = self._context
        chunks = [Tile(*row) for row in zip(rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist())]
        calls = []
        for tiles in cut_chunks(chunks, context.kv_heads * context.query_group):
            calls.append(self._call(tiles, first_token))
            first_token = calls[-1].end
        return tuple(calls)

    def _call(self, tiles: list[Tile], begin: int) -> ChunkCall:
        slots, starts, counts = (np.array(part) for part in zip(*tiles))
        size = max(MIN_SIZE, int(counts.max()))
        query = np.arange(size)
        is_query = query < counts[:, None]
        q_position = np.where(is_query, starts[:, None] + query, -1).astype(np.int32)
        device = self._context.device
        blocks = {reach: self._blocks(slots, starts, starts + counts, reach) for reach in self._context.reaches}
        call = ChunkCall(begin, begin + int(counts.sum()), blocks, to_device(q_position, device))
        if is_query.all():
            return call
        before = begin + np.cumsum(counts) - counts
        tokens, places = np.where(is_query, before[:, None] + query, begin).reshape(-1), np.flatnonzero(is_query)
        return call._replace(tokens=to_device(tokens, device), places=to_device(places, device))

    def _blocks(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, reach: Reach) -> tuple[Tensor, Tensor]:
        tables, device = self._context.tables, self._context.device
        begin = first_seen(starts, reach) // tables.block_size
        count = (ends - 1) // tables.block_size + 1 - begin
        place = np.arange(max(MIN_SIZE, int(count.max())))
        index = np.minimum(begin[:, None] + place, tables.block_table.host.shape[1] - 1)
        blocks = np.where(place < count[:, None], tables.block_table.host[slots[:, None], index], 0)
        first = (begin * tables.block_size).astype(np.int32)
        return to_device(blocks.astype(np.int32), device), to_device(first, device)

    def attend(
        self,
        calls: tuple[ChunkCall, ...],
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [tokens of the step, kv_heads, G, D] -> o of those that are in these calls."""
        kernel, parts = self._kernels[spec], []
        for begin, end, blocks, q_position, tokens, places in calls:
            own = q[begin:end] if tokens is None else q[tokens]
            o: Tensor = kernel(
                own.view(*q_position.shape, *q.shape[1:]), cache.k, cache.v, *blocks[spec.reach], q_position
            )
            parts.append(o.flatten(0, 1) if places is None else o.flatten(0, 1)[places])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
