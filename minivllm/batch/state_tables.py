"""Where the states of requests lie, and how the rows of a step find them."""

from __future__ import annotations

import numpy as np
import torch

from kernels_triton_free.state.rows import StateRows
from minivllm.attention import StepRows
from minivllm.device.buffers import StagingBuffer, rounded_capacity
from minivllm.kv_cache.specs import GroupSpec


class StateTables:
    """The state of the request in each batch slot:
    where its next step reads it, and where that step writes it.

    num_slots: of the pool, the null slot 0 included, which stays zero.
    The slot behind them takes what padding writes.
    """

    def __init__(self, max_num_seqs: int, group: GroupSpec) -> None:
        self.num_slots = group.num_blocks
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
        host, device = self._buffer.host, self._buffer.device
        num_requests, num_tokens = len(rows.slots), rows.num_padded
        padding = num_tokens - int(rows.counts.sum())
        # Compiled regions take two rows or more where there are several tokens: the last one may be empty.
        is_alone = num_requests + padding == 1 and num_tokens > 1
        counts = np.concatenate([rows.counts, np.ones(padding, np.int64), np.zeros(int(is_alone), np.int64)])
        host["read"][: len(counts)], host["write"][: len(counts)] = 0, self._tables.num_slots
        host["read"][:num_requests], host["write"][:num_requests] = self._tables.move_on(rows.slots)
        host["counts"][: len(counts)] = counts
        host["starts"][: len(counts)] = starts = np.cumsum(counts) - counts
        host["token_rows"][:num_tokens] = token_rows = np.repeat(np.arange(len(counts)), counts)
        host["offsets"][:num_tokens] = np.arange(num_tokens) - starts[token_rows]
        self._buffer.commit()
        by_row, by_token = ("read", "write", "starts", "counts"), ("token_rows", "offsets")
        parts = [device[name][: len(counts)] for name in by_row] + [
            device[name][:num_tokens] for name in by_token
        ]
        return StateRows(*parts), counts
