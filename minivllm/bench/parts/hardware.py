"""What a machine can do at best, measured: memory bandwidth and matrix products. Speeds are held against these."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

PROBES = 9
WARM_UP_PROBES = 3


@dataclass(frozen=True)
class Machine:
    """Measured limits. copy: bytes read plus bytes written per second. read: bytes read per second by a sum.

    flops: per second of a product of square matrices.
    """

    copy: float
    read: float
    flops: float

    @property
    def bandwidth(self) -> float:
        """What decoding is held against: the faster of the two, so that nobody beats the bound by a slow probe."""
        return max(self.copy, self.read)


def seconds_per_call(function: Callable[[], Any], device: torch.device, calls: int = PROBES) -> list[float]:
    """Time of each call, the device's queue emptied before and after; the first few are not counted [seconds]."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for call in range(-WARM_UP_PROBES, calls):
        wait()
        started = time.perf_counter()
        function()
        wait()
        if call >= 0:
            seconds.append(time.perf_counter() - started)
    return seconds


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Of a plain copy of ``size`` bytes, the best of several."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * size / min(seconds_per_call(lambda: target.copy_(source), device))


def read_bandwidth(device: torch.device, size: int, calls: int = PROBES) -> float:
    """Of adding up ``size`` bytes of float32, the best of several."""
    # Ones, not zeros: untouched zero pages of a CPU's memory are all one and the same page.
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    return size / min(seconds_per_call(source.sum, device, calls))


def matmul_peak(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """Floating point operations per second of a product of ``width`` by ``width`` matrices, the best of several."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(width, width, device=device, generator=generator).to(dtype) for _ in range(2))
    return 2 * width**3 / min(seconds_per_call(lambda: a @ b, device))


def measure_machine(device: torch.device, dtype: torch.dtype, size: int, width: int) -> Machine:
    """All limits. size: bytes that are copied and read. width: of the matrices."""
    with torch.inference_mode():
        return Machine(copy_bandwidth(device, size), read_bandwidth(device, size), matmul_peak(device, dtype, width))
