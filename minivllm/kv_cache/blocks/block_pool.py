"""Physical KV cache blocks: who uses them, which one is reused next, and which contents can be found again.

A block without users keeps its contents until it is reused, so the free queue is also the eviction order
of the prefix cache. (PagedAttention's block manager with vLLM V1's queue of free blocks.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from minivllm.errors import ConfigError
from minivllm.kv_cache.blocks.continuations import Continuations
from minivllm.kv_cache.blocks.free_queue import FreeBlockQueue, KVCacheBlock

NULL_BLOCK_ID = 0
"""Padding writes go to this block. It is never handed out, counted or hashed. Only attention sinks read it:
its last cache slot, where V stays zero."""

TAIL_SHARE = 8
"""One of so many blocks, at most, is kept although it is not full."""


class BlockPool:
    """All blocks of one KV group. Raises ConfigError for fewer than two: block 0 is the null block.

    Several blocks may hold the same contents (requests that computed the same prefix side by side): block
    tables only grow, so a block is never exchanged for its twin, and all of them are kept under one hash.

    continuations: the tokens in blocks, where they are kept.
    The contents of a block can be found under its hash, or by its piece there.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"The KV cache has {num_blocks} blocks, but needs at least 2, because one takes padding "
                "writes: give "
                "it more memory."
            )
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[NULL_BLOCK_ID]
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.continuations = Continuations((num_blocks - 1) // TAIL_SHARE)
        self.clock: Callable[[], float] = time.monotonic
        """The time now [seconds], for the age of blocks. Simulations set it."""
        self._cached: dict[bytes, dict[int, KVCacheBlock]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks without users, whether or not their contents can still be found."""
        return self.free_queue.num_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return 1.0 - self.free_queue.num_blocks / (self.num_blocks - 1)

    @property
    def num_cached_hashes(self) -> int:
        """Different contents that can be found."""
        return len(self._cached)

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """A block that holds these contents, the oldest one of several."""
        twins = self._cached.get(block_hash)
        return None if twins is None else next(iter(twins.values()))

    def blocks_under(self, block_hash: bytes | None) -> list[KVCacheBlock]:
        """All blocks that can be found under a hash."""
        return [] if block_hash is None else list(self._cached.get(block_hash, {}).values())

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Take ``count`` blocks from the front of the free queue; what they cached is forgotten.

        Raises ValueError if there are not so many; then nothing is taken.
        """
        if count > self.free_queue.num_blocks:
            raise ValueError(
                f"{count} blocks were asked for, but only {self.free_queue.num_blocks} are free."
            )
        blocks = []
        for _ in range(count):
            block = self.free_queue.popleft()
            if self._is_findable(block):
                self.forget(block)
            block.ref_count = 1
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more user for each block; a free one leaves the queue and keeps its contents."""
        for block in blocks:
            if block.block_id == NULL_BLOCK_ID:
                continue
            if block.ref_count == 0:
                self.free_queue.remove(block)
            block.ref_count += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One user less for each block. Of those that become free, the first is reused first among its kind.

        Blocks whose contents cannot be found any more go to the front of the queue, the others to the back.
        """
        lost, now = [], self.clock()
        for block in ordered_blocks:
            if block.block_id == NULL_BLOCK_ID:
                continue
            block.ref_count -= 1
            if block.ref_count == 0:
                block.last_used = now
                if self._is_findable(block):
                    self.free_queue.append(block)
                else:
                    lost.append(block)
        for block in reversed(lost):
            self.free_queue.prepend(block)

    def _is_findable(self, block: KVCacheBlock) -> bool:
        return block.block_hash is not None or block.block_id in self.continuations

    def cache_full_blocks(self, blocks: Sequence[KVCacheBlock], block_hashes: Sequence[bytes]) -> None:
        """Let full blocks be found under their hashes, one each."""
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            if block.block_id == NULL_BLOCK_ID or block.block_hash is not None:
                continue
            block.block_hash = block_hash
            twins = self._cached.get(block_hash)
            if twins is None:
                self._cached[block_hash] = {block.block_id: block}
            else:
                twins[block.block_id] = block

    def forget(self, block: KVCacheBlock) -> None:
        """The contents of a block can no longer be found: it is reused, or they were never computed."""
        block_hash = block.block_hash
        if block_hash is None:
            self.continuations.forget(block.block_id)
            return
        twins = self._cached[block_hash]
        del twins[block.block_id]
        if twins:
            self.continuations.hand_over(block.block_id, next(iter(twins)))
        else:
            self.continuations.forget(block.block_id)
            del self._cached[block_hash]
        block.block_hash = None

    def keep_piece(
        self, parent: bytes, block: KVCacheBlock, token_ids: Sequence[int], *, is_planned: bool
    ) -> None:
        """Let the tokens in a block be found; see Continuations.put."""
        if block.block_id != NULL_BLOCK_ID:
            is_tail = block.block_hash is None
            self._lose(
                self.continuations.put(
                    parent, block.block_id, token_ids, is_tail=is_tail, is_planned=is_planned
                )
            )

    def settle(self) -> None:
        """The planned step is sent; see Continuations.settle."""
        self._lose(self.continuations.settle())

    def _lose(self, block_ids: Iterable[int]) -> None:
        """Blocks have lost their piece: free ones that cannot be found any more are reused next."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0 and not self._is_findable(block):
                self.reuse_next(block)

    def reuse_next(self, block: KVCacheBlock) -> None:
        """Forget the contents of a block without users, and put it at the front of the free queue."""
        self.forget(block)
        self.free_queue.remove(block)
        self.free_queue.prepend(block)

    def reset_prefix_cache(self) -> bool:
        """Forget all contents. Does nothing and returns False while any block is in use."""
        if self.num_free_blocks != self.num_blocks - 1:
            return False
        for block in self.blocks:
            block.block_hash = None
        self._cached.clear()
        self.continuations.clear()
        return True

    def check_integrity(self, expected_ref_counts: dict[int, int]) -> None:
        """Compare with the users counted by the caller (block id -> users).
        Raises RuntimeError on a contradiction."""
        free = list(self.free_queue)
        free_ids = {block.block_id for block in free}
        _require(
            len(free) == len(free_ids) == self.free_queue.num_blocks, "The free queue miscounts its blocks."
        )
        following: KVCacheBlock | None = None
        for block in free:
            _require(
                following is None or block.previous is following, "The links of the free queue disagree."
            )
            following = block
        _require(NULL_BLOCK_ID not in free_ids, "The null block is in the free queue.")
        _require(
            self.null_block.ref_count == 0 and self.null_block.block_hash is None, "The null block is in use."
        )
        for block in self.blocks[1:]:
            users = expected_ref_counts.get(block.block_id, 0)
            _require(block.ref_count == users, f"{block!r} has {users} users.")
            _require(
                (block.block_id in free_ids) == (users == 0), f"{block!r} with {users} users is misplaced."
            )
            if block.block_hash is not None:
                found = self._cached.get(block.block_hash, {}).get(block.block_id)
                _require(found is block, f"{block!r} cannot be found under its hash.")
        hashed = sum(block.block_hash is not None for block in self.blocks)
        _require(
            hashed == sum(map(len, self._cached.values())),
            "The prefix cache lists blocks that lost their hash.",
        )
        contradiction = self.continuations.contradiction()
        _require(not contradiction, contradiction)


def _require(holds: bool, contradiction: str) -> None:
    if not holds:
        raise RuntimeError(f"KV cache integrity: {contradiction}")
