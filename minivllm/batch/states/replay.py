"""Drafts in layers that keep a state: a state cannot be taken back when a draft is rejected, so no draft gets
into it before it is accepted.

A step updates states twice. The first update takes known tokens: the drafts that the last step accepted,
whose inputs were kept (they are *replayed*), and those that this step computes. Its end is written. The
second one starts there, and takes the drafts: it gives their outputs, and its end is thrown away. Their
inputs are kept in turn, a few values for each draft in place of a state for each. (TensorRT-LLM and ReplaySSM
do the same.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.state.rows import StateRows
from minivllm.attention import StepRows
from minivllm.batch.states.state_tables import StateTables, rows_in, write_rows
from minivllm.device.buffers import StagingBuffer, rounded_capacity
from minivllm.models.mixers.mixer import StateUpdate


class DraftRows(NamedTuple):
    """The second update. All int32.

    rows: one for each request that has drafts. tokens [tokens]: which of the step's tokens they are, any for
    padding. kept [drafts]: where their inputs are kept. prepared: what each kind of update has prepared.
    """

    rows: StateRows
    tokens: Tensor
    kept: Tensor
    prepared: Sequence[Any]


class ReplayRows(NamedTuple):
    """A step in which something is replayed, or some rows end with drafts. All int32.

    rows: those of the first update, one for each request. tokens [tokens]: which of the step's tokens it
    takes; any where one is replayed, or padding. replayed, kept [replays]: the places of those among
    ``tokens``, and where their inputs were kept. drafts: None without any. outputs [tokens of the step]:
    where their outputs lie among those of the first update and, after them, of the second one. prepared: what
    each kind of update has prepared.
    """

    rows: StateRows
    tokens: Tensor
    replayed: Tensor
    kept: Tensor
    drafts: DraftRows | None
    outputs: Tensor
    prepared: Sequence[Any]

    def update(
        self,
        kind: int,
        update: StateUpdate,
        x: Tensor,
        state: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        inputs: Tensor,
    ) -> Tensor:
        """As ``StateUpdate`` for one layer. kind: which of the updates it is.
        inputs: those of drafts [batch slots * most drafts, width], kept for each batch slot."""
        known = x[self.tokens]
        if len(self.replayed):
            known[self.replayed] = inputs[self.kept]
        o = update(known, state, self.rows, self.prepared[kind], weights)
        if self.drafts is None:
            return o[self.outputs]
        guessed = x[self.drafts.tokens]
        inputs[self.drafts.kept] = guessed[: len(self.drafts.kept)]
        # Copied before the same code is called again: for one row it gives its outputs in the same place.
        both = o.new_empty((len(known) + len(guessed), *o.shape[1:]))
        both[: len(known)] = o
        both[len(known) :] = update(guessed, state, self.drafts.rows, self.drafts.prepared[kind], weights)
        return both[self.outputs]


class ReplayBuilder:
    """Builds the ReplayRows of steps in persistent buffers. num_drafts: the most that a row has."""

    def __init__(
        self,
        tables: StateTables,
        num_drafts: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: torch.device,
    ) -> None:
        self._tables = tables
        self._num_drafts = num_drafts
        size = rounded_capacity(max_num_batched_tokens)
        most = rounded_capacity(max_num_seqs * num_drafts)
        names = [*StateRows._fields, "tokens"]
        known = dict.fromkeys(names, size + most) | {"replayed": most, "kept": most, "outputs": size}
        drafts = dict.fromkeys([*names, "kept"], most)
        self._known = StagingBuffer({name: (count,) for name, count in known.items()}, device)
        self._drafts = StagingBuffer({name: (count,) for name, count in drafts.items()}, device)

    def has_replays(self, slots: np.ndarray, starts: np.ndarray) -> bool:
        """Whether a step of requests in these batch slots, from these positions on, replays accepted
        drafts."""
        return bool((starts != self._tables.num_tokens[slots]).any())

    def build(
        self, rows: StepRows, drafts_of: Mapping[int, int], fewest: int, updates: Sequence[StateUpdate]
    ) -> ReplayRows | None:
        """Valid until the next call; None, where an update as without drafts is enough. Once for every step,
        before that. drafts_of: batch slot -> number of drafts. fewest: tokens that an update takes at least.
        """
        slots, tables = rows.slots, self._tables
        num_replays = rows.starts - tables.num_tokens[slots]
        num_drafts = np.array([drafts_of.get(slot, 0) for slot in slots.tolist()], dtype=np.int64)
        num_known = rows.counts - num_drafts
        tables.num_tokens[slots] = rows.starts + num_known
        if not drafts_of and not num_replays.any():
            return None
        self._known.begin()
        self._drafts.begin()
        host, device = self._known.host, self._known.device
        read, write = tables.move_on(slots)
        first = np.cumsum(rows.counts) - rows.counts

        row, offset = _places(num_replays + num_known)
        padded = max(len(row), fewest)
        is_replayed = offset < num_replays[row]
        replayed, computed = np.flatnonzero(is_replayed), np.flatnonzero(~is_replayed)
        tokens = ((first - num_replays)[row] + offset)[computed]
        host["tokens"][:padded] = 0
        host["tokens"][computed] = tokens
        host["replayed"][: len(replayed)] = replayed
        host["kept"][: len(replayed)] = slots[row[replayed]] * self._num_drafts + offset[replayed]
        host["outputs"][: rows.num_padded] = 0
        host["outputs"][tokens] = computed
        counts = write_rows(host, read, write, num_replays + num_known, padded, tables.num_slots)
        drafts = None
        if drafts_of:
            tokens, drafts = self._build_drafts(slots, first + num_known, num_drafts, write, fewest, updates)
            host["outputs"][tokens] = padded + np.arange(len(tokens))
        self._known.commit()
        self._drafts.commit()
        return ReplayRows(
            rows_in(device, len(counts), padded),
            device["tokens"][:padded],
            device["replayed"][: len(replayed)],
            device["kept"][: len(replayed)],
            drafts,
            device["outputs"][: rows.num_padded],
            [update.prepare(counts) for update in updates],
        )

    def _build_drafts(
        self,
        slots: np.ndarray,
        first: np.ndarray,
        num_drafts: np.ndarray,
        written: np.ndarray,
        fewest: int,
        updates: Sequence[StateUpdate],
    ) -> tuple[np.ndarray, DraftRows]:
        """(which of the step's tokens are drafts, their rows). Of each row of the step int64 [rows]: its
        batch slot, its first draft, how many it has, and the slot that the first update writes."""
        host, device, null_slot = self._drafts.host, self._drafts.device, self._tables.num_slots
        row, offset = _places(num_drafts)
        count, padded = len(row), max(len(row), fewest)
        tokens = first[row] + offset
        host["tokens"][:padded] = 0
        host["tokens"][:count] = tokens
        host["kept"][:count] = slots[row] * self._num_drafts + offset
        has_drafts = num_drafts > 0
        # Requests of the warm-up have written what nothing reads.
        read = np.where(written == null_slot, 0, written)[has_drafts]
        ends = np.full_like(read, null_slot)
        counts = write_rows(host, read, ends, num_drafts[has_drafts], padded, null_slot)
        rows = rows_in(device, len(counts), padded)
        prepared = [update.prepare(counts) for update in updates]
        return tokens, DraftRows(rows, device["tokens"][:padded], device["kept"][:count], prepared)


def _places(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, place in the row) of tokens that lie row after row, int64 [tokens] each."""
    row = np.repeat(np.arange(len(counts)), counts)
    return row, np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
