"""An executor without a model, for an engine core whose scheduler, messages and errors are what matters."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from minivllm.config import CacheConfig, EngineConfig, SchedulerConfig
from minivllm.errors import MinivllmError
from minivllm.executor.protocol import FinishedStep, PendingOutput
from minivllm.kv_cache.specs import one_group
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks


def simulated_config(scheduler: SchedulerConfig | None = None, **settings: Any) -> EngineConfig:
    """The configuration of an engine without a model. settings: of EngineConfig."""
    defaults: dict[str, Any] = {
        "model": "simulated",
        "model_path": "/",
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "enforce_eager": True,
        "cache": CacheConfig(),
        "scheduler": scheduler or SchedulerConfig(),
    }
    return EngineConfig(**{**defaults, **settings})


class SimulatedExecutor:
    """An ``Executor`` whose only worker is a function. A step has run when ``execute_model`` returns.

    run: from a step to what it samples. num_blocks: of the KV cache, whose blocks have the size that config
    says. vocab_size: width of the logits. calls: of ``collective``, which are noted, and do nothing.
    """

    def __init__(
        self,
        config: EngineConfig,
        run: Callable[[SchedulerOutput], ModelRunnerOutput],
        num_blocks: int,
        vocab_size: int,
    ) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.transfers = TransferInbox()
        self.pids: Sequence[int] = [os.getpid()]
        self.kv_groups = [one_group(1, config.cache.block_size, num_blocks=num_blocks)]
        self.block_bytes: Sequence[int] = [group.block_bytes for group in self.kv_groups]
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._run = run

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        return FinishedStep(self._run(step))

    def collective(self, method: str, *args: Any) -> list[Any]:
        self.calls.append((method, args))
        return [None]

    def num_recompilations(self) -> int:
        return 0

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """Its worker lives as long as it."""

    def shutdown(self) -> None:
        """Nothing to release."""
