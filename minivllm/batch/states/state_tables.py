"""Where the states of requests lie, and how the rows of a step find them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.state.rows import StateRows
from minivllm.attention import StepRows
from minivllm.device.buffers import StagingBuffer, rounded_capacity
from minivllm.kv_cache.specs import GroupSpec


class StateTables:
    """The state of the request in each batch slot:
    where its next step reads it, and where that step writes it.

    num_slots: of the pool, the null slot 0 included, which stays zero.
    The slot behind them takes what padding and drafts write.
    num_tokens int64 [batch slots]: how many tokens of the request are in its state when the last step that
    was built is done. Kept up to date by a ``ReplayBuilder``, where requests have drafts.
    """

    def __init__(self, max_num_seqs: int, group: GroupSpec) -> None:
        self.num_slots = group.num_blocks
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._read, self._write = np.zeros((2, max_num_seqs), dtype=np.int32)

    def enter(self, slot: int, state_slots: list[int]) -> None:
        """A request comes: it reads the first slot, and writes the last one."""
        self._read[slot], self._write[slot] = state_slots[0], state_slots[-1]

    def extend(self, slot: int, state_slots: list[int]) -> None:
        """The request goes on in another slot, if there is one: what it has written so far stays as it is."""
        if state_slots:
            self._write[slot] = state_slots[-1]

    def move_on(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a step with these batch slots reads and writes. The next one reads what this one writes.
        Requests of the warm-up have the null slot, and write as padding does."""
        read, write = self._read[slots], self._write[slots]
        self._read[slots] = write
        return read, np.where(write == 0, self.num_slots, write)


BY_ROW, BY_TOKEN = ("read", "write", "starts", "counts"), ("token_rows", "offsets")


def write_rows(
    host: Mapping[str, np.ndarray],
    read: np.ndarray,
    write: np.ndarray,
    counts: np.ndarray,
    num_padded: int,
    null_slot: int,
) -> np.ndarray:
    """Fill arrays of the names of StateRows' fields with rows of ``counts`` tokens that read and write these
    slots, and padding up to ``num_padded`` tokens. null_slot: takes what padding writes. Returns the counts
    with those of the padding, int64 [rows]."""
    num_requests = len(counts)
    padding = num_padded - int(counts.sum())
    # Compiled regions take two rows or more where there are several tokens: the last one may be empty.
    is_alone = num_requests + padding == 1 and num_padded > 1
    counts = np.concatenate([counts, np.ones(padding, np.int64), np.zeros(int(is_alone), np.int64)])
    host["read"][: len(counts)], host["write"][: len(counts)] = 0, null_slot
    host["read"][:num_requests], host["write"][:num_requests] = read, write
    host["counts"][: len(counts)] = counts
    host["starts"][: len(counts)] = starts = np.cumsum(counts) - counts
    host["token_rows"][:num_padded] = token_rows = np.repeat(np.arange(len(counts)), counts)
    host["offsets"][:num_padded] = np.arange(num_padded) - starts[token_rows]
    return counts


def rows_in(device: Mapping[str, Tensor], num_rows: int, num_tokens: int) -> StateRows:
    """The parts of such arrays on the device that hold so many rows and tokens."""
    parts = [device[name][:num_rows] for name in BY_ROW] + [device[name][:num_tokens] for name in BY_TOKEN]
    return StateRows(*parts)


class StateRowBuilder:
    """Builds the StateRows of steps in persistent buffers."""

    def __init__(self, tables: StateTables, max_num_batched_tokens: int, device: torch.device) -> None:
        self._tables = tables
        capacity = rounded_capacity(max_num_batched_tokens)
        self._buffer = StagingBuffer({name: (capacity,) for name in StateRows._fields}, device)

    def build(self, rows: StepRows) -> tuple[StateRows, np.ndarray]:
        """(the rows on the device, how many tokens each has), valid until the next call.
        Once for every step."""
        self._buffer.begin()
        read, write = self._tables.move_on(rows.slots)
        null_slot = self._tables.num_slots
        counts = write_rows(self._buffer.host, read, write, rows.counts, rows.num_padded, null_slot)
        self._buffer.commit()
        return rows_in(self._buffer.device, len(counts), rows.num_padded), counts
