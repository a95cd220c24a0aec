"""Block tables of one KV cache group: layers whose keys and values live and die together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from minivllm.kv_cache.block_pool import BlockPool, KVCacheBlock


class BlockTable:
    """Blocks of one request in logical order; the first ``num_cached`` of them were offered to the prefix cache."""

    __slots__ = ("blocks", "num_cached")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_cached = 0


class SingleGroupManager(ABC):
    """Tables of all requests for one group. Kinds of attention differ in what they can reuse and what they may drop.

    group_id: position of the group among all; the same tokens have different keys and values in different groups, so
    it is part of the key under which a block is cached.
    """

    def __init__(self, group_id: int, block_size: int, pool: BlockPool) -> None:
        self.group_id = group_id
        self.block_size = block_size
        self.pool = pool
        self.tables: dict[str, BlockTable] = {}
        self._group_key = group_id.to_bytes(4, "little")

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_num_blocks: int) -> list[KVCacheBlock]:
        """Blocks that hold the longest reusable prefix of at most ``max_num_blocks`` blocks. Changes nothing."""

    @abstractmethod
    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Replace blocks that no later token will read by the null block, and free them."""

    def num_new_blocks(self, request_id: str, num_tokens: int, num_hits: int = 0) -> int:
        """Blocks to take from the pool so that ``num_tokens`` tokens fit; ``num_hits`` hits will be added before."""
        table = self.tables.get(request_id)
        held = num_hits if table is None else len(table.blocks) + num_hits
        missing = -(-num_tokens // self.block_size) - held
        return missing if missing > 0 else 0

    def add_hits(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Start the table of a request with blocks that were found in the cache and are already touched."""
        table = self.tables[request_id] = BlockTable()
        table.blocks.extend(hits)
        table.num_cached = len(hits)

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
        table = self.tables[request_id]
        start = table.num_cached
        if num_full_blocks > start:
            keys = [block_hash + self._group_key for block_hash in block_hashes[start:num_full_blocks]]
            self.pool.cache_full_blocks(table.blocks[start:num_full_blocks], keys)
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

    def _cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        return self.pool.get_cached_block(block_hash + self._group_key)


class FullAttentionManager(SingleGroupManager):
    """Every token reads all tokens before it: a hit is an unbroken run from the start, and nothing can be dropped."""

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_num_blocks: int) -> list[KVCacheBlock]:
        hits: list[KVCacheBlock] = []
        for index in range(min(max_num_blocks, len(block_hashes))):
            block = self._cached_block(block_hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Nothing falls out of a full attention."""
