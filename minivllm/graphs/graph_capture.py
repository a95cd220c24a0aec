"""Graphs with breaks: what a step launches is recorded once and replayed, except for the parts that must run anew.

A capture is a list of segments with eager callables between them. Without a break it is one FULL graph; with attention
as the break between layers it is the PIECEWISE form of vLLM V1. The captured work reads and writes fixed addresses, so
whoever replays fills the same buffers in place.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves

Replay = Callable[[], None]


class GraphBackend(Protocol):
    """Records what is launched between begin and end."""

    def begin(self) -> None: ...

    def end(self) -> Replay:
        """Returns what launches all of it again, with the same addresses."""

    def memory_used(self) -> int:
        """Memory that the recorded work keeps for its intermediate results [bytes]."""


class GraphCapture:
    """A context in which work is captured; ``run_between`` breaks it. Afterwards ``replay`` repeats everything."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._parts: list[Replay] = []
        self.num_graphs = 0

    def __enter__(self) -> GraphCapture:
        self._backend.begin()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._parts.append(self._backend.end())
        self.num_graphs += 1


class CudaGraphs:
    """CUDA graphs that share one memory pool: capture the largest first, and the others fit into its memory.

    Because of the shared pool the results of a replay live until the next one. Captures must run on ``stream``.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()
        self._free_at_start = torch.cuda.mem_get_info()[0]
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def end(self) -> Replay:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph.replay

    def memory_used(self) -> int:
        return max(0, self._free_at_start - torch.cuda.mem_get_info()[0])


class RecordedGraphs:
    """The same contract without CUDA, for tests and for learning: every tensor operation is recorded, and a replay runs
    it on the recorded tensors and puts its result where the first one was.

    As with CUDA, what Python computed in between is frozen, a tensor that was replaced instead of overwritten is not
    seen, and compiled code that does not go through the dispatcher cannot be recorded: regions must be eager.
    """

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None
        self._bytes = 0

    def begin(self) -> None:
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def end(self) -> Replay:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        recorder.__exit__(None, None, None)
        self._bytes += recorder.num_bytes
        return recorder.replay

    def memory_used(self) -> int:
        return self._bytes


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple, dict[str, Any], dict[int, Tensor]]] = []
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Results that share memory with an argument follow it by themselves; the others must be put in place. Which are
        # which is only known now: a reshape, say, is sometimes a view and sometimes a copy.
        given = {_memory_of(value) for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        fresh = {
            place: value
            for place, value in enumerate(tree_leaves(result))
            if isinstance(value, Tensor) and _memory_of(value) not in given
        }
        self._operations.append((func, args, kwargs or {}, fresh))
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in fresh.values())
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        for func, args, kwargs, fresh in self._operations:
            result = tree_leaves(func(*args, **kwargs))
            for place, tensor in fresh.items():
                tensor.copy_(result[place])


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
