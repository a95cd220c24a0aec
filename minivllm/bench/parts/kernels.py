"""Where a step's time goes, kernel by kernel:
what PyTorch's profiler hears of operators and of compiled code."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine

COMPILED_TELLS = "TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"
"""With it, Inductor writes code for CPUs that names its kernels to the profiler;
without it, it names none."""
NAME_CHARS = 56


@dataclass(frozen=True)
class KernelTime:
    """Of a step: calls, and the time in the kernel itself [seconds], without what it calls."""

    name: str
    calls: float
    seconds: float


def have_compiled_code_tell() -> None:
    """To be called before anything is compiled. Such code is built once and kept beside the other."""
    os.environ[COMPILED_TELLS] = "1"


def time_kernels(engine: LLMEngine, steps: int) -> tuple[list[KernelTime], float]:
    """Run ``steps`` steps; their kernels, the dearest one first, and how long a step took [seconds]:
    a little longer than without a profiler."""
    from torch.profiler import ProfilerActivity, profile, supported_activities

    on_cuda = ProfilerActivity.CUDA in supported_activities()
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_cuda) as profiler:
        started = time.perf_counter()
        for _ in range(steps):
            engine.step()
        whole = (time.perf_counter() - started) / steps
    seconds: dict[str, float] = {}
    calls: dict[str, float] = {}
    for event in profiler.key_averages():
        name = readable(event.key)
        spent = event.self_device_time_total if on_cuda else event.self_cpu_time_total
        seconds[name] = seconds.get(name, 0.0) + spent / 1e6 / steps
        calls[name] = calls.get(name, 0.0) + event.count / steps
    found = [KernelTime(name, calls[name], seconds[name]) for name in seconds if seconds[name] > 0]
    return sorted(found, key=lambda kernel: -kernel.seconds), whole


def readable(name: str) -> str:
    """The name of a kernel without what all have in common;
    its beginning and, if it is long, what numbers it."""
    name = re.sub(r"^(graph_\d+_|aoti_torch_)?(cpp_fused_+|cpu_+)?", "", name)
    return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 5]}…{name[-4:]}"


def kernel_note(kernels: list[KernelTime], whole: float, count: int = 12) -> str:
    """The dearest kernels of a step, a line each, and what is between kernels."""
    lines = [
        f"{1e3 * one.seconds:8.3f} ms {one.seconds / whole:5.0%} {one.calls:6.1f} x {one.name}"
        for one in kernels[:count]
    ]
    others = sum(one.seconds for one in kernels[count:])
    between = max(0.0, whole - others - sum(one.seconds for one in kernels[:count]))
    lines.append(f"{1e3 * others:8.3f} ms {others / whole:5.0%}          other kernels")
    lines.append(
        f"{1e3 * between:8.3f} ms {between / whole:5.0%}          between kernels: Python, calls, waiting"
    )
    return "\n".join([f"A step of {1e3 * whole:.3g} ms under the profiler, by kernel:", *lines])
