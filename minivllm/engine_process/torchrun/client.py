"""What a frontend uses on every rank:
rank 0 has the engine core, and the others do what it does, call by call.

Each rank makes the same calls (SPMD). Deciding on one rank only is what keeps them together: schedules depend
on the clock, so ranks that decide by themselves can come apart. (vLLM's "external_launcher" lets every rank
schedule.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from minivllm.config import EngineArgs
from minivllm.engine.administration import Administration
from minivllm.engine.core import EngineCore
from minivllm.engine.resolve import resolve
from minivllm.engine_process.torchrun.executor import Rank, TorchrunExecutor
from minivllm.engine_process.torchrun.records import Added, Done, Stepped, place_of
from minivllm.errors import EngineDeadError, MinivllmError, RequestError
from minivllm.executor.records.child_reports import ErrorInfo
from minivllm.messages import EngineOutput, EngineRequest, SchedulerStats

Value = TypeVar("Value")


class TorchrunClient:
    """An ``EngineClient``. Raises ConfigError, on every rank, if torchrun did not start as many as there are
    workers, and what loading the model raises."""

    def __init__(self, args: EngineArgs) -> None:
        self._number, size = place_of(args)
        self.config, facts = resolve(args.for_another_process())
        self.model_vocab_size = facts.vocab_size
        self.eos_token_ids = tuple(facts.eos_token_ids)
        self._rank: Rank | None = Rank(self.config, facts, self._number, size)
        self._core: EngineCore | None = None
        self._together("start", lambda: self._load(facts))

    def _load(self, facts: Any) -> None:
        self._core = EngineCore(self.config, TorchrunExecutor(self.config, self._live, facts))

    @property
    def _live(self) -> Rank:
        if self._rank is None:
            raise EngineDeadError("The engine is closed: make a new one.")
        return self._rank

    @property
    def _leader(self) -> EngineCore:
        """On rank 0."""
        if self._core is None:
            raise EngineDeadError("The engine is closed: make a new one.")
        return self._core

    def _together(self, name: str, function: Callable[[], Any]) -> Any:
        """Rank 0 calls the function, and all ranks give its result, or raise its error."""
        if self._number == 0:
            try:
                value = function()
            except MinivllmError as error:
                self._live.tell(Done(name, error=ErrorInfo.of(error)))
                raise
            self._live.tell(Done(name, value))
            return value
        done = self._live.follow()
        if not isinstance(done, Done) or done.name != name:
            raise self._apart(name)
        if done.error is not None:
            raise done.error.exception()
        return done.value

    def _apart(self, name: str) -> EngineDeadError:
        return EngineDeadError(
            f"Rank {self._number} has come to {name}, but rank 0 has not: every rank must make the same "
            "calls, with "
            "the same arguments, in the same order."
        )

    def add_request(self, request: EngineRequest) -> None:
        if self._number == 0:
            try:
                self._leader.add_request(request)
            except RequestError as error:
                self._live.tell(Added(request, ErrorInfo.of(error)))
                raise
            self._live.tell(Added(request))
            return
        added = self._live.follow()
        if not isinstance(added, Added):
            raise self._apart("add_request")
        if msgspec.structs.replace(added.request, arrival_time=request.arrival_time) != request:
            raise self._apart("another request")
        if added.error is not None:
            raise added.error.exception()

    def get_outputs(self) -> list[EngineOutput]:
        """One step."""
        if self._number == 0:
            try:
                outputs = self._leader.step()
            except MinivllmError as error:
                self._live.tell(Done("get_outputs", error=ErrorInfo.of(error)))
                raise
            self._live.tell(Stepped(outputs))
            return outputs
        stepped = self._live.follow()
        if isinstance(stepped, Done) and stepped.error is not None:
            raise stepped.error.exception()
        if not isinstance(stepped, Stepped):
            raise self._apart("get_outputs")
        return stepped.outputs

    def abort(self, request_ids: list[str]) -> None:
        self._together("abort", lambda: self._leader.abort_requests(request_ids))

    def has_unfinished_requests(self) -> bool:
        return bool(self._together("has_unfinished_requests", lambda: self._leader.has_unfinished_requests()))

    def stats(self) -> SchedulerStats:
        return msgspec.convert(self.call("stats"), SchedulerStats)

    def reset_prefix_cache(self) -> bool:
        return bool(self.call("reset_prefix_cache"))

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of Administration. Raises RequestError if it refuses."""
        return self._together(method, lambda: Administration(self._leader).call(method, args))

    def close(self) -> None:
        """On every rank. Closing twice is fine."""
        rank, self._rank = self._rank, None
        if rank is None:
            return
        if self._core is not None:
            with contextlib.suppress(RuntimeError):  # another rank has gone
                self._core.shutdown()
        rank.close()
