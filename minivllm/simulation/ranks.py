"""All ranks of an engine as threads of one process:
what worker processes compute, bit by bit, within a debugger."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import msgspec
from torch import Tensor

from minivllm.config import EngineArgs, EngineConfig
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.expert_group import ExpertGroup
from minivllm.distributed.other_workers import OtherWorkers
from minivllm.distributed.shared_links import SharedLinks
from minivllm.distributed.stage import Stage
from minivllm.engine.core import EngineCore
from minivllm.engine.resolve import resolve
from minivllm.engine_process.client import InProcessClient
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.executor.protocol import PendingOutput, call_method, start_workers
from minivllm.frontend.llm import LLM
from minivllm.frontend.llm_engine import LLMEngine, load_model_tokenizer
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks
from minivllm.specs.facts import ModelFacts
from minivllm.worker.worker import Worker

EXCHANGE_SECONDS, CALL_SECONDS = 60, 120
"""How long a rank waits for the others, and the executor for a rank."""


class ThreadCommunicator(Communicator):
    """Ranks that are threads lay their tensors into a list.

    Two lists alternate: a rank that writes into one has seen that all have written into the other one, and so
    have read what was there before. barrier: for all ranks. lists: two, with room for every rank.
    """

    def __init__(self, rank: int, barrier: threading.Barrier, lists: Sequence[list[Any]]) -> None:
        self.rank = rank
        self.size = barrier.parties
        self._barrier = barrier
        self._lists = lists

    def exchange(self, x: Tensor) -> list[Tensor]:
        given = self._lists[self.num_exchanges % 2]
        self.num_exchanges += 1
        given[self.rank] = x.clone()
        self._barrier.wait(EXCHANGE_SECONDS)
        return list(given)

    def give_up(self) -> None:
        """Another rank has failed: those that wait for it fail too."""
        self._barrier.abort()


def communicators(size: int, kind: Callable[..., Any] = ThreadCommunicator) -> list[Any]:
    """Of so many ranks, each of the class ``kind``, which takes what ThreadCommunicator takes."""
    barrier = threading.Barrier(size)
    lists: list[list[Any]] = [[None] * size, [None] * size]
    return [kind(rank, barrier, lists) for rank in range(size)]


def together(function: Callable[[Any], Any], given: Sequence[Any]) -> list[Any]:
    """Call a function with each of these, all at the same time."""
    with ThreadPoolExecutor(len(given)) as threads:
        return list(threads.map(function, given))


class _PendingStep(NamedTuple):
    """What the ranks of the last stage are about to give. threads: those of these ranks, which alone touch
    their workers."""

    launched: Sequence[Future[PendingOutput]]
    threads: Sequence[ThreadPoolExecutor]

    def result(self) -> ModelRunnerOutput:
        last = self.launched[-len(self.threads) :]
        wait(last, CALL_SECONDS, FIRST_EXCEPTION)
        for future in self.launched:
            if future.done():
                future.result()
        asked = [thread.submit(future.result().result) for thread, future in zip(self.threads, last)]
        first, *others = [future.result() for future in asked]
        expected = msgspec.json.encode(first)
        if any(msgspec.json.encode(other) != expected for other in others):
            raise EngineDeadError("The ranks have not sampled the same tokens in the same way.")
        return first


class VirtualShards:
    """An ``Executor``. Every step, all ranks of the last stage must give the very same output.

    stages: the communicators of each stage, in order of rank; ThreadCommunicators by default.
    """

    def __init__(
        self, config: EngineConfig, facts: ModelFacts, stages: Sequence[Sequence[Communicator]] | None = None
    ) -> None:
        size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self.config = config
        self.vocab_size = facts.vocab_size
        self.transfers = TransferInbox()
        self.pids: Sequence[int] = [os.getpid()] * config.num_workers
        self._size = size
        self._stages = [communicators(size) for _ in range(num_stages)] if stages is None else stages
        self._shared = SharedLinks(size, num_stages)
        self._threads = [ThreadPoolExecutor(1) for _ in range(config.num_workers)]
        self.workers: list[Worker] = []
        for number, ranks in enumerate(self._stages):
            for communicator in ranks:
                stage = Stage(number, num_stages, self._shared.links(len(self.workers)))
                others = OtherWorkers(communicator=communicator if size > 1 else None, stage=stage)
                self.workers.append(Worker(config, facts, self.transfers.put, others))
        self.kv_groups: Sequence[GroupSpec]
        self.block_bytes: Sequence[int]
        self.kv_groups, self.block_bytes = start_workers(self.collective)

    def _submit(self, call: Callable[[Worker], Any]) -> list[Future[Any]]:
        def guarded(worker: Worker) -> Any:
            try:
                return call(worker)
            except MinivllmError:
                raise
            except BaseException:
                self._release_all()
                raise

        return [thread.submit(guarded, worker) for thread, worker in zip(self._threads, self.workers)]

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        masks = None if token_masks is None else token_masks()
        launched = self._submit(lambda worker: worker.launch(step, None if masks is None else lambda: masks))
        return _PendingStep(launched, self._threads[-self._size :])

    def _release_all(self) -> None:
        """One rank has failed: those that wait for it fail too."""
        for ranks in self._stages:
            for communicator in ranks:
                if isinstance(communicator, ThreadCommunicator):
                    communicator.give_up()
        for rank in range(len(self.workers)):
            links = self._shared.links(rank)
            for link in [links.source, *links.tokens]:
                if link is not None:
                    os.eventfd_write(link[1], 1000)

    def collective(self, method: str, *args: Any) -> list[Any]:
        calls = self._submit(lambda worker: call_method(worker, method, args))
        return [future.result(CALL_SECONDS) for future in calls]

    def num_recompilations(self) -> int:
        return max(worker.num_recompilations for worker in self.workers)

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """Threads die with this process."""

    def shutdown(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for worker in self.workers:
            worker.stop_transfers()
        self._shared.close()


def lockstep_workers(args: EngineArgs) -> list[Worker]:
    """The workers of engines that share experts, of one worker each, loaded and warmed up as threads."""
    config, facts = resolve(args)

    def started(communicator: ThreadCommunicator) -> Worker:
        others = OtherWorkers(group=ExpertGroup(communicator, num_workers=1))
        worker = Worker(config, facts, others=others)
        worker.load_model()
        groups = worker.size_cache()
        worker.initialize(groups, [group.block_bytes for group in groups])
        return worker

    return together(started, communicators(args.data_parallel_size))


def virtual_llm(**arguments: Any) -> LLM:
    """An engine of these EngineArgs whose ranks are threads."""
    args = EngineArgs(**arguments)
    config, facts = resolve(args)
    client = InProcessClient(
        EngineCore(config, VirtualShards(config, facts)), facts.vocab_size, facts.eos_token_ids
    )
    return LLM(engine=LLMEngine(client, load_model_tokenizer(args, config.model_path, config.load_format)))
