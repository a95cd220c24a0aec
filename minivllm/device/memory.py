"""Memory for the KV cache and for weights: how much there is, and the pages it lies in."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

MAX_CPU_CACHE_BYTES = 4 * 2**30
"""Most memory the cache takes on a CPU unless the user sizes it: other programs live there too."""
HUGE_PAGE_BYTES = 2 * 2**20
CHUNK_BYTES, LINE_BYTES = 64 * 2**20, 64
"""Memory for weights is taken in such chunks,
in which each tensor begins with a line of the processor's caches."""


def cache_memory(device: torch.device, utilization: float, profile_step: Callable[[], None]) -> int:
    """Bytes for the KV cache, measured after the weights were loaded.

    CUDA: ``utilization`` of the device's memory, less what is in use and what the largest step needs on top
    (profile_step runs it). CPU: ``utilization`` of the free memory, 4 GiB at most.
    """
    if device.type != "cuda":
        return min(int(free_cpu_memory() * utilization), MAX_CPU_CACHE_BYTES)
    torch.cuda.reset_peak_memory_stats(device)
    loaded = torch.cuda.memory_allocated(device)
    profile_step()
    activations = torch.cuda.max_memory_allocated(device) - loaded
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free) - activations)


def free_cpu_memory(root: Path = Path("/")) -> int:
    """Bytes this process could still take without swapping,
    within its control group's limit where there is one.

    root: where ``proc`` and ``sys`` are found.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_PHYS_PAGES") * page // 2
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    group = root / "sys/fs/cgroup"
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        in_use = int(used.read_text()) - _reclaimable_bytes(group / "memory.stat")
        free = min(free, max(0, int(text) - in_use))
    return free


def _reclaimable_bytes(statistics: Path) -> int:
    """Cached file contents that a control group counts as used, but gives up when memory is asked for."""
    if statistics.is_file():
        for line in statistics.read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    return 0


def lazily_zeroed(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A zeroed CPU tensor whose memory the operating system hands out when it is first touched.

    In huge pages where there are any, which made decode attention of 16 requests a tenth faster. They take
    private memory, which only POSIX systems have.
    """
    memory = _new_memory(math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


def _new_memory(num_bytes: int) -> mmap.mmap:
    """Zero, in huge pages, and there for as long as a tensor lies in it."""
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, num_bytes, flags=private) if private else mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class WeightMemory:
    """Copies of weights, one after the other in huge pages.

    A decode step reads every weight once, and with pages of 4 KiB the processor looks up where the next one
    lies all the time: in huge pages bfloat16 decode is 6 % faster. To copy a weight there while it is loaded
    costs nothing, as the pages of the original serve the next one; to move it afterwards takes seconds of a
    core. A chunk is given back when no tensor lies in it any more.
    """

    def __init__(self) -> None:
        self._used = 0
        # Weak: once a model has gone, nothing may hold its last chunk.
        self._chunk: Callable[[], mmap.mmap | None] = lambda: None
        self._lock = threading.Lock()  # models may be loaded by several threads

    def copy(self, tensor: Tensor) -> Tensor:
        """The same values and Python attributes, contiguous.
        Of a tensor on another device, or a small one, a clone."""
        if tensor.device.type == "cpu" and tensor.nbytes >= mmap.PAGESIZE:
            copied = self._room(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        else:
            copied = tensor.clone(memory_format=torch.contiguous_format)
        copied.__dict__.update(tensor.__dict__)
        return copied

    def _room(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes]"""
        with self._lock:
            chunk = self._chunk()
            if chunk is None or self._used + num_bytes > len(chunk):
                chunk = _new_memory(max(CHUNK_BYTES, num_bytes) + HUGE_PAGE_BYTES)
                self._chunk = weakref.ref(chunk)
                self._used = -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
            first = self._used
            self._used = -(-(first + num_bytes) // LINE_BYTES) * LINE_BYTES
            return torch.frombuffer(chunk, dtype=torch.uint8, count=num_bytes, offset=first)


def touched_bytes(tensor: Tensor) -> int:
    """Of a CPU tensor's memory, what the operating system has handed out; all of any other tensor's.

    All of it, too, where the system does not tell.
    """
    if tensor.device.type != "cpu" or tensor.numel() == 0:
        return tensor.nbytes
    first = tensor.data_ptr() // mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (-(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) - first))()
    with contextlib.suppress(OSError, AttributeError):
        look = ctypes.CDLL(None).mincore
        if (
            look(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(len(pages) * mmap.PAGESIZE), pages)
            == 0
        ):
            return min(sum(page & 1 for page in pages) * mmap.PAGESIZE, tensor.nbytes)
    return tensor.nbytes
