"""Pipeline parallelism: a model cut into stages of consecutive layers, each with its own workers.

What a stage has computed goes to the next one: the residual stream, one tensor for a step. While that
computes, this one goes on with other requests. (GPipe: Huang et al. 2019; of inference only the forward
direction is left.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minivllm.device.host_work import do_on_host, on_host
from minivllm.distributed.link import Link, StageLinks
from minivllm.profiling.spans import span


class Records(Protocol):
    """Records from one worker to another, on this host or not.
    One side only sends, the other one only receives."""

    def send(self, record: bytes | memoryview) -> None: ...

    def receive(self) -> bytearray: ...


@dataclass(frozen=True, kw_only=True)
class RemoteLinks:
    """Those of ``StageLinks`` that lead to other hosts."""

    source: Records | None = None
    sink: Records | None = None
    tokens: tuple[Records, ...] = ()


class Stage:
    """Stage ``number`` of ``size``, counted from 0; of a model in one piece if nothing else is said. links:
    to others on this host. remote: to those that are not. device: of the tensors, which travel through host
    memory."""

    def __init__(
        self,
        number: int = 0,
        size: int = 1,
        links: StageLinks | None = None,
        remote: RemoteLinks | None = None,
        device: str = "cpu",
    ) -> None:
        self.number = number
        self.size = size
        self._device = torch.device(device)
        links, remote = links or StageLinks(), remote or RemoteLinks()
        self._source = remote.source if links.source is None else Link(links.source)
        self._sink = remote.sink if links.sink is None else Link(links.sink)
        self.tokens: list[Records] = [*map(Link, links.tokens), *remote.tokens]
        self.num_handed = -self.is_last
        """How far it has come: 2 for every step handed on, 1 more while it has the next one,
        or waits for it."""

    @property
    def is_first(self) -> bool:
        """It embeds tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """It makes logits and samples."""
        return self.number == self.size - 1

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor that the stage before has sent; waits for it.
        Raises RuntimeError if its size is another one."""
        return on_host(lambda: self._receive(shape, dtype))

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        assert self._source is not None
        self.num_handed += 1 + self.is_last
        with span("receive"):
            values = torch.frombuffer(self._source.receive(), dtype=dtype)
        return values.view(shape).to(self._device)

    def send(self, x: Tensor) -> None:
        """Hand a tensor to the next stage; waits if that is far behind, and until a GPU has computed it."""
        do_on_host(lambda: self._send(x))

    def _send(self, x: Tensor) -> None:
        assert self._sink is not None
        with span("send"):
            self._sink.send(x.cpu().contiguous().view(torch.uint8).flatten().numpy().data)
        self.num_handed += 1 + self.is_first


def divide_layers(costs: Sequence[int], size: int) -> list[range]:
    """Consecutive layers for each of ``size`` stages, at least one, so that the dearest stage costs as little
    as it can; the earlier ones are filled first."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _num_stages(costs, middle) <= size:
            high = middle
        else:
            low = middle + 1
    stages, start = [], 0
    for num_after in reversed(range(size)):
        stop, total = start + 1, costs[start]
        while stop < len(costs) - num_after and total + costs[stop] <= low:
            total += costs[stop]
            stop += 1
        stages.append(range(start, stop))
        start = stop
    return stages


def _num_stages(costs: Sequence[int], most: int) -> int:
    """Stages that are needed if none may cost more than ``most``."""
    count, total = 1, 0
    for cost in costs:
        if total + cost > most:
            count, total = count + 1, 0
        total += cost
    return count
