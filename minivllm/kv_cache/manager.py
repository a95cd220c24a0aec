"""The scheduler's view of the KV cache: find cached prefixes, make room for tokens, let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from minivllm.errors import ConfigError
from minivllm.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from minivllm.kv_cache.coordinator import BlocksPerGroup, KVCacheCoordinator
from minivllm.kv_cache.group_manager import FullAttentionManager, SingleGroupManager
from minivllm.kv_cache.hashing import extend_block_hashes
from minivllm.messages import BlockIds
from minivllm.request import Request


class KVCacheManager:
    """Block tables of all requests over one pool of blocks.

    num_blocks: physical blocks, the null block included. block_size: tokens per block. max_model_len: tokens of the
    longest request. group_types: one manager class per KV cache group.
    prefix_cache_queried_tokens, prefix_cache_hit_tokens: counted once per request, when it is first admitted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        group_types: Sequence[type[SingleGroupManager]] = (FullAttentionManager,),
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}, but must be at least 1.")
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.prefix_cache_queried_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.no_block_ids: BlockIds = tuple([] for _ in group_types)
        """What allocate_slots returns, as this very object, when the blocks a request has are enough."""
        self._no_blocks: BlocksPerGroup = tuple([] for _ in group_types)
        self._coordinator = KVCacheCoordinator(group_types, block_size, self.pool)
        self._groups = self._coordinator.groups

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return self.pool.usage

    def fits_alone(self, num_tokens: int) -> bool:
        """True if a request of ``num_tokens`` tokens can be served when it has the whole pool."""
        return self._coordinator.num_blocks_to_take("", num_tokens, None) <= self.pool.num_blocks - 1

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that a running request still has to take for the tokens that are known."""
        return self._coordinator.num_blocks_to_take(request.request_id, request.num_tokens, None)

    def get_computed_blocks(self, request: Request) -> tuple[BlocksPerGroup, int]:
        """The longest cached prefix of a waiting request: (blocks per group, tokens in them). Changes no block.

        Whole blocks only, and at most ``num_tokens - 1`` tokens: one token must run to give logits.
        """
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return self._no_blocks, 0
        extend_block_hashes(request, self.block_size)
        max_num_blocks = (request.num_tokens - 1) // self.block_size
        hits = self._coordinator.find_longest_cache_hit(request.block_hashes, max_num_blocks)
        return hits, len(hits[0]) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: BlocksPerGroup | None = None,
        num_lookahead_tokens: int = 0,
        delay_caching: bool = False,
        num_reserved_blocks: int = 0,
    ) -> BlockIds | None:
        """Make room for the next ``num_new_tokens`` tokens of a request.

        A request that is admitted gets no block unless all its known tokens could have theirs, besides the reserved.

        num_new_computed_tokens: tokens that need no computation, from the prefix cache or a connector.
        new_computed_blocks: what get_computed_blocks returned; given exactly when the request is admitted.
        num_lookahead_tokens: room for tokens that a drafter writes beyond the scheduled ones.
        delay_caching: the contents arrive later; call cache_blocks when they are there.
        num_reserved_blocks: free blocks that others will need.
        Returns ids of the new blocks per group (hits not included), or None without any side effect if there is no
        room.
        """
        request_id = request.request_id
        num_computed = request.num_computed_tokens + num_new_computed_tokens
        num_committed = num_computed + num_new_tokens
        num_slots = min(num_committed + num_lookahead_tokens, self.max_model_len)

        for group in self._groups:
            group.drop_skipped_blocks(request_id, num_computed)
        new_block_ids = self.no_block_ids
        num_to_hold = num_slots if new_computed_blocks is None else max(num_slots, request.num_tokens)
        num_to_take = self._coordinator.num_blocks_to_take(request_id, num_to_hold, new_computed_blocks)
        if num_to_take + num_reserved_blocks > self.pool.num_free_blocks:
            return None
        if new_computed_blocks is not None:
            self._admit(request, new_computed_blocks)
        if num_to_take:
            counts = [group.num_new_blocks(request_id, num_slots) for group in self._groups]
            new_block_ids = tuple(group.add_new_blocks(request_id, count) for group, count in zip(self._groups, counts))
        if self.enable_prefix_caching and not delay_caching:
            # Drafts are not committed: a rejected one must never be found as the prefix of another request.
            self.cache_blocks(request, min(num_committed, len(request.all_token_ids)))
        return new_block_ids

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Let others find the full blocks among the first ``num_tokens`` tokens of a request."""
        num_full_blocks = num_tokens // self.block_size
        for group in self._groups:
            if num_full_blocks > group.tables[request.request_id].num_cached:
                extend_block_hashes(request, self.block_size)
                group.cache_blocks(request.request_id, request.block_hashes, num_full_blocks)

    def free(self, request: Request) -> None:
        """Give up the blocks of a request that finished or is preempted; unknown requests are ignored.

        ``num_computed_tokens`` must still say how much was computed.
        """
        for group in self._groups:
            group.free(request.request_id, request.num_computed_tokens)

    def get_block_ids(self, request_id: str) -> BlockIds:
        """All block ids of a request in logical order, one list per group."""
        return tuple(group.block_ids(request_id) for group in self._groups)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while a request holds blocks."""
        return self.pool.reset_prefix_cache()

    def check_integrity(self, running_requests: Iterable[Request]) -> None:
        """Check that exactly the running requests hold blocks, enough of them, and that the pool agrees.

        For tests and idle checks, between steps. Raises RuntimeError that says what is wrong.
        """
        running = {request.request_id: request for request in running_requests}
        users: Counter[int] = Counter()
        for group in self._groups:
            if group.tables.keys() != running.keys():
                differing = sorted(group.tables.keys() ^ running.keys())
                raise RuntimeError(f"KV cache integrity: block tables and running requests differ in {differing}.")
            for request_id, table in group.tables.items():
                num_computed = running[request_id].num_computed_tokens
                if len(table.blocks) * self.block_size < num_computed:
                    raise RuntimeError(
                        f"KV cache integrity: {request_id} has {num_computed} computed tokens, but {len(table.blocks)} "
                        "blocks."
                    )
                if table.num_cached * self.block_size > num_computed:
                    raise RuntimeError(
                        f"KV cache integrity: {request_id} has {num_computed} computed tokens, but {table.num_cached} "
                        "cached blocks."
                    )
                users.update(block.block_id for block in table.blocks if block.block_id != NULL_BLOCK_ID)
        self.pool.check_integrity(users)

    def _admit(self, request: Request, hits: BlocksPerGroup) -> None:
        # All hits leave the free queue before any new block is taken from it: a new block must not evict a hit.
        for blocks in hits:
            self.pool.touch(blocks)
        for group, blocks in zip(self._groups, hits):
            group.add_hits(request.request_id, blocks)
        if self.enable_prefix_caching and request.num_preemptions == 0 and not request.skips_prefix_cache:
            self.prefix_cache_queried_tokens += request.num_tokens
            self.prefix_cache_hit_tokens += len(hits[0]) * self.block_size
