"""CUDA graphs: the operators of a capture are recorded, with the tensors that they read and wrote,
and a replay computes them again in the same memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.pretended_gpu import streams


class CUDAGraph:
    """``torch.cuda.CUDAGraph`` for work of one thread."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._launches: list[Callable[[], None]] = []

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        streams.check_not_capturing("a second capture")
        if streams.current_stream() is streams.default_stream():
            raise RuntimeError("CUDA graphs must be captured on a stream that is not the default one.")
        streams.set_capture(self)

    def capture_end(self) -> None:
        streams.set_capture(None)
        if not self._launches:
            warnings.warn(
                "The CUDA Graph is empty. This usually means that nothing was launched.", stacklevel=2
            )

    def record(self, launch: Callable[[], Any], results: Any) -> None:
        """launch: computes again, on the CPU. results: where later launches expect what it returns."""
        kept = [result for result in tree_leaves(results) if isinstance(result, Tensor)]

        def run() -> None:
            computed = [result for result in tree_leaves(launch()) if isinstance(result, Tensor)]
            for target, value in zip(kept, computed, strict=True):
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)

        self._launches.append(run)

    def replay(self) -> None:
        streams.check_not_capturing("replay")
        for launch in self._launches:
            launch()

    def reset(self) -> None:
        self._launches.clear()

    def pool(self) -> tuple[int, int]:
        return 0, 1


@contextmanager
def graph(
    recorded: CUDAGraph, pool: Any = None, stream: streams.Stream | None = None, **_: Any
) -> Iterator[None]:
    """``torch.cuda.graph``"""
    streams.synchronize()
    with stream or streams.Stream():
        recorded.capture_begin(pool)
        try:
            yield
        finally:
            recorded.capture_end()


def graph_pool_handle() -> tuple[int, int]:
    return 0, 1
