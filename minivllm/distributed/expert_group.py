"""Tokens on their way to experts of other engines, and back.

The workers of all engines divide the experts. In front of a layer's experts every worker gets the tokens of
all engines, behind them the sum of what all workers made of its own engine's: all-gather and reduce-scatter.
An engine's tokens stand in the same order wherever they are, and sums are made in order of rank, so all
workers of an engine go on with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.distributed.communicator import Communicator, add_up
from minivllm.distributed.shard import Shard
from minivllm.profiling.spans import span


class ExpertGroup:
    """One worker's end. everyone: connects the workers of all engines,
    those of an engine one after the other. num_workers: of each engine."""

    def __init__(self, everyone: Communicator, num_workers: int) -> None:
        self.everyone = everyone
        self._num_workers = num_workers
        self.shard = Shard(everyone.rank, everyone.size)
        self._counts: Sequence[int] = ()

    def begin_step(self, num_tokens: int) -> bool:
        """All engines begin a step, this one with ``num_tokens`` tokens;
        returns False if none of them has any."""
        with span("exchange"):
            counts = self.everyone.exchange(torch.tensor([num_tokens]))
        self._counts = [int(count) for count in counts[:: self._num_workers]]
        return any(self._counts)

    def gather(self, x: Tensor) -> Tensor:
        """x [own tokens, hidden] -> [tokens of all engines, hidden], in order of engine."""
        with span("exchange"):
            parts = self.everyone.exchange(F.pad(x, (0, 0, 0, max(self._counts) - len(x))).contiguous())
            first = parts[:: self._num_workers]
            return torch.cat([part[:count] for part, count in zip(first, self._counts, strict=True)])

    @property
    def own(self) -> slice:
        """This engine's tokens among those of all."""
        engine = self.shard.rank // self._num_workers
        start = sum(self._counts[:engine])
        return slice(start, start + self._counts[engine])

    def combine(self, x: Tensor) -> Tensor:
        """What this worker has for the tokens of all engines -> the sum of what all have for its own
        engine's."""
        with span("exchange"):
            parts = self.everyone.exchange(x.contiguous())
            return add_up([part[self.own] for part in parts])
