"""Tensors of the workers on one host, through memory that they share.

Every rank copies its tensor to a place of its own, tells all others, and waits for them. Two sets of places
alternate: who writes into one set has heard that all have written into the other one, and so have read what
was there before.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.distributed.communicator import Communicator
from minivllm.distributed.segment import PLACE_BYTES

SPIN_SECONDS = 300e-6
"""How long a rank asks for another one before it sleeps: others are mostly as far, and to be woken up takes
as long as to add small tensors. Ranks that have no core of their own sleep at once."""


class SharedMemoryCommunicator(Communicator):
    """The workers of one host; each makes one from what ``open_segment`` returned."""

    def __init__(self, rank: int, memory: int, events: Sequence[Sequence[int]]) -> None:
        self.rank = rank
        self.size = len(events)
        whole = torch.frombuffer(mmap.mmap(memory, 2 * self.size * PLACE_BYTES), dtype=torch.uint8)
        self._places = whole.view(2, self.size, PLACE_BYTES)
        self._turn = 0
        self._tell = [event for event in events[rank] if event >= 0]
        self._hear = [(row[rank], select.poll()) for row in events if row[rank] >= 0]
        for event, poll in self._hear:
            poll.register(event, select.POLLIN)
        self._spin = (
            SPIN_SECONDS if self.size * torch.get_num_threads() <= len(os.sched_getaffinity(0)) else 0.0
        )

    def exchange(self, x: Tensor) -> list[Tensor]:
        mine = x.reshape(-1).view(torch.uint8)
        if len(mine) <= PLACE_BYTES:
            return [part.view(x.dtype).view(x.shape) for part in self._exchange(mine)]
        all_of_it = torch.empty(self.size, len(mine), dtype=torch.uint8)
        for start in range(0, len(mine), PLACE_BYTES):
            piece = slice(start, min(start + PLACE_BYTES, len(mine)))
            for rank, part in enumerate(self._exchange(mine[piece])):
                all_of_it[rank, piece] = part
        return [part.view(x.dtype).view(x.shape) for part in all_of_it]

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        """What lies in the places of all ranks, len(mine) bytes of each."""
        self.num_exchanges += 1
        places = self._places[self._turn, :, : len(mine)]
        self._turn = 1 - self._turn
        places[self.rank].copy_(mine)
        for event in self._tell:
            os.eventfd_write(event, 1)
        end = time.perf_counter() + self._spin
        for event, poll in self._hear:
            while not poll.poll(0) and time.perf_counter() < end:
                continue
            os.eventfd_read(event)
        return list(places)
