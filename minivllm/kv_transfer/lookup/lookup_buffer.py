"""What a producer holds for its consumers: blocks by their hashes, within a bound in bytes (vLLM V0's LookupBuffer).

V0 deletes a block when it is selected. Here it stays until its room is needed, and goes before those that nobody has
taken: the next prompt with the same beginning, and another consumer, still find it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock

from torch import Tensor

from minivllm.errors import ConfigError

Contents = tuple[Tensor, Callable[[], None]]
"""A block, uint8 [block_bytes], which holds what it should once the function has returned."""
Listener = Callable[[Sequence[bytes], Sequence[bytes]], None]
"""Hears which blocks have come and which have gone; called under the buffer's lock, so it must only take note."""


class LookupBuffer:
    """Any thread may call it, and none ever waits for a consumer: a full buffer drops blocks.

    max_bytes: of all blocks. What was taken is dropped first, then what has waited longest.
    """

    def __init__(self, max_bytes: int, block_bytes: int) -> None:
        """block_bytes: over all workers, of whose parts max_bytes is the bound. Raises ConfigError if there is no room
        for one block."""
        self.max_blocks = max_bytes // block_bytes
        if self.max_blocks < 1:
            raise ConfigError(
                f"buffer_bytes is {max_bytes}, but one block takes {block_bytes}: give the connector more."
            )
        self._fresh: OrderedDict[bytes, Contents] = OrderedDict()
        self._taken: OrderedDict[bytes, Contents] = OrderedDict()
        self._listeners: list[Listener] = []
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._taken)

    def holds(self, key: bytes) -> bool:
        """Whether the block is here. A block that was taken counts as new again: somebody has just computed it."""
        with self._lock:
            if key in self._taken:
                self._fresh[key] = self._taken.pop(key)
            return key in self._fresh

    def insert(self, blocks: Sequence[tuple[bytes, Tensor]], wait: Callable[[], None]) -> None:
        """Add the blocks of a step, the first ones of a prompt before its next ones; those that are here are left.

        wait: returns once all of them hold what they should. Of blocks that do not all fit, the first ones stay: what
        follows a missing block is of no use.
        """
        came, gone = [], []
        with self._lock:
            for key, data in reversed(blocks[: self.max_blocks]):
                if key in self._fresh or key in self._taken:
                    continue
                if len(self) >= self.max_blocks:
                    gone.append((self._taken or self._fresh).popitem(last=False)[0])
                self._fresh[key] = (data, wait)
                came.append(key)
            for listener in self._listeners:
                listener(came, gone)

    def drop_select(self, key: bytes) -> Contents | None:
        """The block, which is from now on the next to be dropped but for those taken before; None if it is not here."""
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
