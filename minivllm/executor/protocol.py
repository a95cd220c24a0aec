"""What the engine core asks of its workers, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks


class PendingOutput(Protocol):
    """Results of a step that may still be running."""

    def result(self) -> ModelRunnerOutput:
        """Wait for them. Raises what the workers raised."""


class Executor(Protocol):
    """What the engine core asks of its workers, wherever they are."""

    num_blocks: int
    vocab_size: int
    """Width of the logits."""

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        """Run one step on all workers; the output is that of the last one. Steps run in the order of these calls, also
        if the next one comes before the last one's result was asked for.

        token_masks: waits for the masks of the step, which are computed while the model runs; called before sampling.
        """

    def collective(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, after the steps that were given to them; the results in order of rank. Raises
        RequestError if args do not fit."""

    def num_recompilations(self) -> int:
        """Regions that were compiled after warm-up."""

    def shutdown(self) -> None:
        """Release the workers and their memory."""
