"""Where workers live. Here: one worker in the engine's own process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minivllm.config import EngineConfig
from minivllm.executor.remote_calls import check_arguments
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks
from minivllm.models.decoder_config import DecoderConfig
from minivllm.worker.worker import Worker


class Executor(Protocol):
    """What the engine core asks of its workers, wherever they are."""

    num_blocks: int
    vocab_size: int
    """Width of the logits."""

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> ModelRunnerOutput:
        """Run one step on all workers and return the output of the last one.

        token_masks: waits for the masks of the step, which are computed while the model runs; called before sampling.
        """

    def collective(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker; their results in order of rank. Raises RequestError if args do not fit."""

    def num_recompilations(self) -> int:
        """Regions that were compiled after warm-up."""

    def shutdown(self) -> None:
        """Release the workers and their memory."""


class UniProcExecutor:
    """Loads, sizes and warms up one worker."""

    def __init__(self, config: EngineConfig, decoder_config: DecoderConfig) -> None:
        self._worker: Worker | None = Worker(config, decoder_config)
        self._worker.load_model()
        self.vocab_size = decoder_config.vocab_size
        self.num_blocks = self._worker.num_cache_blocks()
        self._worker.initialize(self.num_blocks)

    @property
    def worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("The executor was shut down.")
        return self._worker

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> ModelRunnerOutput:
        return self.worker.execute(step, token_masks)

    def collective(self, method: str, *args: Any) -> list[Any]:
        function = getattr(self.worker, method)
        return [function(*check_arguments(function, args))]

    def num_recompilations(self) -> int:
        return self.worker.num_recompilations

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.wait_for_builds()
