"""The reference: request by request, gather its blocks and attend to them. Runs wherever PyTorch does, uncompiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from minivllm.attention.backend import AttentionContext, StepRows
from minivllm.attention.lists.tile_lists import first_seen
from minivllm.attention.rule import CAUSAL, AttentionRule
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import LayerCache


class SdpaAttention:
    """Gathers and attends in a loop over the rows of a step, so no graph can repeat it."""

    decode_batches: Sequence[int] = ()

    def __init__(self, context: AttentionContext, rule: AttentionRule = CAUSAL) -> None:
        self._context, self._rule = context, rule
        self._options = {spec: rule.options(spec) for spec in context.specs}

    def prepare(self, rows: StepRows) -> list[tuple[Tensor, int, int]]:
        """Of every row: its blocks int32 [n], the position of its first token, and the number of its tokens.

        Blocks that are not read may be anybody's by now: the first one that is read stands in their places.
        """
        tables = self._context.tables
        first = np.zeros_like(rows.starts)
        if self._rule.visibility is None:
            seen = [first_seen(rows.starts, reach) for reach in self._context.reaches]
            first = np.min(seen, axis=0) // tables.block_size
        spans = []
        for slot, skipped, start, count in zip(
            *(part.tolist() for part in (rows.slots, first, rows.starts, rows.counts))
        ):
            blocks = tables.block_table.device[slot, : -(-(start + count) // tables.block_size)]
            if skipped:
                blocks = torch.cat([blocks[skipped].repeat(skipped), blocks[skipped:]])
            spans.append((blocks, start, count))
        return spans

    def attend(
        self,
        metadata: list[tuple[Tensor, int, int]],
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        v = cache.v if spec.value_dim is None else cache.k[..., : spec.value_dim]
        o = q.new_zeros(*q.shape[:-1], q.shape[-1] if spec.value_dim is None else spec.value_dim)
        token = 0
        for blocks, start, count in metadata:
            own = slice(token, token + count)
            o[own] = gathered_sdpa_attention(
                q[own],
                cache.k,
                v,
                blocks,
                start,
                sinks,
                **self._options[spec],
            )
            token += count
        return o
