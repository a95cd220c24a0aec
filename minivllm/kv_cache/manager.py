"""The scheduler's view of the KV cache: find cached prefixes, make room for tokens, let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from minivllm.errors import ConfigError
from minivllm.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock
from minivllm.kv_cache.hashing import extend_block_hashes
from minivllm.request import Request


class BlockTable:
    """Blocks of one request in logical order; the first ``num_cached`` of them were offered to the prefix cache."""

    __slots__ = ("blocks", "num_cached")

    def __init__(self, hits: Sequence[KVCacheBlock] = ()) -> None:
        self.blocks: list[KVCacheBlock] = list(hits)
        self.num_cached = len(self.blocks)


class KVCacheManager:
    """Block tables of all requests over one pool of blocks.

    num_blocks: physical blocks, the null block included.
    block_size: tokens per block.
    max_model_len: tokens of the longest request.
    prefix_cache_queried_tokens, prefix_cache_hit_tokens: counted once per request, when it is first admitted.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int, enable_prefix_caching: bool = True
    ) -> None:
        if block_size < 1:
            raise ConfigError(f"block_size is {block_size}, but must be at least 1.")
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.tables: dict[str, BlockTable] = {}
        self.prefix_cache_queried_tokens = 0
        self.prefix_cache_hit_tokens = 0
        self.no_block_ids: list[int] = []
        """What allocate_slots returns, as this very object, when the blocks a request has are enough."""

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        return self.pool.usage

    def fits_alone(self, num_tokens: int) -> bool:
        """True if a request of ``num_tokens`` tokens can be served when it has the whole pool."""
        return -(-num_tokens // self.block_size) <= self.pool.num_blocks - 1

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that a running request still has to take for the tokens that are known."""
        return self._num_new_blocks(request.request_id, request.num_tokens)

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """The longest cached prefix of a waiting request: (its blocks, tokens in them). Changes no block.

        Whole blocks only, and at most ``num_tokens - 1`` tokens: one token must run to give logits.
        """
        hits: list[KVCacheBlock] = []
        if not self.enable_prefix_caching or request.skips_prefix_cache:
            return hits, 0
        extend_block_hashes(request, self.block_size)
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self.block_size]:
            block = self.pool.get_cached_block(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits, len(hits) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hits: Sequence[KVCacheBlock] | None = None,
        num_lookahead_tokens: int = 0,
        num_reserved_blocks: int = 0,
    ) -> list[int] | None:
        """Make room for the next ``num_new_tokens`` tokens of a request.

        A request that is admitted gets no block unless all its known tokens could have theirs, besides the reserved.

        hits: what get_computed_blocks returned; given exactly when the request is admitted.
        num_lookahead_tokens: room for tokens that a drafter writes beyond the scheduled ones.
        num_reserved_blocks: free blocks that others will need.
        Returns ids of the new blocks (hits not included), or None without any side effect if there is no room.
        """
        request_id = request.request_id
        num_committed = request.num_computed_tokens + num_new_tokens
        if hits is not None:
            num_committed += len(hits) * self.block_size
        num_slots = min(num_committed + num_lookahead_tokens, self.max_model_len)
        if hits is None:
            num_to_take = self._num_new_blocks(request_id, num_slots)
        else:
            num_to_take = self._num_new_blocks(request_id, max(num_slots, request.num_tokens)) - len(hits)
            num_to_take += sum(block.ref_count == 0 for block in hits)
        if num_to_take + num_reserved_blocks > self.pool.num_free_blocks:
            return None
        if hits is not None:
            self._admit(request, hits)
        new_block_ids = self.no_block_ids
        if num_to_take:
            blocks = self.pool.get_new_blocks(self._num_new_blocks(request_id, num_slots))
            self.tables[request_id].blocks.extend(blocks)
            new_block_ids = [block.block_id for block in blocks]
        if self.enable_prefix_caching:
            # Drafts are not committed: a rejected one must never be found as another request's prefix.
            self._cache_blocks(request, min(num_committed, len(request.all_token_ids)) // self.block_size)
        return new_block_ids

    def free(self, request: Request) -> None:
        """Give up the blocks of a request that finished or is preempted; unknown requests are ignored.

        The last block goes first, so that prefixes survive longest. Blocks are offered to the prefix cache when a step
        is planned: if the request leaves before its step was sent, what lies beyond ``num_computed_tokens``, which must
        still say how much was computed, is withdrawn.
        """
        table = self.tables.pop(request.request_id, None)
        if table is None:
            return
        for block in table.blocks[request.num_computed_tokens // self.block_size : table.num_cached]:
            self.pool.forget(block)
        self.pool.free_blocks(reversed(table.blocks))

    def get_block_ids(self, request_id: str) -> list[int]:
        """All block ids of a request in logical order."""
        table = self.tables.get(request_id)
        return [] if table is None else [block.block_id for block in table.blocks]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing happens, while a request holds blocks."""
        return self.pool.reset_prefix_cache()

    def check_integrity(self, running_requests: Iterable[Request]) -> None:
        """Check that exactly the running requests hold blocks, enough of them, and that the pool agrees.

        For tests and idle checks, between steps. Raises RuntimeError that says what is wrong.
        """
        running = {request.request_id: request for request in running_requests}
        users: Counter[int] = Counter()
        if self.tables.keys() != running.keys():
            differing = sorted(self.tables.keys() ^ running.keys())
            raise RuntimeError(f"KV cache integrity: block tables and running requests differ in {differing}.")
        for request_id, table in self.tables.items():
            num_computed = running[request_id].num_computed_tokens
            has = f"KV cache integrity: {request_id} has {num_computed} computed tokens"
            if len(table.blocks) * self.block_size < num_computed:
                raise RuntimeError(f"{has}, but {len(table.blocks)} blocks.")
            if table.num_cached * self.block_size > num_computed:
                raise RuntimeError(f"{has}, but {table.num_cached} cached blocks.")
            users.update(block.block_id for block in table.blocks if block.block_id != NULL_BLOCK_ID)
        self.pool.check_integrity(users)

    def _num_new_blocks(self, request_id: str, num_tokens: int) -> int:
        """Blocks to take from the pool so that ``num_tokens`` tokens of a request fit."""
        table = self.tables.get(request_id)
        missing = -(-num_tokens // self.block_size) - (0 if table is None else len(table.blocks))
        return missing if missing > 0 else 0

    def _cache_blocks(self, request: Request, num_full_blocks: int) -> None:
        """Let others find the first ``num_full_blocks`` blocks of a request."""
        table = self.tables[request.request_id]
        start = table.num_cached
        if num_full_blocks > start:
            extend_block_hashes(request, self.block_size)
            new_hashes = request.block_hashes[start:num_full_blocks]
            self.pool.cache_full_blocks(table.blocks[start:num_full_blocks], new_hashes)
            table.num_cached = num_full_blocks

    def _admit(self, request: Request, hits: Sequence[KVCacheBlock]) -> None:
        # All hits leave the free queue before any new block is taken from it: a new block must not evict a hit.
        self.pool.touch(hits)
        self.tables[request.request_id] = BlockTable(hits)
        if self.enable_prefix_caching and request.num_preemptions == 0 and not request.skips_prefix_cache:
            self.prefix_cache_queried_tokens += request.num_tokens
            self.prefix_cache_hit_tokens += len(hits) * self.block_size
