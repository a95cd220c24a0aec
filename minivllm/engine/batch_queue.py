"""The steps in flight: scheduled and handed to the workers, their results not consumed yet.

One place makes a synchronous engine, two make async scheduling: while the workers run step N, step N + 1 is scheduled
and waits for them. (The batch queue of vLLM V1, which pipeline parallelism uses with one place per stage.)
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from minivllm.messages import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from minivllm.executor.protocol import PendingOutput


class BatchQueue:
    """First in, first out: results are consumed in the order of their schedules.

    That, and workers that run their steps in order, is all that makes blocks safe to reuse. A request may end while a
    later step that computes it once more is on its way; its blocks are free at once, and whoever gets them does so in a
    step after that one, so that its own keys and values are written over whatever the late step left behind.
    """

    def __init__(self, depth: int) -> None:
        """depth: how many steps may be in flight at the same time, at least 1."""
        self.depth = depth
        self._steps: deque[tuple[SchedulerOutput, PendingOutput]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def has_room(self) -> bool:
        return len(self._steps) < self.depth

    def put(self, step: SchedulerOutput, pending: PendingOutput) -> None:
        """Add a step that the workers have been given."""
        self._steps.append((step, pending))

    def take(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The oldest step with its results, which are waited for. Raises what the workers raised."""
        step, pending = self._steps.popleft()
        return step, pending.result()
