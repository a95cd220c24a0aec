"""Loads under way: the blocks that they fill, and the requests that wait for them.

The blocks of a load are its own until it has ended, whatever becomes of the request: freed earlier, they
could be written into when they are another request's already. They are found under their hashes only once
they are known to hold what they should, so a block that may turn out to be bad is never shared. Then they
become part of the prefix
cache. The request comes back to the head of the queue, and is admitted like any whose beginning is cached.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from minivllm.kv_cache.coordinator import BlocksPerGroup
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_transfer.connector import KVConnectorScheduler
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.loads import Load
from minivllm.kv_transfer.taken_blocks import (
    give_back,
    hold,
    num_missing_behind,
    read_after_load,
    take_for_load,
)
from minivllm.messages import KVTransferStats
from minivllm.request import Request

LOAD_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Bounds of a histogram: how long requests waited for loads [seconds]."""


class _TierCounts:
    """What came from a tier since the start."""

    def __init__(self) -> None:
        self.hit_tokens = self.num_loaded = self.num_failed = 0
        self.num_loads = 0
        self.load_seconds = 0.0
        self.loads_within = dict.fromkeys(LOAD_SECONDS, 0)

    def add_load(self, seconds: float) -> None:
        self.num_loads += 1
        self.load_seconds += seconds
        for bound in LOAD_SECONDS:
            self.loads_within[bound] += seconds <= bound


class RemoteLoads:
    """Asks the connector for what the prefix cache lacks, and keeps what is under way.

    waiting: the requests that wait for a load (vLLM's WAITING_FOR_REMOTE_KVS), beside the queue, by id.
    """

    def __init__(self, manager: KVCacheManager, connector: KVConnectorScheduler) -> None:
        self._manager = manager
        self._connector = connector
        self.waiting: dict[str, Load] = {}
        self._loads: dict[str, Load] = {}
        self._sending: dict[str, tuple[BlocksPerGroup, set[int]]] = {}
        self._num_begun = 0
        self._counts = [_TierCounts() for _ in connector.tiers]

    @property
    def num_transfers(self) -> int:
        """Transfers that hold blocks."""
        return len(self._loads) + len(self._sending)

    def num_tokens(self, request: Request, num_hit_tokens: int) -> int | None:
        """Tokens that a load would bring, in whole blocks; None: the connector cannot say yet. It is asked
        for requests that may reuse all but their last token, since a state that it has may lie further on
        than others may."""
        if request.load_failed or request.num_reusable_tokens < request.num_tokens - 1:
            return 0
        count = self._connector.get_num_new_matched_tokens(request, num_hit_tokens)
        if not count:
            return count
        size = self._manager.hash_block_size
        return min(count, request.num_tokens - 1 - num_hit_tokens) // size * size

    def begin(
        self,
        request: Request,
        hits: BlocksPerGroup,
        num_hit_tokens: int,
        num_tokens: int,
        reserved: list[int],
    ) -> bool:
        """Take blocks for the tokens behind the hits and have them filled; False, and nothing has changed, if
        there is no room for all known tokens of the request besides the reserved blocks."""
        hits = read_after_load(self._manager, hits, num_hit_tokens + num_tokens)
        blocks = take_for_load(self._manager, request, hits, num_hit_tokens, num_tokens, reserved)
        if blocks is None:
            return False
        start, self._num_begun = num_hit_tokens // self._manager.hash_block_size, self._num_begun + 1
        keys = request.block_hashes[start : start + len(blocks[0])]
        load = Load(str(self._num_begun), request, keys, hits, blocks)
        self._loads[load.transfer_id] = load
        self.waiting[request.request_id] = load
        self._connector.update_state_after_alloc(request, load)
        for tier, num_blocks in self._connector.sources(load):
            self._counts[tier].hit_tokens += num_blocks * self._manager.hash_block_size
        return True

    def end(self, output: KVConnectorOutput) -> list[tuple[Request, bool]]:
        """Take in what the workers report;
        the requests that need not wait any longer, and whether all of it came.

        A transfer is over when every rank has reported it; blocks are good as far as they are with all of
        them. What is not known, or comes from a rank for the second time, has been reported before: it is
        ignored.
        """
        released, num_ranks = [], self._connector.num_ranks
        output = self._connector.merge(output)
        for transfer_id, num_valid in output.finished_recving.items():
            load = self._loads.get(transfer_id)
            if load is None:
                continue
            load.valid.setdefault(output.rank, num_valid)
            if len(load.valid) < num_ranks:
                continue
            del self._loads[transfer_id]
            num_valid = min(*load.valid.values(), len(load.keys))
            is_whole = num_valid == len(load.keys)
            self._count(load, num_valid)
            self._connector.update_connector_output(load, num_valid)
            give_back(self._manager, load.blocks, load.keys[:num_valid])
            give_back(self._manager, load.hits)
            if self.waiting.get(load.request.request_id) is load:
                del self.waiting[load.request.request_id]
                load.request.load_failed = not is_whole
                released.append((load.request, is_whole))
        for request_id in output.finished_sending:
            if request_id in self._sending:
                blocks, ranks = self._sending[request_id]
                ranks.add(output.rank)
                if len(ranks) == num_ranks:
                    del self._sending[request_id]
                    give_back(self._manager, blocks)
        return released

    def _count(self, load: Load, num_valid: int) -> None:
        """Whatever lies behind a piece that failed counts neither as loaded nor as failed."""
        seconds = time.monotonic() - load.begun
        for tier, num_blocks in self._connector.sources(load):
            counts, num_good = self._counts[tier], min(num_valid, num_blocks)
            counts.num_loaded += num_good
            counts.add_load(seconds)
            if num_good < num_blocks:
                counts.num_failed += num_blocks - num_good
                break
            num_valid -= num_good

    def finish(self, request: Request) -> None:
        """A request ends, and its blocks are about to be freed: hold those that the connector still reads."""
        self.waiting.pop(request.request_id, None)
        connector = self._connector
        if connector.is_connected and connector.request_finished(
            request, self._manager.get_block_ids(request.request_id)
        ):
            self._sending[request.request_id] = hold(self._manager, request.request_id), set()

    def is_sending(self, request_id: str) -> bool:
        """Whether blocks of a request that has ended are still read."""
        return request_id in self._sending

    def num_promised_blocks(self) -> list[list[int]]:
        """Blocks of each KV group that the requests which wait for a load will take besides those it
        fills."""
        return [
            num_missing_behind(
                self._manager,
                load.request,
                tuple(hits + blocks for hits, blocks in zip(load.hits, load.blocks)),
            )
            for load in self.waiting.values()
        ]

    def held(self) -> Iterable[BlocksPerGroup]:
        """Blocks that are in use besides those of running requests."""
        for load in self._loads.values():
            yield load.blocks
            yield load.hits
        yield from (blocks for blocks, _ in self._sending.values())

    def stats(self) -> list[KVTransferStats]:
        """Of each tier."""
        return [
            KVTransferStats(
                tier=tier.tier,
                hit_tokens=counts.hit_tokens,
                num_loaded_blocks=counts.num_loaded,
                num_saved_blocks=tier.num_saved_blocks,
                num_failed_blocks=counts.num_failed,
                num_loads=counts.num_loads,
                loads_within=list(counts.loads_within.items()),
                load_seconds=counts.load_seconds,
                block_bytes=tier.block_bytes,
            )
            for tier, counts in zip(self._connector.tiers, self._counts)
        ]
