"""Query tiles of prompt chunks that read a copy of only the blocks of their step, as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import attend_to_copies
from minivllm.attention.costs.model import Work
from minivllm.attention.interface.backend import BlockTables, StepRows
from minivllm.attention.lists.bounds import HostBounds, bounds_of
from minivllm.attention.lists.key_groups import MIN_GROUPS, KeyGroups, bundles_of, groups_of_step
from minivllm.attention.lists.tile_lists import CutTiles, blocks_read, cut_tiles
from minivllm.attention.tiles import Edges, QueryTiles, Seen, Tiles, TilesRead, edges_of
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache


class GatheredTiles(QueryTiles):
    """Tiles that read a copy, in the dtype of the queries, of only the blocks that the step reads. The kernel
    takes the queries out of the step and puts back what it finds for them."""

    settles = False

    @property
    def _blocks_together(self) -> int:
        dtype = self._compute_dtype or self._context.query_dtype
        return max(1, self._context.policy.keys_together(dtype) // self._context.tables.block_size)

    @property
    def _keys(self) -> int:
        """Of a group of blocks."""
        return self._blocks_together * self._context.tables.block_size

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
        device, keys = self._context.device, self._keys
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
            table, row = self._joined(cut, groups, edges)
        return TilesRead(self._lists(table, row, edges, count, width, keys), bounds, None, step_blocks)

    def _joined(self, cut: CutTiles, groups: KeyGroups, edges: Edges) -> tuple[np.ndarray, np.ndarray]:
        """``groups.group_of`` with a further row for each tile of several rows, which reads what one row
        would that had all of their groups; and the row of each tile. Changes the edges of these tiles."""
        row, keys = cut.row[:, 0].copy(), self._keys
        mixed = np.flatnonzero((cut.row != row[:, None]).any(1))
        row[mixed] = len(groups.group_of) + np.arange(len(mixed))
        table, ends = groups.joined([list(dict.fromkeys(cut.row[tile].tolist())) for tile in mixed])
        for first, last in edges.values():
            first.high[mixed] = groups.own[cut.row[mixed, 0]] * keys - 1
            last.high[mixed] = ends * keys - 1
        return table, row

    def over(self, tables: BlockTables) -> GatheredTiles:
        """The same code for requests with other block tables."""
        own = replace(self._context, tables=tables), self._rule, self._kind, self.size, self._capacity
        return GatheredTiles(*own, compute_dtype=self._compute_dtype)

    def expected_work(self, rows: StepRows) -> dict[Reach, Work]:
        """What a layer of each reach would do with these rows."""
        first_blocks = self._context.tables.block_table.host[rows.slots, 0]
        shares = self.mixes_rows and len(np.unique(first_blocks)) < len(first_blocks)
        groups = self._copied(rows) if shares else None
        cut = cut_tiles(rows.starts, rows.counts, self.size, 1, self._bundles(groups, rows.counts))
        edges = edges_of(
            cut, {reach: bounds_of(cut.position, self._read_reach(reach)) for reach in self._context.reaches}
        )
        if groups is not None and (cut.row != cut.row[:, :1]).any():
            self._joined(cut, groups, edges)
        work = {}
        for reach, (first, last) in edges.items():
            begin, _, _, end, _ = blocks_read(first, last, self._keys, tells_full=False)
            copied = int((end - begin).sum()) if groups is None else len(groups.blocks)
            work[reach] = self._work(copied, int((end - begin).sum()))
        return work

    def work(self, prepared: Tiles) -> dict[Reach, Work]:
        """What a layer of each reach does in a step. Waits for the device."""
        assert prepared.step_blocks is not None
        copied, listed = len(prepared.step_blocks), {}
        for reach, lists in prepared.lists.items():
            counts = [count for count in (lists.partial_count, lists.full_count) if count is not None]
            listed[reach] = sum(int(count.sum()) for count in counts)
        return {reach: self._work(copied, number) for reach, number in listed.items()}

    def _work(self, copied: int, listed: int) -> Work:
        """Where so many groups are copied, and tiles read so many of them."""
        per_token = self._context.cache_spec.bytes_per_token
        return Work(copied * self._keys * per_token, listed * self._keys * self.size)

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
