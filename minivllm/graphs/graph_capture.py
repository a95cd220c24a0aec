"""Graphs with breaks: what a step launches is recorded once and replayed,
except for the parts that must run anew.

A capture is a list of segments with eager callables between them. Without a break it is one FULL graph; with
attention as the break between layers it is the PIECEWISE form of vLLM V1. The captured work reads and writes
fixed addresses, so the caller of a replay fills the same buffers in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

import torch

from minivllm.device.host_work import broken_by_host_work

Replay = Callable[[], None]


class GraphBackend(Protocol):
    """Records what is launched between begin and end."""

    def begin(self) -> None: ...

    def end(self) -> Replay | None:
        """Returns what launches all of it again, with the same addresses; None where nothing was launched."""

    def memory_used(self) -> int:
        """Memory that the recorded work keeps for its intermediate results [bytes]."""


class GraphCapture:
    """A context in which work is captured; ``run_between`` breaks it.
    Afterwards ``replay`` repeats everything."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._parts: list[Replay] = []
        self._breaks = broken_by_host_work(self)
        self.num_graphs = 0

    def __enter__(self) -> GraphCapture:
        self._backend.begin()
        self._breaks.__enter__()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._breaks.__exit__(error_type, error, trace)
        # Where something failed between segments, no segment is open and the capture is of no use.
        if error is None:
            self._end_segment()

    def run_between(self, function: Callable[[], None]) -> None:
        """Run function now, outside any graph, and again in this place at every replay."""
        self._end_segment()
        function()
        self._parts.append(function)
        self._backend.begin()

    def replay(self) -> None:
        for part in self._parts:
            part()

    def _end_segment(self) -> None:
        replay = self._backend.end()
        if replay is not None:
            self._parts.append(replay)
            self.num_graphs += 1


class CudaGraphs:
    """CUDA graphs that share one memory pool: capture the largest first, and the others fit into its memory.

    Because of the shared pool the results of a replay live until the next one.
    Captures must run on ``stream``.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._free_at_start = torch.cuda.mem_get_info()[0]
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Threads beside this one use the device meanwhile: NCCL's, and those that move blocks.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay | None:
        graph, self._graph = self._graph, None
        assert graph is not None
        # Only a warning tells that a graph is empty. The segment that follows the last attention is.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            graph.capture_end()
        others = [warning for warning in caught if "CUDA Graph is empty" not in str(warning.message)]
        for warning in others:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return graph.replay if len(others) == len(caught) else None

    def memory_used(self) -> int:
        return max(0, self._free_at_start - torch.cuda.mem_get_info()[0])
