"""Blocks in the hands of transfers: taken to be filled, held while they are read, and given back."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.kv_cache.blocks.free_queue import KVCacheBlock
from minivllm.kv_cache.coordinator import BlocksPerGroup
from minivllm.kv_cache.group_manager import StateManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.request import Request


def read_after_load(manager: KVCacheManager, hits: BlocksPerGroup, num_loaded_to: int) -> BlocksPerGroup:
    """The hits that a request still reads once it has its first ``num_loaded_to`` tokens;
    null blocks for the rest.

    A window that the load moves past its hits needs none of them,
    and a state that arrives replaces the one before.
    """
    kept: list[list[KVCacheBlock]] = []
    for group, found in zip(manager.groups, hits):
        if isinstance(group, StateManager):
            kept.append([])
        else:
            num_skipped = min(group.first_read(num_loaded_to) // group.block_size, len(found))
            kept.append([group.pool.null_block] * num_skipped + found[num_skipped:])
    return tuple(kept)


def take_for_load(
    manager: KVCacheManager,
    request: Request,
    hits: BlocksPerGroup,
    num_hit_tokens: int,
    num_tokens: int,
    reserved: Sequence[int],
) -> BlocksPerGroup | None:
    """Blocks for the ``num_tokens`` tokens of a waiting request that lie behind its hits and come from
    elsewhere; of layers that keep a state, a slot for the one after the last of these tokens.

    Null blocks in groups that will not read what lies there. The hits, as read_after_load returns them, are
    kept from eviction as well: all of it goes back with give_back. None, and nothing is taken, if not all
    known tokens have room besides the reserved blocks. In a pool that is free and reserved for nothing, a
    request that fits it has room.
    """
    size = manager.hash_block_size
    start, end = num_hit_tokens // size, (num_hit_tokens + num_tokens) // size
    firsts = [
        end - 1 if isinstance(group, StateManager) else max(start, group.first_read(end * size) // size)
        for group in manager.groups
    ]
    needed = []
    for group, first, found in zip(manager.groups, firsts, hits):
        missing = group.num_missing_blocks(request.request_id, request.num_tokens, found)
        unused = sum(block.ref_count == 0 and block.block_id != NULL_BLOCK_ID for block in found)
        # A state comes into another slot than the one that the request will write.
        count = missing + 1 if isinstance(group, StateManager) else max(missing, end - first)
        needed.append(count + unused)
    if not manager.have_free(needed, reserved):
        return None
    blocks = []
    for group, first, found in zip(manager.groups, firsts, hits):
        group.pool.touch(found)
        blocks.append([group.pool.null_block] * (first - start) + group.pool.get_new_blocks(end - first))
    return tuple(blocks)


def hold(manager: KVCacheManager, request_id: str) -> BlocksPerGroup:
    """All blocks of a request, kept from reuse until they are given back."""
    held = tuple(
        list(group.tables[request_id].blocks) if request_id in group.tables else []
        for group in manager.groups
    )
    for group, blocks in zip(manager.groups, held):
        group.pool.touch(blocks)
    return held


def give_back(manager: KVCacheManager, blocks: BlocksPerGroup, keys: Sequence[bytes] = ()) -> None:
    """Free blocks that were taken or held; the first ones hold what these hashes name, and can be found."""
    for group, own in zip(manager.groups, blocks):
        group.pool.cache_full_blocks(own[: len(keys)], keys)
        group.pool.free_blocks(reversed(own))


def num_missing_behind(manager: KVCacheManager, request: Request, blocks: BlocksPerGroup) -> list[int]:
    """Blocks of each group by which a waiting request, whose first blocks these are,
    will grow at most until all known tokens are computed."""
    return [
        group.num_missing_blocks(request.request_id, request.num_tokens, own)
        for group, own in zip(manager.groups, blocks)
    ]
