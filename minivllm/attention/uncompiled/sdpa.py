"""The reference: request by request, gather its blocks and attend to them.
Runs wherever PyTorch does, uncompiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from kernels_triton_free.strips.visibility import Bounds
from minivllm.attention.interface.backend import AttentionContext, StepRows
from minivllm.attention.interface.rule import CAUSAL, AttentionRule
from minivllm.attention.lists.bounds import bounds_of, first_seen, first_seen_on_device
from minivllm.device.buffers import to_device
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache


class GatheredRows(NamedTuple):
    """The rows of a step."""

    spans: list[tuple[Tensor, int, int]]
    """Of every row: its blocks int32 [n], the position of its first token, and the number of its tokens."""
    bounds: dict[Reach, Bounds]
    """Of all tokens [tokens], for layers whose tokens do not always see all up to themselves, or where
    positions are those of the device."""


class SdpaAttention:
    """Gathers and attends in a loop over the rows of a step, so no graph can repeat it."""

    decode_batches: Sequence[int] = ()

    def __init__(self, context: AttentionContext, rule: AttentionRule = CAUSAL) -> None:
        rule.check(context.specs)
        self.settles = not rule.needs_positions
        self._context = context
        self._rule = rule
        self._reach_of = {spec: spec.reach for spec in context.specs}
        self._bounded = [reach for reach in context.reaches if reach.is_limited or reach.looks_ahead]
        self._options = {spec: rule.options(spec) for spec in context.specs}

    def prepare(self, rows: StepRows) -> GatheredRows:
        """Blocks that are not read may be anybody's by now:
        the first one that is read stands in their places."""
        tables = self._context.tables
        first = np.zeros_like(rows.starts)
        if self._rule.visibility is None:
            lowest = rows.starts if rows.unsure is None else rows.starts - rows.unsure
            seen = [first_seen(lowest, reach) for reach in self._context.reaches]
            first = np.min(seen, axis=0) // tables.block_size
        spans = []
        for slot, skipped, start, count in zip(
            *(part.tolist() for part in (rows.slots, first, rows.starts, rows.counts))
        ):
            blocks = tables.block_table.device[slot, : -(-(start + count) // tables.block_size)]
            if skipped:
                blocks = torch.cat([blocks[skipped].repeat(skipped), blocks[skipped:]])
            spans.append((blocks, start, count))
        if rows.shift is not None:
            return GatheredRows(spans, self._settled(rows, rows.shift))
        return GatheredRows(spans, {reach: self._bounds(rows, reach) for reach in self._bounded})

    def _settled(self, rows: StepRows, shift: Tensor) -> dict[Reach, Bounds]:
        """Bounds of all reaches, where the device alone knows the positions. Rows that see themselves belong
        to prompts, whose positions are known."""
        high = to_device(rows.positions, self._context.device) - shift
        found = {}
        for reach in self._context.reaches:
            last = high
            if reach.looks_ahead and rows.ahead is not None:
                last = to_device(rows.ahead, self._context.device) - shift
            low = first_seen_on_device(high, reach).int() if reach.is_limited else None
            found[reach] = Bounds(last.int(), low)
        return found

    def _bounds(self, rows: StepRows, reach: Reach) -> Bounds:
        host = bounds_of(rows.positions, reach, rows.ahead)
        sent = [
            to_device(values.astype(np.int32), self._context.device) for values in host if values is not None
        ]
        return Bounds(*sent)

    def attend(
        self,
        metadata: GatheredRows,
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        v = cache.v if spec.value_dim is None else cache.k[..., : spec.value_dim]
        o = q.new_zeros(*q.shape[:-1], q.shape[-1] if spec.value_dim is None else spec.value_dim)
        token, bounds = 0, metadata.bounds.get(self._reach_of[spec])
        for blocks, start, count in metadata.spans:
            own = slice(token, token + count)
            o[own] = gathered_sdpa_attention(
                q[own],
                cache.k,
                v,
                blocks,
                start,
                sinks,
                None if bounds is None else Bounds(*(bound[own] for bound in bounds if bound is not None)),
                **self._options[spec],
            )
            token += count
        return o
