"""Memory behind KV pages is there before they are written, and no more of it than is used soon."""

import ctypes
import mmap
import sys
import threading
import time

import pytest
import torch

from minivllm.models.decoder import LayerCache
from minivllm.worker.memory import lazily_zeroed
from minivllm.worker.page_backing import AHEAD_BYTES, PageBacking, populate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked for memory in advance")
MEBIBYTE = 2**20


def resident_bytes(tensor: torch.Tensor) -> int:
    """How much of this tensor's memory the kernel says is present."""
    start = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - start
    present = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), present) == 0
    return sum(byte & 1 for byte in present) * mmap.PAGESIZE


def caches(megabytes_per_page: int, pages: int) -> list[LayerCache]:
    shape = (pages, megabytes_per_page * MEBIBYTE // 4)
    return [LayerCache(lazily_zeroed(shape, torch.float32), lazily_zeroed(shape, torch.float32))]


def wait_until(backing: PageBacking, pages: int) -> None:
    deadline = time.monotonic() + 20
    while backing.num_backed_pages < pages and time.monotonic() < deadline:
        time.sleep(0.01)
    assert backing.num_backed_pages == pages


def can_populate() -> bool:
    return sys.platform == "linux" and populate(lazily_zeroed((mmap.PAGESIZE,), torch.uint8))


@pytest.mark.skipif(not can_populate(), reason="this kernel cannot be asked (it takes Linux 5.14)")
def test_populated_memory_is_resident_and_keeps_what_was_written() -> None:
    memory = lazily_zeroed((32 * MEBIBYTE,), torch.uint8)
    memory[5] = 7
    assert resident_bytes(memory) <= 4 * MEBIBYTE  # a huge page
    assert populate(memory[: 16 * MEBIBYTE])
    assert 16 * MEBIBYTE <= resident_bytes(memory) <= 20 * MEBIBYTE
    assert memory[5] == 7 and memory.sum() == 7


@pytest.mark.skipif(not can_populate(), reason="this kernel cannot be asked (it takes Linux 5.14)")
def test_pages_ahead_of_the_highest_in_use_are_backed_but_not_the_whole_cache() -> None:
    layers = caches(megabytes_per_page=4, pages=40)
    ahead = AHEAD_BYTES // (8 * MEBIBYTE)
    backing = PageBacking(layers)
    backing.use(highest_page=0)
    wait_until(backing, 1 + ahead)
    assert (1 + ahead) * 4 * MEBIBYTE <= resident_bytes(layers[0].k) <= (1 + ahead + 2) * 4 * MEBIBYTE
    backing.use(highest_page=ahead // 2)  # half of what is ahead may be used up
    assert backing.num_backed_pages == 1 + ahead
    backing.use(highest_page=38)
    wait_until(backing, 40)


@pytest.mark.skipif(not can_populate(), reason="this kernel cannot be asked (it takes Linux 5.14)")
def test_a_cache_that_was_emptied_and_filled_again_is_backed_again() -> None:
    layers = caches(megabytes_per_page=1, pages=4)
    backing = PageBacking(layers)
    backing.use(highest_page=1)
    wait_until(backing, 4)
    layers.clear()
    backing.forget()
    backing.use(highest_page=1)  # nothing to do without caches
    layers.extend(caches(megabytes_per_page=1, pages=4))
    backing.use(highest_page=1)
    wait_until(backing, 4)
    assert resident_bytes(layers[0].k) == 4 * MEBIBYTE


def test_a_system_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def refuse(memory: torch.Tensor) -> bool:
        asked.set()
        return False

    monkeypatch.setattr("minivllm.worker.page_backing.populate", refuse)
    backing = PageBacking(caches(megabytes_per_page=1, pages=200))
    backing.use(highest_page=1)
    assert asked.wait(20)
    assert backing._thread is not None
    backing._thread.join(20)
    assert not backing._thread.is_alive()
    asked.clear()
    backing.use(highest_page=100)
    assert backing.num_backed_pages == 0 and not asked.wait(0.05)
