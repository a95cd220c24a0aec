"""Workers in processes of their own, which all read one broadcast ring: the engine core writes each step once.

What lives is held by ``WorkerGroup``. A thread of its own listens to the workers, and learns of their ends: the first
death ends the group, and whoever waits for it, now or later, gets the reason.
"""

from __future__ import annotations

import inspect
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import msgspec

from minivllm.compilation.package_builds import close_in_children, forget_descriptor
from minivllm.config import EngineConfig
from minivllm.distributed.shared_memory import Segment, open_segment, segment_descriptors
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.executor.broadcast_ring import PeerGone, RingWriter
from minivllm.executor.child_reports import FRONTEND_SIGNALS, ErrorInfo, Log, describe_exit
from minivllm.executor.protocol import PendingOutput
from minivllm.executor.records import (
    Answer,
    Call,
    Channel,
    Died,
    FromWorker,
    Masks,
    Output,
    Report,
    Start,
    Step,
    Stop,
)
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks
from minivllm.model_facts.facts import ModelFacts
from minivllm.worker.worker import Worker

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, *["-O"] * sys.flags.optimize, "-P", "-m", "minivllm.executor.worker_process")
GRACE_SECONDS = 3.0
"""How long workers may take to end by themselves."""
EXIT_SECONDS = 0.3
"""How long to wait for the status of a worker whose socket has closed."""


