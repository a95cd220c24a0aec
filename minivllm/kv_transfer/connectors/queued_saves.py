"""Saves to where writing is slow:
a thread of their own does it, and no more of them wait than a queue holds."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

import torch
from torch import Tensor

from minivllm.kv_transfer.connector import TransferContext
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, KVConnectorWorker, WorkerContext
from minivllm.profiling.spans import spanned

logger = logging.getLogger(__name__)

MAX_QUEUED_BLOCKS = 64
"""Blocks that wait to be written. Those that come while so many do are not saved."""


class QueuedSaves(KVConnectorWorker):
    """A subclass says what ``load_block`` and ``write_block`` do."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kv-saves")
        self._room = Semaphore(MAX_QUEUED_BLOCKS)
        self._cannot_write = False

    @abstractmethod
    def write_block(
        self, transfer: TransferContext, key: bytes, contents: Tensor, blocks: CacheBlocks
    ) -> None:
        """Keep what a block holds, uint8 [blocks.block_bytes]. Called by the saves' thread. transfer: has the
        fingerprint of the weights that the block was computed with. Raises OSError."""

    def save_block(self, key: bytes, target: int, blocks: CacheBlocks) -> Tensor | None:
        if not self._room.acquire(blocking=False):
            return None
        is_cuda = self.context.device.type == "cuda"
        return torch.empty(blocks.block_bytes, dtype=torch.uint8, pin_memory=is_cuda)

    def saved(self, data: list[tuple[bytes, Tensor]], wait: Callable[[], None], blocks: CacheBlocks) -> None:
        self._writer.submit(self._write, self.context.transfer, data, wait, blocks)

    @spanned("write_kv")
    def _write(
        self,
        transfer: TransferContext,
        data: list[tuple[bytes, Tensor]],
        wait: Callable[[], None],
        blocks: CacheBlocks,
    ) -> None:
        wait()
        for key, contents in reversed(data):
            try:
                self.write_block(transfer, key, contents, blocks)
            except OSError as error:
                if not self._cannot_write:
                    logger.warning("%s cannot save blocks: %s.", transfer.config.kv_connector, error)
                self._cannot_write = True
            finally:
                self._room.release()

    def shutdown(self) -> None:
        super().shutdown()
        self._writer.shutdown()
