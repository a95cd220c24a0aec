"""The reference: request by request, gather its blocks and attend to them. Runs wherever PyTorch does, uncompiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from minivllm.attention.backend import CAUSAL, AttentionContext, AttentionRule, StepRows
from minivllm.models.decoder_config import AttentionSpec
from minivllm.models.model import LayerCache


class SdpaAttention:
    """Gathers and attends in a loop over the rows of a step, so no graph can repeat it."""

    decode_batches: Sequence[int] = ()

    def __init__(self, context: AttentionContext, rule: AttentionRule = CAUSAL) -> None:
        self._tables, self._rule = context.tables, rule

    def prepare(self, rows: StepRows) -> list[tuple[Tensor, int, int]]:
        """Of every row: its blocks int32 [n], the position of its first token, and the number of its tokens."""
        table, size = self._tables.block_table.device, self._tables.block_size
        spans = zip(rows.slots.tolist(), rows.starts.tolist(), rows.counts.tolist())
        return [(table[slot, : -(-(start + count) // size)], start, count) for slot, start, count in spans]

    def attend(
        self,
        metadata: list[tuple[Tensor, int, int]],
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        o = torch.zeros_like(q)
        token = 0
        for blocks, start, count in metadata:
            own = slice(token, token + count)
            o[own] = gathered_sdpa_attention(
                q[own],
                cache.k,
                cache.v,
                blocks,
                start,
                sinks,
                scale=spec.scale,
                window=spec.window,
                chunk=spec.chunk,
                soft_cap=spec.soft_cap,
                visibility=self._rule.visibility,
                score_change=self._rule.score_change,
            )
            token += count
        return o
