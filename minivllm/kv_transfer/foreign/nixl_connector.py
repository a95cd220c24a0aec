"""Disaggregated prefill by one-sided reads:
a consumer reads blocks out of a producer's memory through NIXL (UCX).

Announcements, the handshake and leases go over the sockets of the lookup connector; the blocks do not. A
consumer takes a lease, reads, and asks whether the lease is still there. Only then it believes what it has
read: a producer that was slow or stopped in between may have put other blocks there (vLLM once answered with
another prompt's text so).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
import torch
from torch import Tensor

from minivllm.config import KVTransferConfig
from minivllm.errors import ConfigError
from minivllm.kv_transfer.connector import KVConnector
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks, KVConnectorWorker, WorkerContext
from minivllm.kv_transfer.foreign.leased_blocks import LeasedBlocks
from minivllm.kv_transfer.lookup.gate import Gate, LookupBufferOptions, addresses_of, check
from minivllm.kv_transfer.lookup.handshake import Purpose
from minivllm.kv_transfer.lookup.lookup_connector import LookupBufferScheduler
from minivllm.kv_transfer.lookup.lookup_server import FOREVER, LookupServer
from minivllm.kv_transfer.lookup.pipe import Address, Key, Pipe
from minivllm.messages import BlockTransfer
from minivllm.specs.caches import LayerCache, StateTensors

logger = logging.getLogger(__name__)

STAGED_BLOCKS = 64
"""Blocks that are read under one lease."""
LOOK_SECONDS = 0.0002


class NixlOptions(LookupBufferOptions, forbid_unknown_fields=True):
    """lease_seconds: how long a producer keeps blocks for a consumer that has not come back."""

    lease_seconds: float = 10.0


class TakeLease(msgspec.Struct, frozen=True, tag="take_lease"):
    """A consumer wants to read these blocks."""

    keys: list[Key]


class Leased(msgspec.Struct, frozen=True, tag="leased"):
    """addresses: of the first ones of the blocks, as far as they are there.
    agent: the producer's NIXL metadata."""

    number: int
    addresses: list[int]
    agent: bytes


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """The consumer has read, and wants to know whether it may believe it."""

    number: int


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    is_valid: bool


def make_agent(role: str, memory: Tensor) -> Any:
    """A NIXL agent that moves host memory, and what it may read or others may."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # its lines go to stdout, where answers may go
    api = import_module("nixl._api")
    agent = api.nixl_agent(
        f"minivllm-{role}-{os.getpid()}-{time.time_ns()}", api.nixl_agent_config(backends=["UCX"])
    )
    agent.register_memory(memory)
    return agent


class LeaseServer(LookupServer):
    """A producer's end. Consumers take leases and come back; in between they read by themselves."""

    def __init__(self, address: Address, gate: Gate, blocks: LeasedBlocks, agent: bytes) -> None:
        self._blocks = blocks
        self._agent = agent
        super().__init__(address, gate, blocks)  # type: ignore[arg-type]  # which is only asked for its news

    def _answer(self, pipe: Pipe) -> None:
        while not self._is_closed:
            wanted = pipe.receive_message(TakeLease, FOREVER)
            number, addresses = self._blocks.lease(wanted.keys)
            try:
                deadline = time.monotonic() + self._gate.timeout
                pipe.send_message(Leased(number, addresses, self._agent), deadline)
                is_valid = pipe.receive_message(Confirm, FOREVER).number == number and self._blocks.confirm(
                    number
                )
                pipe.send_message(Confirmed(is_valid), time.monotonic() + self._gate.timeout)
            finally:
                self._blocks.confirm(number)  # also of a consumer that has gone


