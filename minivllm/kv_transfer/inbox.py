"""Reports of workers on transfers, as messages that wake the engine core, so no thread polls."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue

import msgspec

from minivllm.errors import MinivllmError


class KVConnectorOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a connector's worker side on finished transfers. rank: of the worker. A transfer is over
    when every rank has reported it. part: which of several connectors reports.

    finished_recving: transfer id of each load that has ended -> how many of its blocks, from the first one
    on, hold what they should; from here on nothing writes into any of them. finished_sending: requests that
    have ended, of whose blocks nothing is read any longer.
    """

    rank: int = 0
    part: int = 0
    finished_recving: dict[str, int] = msgspec.field(default_factory=dict)
    finished_sending: list[str] = msgspec.field(default_factory=list)


class TransferInbox:
    """Written by the workers' threads, read by the thread that drives the core.
    wake: called after every report."""

    def __init__(self) -> None:
        self._reports: SimpleQueue[KVConnectorOutput] = SimpleQueue()
        self._error: MinivllmError | None = None
        self.wake: Callable[[], None] = lambda: None

    def put(self, report: KVConnectorOutput) -> None:
        self._reports.put(report)
        self.wake()

    def fail(self, error: MinivllmError) -> None:
        """A worker has died: there are no more reports, and a caller of ``take`` gets this error."""
        self._error = error
        self.put(KVConnectorOutput())

    def take(self, may_wait: bool = False) -> list[KVConnectorOutput]:
        """All reports that are there. may_wait: wait for the first one. Raises what ``fail`` was given."""
        if self._error is not None:
            raise self._error
        reports = [self._reports.get()] if may_wait else []
        while not self._reports.empty():
            try:
                reports.append(self._reports.get_nowait())
            except Empty:
                break
        if self._error is not None:
            raise self._error
        return reports
