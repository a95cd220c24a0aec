"""Query tiles of prompt chunks that read a copy of only the blocks of their step, as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import attend_to_copies
from minivllm.attention.interface.backend import StepRows
from minivllm.attention.lists.bounds import HostBounds
from minivllm.attention.lists.key_groups import MIN_GROUPS, KeyGroups, bundles_of, groups_of_step
from minivllm.attention.lists.tile_lists import CutTiles, cut_tiles
from minivllm.attention.tiles import QueryTiles, Seen, Tiles, TilesRead, edges_of
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import LayerCache


class GatheredTiles(QueryTiles):
    """Tiles that read a copy, in the dtype of the queries, of only the blocks that the step reads. The kernel
    takes the queries out of the step and puts back what it finds for them."""

    @property
    def _blocks_together(self) -> int:
        dtype = self._compute_dtype or self._context.query_dtype
        return max(1, self._context.policy.keys_together(dtype) // self._context.tables.block_size)

    def _kernel(self) -> Callable:
        return attend_to_copies

    def _inputs(self, spec: AttentionSpec, batch: int | None) -> dict[str, Any]:
        context = self._context
        inputs = super()._inputs(spec, batch)

        def numbers(*shape: int | Size) -> TensorSpec:
            return TensorSpec(shape, torch.int32, context.device)

        shape = Size("tokens", 11), context.kv_heads, context.query_group, context.head_dim
        groups = Size(
            "groups of blocks", max(MIN_GROUPS, min(64, context.num_blocks) // self._blocks_together)
        )
        return {
            "q": TensorSpec(shape, context.query_dtype, context.device),
            "k_cache": inputs.pop("k_cache"),
            "v_cache": inputs.pop("v_cache"),
            "step_blocks": numbers(groups, self._blocks_together),
            "lists": inputs.pop("lists"),
            "bounds": inputs.pop("bounds"),
            "kv_position": numbers(self._capacity, 1) if self._rule.needs_positions else None,
            "to_tiles": numbers(Size("tiles", 5), context.kv_heads, self.size),
            "to_tokens": numbers(Size("tokens in tiles", 9), context.kv_heads),
            **{name: inputs[name] for name in ("sinks",) if name in inputs},
        }

    def _options(self) -> dict[str, Any]:
        return {"dtype": self._compute_dtype}

    @property
    def mixes_rows(self) -> bool:
        """In tiles of rows that share groups. What a query sees beside these is one interval of slots."""
        return not self._rule.needs_positions and not any(reach.is_limited for reach in self._context.reaches)

    def _bundles(self, groups: KeyGroups | None, counts: np.ndarray) -> np.ndarray | None:
        return bundles_of(groups, counts, self.size) if groups is not None and self.mixes_rows else None

    def _copied(self, rows: StepRows) -> KeyGroups:
        tables = self._context.tables
        return groups_of_step(
            tables.block_table.host[rows.slots],
            rows.starts,
            rows.starts + rows.counts,
            [self._read_reach(reach) for reach in self._context.reaches],
            self._blocks_together,
            tables.block_size,
            by_position=self._rule.needs_positions,
        )

    def _read(
        self, rows: StepRows, cut: CutTiles, seen: Seen, count: int, groups: KeyGroups | None
    ) -> TilesRead:
        assert groups is not None
        device, keys = self._context.device, self._blocks_together * self._context.tables.block_size
        row, edges, shift = cut.row[:, 0].copy(), edges_of(cut, seen), groups.shift[cut.row]
        table, step_blocks = groups.group_of, to_device(groups.blocks, device)
        width = len(groups.blocks)
        if self._rule.needs_positions:
            kv_position = np.zeros((self._capacity, 1), dtype=np.int32)
            kv_position[: len(row)] = shift[:, :1]
            lists = self._lists(table, row, edges, count, width, keys)
            return TilesRead(lists, seen, to_device(kv_position, device), step_blocks)
        if not self.mixes_rows:
            bounds = {
                reach: HostBounds(high - shift, None if low is None else low - shift)
                for reach, (high, low) in seen.items()
            }
            return TilesRead(self._lists(table, row, edges, count, width, keys), bounds, None, step_blocks)
        is_mixed = (cut.row != row[:, None]).any(1)
        first_own = np.where(is_mixed[:, None], groups.own[cut.row] * keys - shift, 0)
        bounds = {reach: HostBounds(high - shift, first_own) for reach, (high, _) in seen.items()}
        if is_mixed.any():
            # A tile of several rows reads what one row would that had all of their groups.
            mixed = np.flatnonzero(is_mixed)
            row[mixed] = len(table) + np.arange(len(mixed))
            table, ends = groups.joined([list(dict.fromkeys(cut.row[tile].tolist())) for tile in mixed])
            for first, last in edges.values():
                first.high[mixed] = groups.own[cut.row[mixed, 0]] * keys - 1
                last.high[mixed] = ends * keys - 1
        return TilesRead(self._lists(table, row, edges, count, width, keys), bounds, None, step_blocks)

    def num_products(self, rows: StepRows) -> int:
        """Queries times keys that tiles of these rows would multiply, padding included."""
        groups = self._copied(rows)
        bundles = self._bundles(groups, rows.counts)
        cut = cut_tiles(rows.starts, rows.counts, self.size, 1, bundles)
        keys = self._blocks_together * self._context.tables.block_size
        # A tile reads the groups that its rows share once, and those that each has to itself.
        is_first = np.concatenate(
            [np.ones((len(cut.row), 1), dtype=bool), cut.row[:, 1:] != cut.row[:, :-1]], 1
        )
        of_each = np.where(is_first & cut.is_query, (groups.end - groups.own)[cut.row], 0).sum()
        return self.size * keys * int(groups.own[cut.row[:, 0]].sum() + of_each)

    def attend(
        self, tiles: Tiles, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        kernel, reach = self._kernels[spec, None]
        assert tiles.to_tiles is not None and tiles.to_tokens is not None
        heads = self._context.kv_heads
        chunks = tiles.to_tiles.view(-1, heads, self.size), tiles.to_tokens.view(-1, heads)
        read = cache.k, cache.v, tiles.step_blocks, tiles.lists[reach], tiles.bounds[reach], tiles.kv_position
        o: Tensor = kernel(q, *read, *chunks, *((sinks,) if spec.has_sinks else ()))
        return o
