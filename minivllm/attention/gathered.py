"""Query tiles of prompt chunks that read a copy of only the blocks of their step, as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import TileLists, attend_to_copies
from minivllm.attention.backend import StepRows
from minivllm.attention.lists.key_groups import MIN_GROUPS, groups_of_step
from minivllm.attention.tiles import Edges, QueryTiles, Tiles
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec, Reach
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

    def _list_blocks(
        self, rows: StepRows, row: np.ndarray, edges: Edges, count: int
    ) -> tuple[dict[Reach, TileLists], Tensor | None, Tensor | None, np.ndarray | int]:
        tables, device, size = self._context.tables, self._context.device, self._blocks_together
        groups = groups_of_step(
            tables.block_table.host[rows.slots],
            rows.starts,
            rows.starts + rows.counts,
            [self._read_reach(reach) for reach in self._context.reaches],
            size,
            tables.block_size,
            by_position=self._rule.needs_positions,
        )
        shift = groups.shift[row][:, None]
        lists = self._lists(groups.group_of, row, edges, count, len(groups.blocks), size * tables.block_size)
        step_blocks = to_device(groups.blocks, device)
        if not self._rule.needs_positions:
            return lists, None, step_blocks, shift
        kv_position = np.zeros((self._capacity, 1), dtype=np.int32)
        kv_position[: len(row)] = shift
        return lists, to_device(kv_position, device), step_blocks, 0

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
