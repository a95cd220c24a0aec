"""All that a worker knows of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.distributed.communicator import Communicator
from minivllm.distributed.expert_group import ExpertGroup
from minivllm.distributed.stage import Stage


@dataclass(frozen=True, kw_only=True)
class OtherWorkers:
    """How a worker reaches others, as far as there are some. communicator: those that divide the same layers
    with it. stage: which layers these are, if not all. group: the workers of all engines that share
    experts."""

    communicator: Communicator | None = None
    stage: Stage | None = None
    group: ExpertGroup | None = None

    def largest(self, values: Sequence[float]) -> list[float]:
        """See Communicator, of all workers that take every step with this one."""
        everyone = self.communicator if self.group is None else self.group.everyone
        return list(values) if everyone is None else everyone.largest(values)


NO_OTHERS = OtherWorkers()
