"""One load: the blocks that it fills, and what its workers have reported."""

from __future__ import annotations

import time

from minivllm.kv_cache.coordinator import BlocksPerGroup
from minivllm.messages import BlockIds
from minivllm.request import Request


class Load:
    """keys: hashes of its blocks. blocks: one for each key in every KV group, the null block where nothing is
    read. hits: those blocks before them that the request reads after the load, kept from eviction meanwhile.
    valid: rank -> how many of the first blocks hold what they should, as far as that worker has reported.
    begun: time.monotonic()."""

    __slots__ = ("begun", "blocks", "hits", "keys", "request", "transfer_id", "valid")

    def __init__(
        self,
        transfer_id: str,
        request: Request,
        keys: list[bytes],
        hits: BlocksPerGroup,
        blocks: BlocksPerGroup,
    ) -> None:
        self.transfer_id = transfer_id
        self.request = request
        self.keys = keys
        self.hits = hits
        self.blocks = blocks
        self.valid: dict[int, int] = {}
        self.begun = time.monotonic()

    @property
    def block_ids(self) -> BlockIds:
        return tuple([block.block_id for block in group] for group in self.blocks)
