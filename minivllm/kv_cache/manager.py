"""The scheduler's view of the KV cache: find cached prefixes, make room for tokens, let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID, BlockPool
from minivllm.kv_cache.blocks.continuations import MIN_COPIED_TOKENS
from minivllm.kv_cache.blocks.free_queue import KVCacheBlock
from minivllm.kv_cache.blocks.hashing import extend_block_hashes, state_name
from minivllm.kv_cache.coordinator import BlocksPerGroup, KVCacheCoordinator, Prefix
from minivllm.kv_cache.group_manager import (
    BlockTable,
    FullAttentionManager,
    SingleGroupManager,
    StateManager,
    StateTable,
)
from minivllm.messages import BlockCopy, BlockIds, PoolStats
from minivllm.request import Request


class FullBlock(NamedTuple):
    """A block that has just become full, or a state that stays as it is. key: its hash, or the state's name.
    block_ids: one for each KV group, the null block in those that keep a state, or in the others."""

    key: bytes
    block_ids: tuple[int, ...]
    is_state: bool = False


AWAITED_COPIES = 4
"""A request waits for a step that computes so many times min_copied_tokens of its prompt for another one."""


class KVCacheManager:
    """Block tables of all requests, over a pool of blocks for each KV group.

    groups: those of the model; ``FullAttentionManager(num_blocks, block_size)`` alone for most.
    max_model_len: tokens of the longest request. min_copied_tokens: the block in which a prefix ends is
    copied for so many tokens of it or more; None for whole blocks only. States end where blocks do, so layers
    that keep one have whole blocks only, too. prefix_cache_queried_tokens, prefix_cache_hit_tokens: counted
    once per request, when it is first admitted. prefix_cache_copied_tokens: those of the latter that are not
    in whole blocks.
    """

    def __init__(
        self,
        groups: Sequence[SingleGroupManager],
        max_model_len: int,
        enable_prefix_caching: bool = True,
        min_copied_tokens: int | None = MIN_COPIED_TOKENS,
    ) -> None:
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queried_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.prefix_cache_copied_tokens = 0
        self.no_block_ids: BlockIds = tuple([] for _ in groups)
        """What allocate_slots returns, as this very object, when the blocks a request has are enough."""
        self._no_blocks: BlocksPerGroup = tuple([] for _ in groups)
        self._coordinator = KVCacheCoordinator(groups)
        self._groups = self._coordinator.groups
        self._dropping = [group for group in groups if group.drops_blocks]
        self._states = [group for group in self._groups if isinstance(group, StateManager)]
        self._attending = [group for group in self._groups if not isinstance(group, StateManager)]
        self._num_reserved = [0] * len(groups)
        self._newly_full: list[tuple[Request, int, int]] | None = None
        self._min_awaited_tokens = 0
        self._is_planning = False
        self._copies_blocks = enable_prefix_caching and min_copied_tokens is not None and not self._states
        if self._copies_blocks and min_copied_tokens is not None:
            self._min_awaited_tokens = AWAITED_COPIES * min_copied_tokens
            for group in groups:
                group.pool.continuations.min_tokens = min_copied_tokens

    @property
    def hash_block_size(self) -> int:
        """Tokens per block hash."""
        return self._coordinator.hash_block_size

    @property
    def groups(self) -> Sequence[SingleGroupManager]:
        """Of all layers."""
        return self._groups

    @property
    def pools(self) -> list[BlockPool]:
        """One for each group."""
        return [group.pool for group in self._groups]

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1, in the pool that has the fewest left."""
        return max(pool.usage for pool in self.pools)

    def pool_stats(self) -> list[PoolStats]:
        """Of every group, in their order."""
        return [
            PoolStats(name=group.name, num_blocks=group.pool.num_blocks - 1, usage=group.pool.usage)
            for group in self._groups
        ]

    @property
    def room(self) -> int:
        """Tokens of the longest request that can be served when it has all pools, at most max_model_len."""
        return min(group.max_tokens_alone(self.max_model_len) for group in self._groups)

    @property
    def copies_blocks(self) -> bool:
        """Whether prefixes that end inside a block are found, which needs an index of how texts go on."""
        return self._copies_blocks

    def cut_chunk(self, request: Request, num_computed: int, num_new: int) -> int:
        """How many of the next ``num_new`` tokens to compute in one step.

        Where layers keep states, a step ends at the end of a block if it can: at the last one of the known
        tokens, and where the request leaves a prefix that only its states are missing of. There a snapshot is
        kept. Drafts get into a state one step after they were accepted, so they may not carry a request over
        the end of a block.
        """
        if not self._states or not self.enable_prefix_caching:
            return num_new
        alignment = self._coordinator.alignment
        if request.draft_token_ids and num_computed + num_new > request.num_tokens:
            end = (request.num_tokens // alignment + 1) * alignment
            return min(num_new, max(end - 1, request.num_tokens) - num_computed)
        end = min(num_computed + num_new, request.num_tokens - 1) // alignment * alignment
        if num_computed < request.branch_point < end:
            end = request.branch_point
        return end - num_computed if end > num_computed else num_new

    def num_missing_blocks(self, request: Request) -> list[int]:
        """Blocks of each group by which a running request will grow at most until all known tokens are
        computed."""
        return [group.num_missing_blocks(request.request_id, request.num_tokens) for group in self._groups]

    def get_computed_blocks(self, request: Request) -> tuple[BlocksPerGroup, int]:
        """The longest cached prefix of a waiting request: (blocks per group, tokens in them).
        Changes no block.

        Whole blocks only, of the tokens that may be reused.
        """
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return self._no_blocks, 0
        extend_block_hashes(request, self.hash_block_size)
        hashes, longest = request.block_hashes, request.num_reusable_tokens
        hits, num_tokens = self._coordinator.find_longest_cache_hit(hashes, longest)
        if self._states:
            request.branch_point = self._coordinator.find_longest_cache_hit(hashes, longest, self._attending)[
                1
            ]
        return hits, num_tokens

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens in the blocks that get_computed_blocks would return, by few look-ups where all layers attend
        to the whole prefix, as in most models."""
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return 0
        extend_block_hashes(request, self.hash_block_size)
        hashes, length = request.block_hashes, request.num_reusable_tokens
        whole = [group for group in self._groups if isinstance(group, FullAttentionManager)]
        for group in whole:
            length = group.num_cached_blocks(hashes, length // group.block_size) * group.block_size
        if len(whole) < len(self._groups):
            return self._coordinator.find_longest_cache_hit(hashes, length)[1]
        return length // self._coordinator.alignment * self._coordinator.alignment

    def continue_prefix(self, request: Request, hits: BlocksPerGroup, num_tokens: int) -> Prefix:
        """The prefix that get_computed_blocks returned, and the tokens after it that a copy of a block gives.

        Copies are made before anything else in a step writes into the cache, and steps run in order. So the
        block that is copied is safe once this step is planned, and may be anything's meanwhile.
        """
        prefix = Prefix(hits, num_tokens)
        if not self._copies_blocks or request.skips_prefix_cache:
            return prefix
        return self._coordinator.continue_prefix(request, prefix)

    def is_worth_waiting(self, request: Request, hits: BlocksPerGroup, prefix: Prefix) -> bool:
        """Whether the step that is being planned computes tokens that the request could copy in the next one,
        instead of computing them beside it. prefix: as continue_prefix has found it, after these hits."""
        if request.skips_prefix_cache or not self._is_planning:
            return False
        num_tokens = prefix.num_tokens // self._coordinator.alignment * self._coordinator.alignment
        later = self._coordinator.continue_prefix(request, Prefix(hits, num_tokens), with_planned=True)
        return later.num_tokens - prefix.num_tokens >= self._min_awaited_tokens

    def block_copies(self, request: Request, prefix: Prefix) -> list[BlockCopy]:
        """What the workers have to copy for a request that was admitted with this prefix."""
        copies = []
        for place, (group, source) in enumerate(zip(self._groups, prefix.sources)):
            if source is not None:
                target = group.tables[request.request_id].blocks[len(prefix.blocks[place])]
                copies.append(BlockCopy(group=place, source=source.block_id, target=target.block_id))
        return copies

    def settle(self) -> None:
        """The step is planned for good: what it computes may be copied by the next one."""
        if self._is_planning:
            self._is_planning = False
            for group in self._groups:
                group.pool.settle()

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: BlocksPerGroup | None = None,
        num_lookahead_tokens: int = 0,
        delay_caching: bool = False,
        num_reserved_blocks: Sequence[int] | None = None,
        sources: Sequence[KVCacheBlock | None] = (),
    ) -> BlockIds | None:
        """Make room for the next ``num_new_tokens`` tokens of a request.

        A request that is admitted gets no block unless all its known tokens could have theirs,
        besides the reserved.

        num_new_computed_tokens: tokens that need no computation, from the prefix cache or a connector.
        new_computed_blocks: what get_computed_blocks returned; given exactly when the request is admitted.
        num_lookahead_tokens: room for tokens that a drafter writes beyond the scheduled ones.
        delay_caching: the contents arrive later; call cache_blocks when they are there.
        num_reserved_blocks: free blocks of each pool that others will need.
        sources: see Prefix.
        Returns ids of the new blocks per group (hits not included), or None if a pool has no room. Then
        nothing has changed, but that blocks which the request no longer reads are free.
        """
        request_id = request.request_id
        num_computed = request.num_computed_tokens + num_new_computed_tokens
        num_committed = num_computed + num_new_tokens
        num_slots = min(num_committed + num_lookahead_tokens, self.max_model_len)

        if new_computed_blocks is None:
            for group in self._dropping:
                group.drop_skipped_blocks(request_id, num_computed - request.num_unsure_tokens)
            if self._states:
                self._keep_snapshots(request, num_computed)
            counts = [group.num_new_blocks(request_id, num_slots) for group in self._groups]
            if any(counts) and not self.have_free(counts, self._num_reserved):
                return None
        else:
            num_tokens = max(num_slots, request.num_tokens)
            prefix = Prefix(new_computed_blocks, num_new_computed_tokens, tuple(sources))
            needed = self._coordinator.num_blocks_to_admit(request_id, num_slots, num_tokens, prefix)
            if not self.have_free(needed, num_reserved_blocks or self._num_reserved):
                return None
            self._admit(request, prefix)
            counts = [group.num_new_blocks(request_id, num_slots) for group in self._groups]
        new_block_ids = self.no_block_ids
        if any(counts):  # always where something is copied: the copy is one of the new blocks
            new_block_ids = tuple(
                group.add_new_blocks(request_id, count) for group, count in zip(self._groups, counts)
            )
        for group, source in zip(self._groups, sources):
            if source is not None:
                group.pool.free_blocks([source])
        for states in self._states:
            table: StateTable = states.tables[request_id]
            table.num_drafts = max(0, num_committed - request.num_tokens) if request.draft_token_ids else 0
            table.num_planned = num_committed - table.num_drafts
        if self.enable_prefix_caching and not delay_caching:
            # Drafts are not committed: a rejected one must never be found as the prefix of another request.
            num_known = min(num_committed, len(request.all_token_ids))
            self.cache_blocks(request, num_known)
            if self._copies_blocks and num_computed < request.num_prompt_tokens <= num_committed:
                self._keep_tails(request, num_known, is_planned=True)
        request.num_settled_slots = self._num_settled_slots(request, num_committed)
        return new_block_ids

    def _num_settled_slots(self, request: Request, num_committed: int) -> int:
        """See Request. One less than there may be, and 0 where every step has something to do."""
        if self._dropping or self._states:
            return 0
        tables: list[tuple[int, BlockTable]] = [
            (group.block_size, group.tables[request.request_id]) for group in self._groups
        ]
        if self.enable_prefix_caching:
            num_slots = min(size * min(len(table.blocks), table.num_cached + 1) for size, table in tables) - 1
            is_prompt = self._copies_blocks and num_committed < request.num_prompt_tokens
            return min(num_slots, request.num_prompt_tokens - 1) if is_prompt else num_slots
        return min(size * len(table.blocks) for size, table in tables) - 1

    def _keep_snapshots(self, request: Request, num_computed: int) -> None:
        """Keep the states that are computed, if a block ends after their tokens: all that are computed, or
        all but the drafts that the last step accepted. Those near the end of the prompt, and where a prefix
        was left, may serve others; that at the end of the answer so far serves the next turn."""
        num_prompt, alignment = request.num_prompt_tokens, self._coordinator.alignment
        for group in self._states if self.enable_prefix_caching else ():
            num_tokens = group.tables[request.request_id].num_planned
            if num_tokens > num_computed or num_tokens % alignment:
                continue
            extend_block_hashes(request, self.hash_block_size)
            is_last = num_prompt - alignment <= num_tokens <= num_prompt
            is_passing = not is_last and num_tokens != request.branch_point
            group.keep_snapshot(request.request_id, request.block_hashes, is_passing=is_passing)

    def have_free(self, counts: Sequence[int], reserved: Sequence[int]) -> bool:
        """Whether every pool has so many free blocks besides the reserved ones."""
        for group, count, others in zip(self._groups, counts, reserved):
            if count + others > group.pool.free_queue.num_blocks:
                return False
        return True

    def cache_blocks(self, request: Request, num_tokens: int, *, is_planned: bool = True) -> None:
        """Let others find the full blocks among the first ``num_tokens`` tokens of a request. is_planned:
        some of them are computed by the step that is being planned."""
        for group in self._attending:
            start, num_full_blocks = (
                group.tables[request.request_id].num_cached,
                num_tokens // group.block_size,
            )
            if num_full_blocks > start:
                extend_block_hashes(request, self.hash_block_size)
                if self._newly_full is not None and group is self._groups[0]:
                    self._newly_full.append((request, start, num_full_blocks))
                group.cache_blocks(request.request_id, request.block_hashes, num_full_blocks)
                if self._copies_blocks:
                    self._is_planning |= is_planned
                    end = num_full_blocks * group.block_size
                    group.keep_pieces(request, start, end, is_planned=is_planned)

    def _keep_tails(self, request: Request, num_tokens: int, *, is_planned: bool) -> None:
        """Let others find the beginnings of blocks in which the first ``num_tokens`` tokens of a request
        end."""
        extend_block_hashes(request, self.hash_block_size)
        self._is_planning |= is_planned
        for group in self._attending:
            group.keep_pieces(request, num_tokens // group.block_size, num_tokens, is_planned=is_planned)

    # -- blocks that travel ------------------------------------------------------------------------

    def watch_full_blocks(self) -> None:
        """Let take_full_blocks know of every block and snapshot from now on."""
        self._newly_full = []
        for group in self._states:
            group.snapshots = []

    def take_full_blocks(self) -> list[FullBlock]:
        """What came up since the last call: blocks that became full, of requests that still have them, and
        snapshots, which no step writes into that was planned before the call."""
        found = []
        for place, group in enumerate(self._groups):
            for name, slot in group.take_snapshots() if isinstance(group, StateManager) else ():
                block_ids = [NULL_BLOCK_ID] * len(self._groups)
                block_ids[place] = slot.block_id
                found.append(FullBlock(state_name(name), tuple(block_ids), is_state=True))
        if not self._newly_full:
            return found
        ranges, self._newly_full = self._newly_full, []
        for request, start, end in ranges:
            tables = {group: group.tables.get(request.request_id) for group in self._attending}
            if None in tables.values():
                continue
            for place in range(start, end):
                attended = {group: table.blocks[place].block_id for group, table in tables.items() if table}
                if NULL_BLOCK_ID not in attended.values():
                    block_ids = [attended.get(group, NULL_BLOCK_ID) for group in self._groups]
                    found.append(FullBlock(request.block_hashes[place], tuple(block_ids)))
        return found

    # -- the end, and a look inside ----------------------------------------------------------------

    def free(self, request: Request) -> None:
        """Give up the blocks of a request that finished or is preempted, whose ``num_computed_tokens`` must
        still say how much was computed; unknown requests are ignored."""
        if self._states and request.request_id in self._states[0].tables:
            self._keep_snapshots(request, request.num_computed_tokens)
        for group in self._groups:
            group.withdraw(request.request_id, request.num_computed_tokens)
        if self._copies_blocks and request.request_id in self._groups[0].tables:
            num_known = min(request.num_computed_tokens, request.num_tokens)
            self.cache_blocks(request, num_known, is_planned=False)
            self._keep_tails(request, num_known, is_planned=False)
        for group in self._groups:
            group.free(request.request_id)

    def get_block_ids(self, request_id: str) -> BlockIds:
        """All block ids of a request in logical order, one list per group."""
        return tuple(group.block_ids(request_id) for group in self._groups)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while a request holds blocks."""
        if any(group.tables for group in self._groups):
            return False
        return all([pool.reset_prefix_cache() for pool in self.pools])

    def check_integrity(
        self, running_requests: Iterable[Request], held: Iterable[BlocksPerGroup] = ()
    ) -> None:
        """Check that exactly the running requests hold blocks, enough of them, and that the pools agree;
        held: blocks that are taken besides. For tests, between steps. Raises RuntimeError that says what is
        wrong."""
        running = {request.request_id: request for request in running_requests}
        held_besides = list(held)
        for place, group in enumerate(self._groups):
            if group.tables.keys() != running.keys():
                differing = sorted(group.tables.keys() ^ running.keys())
                raise RuntimeError(
                    f"KV cache integrity: block tables and running requests differ in {differing}."
                )
            users: Counter[int] = Counter(
                block.block_id for blocks in held_besides for block in blocks[place]
            )
            del users[NULL_BLOCK_ID]
            for request_id, table in group.tables.items():
                num_computed = running[request_id].num_computed_tokens
                what = group.contradiction(request_id, num_computed)
                if what:
                    what = f"{request_id} has {num_computed} computed tokens, but {what}"
                    raise RuntimeError(f"KV cache integrity: {what}.")
                users.update(block.block_id for block in table.blocks if block.block_id != NULL_BLOCK_ID)
            group.pool.check_integrity(users)

    def _admit(self, request: Request, prefix: Prefix) -> None:
        # All hits leave the free queue before any new block is taken from it: a new block must not evict a
        # hit. What is copied leaves it until the new blocks are taken, so that no block is to be copied into
        # itself.
        for group, blocks in zip(self._groups, prefix.blocks):
            group.pool.touch(blocks)
            group.add_hits(request.request_id, blocks)
        for group, source in zip(self._groups, prefix.sources):
            group.pool.touch([] if source is None else [source])
        if self.enable_prefix_caching and request.num_preemptions == 0 and not request.skips_prefix_cache:
            self.prefix_cache_queried_tokens += request.num_tokens
            self.prefix_cache_hit_tokens += prefix.num_tokens
            self.prefix_cache_copied_tokens += (
                prefix.num_tokens % self._coordinator.alignment if prefix.sources else 0
            )
