"""Block tables of one KV group: layers whose keys and values live and die together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from minivllm.errors import ConfigError
from minivllm.kv_cache.block_pool import BlockPool, KVCacheBlock
from minivllm.kv_cache.specs import GroupSpec, max_blocks


class BlockTable:
    """Blocks of one request in logical order; the first ``num_cached`` of them were offered to the prefix cache, and
    the first ``num_dropped`` of them are null blocks, since no later token reads what was there."""

    __slots__ = ("blocks", "num_cached", "num_dropped")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_cached = 0
        self.num_dropped = 0


class SingleGroupManager(ABC):
    """Tables of all requests for one group, over a pool of its own. Kinds of attention differ in what they can reuse
    and what they may drop.

    num_blocks: of the pool, the null block included. name: for people. drops_blocks: whether drop_skipped_blocks ever
    does anything. hashes_per_block: blocks are hashed in pieces that divide the block sizes of all groups; the last
    piece of a block names it.
    """

    drops_blocks = False
    name = "full attention"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}, but must be at least 1.")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, BlockTable] = {}
        self.hashes_per_block = 1

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_num_blocks: int) -> list[KVCacheBlock]:
        """Blocks that hold the longest reusable prefix of at most ``max_num_blocks`` blocks, null blocks where nothing
        is read of it. Changes nothing."""

    @abstractmethod
    def first_read(self, num_computed_tokens: int) -> int:
        """The first position that any token reads which is computed after so many."""

    def max_blocks(self, num_tokens: int) -> int:
        """Most blocks that a request of so many tokens holds at once."""
        return -(-num_tokens // self.block_size)

    def max_tokens_alone(self, max_model_len: int) -> int:
        """Tokens of the longest request that fits into the whole pool, at most max_model_len."""
        usable = self.pool.num_blocks - 1
        return max_model_len if self.max_blocks(max_model_len) <= usable else usable * self.block_size

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Replace blocks that no later token will read by the null block, and free them.

        num_computed_tokens: what was computed for certain. Tokens in flight may count, drafts that can be rejected may
        not.
        """
        table = self.tables.get(request_id)
        if table is None:
            return
        start, end = table.num_dropped, self.first_read(num_computed_tokens) // self.block_size
        if end <= start:
            return
        self.pool.free_blocks(table.blocks[start:end])
        table.blocks[start:end] = [self.pool.null_block] * (end - start)
        table.num_dropped = end

    def num_new_blocks(self, request_id: str, num_tokens: int, num_hits: int = 0) -> int:
        """Blocks to take from the pool so that ``num_tokens`` tokens fit; ``num_hits`` hits will be added before."""
        table = self.tables.get(request_id)
        held = num_hits if table is None else len(table.blocks) + num_hits
        missing = -(-num_tokens // self.block_size) - held
        return missing if missing > 0 else 0

    def num_missing_blocks(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> int:
        """Blocks by which a request will grow at most until ``num_tokens`` tokens are computed. ``hits``: as above."""
        missing = self.num_new_blocks(request_id, num_tokens, len(hits))
        if not self.drops_blocks:
            return missing
        table = self.tables.get(request_id)
        held = sum(block is not self.pool.null_block for block in hits)
        if table is not None:
            held += len(table.blocks) - table.num_dropped
        return max(0, min(missing, self.max_blocks(num_tokens) - held))

    def add_hits(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Start the table of a request with blocks that were found in the cache and are already touched."""
        table = self.tables[request_id] = BlockTable()
        table.blocks.extend(hits)
        table.num_cached = len(hits)
        if self.drops_blocks:
            table.num_dropped = sum(block is self.pool.null_block for block in hits)

    def add_new_blocks(self, request_id: str, count: int) -> list[int]:
        """Take ``count`` blocks for a request; returns their ids."""
        table = self.tables.get(request_id)
        if table is None:
            table = self.tables[request_id] = BlockTable()
        blocks = self.pool.get_new_blocks(count)
        table.blocks.extend(blocks)
        return [block.block_id for block in blocks]

    def cache_blocks(self, request_id: str, block_hashes: Sequence[bytes], num_full_blocks: int) -> None:
        """Let the first ``num_full_blocks`` blocks of a request be found by others."""
        table, step = self.tables[request_id], self.hashes_per_block
        start = table.num_cached
        if num_full_blocks > start:
            names = block_hashes[(start + 1) * step - 1 : num_full_blocks * step : step]
            self.pool.cache_full_blocks(table.blocks[start:num_full_blocks], names)
            table.num_cached = num_full_blocks

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        """Give up all blocks of a request, the last one first, so that prefixes survive longest.

        Blocks are offered to the prefix cache when a step is planned. If this request leaves before its step was sent,
        what lies beyond ``num_computed_tokens`` was never computed and is withdrawn.
        """
        table = self.tables.pop(request_id, None)
        if table is None:
            return
        for block in table.blocks[num_computed_tokens // self.block_size : table.num_cached]:
            self.pool.forget(block)
        self.pool.free_blocks(reversed(table.blocks))

    def block_ids(self, request_id: str) -> list[int]:
        table = self.tables.get(request_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    def _names(self, block_hashes: Sequence[bytes], num_blocks: int) -> Sequence[bytes]:
        """Of the first ``num_blocks`` blocks, or of as many as are hashed."""
        step = self.hashes_per_block
        return block_hashes[step - 1 : num_blocks * step : step]


class FullAttentionManager(SingleGroupManager):
    """Every token reads all tokens before it: a hit is an unbroken run from the start, and nothing can be dropped."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_num_blocks: int) -> list[KVCacheBlock]:
        hits: list[KVCacheBlock] = []
        for name in self._names(block_hashes, max_num_blocks):
            block = self.pool.get_cached_block(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def first_read(self, num_computed_tokens: int) -> int:
        return 0


class LocalAttentionManager(SingleGroupManager):
    """A token reads only what is near: blocks further back are dropped, and a hit needs only those that the token
    behind it reads.

    reach: window or chunk [tokens]. longest_chunk: tokens of one request that a step writes at most.
    """

    drops_blocks = True

    def __init__(self, num_blocks: int, block_size: int, reach: int, longest_chunk: int) -> None:
        super().__init__(num_blocks, block_size)
        self.reach, self.longest_chunk = reach, longest_chunk
        self.name = f"{self.name} of {reach}"

    def max_blocks(self, num_tokens: int) -> int:
        return max_blocks(num_tokens, self.block_size, self.reach, self.longest_chunk)

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_num_blocks: int) -> list[KVCacheBlock]:
        names = self._names(block_hashes, max_num_blocks)
        # Right to left: where a block is missing, the hit ends before it, and what is behind it does not count.
        index = end = len(names)
        found: list[KVCacheBlock] = []
        while index > self.first_read(end * self.block_size) // self.block_size:
            index -= 1
            block = self.pool.get_cached_block(names[index])
            if block is None:
                end, found = index, []
            else:
                found.append(block)
        return [self.pool.null_block] * index + found[::-1]


class SlidingWindowManager(LocalAttentionManager):
    """A token reads itself and the ``reach - 1`` tokens before it."""

    name = "sliding window"

    def first_read(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - self.reach + 1)


class ChunkedAttentionManager(LocalAttentionManager):
    """Sequences are cut into chunks of ``reach`` tokens, and a token reads those of its own chunk up to itself."""

    name = "chunked attention"

    def first_read(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.reach * self.reach


def make_group(spec: GroupSpec, longest_chunk: int) -> SingleGroupManager:
    """The manager of a group whose pool is sized. longest_chunk: see LocalAttentionManager."""
    if spec.reach is None:
        return FullAttentionManager(spec.num_blocks, spec.block_size)
    kind = SlidingWindowManager if spec.kind == "sliding window" else ChunkedAttentionManager
    return kind(spec.num_blocks, spec.block_size, spec.reach, longest_chunk)
