"""A producer's blocks in one piece of memory, which consumers read without asking for each byte.

Who reads holds a *lease*: until it ends, no other block is written over those it names. A lease that its
consumer does not renew by coming back in time ends by itself, so a consumer that has died holds nothing up.
So what was read counts only if the lease is still there after the read: ``confirm`` says so, and ends it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from threading import Lock

from torch import Tensor

from minivllm.kv_transfer.lookup.lookup_buffer import Listener


@dataclass(frozen=True)
class Lease:
    """keys: the blocks, of which a prefix was asked for. ends: value of time.monotonic()."""

    number: int
    keys: tuple[bytes, ...]
    ends: float


class LeasedBlocks:
    """Any thread may call it. memory: uint8 [slots, block_bytes]. seconds: of a lease."""

    def __init__(self, memory: Tensor, seconds: float) -> None:
        self._memory = memory
        self._seconds = seconds
        self._free = list(range(len(memory) - 1, -1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()
        self._waits: dict[bytes, Callable[[], None]] = {}
        self._leases: dict[int, Lease] = {}
        self._num_leases: Counter[bytes] = Counter()
        self._numbers = count(1)
        self._listeners: list[Listener] = []
        self._lock = Lock()

    def take(self, key: bytes) -> Tensor | None:
        """Memory for a block that is about to be saved, uint8 [block_bytes]; None if it is here, or if all
        others are being read. The block that was used longest ago goes."""
        with self._lock:
            if key in self._slot_of:
                self._slot_of.move_to_end(key)
                return None
            self._end_leases()
            gone = []
            if not self._free:
                gone = [old for old in self._slot_of if old in self._waits and not self._num_leases[old]][:1]
                if not gone:
                    return None
                del self._waits[gone[0]]
                self._free.append(self._slot_of.pop(gone[0]))
            self._slot_of[key] = self._free.pop()
            for listener in self._listeners:
                listener([], gone)
            return self._memory[self._slot_of[key]]

    def publish(self, keys: Sequence[bytes], wait: Callable[[], None]) -> None:
        """These blocks hold what they should once ``wait`` has returned."""
        with self._lock:
            self._waits.update(dict.fromkeys(keys, wait))
            for listener in self._listeners:
                listener(keys, [])

    def lease(self, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """The lease of the longest prefix of these blocks that is here: its number, and where they begin."""
        with self._lock:
            self._end_leases()
            found: list[bytes] = []
            for key in keys:
                if key not in self._waits:
                    break
                found.append(key)
            lease = Lease(next(self._numbers), tuple(found), time.monotonic() + self._seconds)
            self._leases[lease.number] = lease
            self._num_leases.update(found)
            for key in reversed(found):
                self._slot_of.move_to_end(key)
            addresses = [self._memory[self._slot_of[key]].data_ptr() for key in found]
            waits = {self._waits[key] for key in found}
        for wait in waits:
            wait()
        return lease.number, addresses

    def confirm(self, number: int) -> bool:
        """End a lease. True if it was valid until now, so that the bytes read under it are the right ones."""
        with self._lock:
            self._end_leases()
            lease = self._leases.get(number)
            if lease is not None:
                self._end(lease)
            return lease is not None

    def subscribe(self, listener: Listener) -> None:
        """Tell what is here now, and from now on whatever comes and goes."""
        with self._lock:
            listener(list(self._waits), [])
            self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.remove(listener)

    def _end_leases(self) -> None:
        now = time.monotonic()
        for lease in [lease for lease in self._leases.values() if lease.ends <= now]:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.number]
        self._num_leases.subtract(lease.keys)
        self._num_leases += Counter()  # without those that are not leased
