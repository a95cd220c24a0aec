"""Workers in processes of their own, which all read one broadcast ring:
the engine core writes each step once.

``WorkerGroup`` owns the processes. A thread listens to the workers and notices when one ends: the first
death ends the group, and every call that waits for it, now or later, raises the reason.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import select
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import msgspec

from minivllm.config import EngineConfig
from minivllm.distributed.lockstep import EngineSeat
from minivllm.distributed.secure_sockets import Network
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.executor.local_workers import WORKER_COMMAND, LocalWorkers
from minivllm.executor.protocol import ExecutorContext, PendingOutput, start_workers
from minivllm.executor.records.agreement import Agreement
from minivllm.executor.records.broadcast_ring import PeerGone, RingWriter
from minivllm.executor.records.child_reports import ErrorInfo, Log, describe_exit
from minivllm.executor.records.records import (
    Answer,
    Call,
    Channel,
    Died,
    FromWorker,
    Listening,
    Masks,
    Output,
    Peers,
    Probe,
    Report,
    Sampled,
    Step,
    Stop,
    Whereabouts,
    output_rank,
)
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks
from minivllm.profiling.spans import span
from minivllm.specs.facts import ModelFacts
from minivllm.worker.worker import Worker

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3.0
"""How long workers may take to end by themselves."""
EXIT_SECONDS = 0.3
"""How long to wait for the status of a worker whose socket has closed,
and for those that seem to hang to say where."""
HANGING_SHARE = 0.75
"""Of heartbeat_timeout: a hanging worker is named before the frontend takes the whole engine for hung."""


class WorkerHandle(Protocol):
    """The process of a worker, wherever it runs: what subprocess.Popen has."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class OtherNodes(Protocol):
    """The workers of other hosts, which look like those of this one. They have the last ranks."""

    @property
    def network(self) -> Network: ...

    @property
    def channels(self) -> Sequence[Channel]: ...

    @property
    def processes(self) -> Sequence[WorkerHandle]: ...

    def start(self, ring: RingWriter, reader: int) -> None:
        """Have them started, and all records brought to them.
        reader: whose places in the ring are free for that."""

    def close(self) -> None:
        """Release what leads to them. The last call."""


Heard = Output | Answer | Report | Log | Whereabouts | Sampled | Listening


class WorkerGroup:
    """Worker processes, the ring to them, and the thread that listens to them. nodes: where others of them
    are. seat: of the engine among those that share experts."""

    def __init__(
        self,
        config: EngineConfig,
        transfers: TransferInbox,
        command: Sequence[str],
        nodes: OtherNodes | None,
        seat: EngineSeat | None,
    ) -> None:
        self._transfers = transfers
        self.size = size = config.num_workers
        self._names = config.worker_names
        self.dead_error: MinivllmError | None = None
        self._nodes = nodes
        self._addresses: dict[int, str] = {}
        self._lock = threading.Lock()
        self._outputs: deque[Future[ModelRunnerOutput]] = deque()
        self._calls: deque[tuple[list[Answer | None], Future[list[Answer]]]] = deque()
        self._tell: Callable[[MinivllmError], None] = lambda error: None
        self._patience = HANGING_SHARE * config.heartbeat_timeout
        self._hung_error: MinivllmError | None = None
        self._whereabouts: dict[int, Whereabouts] = {}
        self._is_closing = False
        self._listener = threading.Thread(target=self._listen, name="workers", daemon=True)
        network = None if nodes is None else nodes.network
        try:
            self.local = LocalWorkers(config, FromWorker, command, network, int(nodes is not None), seat)
        except BaseException:
            if nodes is not None:
                nodes.close()
            raise
        self._ring = self.local.ring
        self._agreement = Agreement(self._ring, size, output_rank(config), len(self.local.ranks))
        self._processes: list[WorkerHandle] = [*self.local.processes]
        self._channels = [*self.local.channels]
        if nodes is not None:
            self._processes += nodes.processes
            self._channels += nodes.channels
            nodes.start(self._ring, len(self.local.ranks))
        self._listener.start()

    # -- what the executor does --------------------------------------------------------------------

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
        """The output of a step. Raises EngineDeadError,
        also if the step takes so long that a worker must hang."""
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
            + (
                f"It was here:\n{found[rank].stack.rstrip()}"
                if rank in found
                else "It could not say where it was."
            )
        )
        self._processes[rank].kill()

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """See Executor."""
        with self._lock:
            self._tell = tell

    def _raise_if_dead(self) -> None:
        if self.dead_error is not None:
            raise self.dead_error

    # -- listening ---------------------------------------------------------------------------------

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

    def _take(self, rank: int, message: Heard) -> None:
        """Raises EngineDeadError if the ranks have not sampled alike."""
        if isinstance(message, Log):
            message.handle()
        elif isinstance(message, Report):
            self._transfers.put(message.output)
        elif isinstance(message, Whereabouts):
            self._whereabouts[rank] = message
        elif isinstance(message, Sampled):
            self._agreement.note(rank, message.step, message.digest)
        elif isinstance(message, Listening):
            self._addresses[rank] = message.address
            if len(self._addresses) == self.size:
                for channel in self._channels:
                    with contextlib.suppress(OSError):  # its end will be heard of next
                        channel.send(Peers(self._addresses))
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
        while killed is None and time.monotonic() < deadline and self._processes[rank].poll() is None:
            time.sleep(0.005)
            killed = self._killed_rank()
        error: MinivllmError
        if self._hung_error is not None:
            error = self._hung_error
        elif killed is not None or message is None:
            error = EngineDeadError(self._describe_end(rank if killed is None else killed))
        else:
            error = message.error.exception(self._names[rank])
        for process in self._processes:
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
        return next((rank for rank, process in enumerate(self._processes) if (process.poll() or 0) < 0), None)

    def _describe_end(self, rank: int) -> str:
        try:
            status = self._processes[rank].wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = None
        return describe_exit(self._names[rank], status)

    def close(self) -> None:
        """End the workers, after what they were given. Nothing is left of them. The last call."""
        self._is_closing = True
        if self.dead_error is None:
            try:
                self._ring.write(
                    msgspec.msgpack.encode(Stop()), [channel.fileno() for channel in self._channels]
                )
                deadline = time.monotonic() + GRACE_SECONDS
                for process in self._processes:
                    process.wait(max(0.0, deadline - time.monotonic()))
            except (PeerGone, subprocess.TimeoutExpired):
                pass
        for process in self._processes:
            process.kill()
            process.wait()
        self._listener.join()
        if self._nodes is not None:
            self._nodes.close()
        self.local.close()


