"""``install`` gives a process a GPU that computes on the CPU."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.gpu_code.pretend_gpu import Card, answers_of, register_device_guard
from tests.pretended_gpu import attention, graphs, streams
from tests.pretended_gpu.tensors import OnGpu

MEMORY = 4 * 2**30
"""Bytes that a pretended card has: they are the host's."""
COUNT = "PRETENDED_GPUS"
"""How many cards there are, 1 by default."""
ROOT = Path(__file__).parents[2]
FOR_CHILDREN = [str(Path(__file__).parent / "startup"), str(ROOT)]
"""Python processes that find modules here have the pretended GPU."""


def install() -> None:
    """For this process, and those that it starts. Once."""
    if torch.cuda.Stream is streams.Stream:
        return
    if FOR_CHILDREN[0] not in sys.path:
        sys.path[:0] = FOR_CHILDREN  # engines pass it on to their processes
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOR_CHILDREN, os.environ.get("PYTHONPATH", "")])
    _answer_for_cuda(replace(Card(), total_memory=MEMORY))
    register_device_guard(Path(torch.__file__).parent)
    torch._C._set_only_lift_cpu_tensors(True)
    _pretend_in_every_thread()
    _leave_out_compilation()
    _exchange_through_gloo()


def _count() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(os.environ.get(COUNT, "1")) if visible is None else len([*filter(None, visible.split(","))])


def _answer_for_cuda(card: Card) -> None:
    answers = answers_of(card) | {
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": _count,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "Stream": streams.Stream,
        "Event": streams.Event,
        "stream": streams.stream_context,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "synchronize": streams.synchronize,
        "set_sync_debug_mode": streams.set_sync_debug_mode,
        "get_sync_debug_mode": streams.get_sync_debug_mode,
        "is_current_stream_capturing": lambda: streams.capture_of_thread() is not None,
        "CUDAGraph": graphs.CUDAGraph,
        "graph": graphs.graph,
        "graph_pool_handle": graphs.graph_pool_handle,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def _pretend_in_every_thread() -> None:
    """Modes belong to a thread."""
    start = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with OnGpu():
            start(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    OnGpu().__enter__()


_compiling = threading.local()


def _leave_out_compilation() -> None:
    """Regions run as they are written, and are told that they are compiled."""
    is_compiling = torch.compiler.is_compiling

    def compile(function: Callable | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile, **options)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            before = getattr(_compiling, "now", False)
            _compiling.now = True
            try:
                return function(*args, **kwargs)
            finally:
                _compiling.now = before

        return run

    torch.compile = compile  # type: ignore[assignment]
    torch.compiler.is_compiling = lambda: getattr(_compiling, "now", False) or is_compiling()
    import torch.nn.attention.flex_attention as flex

    flex.flex_attention = attention.flex_attention  # type: ignore[assignment]


def _exchange_through_gloo() -> None:
    import torch.distributed as dist

    begin = dist.init_process_group

    def init_process_group(backend: str | None = None, **arguments: Any) -> None:
        begin("gloo" if backend == "nccl" else backend, **arguments)

    dist.init_process_group = init_process_group
