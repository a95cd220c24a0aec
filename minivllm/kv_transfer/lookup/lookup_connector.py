"""Disaggregated prefill: a producer's blocks go to consumers over sockets (vLLM V0's connector,
by block hashes).

The producer's worker puts every block that becomes full into a LookupBuffer and announces it, before the
step's tokens leave the engine. A consumer takes what was announced. No request carries parameters: a hash
says everything.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minivllm.config import KVTransferConfig
from minivllm.kv_transfer.connector import BlockStore, KVConnector, TransferContext
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, KVConnectorWorker, WorkerContext
from minivllm.kv_transfer.loads import Load
from minivllm.kv_transfer.lookup.catalogue import RETRY_SECONDS, Catalogue
from minivllm.kv_transfer.lookup.gate import Gate, LookupBufferOptions, addresses_of, check, check_room
from minivllm.kv_transfer.lookup.handshake import Purpose
from minivllm.kv_transfer.lookup.lookup_buffer import LookupBuffer
from minivllm.kv_transfer.lookup.lookup_server import LookupServer
from minivllm.kv_transfer.lookup.pipe import DropSelect, Pipe
from minivllm.messages import BlockTransfer, KVConnectorMetadata

logger = logging.getLogger(__name__)


class LookupBufferScheduler(BlockStore):
    """Knows from the producers' announcements what is to be had. A source is the number of a producer."""

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        _, peers = addresses_of(context.config, context.options)
        self._catalogue = Catalogue(peers, [Gate.of(context, rank) for rank in range(context.num_ranks)])

    def holds(self, key: bytes) -> bool:
        return self._catalogue.find(key) is not None

    def where(self, keys: Sequence[bytes]) -> list[int]:
        found = [self._catalogue.find(key) for key in keys]
        return [-1 if source is None else source for source in found]

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        for key in self.failed(load, num_valid_blocks):
            self._catalogue.forget(key)

    def shutdown(self) -> None:
        self._catalogue.close()


class LookupBufferWorker(KVConnectorWorker):
    """Fills the buffer as a producer, and asks the workers of the same rank of producers as a consumer.

    A load asks for all its blocks at once, and takes them as they come. It ends at its deadline, whatever the
    producer does; a connection that failed is made anew for a later load.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        transfer = context.transfer
        self._options: LookupBufferOptions = transfer.options
        self._gate = Gate.of(transfer, transfer.rank)
        own, peers = addresses_of(transfer.config, self._options)
        self._peers = [peer.beside(transfer.rank) for peer in peers]
        self._buffer: LookupBuffer | None = None
        self._server: LookupServer | None = None
        if own is not None:
            check_room(transfer)
            self._buffer = LookupBuffer(self._options.buffer_bytes)
            self._server = LookupServer(own.beside(transfer.rank), self._gate, self._buffer)
        self._deadlines: dict[str, float] = {}
        self._deadline = 0.0
        self._pipes: dict[int, Pipe] = {}
        self._owed: Counter[int] = Counter()
        self._landing: WeakKeyDictionary[CacheBlocks, Tensor] = WeakKeyDictionary()
        self._not_before: dict[int, float] = {}

    # -- a consumer --------------------------------------------------------------------------------

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        for load in metadata.loads:
            self._deadlines[load.transfer_id] = time.monotonic() + self._options.timeout
        super().start_load_kv(metadata)

    def _load(self, load: BlockTransfer, wait: Callable[[], None]) -> None:
        self._deadline = self._deadlines.pop(load.transfer_id)
        for source in dict.fromkeys(load.where):
            self._ask(source, [key for key, at in zip(load.keys, load.where) if at == source])
        super()._load(load, wait)
        for source in list(+self._owed):
            self._hang_up(source)  # what was asked for and is not wanted any longer

    def _ask(self, source: int, keys: list[bytes]) -> None:
        """Ask a producer for blocks, with a connection if there is none.
        What fails shows when they are to be taken."""
        if source < 0 or (source not in self._pipes and time.monotonic() < self._not_before.get(source, 0.0)):
            return
        try:
            if (
                source in self._pipes and not self._pipes[source].is_quiet
            ):  # it has died since it was used last
                self._hang_up(source)
            if source not in self._pipes:
                self._pipes[source] = self._gate.connect(self._peers[source], Purpose.BLOCKS, self._deadline)
            self._pipes[source].send_message(DropSelect(keys), self._deadline)
            self._owed[source] = len(keys)
        except (OSError, ValueError) as error:
            self._fail(source, error)

    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
        if not self._owed[source]:
            return None
        data = self._landing.get(blocks)
        if data is None or self.context.device.type == "cuda":  # which may still copy out of the one before
            data = self._landing[blocks] = self._make_room(blocks)
        try:
            is_here = self._pipes[source].receive_tensor(key, data, self._deadline)
        except (OSError, ValueError) as error:
            self._fail(source, error)
            return None
        self._owed[source] = self._owed[source] - 1 if is_here else 0
        return data if is_here else None

    def _make_room(self, blocks: CacheBlocks) -> Tensor:
        is_cuda = self.context.device.type == "cuda"
        return torch.empty(blocks.block_bytes, dtype=torch.uint8, pin_memory=is_cuda)

    def _fail(self, source: int, error: Exception) -> None:
        logger.warning("Blocks from %s did not come: %s.", self._peers[source].text, error)
        self._not_before[source] = time.monotonic() + RETRY_SECONDS
        self._hang_up(source)

    def _hang_up(self, source: int) -> None:
        self._owed[source] = 0
        pipe = self._pipes.pop(source, None)
        if pipe is not None:
            pipe.close()

    # -- a producer --------------------------------------------------------------------------------

    def save_block(self, key: bytes, target: int, blocks: CacheBlocks) -> Tensor | None:
        if self._buffer is None or self._buffer.holds(key):
            return None
        return self._make_room(blocks)

    def saved(self, data: list[tuple[bytes, Tensor]], wait: Callable[[], None], blocks: CacheBlocks) -> None:
        if self._buffer is not None:
            transfer = self.context.transfer
            self._buffer.insert(
                data, wait, transfer.state_bytes if blocks is self.states else transfer.block_bytes
            )

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        super().shutdown()
        for source in list(self._pipes):
            self._hang_up(source)


class LookupBufferConnector(KVConnector):
    """kv_connector_extra_config: {"address": …} as kv_producer, {"peers": […]} as kv_consumer; see
    LookupBufferOptions."""

    Options = LookupBufferOptions
    outlives_engine = moves_parts = moves_states = True
    scheduler_side = LookupBufferScheduler
    worker_side = LookupBufferWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        check(config, cls.options(config))
