"""A worked example: a connector of one's own, by public names.
Blocks lie in a dictionary that engines share."""

from __future__ import annotations

import time

import msgspec
import torch
from torch import Tensor

from minivllm import KVConnector
from minivllm.kv_transfer.connector import BlockStore
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, KVConnectorWorker

SHELF: dict[bytes, Tensor] = {}
"""Block hash -> what the block holds. It stands for whatever keeps bytes under a name."""


class ShelfOptions(msgspec.Struct, forbid_unknown_fields=True):
    """delay: seconds that a block takes to come.
    broken: how many of the first blocks asked for are not to be had."""

    delay: float = 0.0
    broken: int = 0


class ShelfScheduler(BlockStore):
    """Knows what is there."""

    def holds(self, key: bytes) -> bool:
        return key in SHELF


class ShelfWorker(KVConnectorWorker):
    """Brings it, and takes it away."""

    num_asked = 0

    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
        options = self.context.transfer.options
        time.sleep(options.delay)
        self.num_asked += 1
        return SHELF.get(key) if self.num_asked > options.broken else None

    def save_block(self, key: bytes, target: int, blocks: CacheBlocks) -> Tensor | None:
        if key in SHELF:
            return None
        return SHELF.setdefault(key, torch.empty(blocks.block_bytes, dtype=torch.uint8))


class ShelfConnector(KVConnector):
    """What kv_connector names, or what register_connector is given."""

    Options = ShelfOptions
    scheduler_side = ShelfScheduler
    worker_side = ShelfWorker