class WorkerGroup:
    """Worker processes, the ring to them, and the thread that listens to them."""

    def __init__(self, config: EngineConfig, transfers: TransferInbox, command: Sequence[str]) -> None:
        self._transfers = transfers
        self.size = size = config.tensor_parallel_size
        self.dead_error: MinivllmError | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._ring = RingWriter(size)
        self._lock = threading.Lock()
        self._outputs: deque[Future[ModelRunnerOutput]] = deque()
        self._calls: deque[tuple[list[Answer | None], Future[list[Answer]]]] = deque()
        self._tell: Callable[[MinivllmError], None] = lambda error: None
        self._is_closing = False
        self._listener = threading.Thread(target=self._listen, name="workers", daemon=True)
        segment = open_segment(size) if size > 1 and config.custom_all_reduce else None
        self._directory = tempfile.TemporaryDirectory(prefix="minivllm-")
        try:
            for rank in range(size):
                self._start(rank, config, command, segment)
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in [] if segment is None else segment_descriptors(segment):
                os.close(descriptor)  # the workers have theirs
        self._listener.start()

    def _start(self, rank: int, config: EngineConfig, command: Sequence[str], segment: Segment | None) -> None:
        own, theirs = socket.socketpair()
        channel = Channel(own, FromWorker)
        self._channels.append(channel)
        close_in_children(channel.fileno())
        descriptors = (theirs.fileno(), *self._ring.descriptors_of(rank))
        shared = [] if segment is None else segment_descriptors(segment)
        # Ctrl-C goes to the whole process group: a worker begins with it blocked, until it can ignore it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FRONTEND_SIGNALS)
        try:
            process = subprocess.Popen(
                [*command, *map(str, descriptors), str(rank), str(self.size)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the command's own output is on 1
                pass_fds=(*descriptors, *shared),
                env=_environment(self.size),
            )
            self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        start = Start(
            config=config,
            rank=rank,
            size=self.size,
            log_level=logging.getLogger("minivllm").getEffectiveLevel(),
            segment=segment,
            rendezvous=f"{self._directory.name}/ranks" if self.size > 1 and segment is None else None,
        )
        try:
            channel.send(start)
        except OSError:
            raise EngineDeadError(self._describe_end(rank)) from None

    # -- what the executor does ----------------------------------------------------------------------------------

    def step(self, record: Step) -> Future[ModelRunnerOutput]:
        """Have all workers run a step. Raises EngineDeadError."""
        future: Future[ModelRunnerOutput] = Future()
        with self._lock:
            self._raise_if_dead()
            self._outputs.append(future)
        self.write(record)
        return future

    def call(self, method: str, args: Sequence[Any]) -> list[Answer]:
        """Call a method of all workers; their answers in order of rank. Raises EngineDeadError."""
        future: Future[list[Answer]] = Future()
        with self._lock:
            self._raise_if_dead()
            self._calls.append(([None] * self.size, future))
        self.write(Call(method, list(args)))
        return future.result()

    def write(self, record: Step | Masks | Call | Stop) -> None:
        """Append a record to the ring. Raises EngineDeadError if it is full and a worker dies."""
        try:
            self._ring.write(msgspec.msgpack.encode(record), [channel.fileno() for channel in self._channels])
        except PeerGone:
            self._listener.join()
            self._raise_if_dead()
            raise

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """See Executor."""
        with self._lock:
            self._tell = tell

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error

    # -- listening -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Until one worker ends: take in what all of them say."""
        poll, ranks = select.poll(), {channel.fileno(): rank for rank, channel in enumerate(self._channels)}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                rank = ranks[descriptor]
                try:
                    messages = self._channels[rank].receive()
                except msgspec.MsgspecError as error:
                    messages = [Died(ErrorInfo.of(error))]
                for message in [None] if messages is None else messages:
                    if message is None or isinstance(message, Died):
                        self._die(rank, message)
                        return
                    self._take(rank, message)

    def _take(self, rank: int, message: Output | Answer | Report | Log) -> None:
        if isinstance(message, Log):
            message.handle()
        elif isinstance(message, Report):
            self._transfers.put(message.output)
        elif isinstance(message, Output):
            with self._lock:
                future = self._outputs.popleft()
            future.set_result(message.output)
        else:
            with self._lock:
                answers, waiting = next(call for call in self._calls if call[0][rank] is None)
                answers[rank] = message
                given = [answer for answer in answers if answer is not None]
                if len(given) == self.size:
                    self._calls.popleft()
            if len(given) == self.size:
                waiting.set_result(given)

    def _die(self, rank: int, message: Died | None) -> None:
        """The first worker has ended: so does the group."""
        if self._is_closing:
            return
        # One that was killed makes others fail which waited for it: theirs is not the reason.
        deadline = time.monotonic() + EXIT_SECONDS
        killed = self._killed_rank()
        while killed is None and time.monotonic() < deadline and self.processes[rank].poll() is None:
            time.sleep(0.005)
            killed = self._killed_rank()
        if killed is not None or message is None:
            error: MinivllmError = EngineDeadError(self._describe_end(rank if killed is None else killed))
        else:
            error = message.error.exception(f"worker of rank {rank}")
        for process in self.processes:
            process.kill()
        with self._lock:
            self.dead_error = error
            waiting: list[Future[Any]] = [*self._outputs, *(future for _, future in self._calls)]
            tell = self._tell
        for future in waiting:
            future.set_exception(error)
        self._transfers.fail(error)
        tell(error)

    def _killed_rank(self) -> int | None:
        return next((rank for rank, process in enumerate(self.processes) if (process.poll() or 0) < 0), None)

    def _describe_end(self, rank: int) -> str:
        try:
            status = self.processes[rank].wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        return describe_exit(f"worker of rank {rank}", status)

    def close(self) -> None:
        """End the workers, after what they were given. Nothing is left of them. The last call."""
        self._is_closing = True
        if self.dead_error is None and len(self.processes) == self.size:
            try:
                self._ring.write(msgspec.msgpack.encode(Stop()), [channel.fileno() for channel in self._channels])
                deadline = time.monotonic() + GRACE_SECONDS
                for process in self.processes:
                    process.wait(max(0.0, deadline - time.monotonic()))
            except (PeerGone, subprocess.TimeoutExpired):
                pass
        for process in self.processes:
            process.kill()
            process.wait()
        if self._listener.ident is not None:
            self._listener.join()
        for channel in self._channels:
            forget_descriptor(channel.fileno())
            channel.close()
        self._ring.close()
        self._directory.cleanup()


class MultiprocExecutor:
    """One worker process per rank. Loads, sizes and warms them up; all ranks get the smallest cache of any.

    Raises what a worker raises while it loads: ConfigError, ModelError, or EngineDeadError that names the rank.
    """

    def __init__(self, config: EngineConfig, facts: ModelFacts, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.vocab_size = facts.vocab_size
        self.transfers = TransferInbox()
        self._group = WorkerGroup(config, self.transfers, command)
        self._close = weakref.finalize(self, self._group.close)
        self.pids = [process.pid for process in self._group.processes]
        try:
            self.collective("load_model")
            sized: list[list[GroupSpec]] = self.collective("size_cache")
            counts = [min(group.num_blocks for group in groups) for groups in zip(*sized)]
            self.block_bytes = sum(group.block_bytes for groups in sized for group in groups)
            self.collective("initialize_pools", counts, self.block_bytes)
        except BaseException:
            self.shutdown()
            raise
        self.kv_groups: Sequence[GroupSpec] = [
            replace(group, num_blocks=count) for group, count in zip(sized[0], counts)
        ]

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        future = self._group.step(Step(step, token_masks is not None))
        if token_masks is not None:
            self._group.write(Masks(token_masks()))
        return future

    def collective(self, method: str, *args: Any) -> list[Any]:
        function = inspect.getattr_static(Worker, method)
        annotation: Any = inspect.signature(_plain(function), eval_str=True).return_annotation
        results = []
        for answer in self._group.call(method, args):
            if answer.error is not None:
                raise answer.error.exception()
            results.append(msgspec.convert(answer.value, annotation))
        return results

    def num_recompilations(self) -> int:
        return max(self.collective("num_recompilations"))

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        self._group.when_dead(tell)

    def shutdown(self) -> None:
        self._close()


def _plain(function: Any) -> Any:
    return function.fget if isinstance(function, property) else function


def _environment(size: int) -> dict[str, str]:
    """Of a worker: this one's, with the places modules come from, and its share of the cores."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    if size > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size)))
    return environment
