"""The executor of rank 0, which tells the others what its own worker does, and what they do with that."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from minivllm.config import EngineConfig
from minivllm.distributed.gloo import GlooCommunicator
from minivllm.distributed.other_workers import OtherWorkers
from minivllm.engine_process.torchrun.records import FromFirst
from minivllm.errors import EngineDeadError, MinivllmError
from minivllm.executor.multiproc import results_of
from minivllm.executor.protocol import FinishedStep, PendingOutput, check_arguments, start_workers
from minivllm.executor.records.child_reports import ErrorInfo
from minivllm.executor.records.records import Answer, Call, Masks, Step
from minivllm.families.makers.registry import load_family
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks
from minivllm.specs.facts import ModelFacts
from minivllm.worker.worker import Worker


class Rank:
    """One process's worker, and its way to the others."""

    def __init__(self, config: EngineConfig, facts: ModelFacts, rank: int, size: int) -> None:
        if config.family is not None:
            load_family(config.family)
        self.communicator = GlooCommunicator(rank, size)
        self._worker = Worker(
            config, facts, others=OtherWorkers(communicator=self.communicator if size > 1 else None)
        )
        self._decoder = msgspec.msgpack.Decoder(FromFirst)
        self._num_steps = 0

    def tell(self, record: FromFirst) -> None:
        """Rank 0: have all others hear of it."""
        self.communicator.broadcast(msgspec.msgpack.encode(record))

    def hear(self) -> FromFirst:
        """Every other rank: wait for what rank 0 tells. Raises EngineDeadError if that has gone."""
        try:
            record: FromFirst = self._decoder.decode(self.communicator.broadcast(None))
        except RuntimeError as error:
            raise EngineDeadError(f"Rank 0 has gone, or another rank: {error}") from None
        return record

    def step(self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None) -> ModelRunnerOutput:
        """Run one. Raises EngineDeadError, on all ranks, if they have not sampled alike."""
        output = self._worker.launch(step, token_masks).result()
        self._num_steps += 1
        digest = float(zlib.crc32(msgspec.msgpack.encode(output.sampled_token_ids)))
        largest, smallest = self.communicator.largest([digest, -digest])
        if largest != -smallest:
            raise EngineDeadError(
                f"In step {self._num_steps} of the engine the ranks have not sampled the same tokens. All "
                "must sample "
                "alike: look for a logits processor that does not depend on its arguments alone, or for "
                "broken memory."
            )
        return output

    def call(self, call: Call) -> list[Answer]:
        """Call a method of the worker; the answers of all ranks."""
        try:
            found: Any = getattr(self._worker, call.method)
            answer = Answer(found(*check_arguments(found, call.args)) if callable(found) else found)
        except MinivllmError as error:
            answer = Answer(error=ErrorInfo.of(error))
        answers = self.communicator.gather(msgspec.msgpack.encode(answer))
        return [msgspec.msgpack.decode(one, type=Answer) for one in answers]

    def follow(self) -> FromFirst:
        """Do what rank 0 does, until something is over; that."""
        while True:
            record = self.hear()
            if isinstance(record, Step):
                self.step(record.step, self._hear_masks if record.has_masks else None)
            elif isinstance(record, Call):
                self.call(record)
            else:
                return record

    def _hear_masks(self) -> TokenMasks:
        record = self.hear()
        assert isinstance(record, Masks), "rank 0 tells them right behind their step"
        return record.masks

    def close(self) -> None:
        self._worker.leave_builds()
        self.communicator.close()


class TorchrunExecutor:
    """An ``Executor`` for the engine core of rank 0. Loads, sizes and warms up the workers of all ranks."""

    def __init__(self, config: EngineConfig, rank: Rank, facts: ModelFacts) -> None:
        self.config = config
        self._rank = rank
        self.vocab_size = facts.vocab_size
        self.transfers = TransferInbox()
        self.pids: Sequence[int] = [os.getpid()]
        self.kv_groups: Sequence[GroupSpec]
        self.block_bytes: Sequence[int]
        self.kv_groups, self.block_bytes = start_workers(self.collective)

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        self._rank.tell(Step(step, token_masks is not None))
        return FinishedStep(
            self._rank.step(step, None if token_masks is None else lambda: self._tell_masks(token_masks()))
        )

    def _tell_masks(self, masks: TokenMasks) -> TokenMasks:
        self._rank.tell(Masks(masks))
        return masks

    def collective(self, method: str, *args: Any) -> list[Any]:
        self._rank.tell(call := Call(method, list(args)))
        return results_of(method, self._rank.call(call))

    def num_recompilations(self) -> int:
        return max(self.collective("num_recompilations"))

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """Nothing to tell: torchrun ends all ranks when one ends."""

    def shutdown(self) -> None:
        """The client of every rank closes its own."""
