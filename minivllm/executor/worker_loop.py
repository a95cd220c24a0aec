"""One worker in a process of its own:
reads records from the ring, runs them in order, answers through its socket."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import traceback
from collections import deque

import msgspec

from minivllm.checkpoints.choose import read_model_facts
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.expert_group import ExpertGroup
from minivllm.distributed.gloo import GlooCommunicator
from minivllm.distributed.mesh import Mesh, MeshCommunicator, remote_links
from minivllm.distributed.nccl import NcclCommunicator
from minivllm.distributed.other_workers import OtherWorkers
from minivllm.distributed.secure_sockets import Network
from minivllm.distributed.shared_memory import SharedMemoryCommunicator
from minivllm.distributed.stage import Stage
from minivllm.distributed.staged import StagedCommunicator
from minivllm.errors import MinivllmError
from minivllm.executor.protocol import PendingOutput, call_method
from minivllm.executor.records.agreement import token_digest
from minivllm.executor.records.broadcast_ring import RingReader
from minivllm.executor.records.child_reports import ErrorInfo, LogSender, printable
from minivllm.executor.records.records import (
    Answer,
    Call,
    Channel,
    Died,
    Listening,
    Masks,
    Output,
    Peers,
    Report,
    Sampled,
    Start,
    Step,
    ToWorkers,
    Whereabouts,
    output_rank,
)
from minivllm.families.makers.registry import load_family
from minivllm.messages import TokenMasks
from minivllm.worker.worker import Worker

MAX_IN_FLIGHT = 2
"""Steps that a device works through while this process waits for the older one."""


class WorkerProcess:
    """Serves one executor until it says Stop."""

    def __init__(self, start: Start, ring: RingReader, channel: Channel) -> None:
        self._start = start
        self._ring = ring
        self._channel = channel
        self._decoder = msgspec.msgpack.Decoder(ToWorkers)
        self._worker: Worker | None = None
        self._mesh: Mesh | None = None
        self._communicator: Communicator | None = None
        self._stage = Stage()
        self._pending: deque[PendingOutput] = deque()
        self._num_outputs = 0

    def run(self) -> int:
        """Load, serve, end; the exit status: 1 if the worker died and said so."""
        try:
            if self._start.network is not None:
                self._mesh = self._join(self._start.network)
            threading.Thread(target=self._answer_probes, name="probes", daemon=True).start()
            self._worker = self._make_worker(self._start)
            self._serve(self._worker)
            self._worker.leave_builds()
            self._worker.stop_transfers()
        except BaseException as error:
            with contextlib.suppress(OSError):  # the engine has gone as well
                self._channel.send(Died(ErrorInfo.of(error)))
            return 1
        return 0

    def _join(self, network: Network) -> Mesh:
        """Wait for the workers of all nodes."""
        mesh = Mesh(self._start.rank, network)
        self._channel.send(Listening(mesh.address))
        peers: Peers = self._channel.receive_one()
        mesh.connect(peers.addresses)
        return mesh

    def _answer_probes(self) -> None:
        while (probes := self._channel.receive()) is not None:
            for _ in probes:
                self._channel.send(self.whereabouts())

    def _make_worker(self, start: Start) -> Worker:
        config = start.config
        if config.family is not None:
            load_family(config.family)
        facts = read_model_facts(
            config.model_path, config.load_format, config.hf_overrides, config.model_impl
        )
        size = config.tensor_parallel_size
        number, rank = divmod(start.rank, size)
        if start.segment is not None:
            self._communicator = SharedMemoryCommunicator(rank, *start.segment)
            if config.device == "cuda":
                self._communicator = StagedCommunicator(self._communicator)
        elif start.rendezvous is not None:
            path = f"/proc/self/fd/{start.rendezvous}"
            if config.device == "cuda":
                self._communicator = NcclCommunicator(rank, size, path)
            else:
                self._communicator = GlooCommunicator(rank, size, path)
        elif self._mesh is not None and size > 1:
            self._communicator = MeshCommunicator(self._mesh, range(number * size, (number + 1) * size))
        remote = None
        if self._mesh is not None:
            remote = remote_links(self._mesh, size, config.num_workers, config.local_ranks)
        self._stage = Stage(number, config.pipeline_parallel_size, start.links, remote, config.device)
        group = None
        if start.seat is not None:
            everyone = SharedMemoryCommunicator(start.seat.rank * size + rank, *start.seat.segment)
            group = ExpertGroup(everyone, size)
        others = OtherWorkers(communicator=self._communicator, stage=self._stage, group=group)
        return Worker(config, facts, lambda output: self._channel.send(Report(output)), others)

    def whereabouts(self) -> Whereabouts:
        """Of the main thread. From any other one."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        num_exchanges = 0 if self._communicator is None else self._communicator.num_exchanges
        return Whereabouts(
            num_exchanges, printable("".join(traceback.format_stack(frame))), self._stage.num_handed
        )

    def _serve(self, worker: Worker) -> None:
        # On a CPU launching is computing: a result is there before the next record is looked at.
        in_flight = 1 if worker.device.type == "cpu" else MAX_IN_FLIGHT
        samples = self._start.rank >= output_rank(self._start.config)
        while True:
            if self._pending and (len(self._pending) == in_flight or not self._ring.has_record):
                self._send_output()
                continue
            record = self._read()
            if isinstance(record, Step):
                pending = worker.launch(record.step, self._read_masks if record.has_masks else None)
                if samples:
                    self._pending.append(pending)
            elif isinstance(record, Call):
                while self._pending:
                    self._send_output()
                self._channel.send(self._call(worker, record))
            else:
                return

    def _send_output(self) -> None:
        output = self._pending.popleft().result()
        self._num_outputs += 1
        digest = token_digest(output.sampled_token_ids)
        self._ring.note(self._num_outputs, digest)
        if self._start.config.local_ranks.start > 0:  # another host's ring
            self._channel.send(Sampled(self._num_outputs, digest))
        if self._start.rank == output_rank(self._start.config):
            self._channel.send(Output(output))

    def _read(self) -> ToWorkers:
        record: ToWorkers = self._decoder.decode(self._ring.read())
        return record

    def _read_masks(self) -> TokenMasks:
        record = self._read()
        assert isinstance(record, Masks), "the executor writes them right behind their step"
        return record.masks

    @staticmethod
    def _call(worker: Worker, call: Call) -> Answer:
        try:
            value = call_method(worker, call.method, call.args)
        except MinivllmError as error:
            return Answer(error=ErrorInfo.of(error))
        if call.method == "initialize_pools":  # what exists now stays
            gc.collect()
            gc.freeze()
        return Answer(value)


def serve(channel: Channel, ring: RingReader) -> int:
    """What a worker process does once it has imported everything; its exit status."""
    start: Start | None = channel.receive_one()
    if start is None:
        return 0  # the engine has gone before it said what to start
    for inherited in start.shared:
        os.set_inheritable(inherited, False)
    package = logging.getLogger("minivllm")
    package.addHandler(LogSender(channel.send))
    package.setLevel(
        start.log_level if start.rank == output_rank(start.config) else max(start.log_level, logging.WARNING)
    )
    package.propagate = False
    return WorkerProcess(start, ring, channel).run()
