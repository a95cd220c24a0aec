"""What besides blocks and budget a waiting request may need before it can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minivllm.request import Request


class AdmissionPolicy(Protocol):
    """Asked in every step about each waiting request whose turn it is, in their order.

    A request that may not run yet is set aside: those behind it are asked next, and it keeps its place in the queue.
    """

    def begin_step(self) -> None:
        """The waiting requests of a step are asked about from here on."""
        ...

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        """True if the request may join those that run; a block or two may still be missing afterwards."""
        ...


class AdmitAll(AdmissionPolicy):
    """Nothing else is needed."""

    def begin_step(self) -> None:
        pass

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        return True
