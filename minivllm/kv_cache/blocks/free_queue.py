"""Physical blocks, and the order in which those that are free are reused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class KVCacheBlock:
    """One physical block. ``previous`` and ``next`` link it into the free queue while no request uses it.

    block_hash: key under which its contents can be found; None while it is not full, or after it was reused.
    last_used: when its last user gave it up, on the clock of its pool.
    """

    __slots__ = ("block_hash", "block_id", "last_used", "next", "previous", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.last_used = 0.0
        self.block_hash: bytes | None = None
        self.previous: KVCacheBlock | None = None
        self.next: KVCacheBlock | None = None

    def __repr__(self) -> str:
        return (
            f"KVCacheBlock({self.block_id}, ref_count={self.ref_count}, hashed={self.block_hash is not None})"
        )


class FreeBlockQueue:
    """Doubly linked list of blocks with a sentinel at both ends: every operation is O(1), also in the middle.

    The links live in the blocks, so moving one allocates nothing. The front is reused first.
    """

    def __init__(self, blocks: Iterable[KVCacheBlock] = ()) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next, self._tail.previous = self._tail, self._head
        self.num_blocks = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self.num_blocks

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """Front to back."""
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def popleft(self) -> KVCacheBlock:
        """Take the front block. Raises IndexError if the queue is empty."""
        block = self._head.next
        if block is None or block is self._tail:
            raise IndexError("The queue of free blocks is empty.")
        self.remove(block)
        return block

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the back: it is reused last."""
        assert self._tail.previous is not None
        self._link(self._tail.previous, block, self._tail)

    def prepend(self, block: KVCacheBlock) -> None:
        """Put a block at the front: it is reused first."""
        assert self._head.next is not None
        self._link(self._head, block, self._head.next)

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out of the queue, wherever it is. Raises ValueError if it is not in the queue."""
        previous, following = block.previous, block.next
        if previous is None or following is None:
            raise ValueError(f"Block {block.block_id} is not in the queue of free blocks.")
        previous.next, following.previous = following, previous
        block.previous = block.next = None
        self.num_blocks -= 1

    def _link(self, previous: KVCacheBlock, block: KVCacheBlock, following: KVCacheBlock) -> None:
        block.previous, block.next = previous, following
        previous.next = following.previous = block
        self.num_blocks += 1
