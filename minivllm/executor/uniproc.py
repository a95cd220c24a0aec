"""One worker in the engine's own process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from minivllm.config import EngineConfig
from minivllm.distributed.expert_group import ExpertGroup
from minivllm.distributed.lockstep import EngineSeat
from minivllm.distributed.other_workers import NO_OTHERS, OtherWorkers
from minivllm.distributed.shared_memory import SharedMemoryCommunicator
from minivllm.errors import MinivllmError
from minivllm.executor.protocol import ExecutorContext, PendingOutput, call_method
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import SchedulerOutput, TokenMasks
from minivllm.specs.facts import ModelFacts
from minivllm.worker.worker import Worker

Result = TypeVar("Result")


class UniProcExecutor:
    """Loads, sizes and warms up one worker.

    A GPU computes beside the host anyway: launching a step does not wait for it. On a CPU a step runs beside
    the engine core only in a thread, which async scheduling gives to the worker: everything that touches the
    worker then happens there, in order.
    """

    def __init__(self, config: EngineConfig, facts: ModelFacts, seat: EngineSeat | None = None) -> None:
        """seat: among engines that share experts."""
        has_thread = config.async_scheduling and config.device == "cpu"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker") if has_thread else None
        self._worker: Worker | None = None
        self.transfers = TransferInbox()
        self.pids: Sequence[int] = [os.getpid()]
        self.config = config
        self.vocab_size = facts.vocab_size
        try:
            self.kv_groups: Sequence[GroupSpec] = self._call(self._load, config, facts, seat)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def start(cls, context: ExecutorContext) -> UniProcExecutor:
        """See EXECUTORS."""
        return cls(context.config, context.facts, context.seat)

    def _load(self, config: EngineConfig, facts: ModelFacts, seat: EngineSeat | None) -> list[GroupSpec]:
        self._worker = Worker(config, facts, self.transfers.put, self._meet_others(seat))
        self._worker.load_model()
        groups = self._worker.size_cache()
        self.block_bytes: Sequence[int] = [group.block_bytes for group in groups]
        self._worker.initialize(groups, self.block_bytes)
        return groups

    def _meet_others(self, seat: EngineSeat | None) -> OtherWorkers:
        if seat is None:
            return NO_OTHERS
        return OtherWorkers(group=ExpertGroup(SharedMemoryCommunicator(seat.rank, *seat.segment), 1))

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("The executor was shut down.")
        return self._worker

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        if self._thread is None:
            return self.worker.launch(step, token_masks)
        return self._thread.submit(self.worker.execute, step, token_masks)

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [self._call(call_method, self.worker, method, args)]

    def num_recompilations(self) -> int:
        return self.worker.num_recompilations

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """Nothing to tell: this worker dies with the engine core."""

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.leave_builds()
            worker.stop_transfers()

    def _call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call something that touches the worker where the worker lives."""
        if self._thread is None:
            return function(*args)
        return self._thread.submit(function, *args).result()
