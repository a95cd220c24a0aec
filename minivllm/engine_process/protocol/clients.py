"""What frontends use of an engine, wherever it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Protocol

from minivllm.config import EngineConfig
from minivllm.engine_process.protocol.pixels import PixelAnswers
from minivllm.errors import EngineDeadError
from minivllm.messages import EngineOutput, EngineRequest, SchedulerStats


class EngineClient(Protocol):
    """What frontends use. model_vocab_size: width of the logits.
    eos_token_ids: all ids that end a sequence."""

    config: EngineConfig
    model_vocab_size: int
    eos_token_ids: tuple[int, ...]

    def serve_pixels(self, answers: PixelAnswers) -> None: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    def get_outputs(self) -> list[EngineOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> SchedulerStats: ...

    def reset_prefix_cache(self) -> bool: ...

    def call(self, method: str, *args: Any) -> Any: ...

    def close(self) -> None: ...


class DeathListener(Protocol):
    def __call__(self, error: EngineDeadError, request_ids: Collection[str] | None = None) -> None:
        """An engine has died. request_ids:
        those that died with it, while others serve on or it starts again; None: it is the end."""


class AsyncEngineClient(Protocol):
    """What ``AsyncLLM`` uses. config: of all engines together:
    as many places and tokens of a step as they have.

    dead_error: why none serves any more. num_up: of num_engines, without one that starts again.
    num_restarts: of each.
    """

    config: EngineConfig
    model_vocab_size: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_engines(self) -> int: ...

    @property
    def num_up(self) -> int: ...

    @property
    def num_restarts(self) -> Sequence[int]: ...

    @property
    def dead_error(self) -> EngineDeadError | None: ...

    def serve_pixels(self, answers: PixelAnswers) -> None: ...

    def start(
        self, on_outputs: Callable[[list[EngineOutput]], Awaitable[None]], on_death: DeathListener
    ) -> None: ...

    def add_request(self, request: EngineRequest) -> None: ...

    def abort(self, request_ids: list[str]) -> None: ...

    async def call(self, method: str, *args: Any) -> Any: ...

    async def call_engine(self, index: int, method: str, *args: Any) -> Any: ...

    async def close(self) -> None: ...

    def kill(self) -> None: ...

    def terminate(self) -> None: ...
