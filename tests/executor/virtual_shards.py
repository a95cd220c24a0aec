"""All ranks of an engine as threads of one process: the reference that real worker processes must equal bit by bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

import msgspec
from torch import Tensor

from minivllm import LLM, EngineArgs
from minivllm.config import EngineConfig
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.other_workers import OtherWorkers
from minivllm.distributed.shared_links import SharedLinks
from minivllm.distributed.stage import Stage
from minivllm.engine.core import EngineCore
from minivllm.engine.resolve import resolve
from minivllm.engine_process.client import InProcessClient
from minivllm.errors import MinivllmError
from minivllm.executor.protocol import PendingOutput, call_method, start_workers
from minivllm.frontend.llm_engine import LLMEngine, load_model_tokenizer
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks
from minivllm.model_facts.facts import ModelFacts
from minivllm.worker.worker import Worker


class ThreadCommunicator(Communicator):
    """places: two lists with room for every rank, which alternate."""

    def __init__(self, rank: int, barrier: threading.Barrier, places: Sequence[list[Any]]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._places, self._turn = barrier, places, 0

    def exchange(self, x: Tensor) -> list[Tensor]:
        places = self._places[self._turn]
        self._turn = 1 - self._turn
        places[self.rank] = x.clone()
        self._barrier.wait(60)
        return list(places)


class VirtualShards:
    """An ``Executor``. Every step, all ranks of the last stage must give the very same output."""

    def __init__(self, config: EngineConfig, facts: ModelFacts) -> None:
        self._size, num_stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self.vocab_size, self.transfers = facts.vocab_size, TransferInbox()
        self.pids = [os.getpid()] * config.num_workers
        self._shared = SharedLinks(self._size, num_stages)
        self._barriers = [threading.Barrier(self._size) for _ in range(num_stages)]
        self._threads = [ThreadPoolExecutor(1) for _ in range(config.num_workers)]
        self.workers = []
        for number, barrier in enumerate(self._barriers):
            places: list[list[Any]] = [[None] * self._size, [None] * self._size]
            for place in range(self._size):
                communicator = ThreadCommunicator(place, barrier, places) if self._size > 1 else None
                stage = Stage(number, num_stages, self._shared.links(len(self.workers)))
                self.workers.append(
                    Worker(config, facts, self.transfers.put, OtherWorkers(communicator=communicator, stage=stage))
                )
        self.kv_groups: Sequence[GroupSpec]
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
        size = self._size

        class Pending:
            def result(self) -> ModelRunnerOutput:
                wait(launched[-size:], 120, FIRST_EXCEPTION)
                for future in launched:
                    if future.done():
                        future.result()
                first, *others = [future.result().result() for future in launched[-size:]]
                for other in others:
                    assert msgspec.json.encode(other) == msgspec.json.encode(first)
                return first

        return Pending()

    def _release_all(self) -> None:
        """One rank has failed: those that wait for it fail too."""
        for barrier in self._barriers:
            barrier.abort()
        for rank in range(len(self.workers)):
            links = self._shared.links(rank)
            for link in [links.source, *links.tokens]:
                if link is not None:
                    os.eventfd_write(link[1], 1000)

    def collective(self, method: str, *args: Any) -> list[Any]:
        return [future.result(120) for future in self._submit(lambda worker: call_method(worker, method, args))]

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


def virtual_llm(**arguments: Any) -> LLM:
    args = EngineArgs(**arguments)
    config, facts = resolve(args)
    client = InProcessClient(EngineCore(config, VirtualShards(config, facts)), facts.vocab_size, facts.eos_token_ids)
    return LLM(engine=LLMEngine(client, load_model_tokenizer(args, config.model_path, config.load_format)))
