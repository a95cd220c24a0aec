"""Block tables of one KV group: layers whose keys and values live and die together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from minivllm.errors import ConfigError
from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID, BlockPool
from minivllm.kv_cache.blocks.free_queue import KVCacheBlock
from minivllm.kv_cache.blocks.hashing import beginning_name, block_extras
from minivllm.kv_cache.specs import SLOTS_PER_REQUEST, GroupSpec, max_blocks
from minivllm.request import Request


class BlockTable:
    """Blocks of one request in logical order; the first ``num_cached`` of them were offered to the prefix
    cache, and the first ``num_dropped`` of them are null blocks, since no later token reads what was
    there."""

    __slots__ = ("blocks", "num_cached", "num_dropped")

    def __init__(self) -> None:
        self.blocks: list[KVCacheBlock] = []
        self.num_cached = 0
        self.num_dropped = 0


class SingleGroupManager(ABC):
    """Tables of all requests for one group, over a pool of its own.
    Kinds of attention differ in what they can reuse and what they may drop.

    num_blocks: of the pool, the null block included. name: for people. drops_blocks: whether
    drop_skipped_blocks ever does anything. hashes_per_block: blocks are hashed in pieces that divide the
    block sizes of all groups; the last piece of a block names it.
    """

    drops_blocks = False
    name = "full attention"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}, but must be at least 1.")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, Any] = {}
        self.hashes_per_block = 1

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_num_blocks: int
    ) -> list[KVCacheBlock]:
        """Blocks that hold the longest reusable prefix of at most ``max_num_blocks`` blocks, null blocks
        where nothing is read of it. Changes nothing."""

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

        num_computed_tokens: what was computed for certain.
        Tokens in flight may count, drafts that can be rejected may not.
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
        """Blocks to take from the pool so that ``num_tokens`` tokens fit;
        ``num_hits`` hits will be added before."""
        table = self.tables.get(request_id)
        held = num_hits if table is None else len(table.blocks) + num_hits
        missing = -(-num_tokens // self.block_size) - held
        return missing if missing > 0 else 0

    def num_missing_blocks(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> int:
        """Blocks by which a request will grow at most until ``num_tokens`` tokens are computed.
        ``hits``: as above."""
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

    def keep_pieces(self, request: Request, start: int, num_tokens: int, *, is_planned: bool) -> None:
        """Let others find how a text goes on, in the blocks from place ``start`` on, up to ``num_tokens``
        tokens. is_planned: see Continuations."""
        size, blocks = self.block_size, self.tables[request.request_id].blocks
        for first in range(start * size, num_tokens, size):
            place, token_ids = first // size, request.all_token_ids[first : min(first + size, num_tokens)]
            self.pool.keep_piece(
                self._parent(request, place), blocks[place], token_ids, is_planned=is_planned
            )

    def find_continuation(
        self, request: Request, num_cached: int, end: int, *, with_planned: bool = False
    ) -> tuple[list[KVCacheBlock], int]:
        """What is cached of the tokens from ``num_cached``, where a block ends, to ``end``:
        (blocks, tokens in them).

        Of the last block only its first tokens may be those. with_planned: see Continuations.best.
        """
        size, step, hashes = self.block_size, self.hashes_per_block, request.block_hashes
        blocks: list[KVCacheBlock] = []
        place = num_cached // size
        while (place + 1) * size <= end:
            whole = self.pool.get_cached_block(hashes[(place + 1) * step - 1])
            if whole is None:
                break
            blocks.append(whole)
            place += 1
        start = place * size
        token_ids = request.all_token_ids[start : min(start + size, end)]
        found = self.pool.continuations.best(
            self._parent(request, place), token_ids, with_planned=with_planned
        )
        if found is None:
            return blocks, start - num_cached
        return [*blocks, self.pool.blocks[found[0]]], start - num_cached + found[1]

    def _parent(self, request: Request, place: int) -> bytes:
        """Under which name the pieces of a block in this place are kept."""
        before = request.block_hashes[place * self.hashes_per_block - 1] if place else b""
        start = place * self.block_size
        return beginning_name(before, block_extras(request, start, start + self.block_size))

    def withdraw(self, request_id: str, num_computed_tokens: int) -> None:
        """Blocks are offered to the prefix cache when a step is planned. If a request leaves before its step
        was sent, what lies beyond ``num_computed_tokens`` was never computed, and is not to be found."""
        table = self.tables.get(request_id)
        if table is not None:
            for block in table.blocks[num_computed_tokens // self.block_size :]:
                self.pool.forget(block)

    def free(self, request_id: str) -> None:
        """Give up all blocks of a request, the last one first, so that prefixes survive longest."""
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks(reversed(table.blocks))

    def contradiction(self, request_id: str, num_computed_tokens: int) -> str:
        """What is wrong with the table of a request between steps; empty if nothing is."""
        table = self.tables[request_id]
        if len(table.blocks) * self.block_size < num_computed_tokens:
            return f"{len(table.blocks)} blocks"
        if table.num_cached * self.block_size > num_computed_tokens:
            return f"{table.num_cached} cached blocks"
        is_missing = any(block is self.pool.null_block for block in table.blocks[table.num_dropped :])
        if is_missing or table.num_dropped * self.block_size > self.first_read(num_computed_tokens):
            return f"no block in a place that its next token reads, of {len(table.blocks)} blocks"
        return ""

    def block_ids(self, request_id: str) -> list[int]:
        table = self.tables.get(request_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    def _names(self, block_hashes: Sequence[bytes], num_blocks: int) -> Sequence[bytes]:
        """Of the first ``num_blocks`` blocks, or of as many as are hashed."""
        step = self.hashes_per_block
        return block_hashes[step - 1 : num_blocks * step : step]


class FullAttentionManager(SingleGroupManager):
    """Every token reads all tokens before it:
    a hit is an unbroken run from the start, and nothing can be dropped."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_num_blocks: int
    ) -> list[KVCacheBlock]:
        hits: list[KVCacheBlock] = []
        for name in self._names(block_hashes, max_num_blocks):
            block = self.pool.get_cached_block(name)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_cached_blocks(self, block_hashes: Sequence[bytes], max_num_blocks: int) -> int:
        """Length of what find_longest_cache_hit returns, by a galloping search.

        A request gives up its last block first, so a block is cached only while those before it are.
        """
        names = self._names(block_hashes, max_num_blocks)
        end = 1
        while end <= len(names) and self.pool.get_cached_block(names[end - 1]) is not None:
            end *= 2
        start, end = end // 2, min(end - 1, len(names))
        return start + bisect_left(
            names[start:end], True, key=lambda name: self.pool.get_cached_block(name) is None
        )

    def first_read(self, num_computed_tokens: int) -> int:
        return 0


