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
from minivllm.attention.tiles import QueryTiles, Tiles
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache


class GatheredTiles(QueryTiles):
    """Tiles that read a copy, in the dtype of the queries, of only the blocks that the step reads. The kernel takes the
    queries out of the step and puts back what it finds for them."""

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

        capacity = self._buffer.host["q_position"].shape[0]
        shape = Size("tokens", 11), context.kv_heads, context.query_group, context.head_dim
        groups = Size("groups of blocks", max(MIN_GROUPS, min(64, context.num_blocks) // self._blocks_together))
        return {
            "q": TensorSpec(shape, context.query_dtype, context.device),
            "k_cache": inputs.pop("k_cache"),
            "v_cache": inputs.pop("v_cache"),
            "step_blocks": numbers(groups, self._blocks_together),
            "lists": inputs.pop("lists"),
            "q_position": inputs.pop("q_position"),
            "kv_position": numbers(capacity, 1),
            "to_tiles": numbers(Size("tiles", 5), context.kv_heads, self.size),
            "to_tokens": numbers(Size("tokens in tiles", 9), context.kv_heads),
            **{name: inputs[name] for name in ("sinks",) if name in inputs},
        }

    def _options(self) -> dict[str, Any]:
        return {"dtype": self._compute_dtype}

    def _list_blocks(
        self, rows: StepRows, row: np.ndarray, first: np.ndarray, last: np.ndarray, count: int
    ) -> tuple[dict[Reach, TileLists], Tensor, Tensor | None]:
        tables, device, size = self._context.tables, self._context.device, self._blocks_together
        groups = groups_of_step(
            tables.block_table.host[rows.slots],
            rows.starts,
            rows.starts + rows.counts,
            [self._read_reach(reach) for reach in self._context.reaches],
            size,
            tables.block_size,
            by_position=self._rule.visibility is not None or self._rule.score_change is not None,
        )
        shift = np.zeros((self._buffer.host["q_position"].shape[0], 1), dtype=np.int32)
        shift[: len(row), 0] = groups.shift[row]
        lists = self._lists(groups.group_of, row, first, last, count, len(groups.blocks), size * tables.block_size)
        return lists, to_device(shift, device), to_device(groups.blocks, device)

    def attend(
        self, tiles: Tiles, cache: LayerCache, spec: AttentionSpec, q: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        kernel, reach = self._kernels[spec, None]
        assert tiles.to_tiles is not None and tiles.to_tokens is not None
        heads = self._context.kv_heads
        chunks = tiles.to_tiles.view(-1, heads, self.size), tiles.to_tokens.view(-1, heads)
        read = cache.k, cache.v, tiles.step_blocks, tiles.lists[reach], tiles.q_position, tiles.kv_position
        o: Tensor = kernel(q, *read, *chunks, *((sinks,) if spec.has_sinks else ()))
        return o
