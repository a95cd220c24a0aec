"""Attention as compiled FlexAttention over query tiles, or as its uncompiled reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minivllm.attention.costs.choice import Choice
from minivllm.attention.gathered import GatheredTiles
from minivllm.attention.interface.backend import AttentionBackend, AttentionContext, StepRows
from minivllm.attention.interface.rule import CAUSAL, AttentionRule
from minivllm.attention.pairs import RowPairs
from minivllm.attention.tiles import QueryTiles
from minivllm.attention.uncompiled.latents import GatheredLatents
from minivllm.attention.uncompiled.sdpa import SdpaAttention
from minivllm.errors import ConfigError
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache


def rule_attention(context: AttentionContext, rule: AttentionRule = CAUSAL) -> AttentionBackend:
    """Attention by a rule: compiled FlexAttention, or the reference where nothing is compiled, which is
    slower. Latents are gathered and multiplied in both cases; ConfigError for a rule over them."""
    if any(spec.value_dim is not None for spec in context.specs):
        if rule != CAUSAL:
            raise ConfigError(
                "attention_backend changes a rule of FlexAttention, which does not compute latent attention."
            )
        return GatheredLatents(context)
    return FlexAttention(context, rule) if context.compiles else SdpaAttention(context, rule)


class TilePart(NamedTuple):
    """The step's tokens from ``begin`` up to ``end`` and their tiles."""

    kind: QueryTiles | RowPairs
    begin: int
    end: int
    tiles: Any


class FlexMetadata(NamedTuple):
    """One step: the number of its tokens without padding, and what they are cut into. is_one: a single part,
    of single tokens, takes in all of it, padding included."""

    num_tokens: int
    parts: tuple[TilePart, ...]
    is_one: bool


class FlexAttention:
    """Compiled FlexAttention. For all specs that compute alike one kernel for rows with a single token (or
    one for each of some batch sizes, see ``DevicePolicy.decode_batches``), one for prompt chunks, and, if
    drafts are verified, one for them: short tiles, one for each row, that read the cache in place as those of
    single tokens do.

    Where the cache is in strips, rows with a single token and drafts are left to ``RowPairs``, and
    FlexAttention computes prompt chunks, which copy what they read in any case.
    """

    def __init__(self, context: AttentionContext, rule: AttentionRule = CAUSAL) -> None:
        rule.check(context.specs)
        if context.tables.block_size < 2 and any(spec.has_sinks for spec in context.specs):
            raise ConfigError("block_size is 1, but attention sinks need blocks of 2 tokens at least.")
        policy, sequences, tokens = context.policy, context.max_num_seqs, context.max_num_batched_tokens
        self.decode_batches = policy.decode_batches(sequences)
        self._max_decodes = max(2, sequences)
        self._single: QueryTiles | RowPairs
        self._few: QueryTiles | None = None

        def short(kind: str, size: int, batches: Sequence[int] = ()) -> QueryTiles:
            full = policy.lists_full_blocks
            return QueryTiles(
                context, rule, kind, size, sequences, fixed_lists=True, tells_full=full, batches=batches
            )

        if context.in_strips:
            self._single = RowPairs(context, rule)
            self._max_decodes *= max(1, context.few_tokens)
        else:
            self._single = short("decode attention", 1, self.decode_batches)
            self._few = short("verify attention", context.few_tokens) if context.few_tokens > 1 else None
        self.settles = self._single.settles  # drafts are single tokens or few
        self.captures_few = self._few is not None
        dtype = policy.prompt_attention_dtype(context.dtype)
        size = policy.query_tile_size(context.query_group, dtype)
        capacity = max(policy.min_tiles, min(tokens, sequences + -(-tokens // size)) + 2)
        make = GatheredTiles if policy.gathers_blocks else QueryTiles
        self._several: QueryTiles = make(
            context, rule, "prompt attention", size, capacity, compute_dtype=dtype
        )
        self._choice: Choice | None = None
        if isinstance(self._single, RowPairs) and isinstance(self._several, GatheredTiles):
            self._choice = Choice(self._single, self._several, context)

    def prepare(self, rows: StepRows) -> FlexMetadata:
        """Tiles of single tokens first, then those of few tokens, then those of prompt chunks."""
        if rows.num_short:
            assert self._few is not None
            tiles = self._few.prepare(rows, 0, rows.num_short, rows.num_padded)
            whole = TilePart(self._few, 0, rows.num_padded, tiles)
            return FlexMetadata(rows.num_padded, (whole,), is_one=False)
        num_rows, few = len(rows.slots), 0 if self._few is None else rows.num_few
        single = rows.num_single
        if self._few is None and rows.num_few and self._takes_pairs(rows):
            single += rows.num_few  # few tokens are as many single ones
        parts = []
        token = int(rows.counts[:single].sum())
        if single or not num_rows:
            # A step of single tokens is padded as a whole,
            # so that nothing but its size decides what a graph replays.
            is_all = single == num_rows
            least = min(rows.num_padded, self._max_decodes) if is_all else max(token, min(rows.num_padded, 2))
            count = next((batch for batch in self.decode_batches if batch >= least), least)
            own = rows if is_all else rows.cut(0, single)
            parts.append(TilePart(self._single, 0, token, self._single.prepare(own, 0, count)))
        for kind, begin, end in ((self._few, single, single + few), (self._several, single + few, num_rows)):
            if begin < end and kind is not None:
                own = rows.cut(begin, end)
                first, token = token, token + int(own.counts.sum())
                parts.append(TilePart(kind, first, token, kind.prepare(own, first, 2)))
        only = parts[0]
        is_one = len(parts) == 1 and only.kind is self._single and only.tiles.num_tiles >= rows.num_padded
        return FlexMetadata(token, tuple(parts), is_one)

    def _takes_pairs(self, rows: StepRows) -> bool:
        """Whether rows of few tokens attend token by token."""
        if self._choice is None or not isinstance(self._single, RowPairs):
            return False
        has_room = self._single.has_room(rows.cut(0, rows.num_single + rows.num_few))
        return has_room and self._choice.pairs_cost_less(rows)

    def calibrate(self) -> None:
        """Measure what both ways to attend to few tokens cost, if there is a choice. Everything must be
        compiled."""
        if self._choice is not None:
            self._choice.calibrate()

    def expected_seconds(self, metadata: FlexMetadata) -> Mapping[Reach, float]:
        """What a layer of each reach should take in this step; empty if no costs were measured."""
        if self._choice is None:
            return {}
        return self._choice.expected_seconds([(part.kind, part.tiles) for part in metadata.parts])

    def attend(
        self,
        metadata: FlexMetadata,
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        part = metadata.parts[0]
        if metadata.is_one:
            return part.kind.attend(part.tiles, cache, spec, q, sinks)
        if part.end == q.shape[0]:
            return part.kind.attend(part.tiles, cache, spec, q, sinks)[: part.end]
        o = torch.empty_like(q)
        for kind, begin, end, tiles in metadata.parts:
            o[begin:end] = kind.attend(tiles, cache, spec, q, sinks)[: end - begin]
        # Padding tokens write to the null block, which must stay finite:
        # 0 * NaN is NaN where a kernel only masks it.
        o[metadata.num_tokens :] = 0
        return o
