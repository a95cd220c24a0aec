"""From a step's decisions to the arrays the model reads: tokens, positions and cache slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from minivllm.attention import Run, StepRows, in_step_order, look_ahead
from minivllm.batch.image_positions import positions_in_space
from minivllm.batch.persistent_batch import GroupTables, PersistentBatch, WorkerRequest
from minivllm.device.buffers import StagingBuffer, rounded_capacity, to_device
from minivllm.lora.manager import BatchAdapters
from minivllm.messages import UNKNOWN, SchedulerOutput
from minivllm.models.model import TokenInputs, token_specs
from minivllm.specs.caches import TOKENS


@dataclass(slots=True)  # not frozen: hundreds are made for every step, and that would take longer
class Row:
    """One request's part of a step:
    ``count`` tokens from position ``start``, the last of them being ``drafts``."""

    request: WorkerRequest
    start: int
    count: int
    drafts: Sequence[int] = ()
    runs: Sequence[Run] = ()
    """Positions that see themselves, as those of some images do: all runs that have tokens in this row."""


def scheduled_rows(batch: PersistentBatch, step: SchedulerOutput) -> list[Row]:
    """The rows of a step, in the scheduler's order. Writes their drafts behind the known tokens, where a
    drafter on the device has not put them already."""
    requests, all_drafts = batch.requests, step.draft_token_ids
    for request_id, drafts in all_drafts.items():
        if drafts[0] != UNKNOWN:
            batch.write_drafts(requests[request_id], drafts)
    return [
        Row(
            request := requests[request_id],
            request.num_computed_tokens,
            count,
            all_drafts.get(request_id, ()),
            _runs(request, count) if request.data.images else (),
        )
        for request_id, count in step.num_scheduled_tokens.items()
    ]


def _runs(request: WorkerRequest, count: int) -> list[Run]:
    """Runs of images that see themselves among the next ``count`` tokens of a request."""
    start = request.num_computed_tokens
    runs = [
        (item.offset + first, item.offset + first + size)
        for item in request.data.images
        if item.sees_itself
        for first, size in item.runs
    ]
    return [run for run in runs if run[0] < start + count and start < run[1]]


@dataclass(frozen=True)
class StepInputs:
    """One step on the device.

    rows: in the order of their tokens, see ``in_step_order``. row_arrays: their slots, starts and counts as
    arrays. num_tokens: of them. token_ids int32 [padded]: as many as compiled regions or a graph want. slots:
    where their keys and values go in each KV group, see LayerCache. attention: what the attention backends
    have prepared.
    """

    rows: list[Row]
    row_arrays: StepRows
    num_tokens: int
    token_ids: Tensor
    tokens: TokenInputs
    slots: tuple[Tensor, ...]
    attention: Any

    def is_sampled(self) -> np.ndarray:
        """bool [rows]: which reach the last known token, or the last draft,
        of a request that wants more of them."""
        ends = [
            row.request.num_tokens + len(row.drafts) if row.request.data.pooling is None else -1
            for row in self.rows
        ]
        return np.fromiter(ends, np.int64, len(ends)) == self.row_arrays.starts + self.row_arrays.counts


class StepInputBuilder:
    """Builds StepInputs in persistent buffers, int32 [max_num_batched_tokens, rounded up] each.

    few_tokens: see ``in_step_order``. adapters: which one the request in each slot of the batch uses, kept
    up to date by its owner; None without adapters. tiles_adapters: they also come as tiles. token_offset: the
    token ids are those so much further in the sequence than the positions (1 for an EAGLE head). groups:
    those of the KV groups of the batch that the model's layers belong to; all, if they are not given.
    position_axes: see Model. launches_ahead: steps that may be built before the device begins the first.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        *,
        max_num_batched_tokens: int,
        device: torch.device,
        few_tokens: int = 0,
        adapters: BatchAdapters | None = None,
        tiles_adapters: bool = False,
        token_offset: int = 0,
        groups: Sequence[GroupTables] | None = None,
        position_axes: int = 1,
        launches_ahead: int = 1,
    ) -> None:
        self._groups = batch.groups if groups is None else groups
        self._batch = batch
        self._few_tokens = few_tokens
        self._token_offset = token_offset
        self._adapters = adapters
        self._tiles_adapters = tiles_adapters
        tokens = rounded_capacity(max_num_batched_tokens)
        self._slot_names = [f"slots.{group}" for group in range(len(self._groups))]
        self._position_axes = position_axes
        names = ["token_index", *self._slot_names, *["lora_slots"] * (adapters is not None)]
        positions = (tokens,) if position_axes == 1 else (tokens, position_axes)
        fields: dict[str, tuple[int, ...]] = {**{name: (tokens,) for name in names}, "positions": positions}
        self._buffer = StagingBuffer(fields, device, depth=launches_ahead)
        self._token_ids = torch.zeros(tokens, dtype=torch.int32, device=device)

    @property
    def token_specs(self) -> TokenInputs:
        """The ``tokens`` of all steps as regions declare them."""
        device, axes = self._token_ids.device, self._position_axes
        if self._adapters is None:
            return token_specs(device, position_axes=axes)
        pieces = self._adapters.tile_specs(TOKENS, device) if self._tiles_adapters else None
        return token_specs(device, RowAdapters(token_specs(device).positions, pieces), axes)

    def _in_space(self, rows: Sequence[Row], token_slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Positions in time, row and column, int32 [tokens, 3]."""
        turned = np.repeat((positions + self._batch.shifts[token_slots])[:, None], 3, axis=1)
        first = 0
        for row in rows:
            images = row.request.data.images
            if images and row.start < images[-1].end:
                turned[first : first + row.count] = positions_in_space(images, row.start, row.count)
            first += row.count
        return turned

    def _settle(self, slots: np.ndarray, assumed: np.ndarray, positions: np.ndarray) -> Tensor:
        """Move the tokens of a step to where they are, if the host assumes more tokens of their requests than
        there are; int64 [tokens] each. Returns by how much, int64 [tokens] on the device.

        Where that would be before the first position, a token stands for the first one once more.
        """
        assert self._batch.true_lengths is not None
        device, total = self._buffer.device, len(positions)
        behind = self._batch.true_lengths.behind(slots, assumed)
        own, there = to_device(np.stack([slots, positions]), behind.device)
        true = (there - behind).clamp_(min=0)
        shift = there - true
        if self._position_axes == 1:
            device["positions"][:total] = true
        else:
            device["positions"][:total] -= shift[:, None]
        device["token_index"][:total] = own * self._batch.token_ids.host.shape[1] + true + self._token_offset
        for name, tables in zip(self._slot_names, self._groups):
            device[name][:total] = tables.cache_slots_on_device(own, true)
        return shift

    def build(
        self, rows: Sequence[Row], padded: int, prepare: Callable[[StepRows], Any], num_short: int = 0
    ) -> StepInputs:
        """Returns views of the persistent buffers, valid until the next call.

        padded: the number of tokens to pad to, at least. No rows and some padding make a step that touches
        nothing but the null block. prepare: of the attention backend. num_short: see StepRows.
        """
        self._buffer.begin()
        host, device = self._buffer.host, self._buffer.device
        ordered, num_single, num_few = in_step_order(rows, self._few_tokens)
        if num_short and (num_single + num_few < len(ordered) or len(ordered) > num_short):
            raise ValueError(f"A graph of {num_short} rows with few tokens cannot hold these rows.")
        slots = np.fromiter([row.request.slot for row in ordered], np.int64, len(ordered))
        starts = np.fromiter([row.start for row in ordered], np.int64, len(ordered))
        ahead = None
        if num_single == len(ordered):
            counts, total, token_slots, positions = np.ones_like(starts), num_single, slots, starts
        else:
            counts = np.fromiter([row.count for row in ordered], np.int64, len(ordered))
            total = int(counts.sum())
            row_of_token = np.repeat(np.arange(len(ordered)), counts)
            token_slots = slots[row_of_token]
            positions = np.arange(total) + (starts - np.cumsum(counts) + counts)[row_of_token]
            runs = [row.runs for row in ordered]
            if any(runs):
                ahead = look_ahead(starts, counts, runs)
        padded = max(total, padded)
        host["positions"][:total] = (
            positions if self._position_axes == 1 else self._in_space(ordered, token_slots, positions)
        )
        width = self._batch.token_ids.host.shape[1]
        host["token_index"][:total] = token_slots * width + positions + self._token_offset
        for name, tables in zip(self._slot_names, self._groups):
            host[name][:total] = tables.cache_slots(token_slots, positions)
        if self._adapters is not None:
            host["lora_slots"][:total] = self._adapters.lora_slots[token_slots]
        for values in host.values():
            values[total:padded] = 0
        self._buffer.commit()
        self._batch.flush()
        if num_short:
            num_single, num_few = 0, len(ordered)
        row_arrays = StepRows(slots, starts, counts, num_single, num_few, padded, ahead, num_short=num_short)
        if self._batch.true_lengths is not None:
            unsure = np.fromiter([row.request.num_unsure_tokens for row in ordered], np.int64, len(ordered))
            if unsure.any():
                assumed = np.fromiter([row.request.num_tokens for row in ordered], np.int64, len(ordered))
                shift = self._settle(token_slots, np.repeat(assumed, counts), positions)
                row_arrays = row_arrays._replace(unsure=unsure, shift=shift)
        attention = prepare(row_arrays)

        token_ids = self._token_ids[:padded]
        torch.index_select(
            self._batch.token_ids.device.view(-1), 0, device["token_index"][:padded], out=token_ids
        )
        adapters = None
        if self._adapters is not None:
            pieces = self._adapters.tiles(token_slots, padded) if self._tiles_adapters else None
            adapters = RowAdapters(device["lora_slots"][:padded], pieces)
        tokens = TokenInputs(device["positions"][:padded], adapters)
        cache_slots = tuple(device[name][:padded] for name in self._slot_names)
        return StepInputs(ordered, row_arrays, total, token_ids, tokens, cache_slots, attention)
