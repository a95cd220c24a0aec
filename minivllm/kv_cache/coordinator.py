"""Several KV groups, each over a pool of its own: a request is served only if every group can serve it."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import NamedTuple

from minivllm.kv_cache.blocks.free_queue import KVCacheBlock
from minivllm.kv_cache.group_manager import SingleGroupManager
from minivllm.request import Request

BlocksPerGroup = tuple[list[KVCacheBlock], ...]


class Prefix(NamedTuple):
    """What a request need not compute.

    blocks: whole blocks of each group. num_tokens: in them, and in the beginnings of sources. sources: one
    for each group, the block whose beginning is copied into the block after the whole ones, or None; empty
    where nothing is copied.
    """

    blocks: BlocksPerGroup
    num_tokens: int
    sources: tuple[KVCacheBlock | None, ...] = ()


class KVCacheCoordinator:
    """Asks all groups and makes their answers agree.

    Block sizes may differ: tokens are hashed in pieces of hash_block_size, which divides all of them, and
    hits end where blocks end in all groups, at multiples of ``alignment``.
    """

    def __init__(self, groups: Sequence[SingleGroupManager]) -> None:
        self.groups = list(groups)
        sizes = [group.block_size for group in groups]
        self.hash_block_size = gcd(*sizes)
        self.alignment = lcm(*sizes)
        for group in groups:
            group.hashes_per_block = group.block_size // self.hash_block_size

    def find_longest_cache_hit(
        self,
        block_hashes: Sequence[bytes],
        max_num_tokens: int,
        groups: Sequence[SingleGroupManager] | None = None,
    ) -> tuple[BlocksPerGroup, int]:
        """The longest prefix that every group, or each of ``groups``, can reuse:
        (its blocks, tokens in them).

        A shorter length may change what another group can offer (a window needs only the end of the prefix),
        so the groups are asked again until the length no longer shrinks.
        """
        groups = self.groups if groups is None else groups
        length = max_num_tokens // self.alignment * self.alignment
        while True:
            start_length = length
            hits = []
            for group in groups:
                found = group.find_longest_cache_hit(block_hashes, length // group.block_size)
                length = len(found) * group.block_size // self.alignment * self.alignment
                hits.append(found)
            if length == start_length or len(groups) == 1:
                return tuple(hits), length
            if length == 0:
                return tuple([] for _ in hits), 0

    def continue_prefix(self, request: Request, prefix: Prefix, *, with_planned: bool = False) -> Prefix:
        """The prefix of whole blocks, and the tokens after it that every group has,
        mostly by copying a block.

        Groups with smaller blocks share whole ones first. with_planned: see Continuations.best.
        """
        start = prefix.num_tokens
        end = most = min(request.num_reusable_tokens, start + self.alignment - 1)
        found = []
        for group in self.groups:
            blocks, count = group.find_continuation(request, start, end, with_planned=with_planned)
            most = min(most, start + count)
            if most - start < group.pool.continuations.min_tokens:
                return prefix
            found.append((blocks, count))
        whole, sources = [], []
        for group, hits, (blocks, num_found) in zip(self.groups, prefix.blocks, found):
            count, rest = divmod(most - start, group.block_size)
            source = blocks[count] if rest else None
            is_whole = count < num_found // group.block_size  # and another group has only the beginning of it
            may_be_planned = with_planned or not is_whole or source is None
            if not may_be_planned and group.pool.continuations.is_planned(blocks[count].block_id):
                return prefix  # it can be shared in this step, but not copied
            whole.append(hits + blocks[:count])
            sources.append(source)
        return Prefix(tuple(whole), most, tuple(sources))

    def num_blocks_to_admit(
        self, request_id: str, num_slots: int, num_tokens: int, prefix: Prefix
    ) -> list[int]:
        """Free blocks of each pool that a waiting request needs: for its first step, with room for
        ``num_slots`` tokens, for the most that it holds until ``num_tokens`` tokens are computed, and for
        hits and sources that
        are free."""
        needed = []
        sources = prefix.sources or [None] * len(self.groups)
        for group, found, source in zip(self.groups, prefix.blocks, sources):
            count = max(
                group.num_new_blocks(request_id, num_slots, len(found)),
                group.num_missing_blocks(request_id, num_tokens, found),
            )
            null_block = group.pool.null_block
            count += sum(block.ref_count == 0 and block is not null_block for block in found)
            needed.append(count + (source is not None and source.ref_count == 0))
        return needed
