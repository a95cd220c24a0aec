"""What the server needs of an engine. ``AsyncLLM`` is one; tests put a scripted one in its place."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.config import EngineConfig
from minivllm.messages import LoRARequest, RecentStep, SchedulerStats
from minivllm.processing.input_processor import PreparedRequest, Prompt
from minivllm.processing.outputs import RequestOutput
from minivllm.sampling_params import PoolingParams, SamplingParams

if TYPE_CHECKING:
    from minivllm.tokenizer.tokenizer import Tokenizer


class AsyncEngine(Protocol):
    """An engine with text at both ends whose requests run beside one another on one event loop."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def has_tokenizer(self) -> bool: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def is_dead(self) -> bool:
        """True once the engine core has died; every further call raises EngineDeadError."""
        ...

    def get_default_sampling_params(self) -> SamplingParams: ...

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special_tokens: bool = False,
    ) -> dict[str, Any]:
        """A conversation as a prompt. Called from one worker thread, as ``prepare`` is. Raises RequestError."""
        ...

    def prepare(
        self,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        lora: LoRARequest | None = None,
        pooling: PoolingParams | None = None,
    ) -> PreparedRequest:
        """Tokenize and validate; nothing runs yet. pooling: the output has an embedding. Raises RequestError."""
        ...

    def generate(
        self, prompt: PreparedRequest, *, deadline: float | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a prepared request. Closing the iterator, or cancelling its reader, aborts the request.

        deadline: seconds from now, after which it ends with an ``error``, whether somebody reads or not. An abort by
        id ends it with finish_reason "abort". Raises EngineDeadError when the engine core dies.
        """
        ...

    async def add_lora(self, lora: LoRARequest) -> None:
        """Have an adapter in memory; doing so twice is fine. Raises RequestError if it cannot be served."""
        ...

    async def remove_lora(self, name: str) -> bool:
        """Forget an adapter; False if it is not known. Raises RequestError while unfinished requests use it."""
        ...

    async def abort(self, request_id: str) -> None: ...

    async def stats(self) -> SchedulerStats: ...

    async def recent_steps(self, after: int = 0) -> list[RecentStep]:
        """The scheduler's last decisions, those with step numbers above ``after``. Raises EngineDeadError."""
        ...

    async def check_health(self) -> None:
        """Return if the engine core's loop answers. Raises EngineDeadError if it does not."""
        ...

    def kill(self) -> None:
        """End the engine core at once; ``close`` then has nothing to wait for."""
        ...

    async def close(self) -> None: ...
