"""Several KV cache groups over one pool: a request is served only if every group can serve it."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv_cache.block_pool import BlockPool, KVCacheBlock
from minivllm.kv_cache.group_manager import SingleGroupManager

BlocksPerGroup = tuple[list[KVCacheBlock], ...]


class KVCacheCoordinator:
    """Asks all groups and makes their answers agree. All groups share the block size and the pool of ids."""

    def __init__(self, group_types: Sequence[type[SingleGroupManager]], block_size: int, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.groups = [group_type(index, block_size, pool) for index, group_type in enumerate(group_types)]

    def find_longest_cache_hit(self, block_hashes: Sequence[bytes], max_num_blocks: int) -> BlocksPerGroup:
        """The longest prefix that every group can reuse.

        A shorter length may change what another group can offer (a window needs only the end of the prefix), so the
        groups are asked again until the length no longer shrinks.
        """
        length = max_num_blocks
        while True:
            start_length = length
            hits = []
            for group in self.groups:
                found = group.find_longest_cache_hit(block_hashes, length)
                length = len(found)
                hits.append(found)
            if length == start_length or length == 0 or len(self.groups) == 1:
                return tuple(found[:length] for found in hits)

    def num_blocks_to_take(self, request_id: str, num_tokens: int, hits: BlocksPerGroup | None) -> int:
        """Free blocks that serving ``num_tokens`` tokens uses up: new ones, and hits that nobody uses now."""
        needed = 0
        if hits is None:  # every request of every step comes this way
            for group in self.groups:
                needed += group.num_new_blocks(request_id, num_tokens)
            return needed
        for group, found in zip(self.groups, hits):
            needed += group.num_new_blocks(request_id, num_tokens, len(found))
            needed += sum(block.ref_count == 0 and block is not self.pool.null_block for block in found)
        return needed
