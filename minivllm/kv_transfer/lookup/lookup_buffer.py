"""The buffer of a producer for its consumers:
blocks by their hashes, within a bound in bytes (vLLM V0's LookupBuffer).

V0 deletes a block when it is selected. Here it stays until its room is needed, and goes before blocks that no
consumer has taken: the next prompt with the same beginning, and another consumer, still find it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import NamedTuple

from torch import Tensor

Listener = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Hears which blocks have come and which have gone;
called under the buffer's lock, so it must only take note."""


class Contents(NamedTuple):
    """A block, uint8, which holds what it should once ``wait`` has returned. num_bytes: over all workers."""

    data: Tensor
    wait: Callable[[], None]
    num_bytes: int


class LookupBuffer:
    """Any thread may call it, and none ever waits for a consumer: a full buffer drops blocks.
    A state is a block here.

    max_bytes: of all blocks, over all workers. Taken blocks are dropped first, then the oldest ones.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._fresh: OrderedDict[bytes, Contents] = OrderedDict()
        self._taken: OrderedDict[bytes, Contents] = OrderedDict()
        self._listeners: list[Listener] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._taken)

    def holds(self, key: bytes) -> bool:
        """True if the block is here. A block that was taken counts as new again,
        since it has just been computed."""
        with self._lock:
            if key in self._taken:
                self._fresh[key] = self._taken.pop(key)
            return key in self._fresh

    def insert(
        self, blocks: Sequence[tuple[bytes, Tensor]], wait: Callable[[], None], num_bytes: int
    ) -> None:
        """Add the blocks of a step, the first ones of a prompt before its next ones;
        those that are here are left.

        num_bytes: of each, over all workers, so that all of them keep the same ones. wait: returns once all
        hold what they should. Of blocks that do not all fit, the first ones stay: what follows a missing
        block is of no use.
        """
        came, gone = [], []
        with self._lock:
            for key, data in reversed(blocks[: self._max_bytes // num_bytes]):
                if key in self._fresh or key in self._taken:
                    continue
                while self._num_bytes + num_bytes > self._max_bytes:
                    oldest, dropped = (self._taken or self._fresh).popitem(last=False)
                    self._num_bytes -= dropped.num_bytes
                    gone.append(oldest)
                self._fresh[key] = Contents(data, wait, num_bytes)
                self._num_bytes += num_bytes
                came.append(key)
            for listener in self._listeners:
                listener(came, gone)

    def drop_select(self, key: bytes) -> Contents | None:
        """The block, which is from now on the next to be dropped but for those taken before;
        None if it is not here."""
        with self._lock:
            contents = self._fresh.pop(key, None) or self._taken.pop(key, None)
            if contents is not None:
                self._taken[key] = contents
            return contents

    def subscribe(self, listener: Listener) -> None:
        """Tell what is here now, and from now on whatever comes and goes."""
        with self._lock:
            listener([*self._taken, *self._fresh], [])
            self._listeners.append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            self._listeners.remove(listener)
