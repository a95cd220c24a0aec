"""Workers in processes of their own, which all read one broadcast ring: the engine core writes each step once.

What lives is held by ``WorkerGroup``. A thread of its own listens to the workers, and learns of their ends: the first
death ends the group, and whoever waits for it, now or later, gets the reason.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from minivllm.compilation.package_builds import close_in_children, forget_descriptor
from minivllm.config import EngineConfig
from minivllm.distributed.shared_links import SharedLinks
from minivllm.errors import EngineDeadError, MinivllmError
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
    Probe,
    Report,
    Start,
    Step,
    Stop,
    Whereabouts,
    output_rank,
)
from minivllm.executor.ring.agreement import Agreement
from minivllm.executor.ring.broadcast_ring import PeerGone, RingWriter
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks
from minivllm.model_facts.facts import ModelFacts
from minivllm.profiling.spans import span
from minivllm.worker.worker import Worker

logger = logging.getLogger(__name__)

WORKER_COMMAND = (sys.executable, *["-O"] * sys.flags.optimize, "-P", "-m", "minivllm.executor.worker_process")
GRACE_SECONDS = 3.0
"""How long workers may take to end by themselves."""
EXIT_SECONDS = 0.3
"""How long to wait for the status of a worker whose socket has closed, and for those that seem to hang to say where."""
HANGING_SHARE = 0.75
"""Of heartbeat_timeout: a hanging worker is named before the frontend takes the whole engine for hung."""


class WorkerGroup:
    """Worker processes, the ring to them, and the thread that listens to them."""

    def __init__(self, config: EngineConfig, transfers: TransferInbox, command: Sequence[str]) -> None:
        self._transfers = transfers
        self.size = size = config.num_workers
        self._names = config.worker_names
        self.dead_error: MinivllmError | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Channel] = []
        self._ring = RingWriter(size)
        self._agreement = Agreement(self._ring, size, output_rank(config))
        self._lock = threading.Lock()
        self._outputs: deque[Future[ModelRunnerOutput]] = deque()
        self._calls: deque[tuple[list[Answer | None], Future[list[Answer]]]] = deque()
        self._tell: Callable[[MinivllmError], None] = lambda error: None
        self._patience = HANGING_SHARE * config.heartbeat_timeout
        self._hung_error: MinivllmError | None = None
        self._whereabouts: dict[int, Whereabouts] = {}
        self._is_closing = False
        self._listener = threading.Thread(target=self._listen, name="workers", daemon=True)
        start = Start(config=config, rank=0, size=size, log_level=logging.getLogger("minivllm").getEffectiveLevel())
        shared = SharedLinks(config.tensor_parallel_size, config.pipeline_parallel_size, not config.custom_all_reduce)
        try:
            for rank in range(size):
                own = {
                    "segment": shared.segment(rank),
                    "rendezvous": shared.rendezvous(rank),
                    "links": shared.links(rank),
                    "shared": shared.descriptors(rank),
                }
                self._start(msgspec.structs.replace(start, rank=rank, **own), command)
        except BaseException:
            self.close()
            raise
        finally:
            shared.close()
        self._listener.start()

    def _start(self, start: Start, command: Sequence[str]) -> None:
        own, theirs = socket.socketpair()
        channel = Channel(own, FromWorker)
        self._channels.append(channel)
        close_in_children(channel.fileno())
        descriptors = (theirs.fileno(), *self._ring.descriptors_of(start.rank))
        # Ctrl-C goes to the whole process group: a worker begins with it blocked, until it can ignore it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FRONTEND_SIGNALS)
        try:
            process = subprocess.Popen(
                [*command, *map(str, descriptors), str(start.rank), str(self.size)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the command's own output is on 1
                pass_fds=(*descriptors, *start.shared),
                env=_environment(self.size),
            )
            self.processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        try:
            channel.send(start)
        except OSError:
            raise EngineDeadError(self._describe_end(start.rank)) from None

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
        with span("encode"):
            encoded = msgspec.msgpack.encode(record)
        try:
            with span("write"):
                self._ring.write(encoded, [channel.fileno() for channel in self._channels])
        except PeerGone:
            self._listener.join()
            self._raise_if_dead()
            raise

    def wait_for(self, future: Future[ModelRunnerOutput]) -> ModelRunnerOutput:
        """The output of a step. Raises EngineDeadError, also if the step takes so long that a worker must hang."""
        try:
            return future.result(self._patience)
        except TimeoutError:
            self._kill_hanging()
            return future.result()

    def _kill_hanging(self) -> None:
        """The worker for which the others wait; its end will be that of the group."""
        for channel in self._channels:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                channel.send(Probe())
        deadline = time.monotonic() + EXIT_SECONDS
        while len(self._whereabouts) < self.size and time.monotonic() < deadline:
            time.sleep(0.005)
        found = dict(self._whereabouts)
        counts = {rank: (where.num_handed, where.num_exchanges) for rank, where in found.items()}
        rank = min(range(self.size), key=lambda rank: counts.get(rank, (-math.inf, 0)))
        self._hung_error = EngineDeadError(
            f"The {self._names[rank]} hangs: its step has taken {self._patience:g} s, and it was killed; "
            f"heartbeat_timeout sets how long a step may take. "
            + (f"It was here:\n{found[rank].stack.rstrip()}" if rank in found else "It could not say where it was.")
        )
        self.processes[rank].kill()

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """See Executor."""
        with self._lock:
            self._tell = tell

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error

    # -- listening -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Until one worker ends, or samples what others do not: take in what all of them say."""
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
                    try:
                        self._take(rank, message)
                    except EngineDeadError as error:
                        self._die(rank, Died(ErrorInfo.of(error)))
                        return

    def _take(self, rank: int, message: Output | Answer | Report | Log | Whereabouts) -> None:
        """Raises EngineDeadError if the ranks have not sampled alike."""
        if isinstance(message, Log):
            message.handle()
        elif isinstance(message, Report):
            self._transfers.put(message.output)
        elif isinstance(message, Whereabouts):
            self._whereabouts[rank] = message
        elif isinstance(message, Output):
            self._agreement.take(message.output.sampled_token_ids)
            with self._lock:
                future = self._outputs.popleft()
            future.set_result(message.output)
        else:
            self._agreement.check()
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
        error: MinivllmError
        if self._hung_error is not None:
            error = self._hung_error
        elif killed is not None or message is None:
            error = EngineDeadError(self._describe_end(rank if killed is None else killed))
        else:
            error = message.error.exception(self._names[rank])
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
        return describe_exit(self._names[rank], status)

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


