"""What CUDA graphs do, on a CPU: the work of a capture is noted, operation by operation, and repeated."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves

from minivllm.graphs.graph_capture import Replay


class RecordedGraphs:
    """A ``GraphBackend`` without CUDA, for tests and for learning: every tensor operation is recorded, and a
    replay runs it on the recorded tensors and puts its result where the first one was.

    As with CUDA, what Python computed in between is frozen, a tensor that was replaced instead of overwritten
    is not seen, and compiled code that does not go through the dispatcher cannot be recorded: regions must be
    eager.
    """

    def __init__(self) -> None:
        self._recorder: _Recorder | None = None
        self._bytes = 0

    def begin(self) -> None:
        self._recorder = _Recorder()
        self._recorder.__enter__()

    def end(self) -> Replay | None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        recorder.__exit__(None, None, None)
        self._bytes += recorder.num_bytes
        return None if recorder.is_empty else recorder.replay

    def memory_used(self) -> int:
        return self._bytes


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, tuple, dict[str, Any], dict[int, Tensor]]] = []
        self.num_bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._operations

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Results that share memory with an argument follow it by themselves; the others must be put in place.
        # Which are which is only known now: a reshape, say, is sometimes a view and sometimes a copy.
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
            for handle in result:  # of a collective, which a CPU has to wait for
                if isinstance(handle, torch.ScriptObject):
                    dist.Work.unbox(handle).wait()
            for place, tensor in fresh.items():
                tensor.copy_(result[place])


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