class LocalAttentionManager(SingleGroupManager):
    """A token reads only what is near:
    blocks further back are dropped, and a hit needs only those that the token behind it reads.

    reach: window or chunk [tokens]. longest_chunk: tokens of one request that a step writes at most.
    """

    drops_blocks = True

    def __init__(self, num_blocks: int, block_size: int, reach: int, longest_chunk: int) -> None:
        super().__init__(num_blocks, block_size)
        self.reach = reach
        self.longest_chunk = longest_chunk
        self.name = f"{self.name} of {reach}"

    def max_blocks(self, num_tokens: int) -> int:
        return max_blocks(num_tokens, self.block_size, self.reach, self.longest_chunk)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_num_blocks: int
    ) -> list[KVCacheBlock]:
        names = self._names(block_hashes, max_num_blocks)
        # Right to left: where a block is missing, the hit ends before it,
        # and what is behind it does not count.
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
    """Sequences are cut into chunks of ``reach`` tokens,
    and a token reads those of its own chunk up to itself."""

    name = "chunked attention"

    def first_read(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.reach * self.reach


class StateTable(BlockTable):
    """blocks: the slot that the next step reads, where it writes another one, and the slot that it writes.

    num_planned: tokens that are in that state when the last step that was planned is done. num_drafts: those
    of that step, which are computed then, but get into the state with a later one. passing: the last snapshot
    of this request that is of no use once there is a later one, and its name.
    """

    __slots__ = ("num_drafts", "num_planned", "passing")

    def __init__(self) -> None:
        super().__init__()
        self.num_planned = 0
        self.num_drafts = 0
        self.passing: tuple[KVCacheBlock, bytes] | None = None


class StateManager(SingleGroupManager):
    """A request has one state, which every step overwrites: blocks are slots for whole states.

    A state can be reused only where it was kept: a *snapshot* is a slot that is found under the hash of the
    last block before it. Nothing is copied. A step reads one slot and writes one, mostly the same; to keep a
    snapshot, the request continues in another slot. A new request reads the null slot, which holds zeros. A
    request that hits a snapshot reads that one. Both write another slot. Snapshots without readers lie in the
    free queue, and the oldest one is reused first.

    snapshots: hash and slot of those that a connector may save; None without a connector.
    """

    drops_blocks = True
    name = "state"
    snapshots: list[tuple[bytes, KVCacheBlock]] | None = None

    def find_longest_cache_hit(
        self, block_hashes: Sequence[bytes], max_num_blocks: int
    ) -> list[KVCacheBlock]:
        names = self._names(block_hashes, max_num_blocks)
        for index in reversed(range(len(names))):
            block = self.pool.get_cached_block(names[index])
            if block is not None:
                return [self.pool.null_block] * index + [block]
        return []

    def first_read(self, num_computed_tokens: int) -> int:
        return num_computed_tokens

    def max_blocks(self, num_tokens: int) -> int:
        return SLOTS_PER_REQUEST

    def drop_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Give up the slot that the last step read, if it was another one than it wrote."""
        blocks = self.tables[request_id].blocks
        self.pool.free_blocks(blocks[:-1])
        del blocks[:-1]
        if blocks[-1].ref_count == 1 and self.pool.num_free_blocks == 0:
            self.pool.forget(blocks[-1])  # no other slot to go on in: the snapshot must go

    def keep_snapshot(self, request_id: str, block_hashes: Sequence[bytes], *, is_passing: bool) -> None:
        """Let others find the state that the last step has written, where a block ends after its tokens and
        they are all hashed.

        is_passing: the next snapshot of this request replaces it, unless a request reads it.
        """
        table = self.tables[request_id]
        last = table.num_planned // self.block_size * self.hashes_per_block - 1
        if not 0 <= last < len(block_hashes) or self.pool.num_free_blocks == 0:
            return
        slot, name = table.blocks[-1], block_hashes[last]
        if slot.block_hash is not None or self.pool.get_cached_block(name) is not None:
            return
        self.pool.cache_full_blocks([slot], [name])
        if table.passing is not None:
            before, its_name = table.passing
            if before.ref_count == 0 and before.block_hash == its_name:
                self.pool.reuse_next(before)
        table.passing = (slot, name) if is_passing else None
        if not is_passing and self.snapshots is not None:
            self.snapshots.append((name, slot))

    def take_snapshots(self) -> list[tuple[bytes, KVCacheBlock]]:
        """Those since the last call. What a step writes that is planned after the call may be in their
        slots."""
        if not self.snapshots:
            return []
        taken, self.snapshots = self.snapshots, []
        return taken

    def withdraw(self, request_id: str, num_computed_tokens: int) -> None:
        """A state is offered only once it is computed."""

    def free(self, request_id: str) -> None:
        """The last passing snapshot has no successor:
        it is the one from which the request, or its next turn, goes on."""
        table = self.tables.get(request_id)
        if table is not None and table.passing is not None and self.snapshots is not None:
            slot, name = table.passing
            if slot.block_hash == name:
                self.snapshots.append((name, slot))
        super().free(request_id)

    def num_new_blocks(self, request_id: str, num_tokens: int, num_hits: int = 0) -> int:
        """1 where the request has no slot that it may write: none, or one that others read or may find."""
        table = self.tables.get(request_id)
        if table is None or not table.blocks:
            return 1
        slot = table.blocks[-1]
        return int(slot.ref_count > 1 or slot.block_hash is not None)

    def num_missing_blocks(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock] = ()) -> int:
        return int(request_id not in self.tables)

    def add_hits(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        table = self.tables[request_id] = StateTable()
        table.blocks.extend(hits[-1:])

    def contradiction(self, request_id: str, num_computed_tokens: int) -> str:
        table = self.tables[request_id]
        if not table.num_planned <= num_computed_tokens <= table.num_planned + table.num_drafts:
            return f"a state after {table.num_planned}, and {table.num_drafts} drafts"
        if not 1 <= len(table.blocks) <= SLOTS_PER_REQUEST or self.pool.null_block in table.blocks:
            return f"the slots {table.blocks}"
        return ""

    def block_ids(self, request_id: str) -> list[int]:
        """(the slot that the next step reads, the slot that it writes)."""
        table = self.tables.get(request_id)
        return [] if table is None else [NULL_BLOCK_ID, *super().block_ids(request_id)][-2:]


def make_group(spec: GroupSpec, longest_chunk: int) -> SingleGroupManager:
    """The manager of a group whose pool is sized. longest_chunk: see LocalAttentionManager."""
    if spec.kind == "state":
        return StateManager(spec.num_blocks, spec.block_size)
    if spec.reach is None:
        return FullAttentionManager(spec.num_blocks, spec.block_size)
    kind = SlidingWindowManager if spec.kind == "sliding window" else ChunkedAttentionManager
    return kind(spec.num_blocks, spec.block_size, spec.reach, longest_chunk)
