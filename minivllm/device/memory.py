"""How much memory the KV cache may take."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

MAX_CPU_CACHE_BYTES = 4 * 2**30
"""Most memory the cache takes on a CPU unless the user sizes it: other programs live there too."""
MADV_COLLAPSE = 25
"""Linux 6.1; Python's mmap has no name for it. Older kernels refuse it."""
HUGE_PAGE_BYTES = 2 * 2**20
MIN_BYTES_FOR_HUGE_PAGES = 32 * 2**20
"""Fewer bytes of weights stay in the processor's caches, or nearly."""


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
    """Bytes this process could still take without swapping, within its control group's limit where there is one.

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

    In huge pages where there are any, which made decode attention of 16 requests a tenth faster. They take private
    memory, which only POSIX systems have.
    """
    size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    memory = mmap.mmap(-1, size, flags=private) if private else mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


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
        if look(ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t(len(pages) * mmap.PAGESIZE), pages) == 0:
            return min(sum(page & 1 for page in pages) * mmap.PAGESIZE, tensor.nbytes)
    return tensor.nbytes


def collapse_into_huge_pages(share: float = 1.0, maps: Path = Path("/proc/self/smaps")) -> int:
    """Put what this process holds in memory into huge pages, and return how many bytes lie there now.

    A decode step reads every weight once, and with pages of 4 KiB the processor looks up where the next one lies all
    the time: bfloat16 decode became 6 % faster. Moved are large private mappings that belong to no file and are in use
    for the most part, which on a CPU after loading are the weights. Nothing happens where the system has no such thing.
    share: of its time that this works; it sleeps for the rest, because a process whose pages are being moved waits
    when it asks for new ones. Alone, 600 MB took 1.5 s.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or not maps.is_file():
        return 0
    advise = ctypes.CDLL(None).madvise
    num_bytes = 0
    for first, end in _large_mappings(maps.read_text()):
        for start in range(first, end, HUGE_PAGE_BYTES):
            started = time.perf_counter()
            address, size = ctypes.c_void_p(start), ctypes.c_size_t(HUGE_PAGE_BYTES)
            if advise(address, size, mmap.MADV_HUGEPAGE) == 0 and advise(address, size, MADV_COLLAPSE) == 0:
                num_bytes += HUGE_PAGE_BYTES
            time.sleep((time.perf_counter() - started) * (1 / share - 1))
    return num_bytes


def _large_mappings(smaps: str) -> Iterator[tuple[int, int]]:
    """Whole huge pages of the mappings worth it, as first and last address. smaps: as in proc(5), which counts KiB."""
    start = end = size = 0
    for line in smaps.splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            anonymous = fields[1] == "rw-p" and (len(fields) == 5 or fields[5] == "[heap]")
            start, end = (int(part, 16) for part in fields[0].split("-")) if anonymous else (0, 0)
        elif fields[0] == "Size:":
            size = int(fields[1])
        elif fields[0] == "Rss:" and end - start >= 2 * HUGE_PAGE_BYTES and int(fields[1]) * 2 >= size:
            yield -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
