"""Memory behind the pages of a CPU's KV cache, asked for shortly before they are first written.

Memory that is mapped but was never touched costs a fault, and the clearing of a page, where it is first written. With
prefix caching never-used pages go first, so that would be in almost every step until all of the cache was used once.
Here a thread does it between and beside the steps, a little ahead of them: no more memory is taken than is used soon.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading

from torch import Tensor

from minivllm.models.decoder import LayerCache

logger = logging.getLogger(__name__)

AHEAD_BYTES = 64 * 2**20
"""Memory that is asked for ahead of its use."""
NICENESS = 10
_MADV_POPULATE_WRITE = 23  # of Linux 5.14; Python's mmap module does not name it


class PageBacking:
    """Keeps the pages behind the highest one in use backed by memory, ``AHEAD_BYTES`` of them.

    caches: K and V of every layer [pages, …] on a CPU; the list may be emptied and filled again. Where the system
    cannot be asked for it, nothing happens.
    """

    def __init__(self, caches: list[LayerCache]) -> None:
        self._caches = caches
        self._backed = 0
        self._wanted = threading.Semaphore(0)
        self._at_work = threading.Lock()
        self._target = 0
        self._thread: threading.Thread | None = None
        self._can_ask = sys.platform == "linux"

    @property
    def num_backed_pages(self) -> int:
        """The first so many pages have memory."""
        return self._backed

    def forget(self) -> None:
        """The caches were emptied: their pages have no memory any more. Afterwards nothing here holds any of them."""
        with self._at_work:
            self._backed = self._target = 0

    def use(self, highest_page: int) -> None:
        """Pages up to this one are in use. Returns at once; half of what is ahead may be used up before more is asked
        for."""
        if not self._can_ask or not self._caches:
            return
        num_pages = len(self._caches[0].k)
        ahead = max(1, AHEAD_BYTES // sum(tensor[0].nbytes for cache in self._caches for tensor in cache))
        if highest_page + 1 + ahead // 2 <= self._target or self._target >= num_pages:
            return
        self._target = min(highest_page + 1 + ahead, num_pages)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="page-backing", daemon=True)
            self._thread.start()
        self._wanted.release()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while self._can_ask:
            self._wanted.acquire()
            with self._at_work:
                self._back_pages()

    def _back_pages(self) -> None:
        first, target = self._backed, self._target
        if first >= target:
            return
        # Held while this runs, so that nobody frees them meanwhile, and no longer.
        tensors = [tensor for cache in list(self._caches) for tensor in cache]
        if all(populate(tensor[first:target]) for tensor in tensors):
            self._backed = target
        else:
            self._can_ask = False


def populate(memory: Tensor) -> bool:
    """Have memory behind a contiguous CPU tensor, as if it had been written; its contents stay. False if the system
    refuses."""
    start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if libc.madvise(start, memory.data_ptr() + memory.nbytes - start, _MADV_POPULATE_WRITE) == 0:
        return True
    logger.debug("Memory is not asked for in advance: %s.", os.strerror(ctypes.get_errno()))
    return False