class _PendingStep(NamedTuple):
    """A ``PendingOutput``."""

    group: WorkerGroup
    future: Future[ModelRunnerOutput]

    def result(self) -> ModelRunnerOutput:
        return self.group.wait_for(self.future)


class MultiprocExecutor:
    """One worker process per rank. Loads, sizes and warms them up; all ranks get the smallest cache of any.

    nodes: where those of other hosts are. seat: of the engine among those that share experts. Raises what a
    worker raises while it loads: ConfigError, ModelError, or EngineDeadError that names the rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        command: Sequence[str] = WORKER_COMMAND,
        nodes: OtherNodes | None = None,
        seat: EngineSeat | None = None,
    ) -> None:
        self.config = config
        self.vocab_size = facts.vocab_size
        self.transfers = TransferInbox()
        self._group = WorkerGroup(config, self.transfers, command, nodes, seat)
        self._close = weakref.finalize(self, self._group.close)
        self.pids: Sequence[int] = [process.pid for process in self._group.local.processes]
        self.kv_groups: Sequence[GroupSpec]
        self.block_bytes: Sequence[int]
        try:
            self.kv_groups, self.block_bytes = start_workers(self.collective)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def start(cls, context: ExecutorContext) -> MultiprocExecutor:
        """See EXECUTORS."""
        return cls(context.config, context.facts, seat=context.seat)

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        group = self._group
        future = group.step(Step(step, token_masks is not None))
        if token_masks is not None:
            group.write(Masks(token_masks()))
        return _PendingStep(group, future)

    def collective(self, method: str, *args: Any) -> list[Any]:
        return results_of(method, self._group.call(method, args))

    def num_recompilations(self) -> int:
        return max(self.collective("num_recompilations"))

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        self._group.when_dead(tell)

    def shutdown(self) -> None:
        self._close()


def results_of(method: str, answers: Sequence[Answer]) -> list[Any]:
    """What the workers' method returned, in the types that it is annotated with.
    Raises what one of them raised."""
    function: Any = inspect.getattr_static(Worker, method)
    function = function.fget if isinstance(function, property) else function
    annotation = inspect.signature(function, eval_str=True).return_annotation
    results = []
    for answer in answers:
        if answer.error is not None:
            raise answer.error.exception()
        results.append(msgspec.convert(answer.value, annotation))
    return results