class _PendingStep(NamedTuple):
    """A ``PendingOutput``."""

    group: WorkerGroup
    future: Future[ModelRunnerOutput]

    def result(self) -> ModelRunnerOutput:
        return self.group.wait_for(self.future)


class MultiprocExecutor:
    """One worker process per rank. Loads, sizes and warms them up; all ranks get the smallest cache of any.

    Raises what a worker raises while it loads: ConfigError, ModelError, or EngineDeadError that names the rank.
    """

    def __init__(self, config: EngineConfig, facts: ModelFacts, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.vocab_size = facts.vocab_size
        self.transfers = TransferInbox()
        self._group = WorkerGroup(config, self.transfers, command)
        self._close = weakref.finalize(self, self._group.close)
        self.pids: Sequence[int] = [process.pid for process in self._group.processes]
        try:
            self.collective("load_model")
            sized: list[list[GroupSpec]] = self.collective("size_cache")
            counts = [min(group.num_blocks for group in groups) for groups in zip(*sized)]
            self.block_bytes: Sequence[int] = [sum(group.block_bytes for group in groups) for groups in zip(*sized)]
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
        group = self._group
        future = group.step(Step(step, token_masks is not None))
        if token_masks is not None:
            group.write(Masks(token_masks()))
        return _PendingStep(group, future)

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