class _Producer:
    """A producer as one consumer knows it. name: of its NIXL agent."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.name = ""


class NixlWorker(KVConnectorWorker):
    """Fills leased memory as a producer, and reads that of others as a consumer."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        transfer = context.transfer
        self._options: NixlOptions = transfer.options
        self._gate = Gate.of(transfer, transfer.rank)
        own, peers = addresses_of(transfer.config, self._options)
        self._own = None if own is None else own.beside(transfer.rank)
        self._peers = [peer.beside(transfer.rank) for peer in peers]
        self._slot_bytes = 0
        self._is_cuda = context.device.type == "cuda"
        self._blocks: LeasedBlocks | None = None
        self._server: LeaseServer | None = None
        self._reader: Any = None
        self._staging: Tensor | None = None
        self._abandoned: list[tuple[Any, ...]] = []
        self._staged: dict[bytes, Tensor] = {}
        self._producers: dict[int, _Producer] = {}
        self._load_now = BlockTransfer(keys=[], block_ids=())
        self._deadline = 0.0

    def register_kv_caches(self, caches: Sequence[LayerCache | StateTensors]) -> None:
        """The memory that others read is taken with the first caches, and stays while the engine sleeps."""
        super().register_kv_caches(caches)
        if self._slot_bytes or not caches:
            return
        self._slot_bytes = max(one.block_bytes for one in (self.blocks, self.states) if one is not None)
        if self._own is not None:
            shape = (self._num_slots(), self._slot_bytes)
            memory = torch.zeros(shape, dtype=torch.uint8, pin_memory=self._is_cuda)
            self._agent = make_agent("producer", memory)
            self._blocks = LeasedBlocks(memory, self._options.lease_seconds)
            self._server = LeaseServer(self._own, self._gate, self._blocks, self._agent.get_agent_metadata())

    def _num_slots(self) -> int:
        """The same on all workers, which share ``buffer_bytes``. A slot holds a block or a state."""
        transfer = self.context.transfer
        size = max(transfer.block_bytes, transfer.state_bytes)
        if self._options.buffer_bytes < size:
            what = "block" if size == transfer.block_bytes else "state"
            raise ConfigError(
                f"buffer_bytes is {self._options.buffer_bytes}, but one {what} takes {size}: give "
                "NixlConnector more."
            )
        return self._options.buffer_bytes // size

    # -- a consumer --------------------------------------------------------------------------------

    def _load(self, load: BlockTransfer, wait: Callable[[], None]) -> None:
        self._load_now = load
        self._staged = {}
        self._deadline = time.monotonic() + self._options.timeout
        super()._load(load, wait)

    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
        if key not in self._staged and source >= 0:
            load, start = self._load_now, self._load_now.keys.index(key)
            keys = load.keys[start : start + STAGED_BLOCKS]
            same = [
                load.where[index] == source and blocks.has([own[index] for own in load.block_ids])
                for index in range(start, start + len(keys))
            ]
            self._staged = {}
            try:
                self._fetch(source, keys[: [*same, False].index(False)], blocks.block_bytes)
            except (OSError, ValueError, RuntimeError) as error:  # NIXL's errors are RuntimeErrors
                logger.warning("Blocks from %s did not come: %s.", self._peers[source].text, error)
                self._hang_up(source)
        data = self._staged.get(key)
        return None if data is None else data[: blocks.block_bytes]

    def _fetch(self, source: int, keys: Sequence[bytes], size: int) -> None:
        """Read blocks of one producer under a lease, ``size`` bytes of each.
        Raises OSError, ValueError, or what NIXL raises."""
        if self._stream is not None:
            self._stream.synchronize()  # what was staged before is on the device
        if self._staging is None:
            shape = (STAGED_BLOCKS, self._slot_bytes)
            self._staging = torch.zeros(shape, dtype=torch.uint8, pin_memory=self._is_cuda)
            for other in list(self._producers):
                self._hang_up(other)
            self._reader = make_agent("consumer", self._staging)
        if source not in self._producers:
            self._producers[source] = _Producer(
                self._gate.connect(self._peers[source], Purpose.BLOCKS, self._deadline)
            )
        producer = self._producers[source]
        producer.pipe.send_message(TakeLease(list(keys)), self._deadline)
        leased = producer.pipe.receive_message(Leased, self._deadline)
        if len(leased.addresses) > len(keys):
            raise ValueError("more blocks came than were asked for")
        if leased.addresses and size:  # a stage may have no layer that attends
            if not producer.name:
                name = self._reader.add_remote_agent(leased.agent)
                producer.name = name.decode() if isinstance(name, bytes) else name
            self._read(producer.name, leased.addresses, self._staging, size)
        producer.pipe.send_message(Confirm(leased.number), self._deadline)
        if producer.pipe.receive_message(Confirmed, self._deadline).is_valid:
            self._staged = {
                key: self._staging[index] for index, key in enumerate(keys[: len(leased.addresses)])
            }

    def _read(self, name: str, addresses: Sequence[int], staging: Tensor, size: int) -> None:
        """Raises TimeoutError, after which the staging memory must not be used: the read may still go on."""
        reader = self._reader
        rows = [(staging[index].data_ptr(), size, 0) for index in range(len(addresses))]
        own, theirs = (
            reader.get_xfer_descs(descriptors, "DRAM")
            for descriptors in (rows, [(address, size, 0) for address in addresses])
        )
        handle = reader.initialize_xfer("READ", own, theirs, name)
        state = reader.transfer(handle)
        while state == "PROC" and time.monotonic() < self._deadline:
            time.sleep(LOOK_SECONDS)
            state = reader.check_xfer_state(handle)
        if state == "PROC":
            self._abandoned.append((reader, handle, staging))
            self._staging = None
            raise TimeoutError("the deadline is over")
        reader.release_xfer_handle(handle)
        if state != "DONE":
            raise ConnectionError(f"NIXL reports {state}")

    def _hang_up(self, source: int) -> None:
        producer = self._producers.pop(source, None)
        if producer is None:
            return
        producer.pipe.close()
        if producer.name and self._staging is not None:
            with contextlib.suppress(RuntimeError):  # NIXL has noticed its end already
                self._reader.remove_remote_agent(producer.name)

    # -- a producer --------------------------------------------------------------------------------

    def save_block(self, key: bytes, target: int, blocks: CacheBlocks) -> Tensor | None:
        data = None if self._blocks is None else self._blocks.take(key)
        return None if data is None else data[: blocks.block_bytes]

    def saved(self, data: list[tuple[bytes, Tensor]], wait: Callable[[], None], blocks: CacheBlocks) -> None:
        if self._blocks is not None:
            self._blocks.publish([key for key, _ in data], wait)

    def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        super().shutdown()
        for source in list(self._producers):
            self._hang_up(source)


class NixlConnector(KVConnector):
    """kv_connector_extra_config: {"address": …} as kv_producer, {"peers": […]} as kv_consumer;
    see NixlOptions."""

    Options = NixlOptions
    outlives_engine = moves_parts = moves_states = True
    scheduler_side = LookupBufferScheduler
    worker_side = NixlWorker

    @classmethod
    def check(cls, config: KVTransferConfig) -> None:
        options = cls.options(config)
        check(config, options)
        if options.lease_seconds <= 0:
            raise ConfigError(f"lease_seconds is {options.lease_seconds}, but must be above 0.")
        if find_spec("nixl") is None:
            raise ConfigError("NixlConnector needs the package nixl: pip install 'minivllm[nixl]'.")
