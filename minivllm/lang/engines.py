"""The engines that programs run on:
``AsyncLLM``, and ``LLM`` whose steps are run between the programs' turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from minivllm.errors import EngineDeadError, RequestError
from minivllm.messages import LoRARequest
from minivllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from minivllm.frontend.async_llm import AsyncLLM
    from minivllm.frontend.llm import LLM
    from minivllm.frontend.llm_engine import TextFrontend
    from minivllm.multimodal.files.decoding import Picture
    from minivllm.multimodal.prompt_images import PromptImages
    from minivllm.processing.outputs import RequestOutput

_TURNS = 4
"""Rounds of the event loop between two steps:
a branch ends, ``join`` returns, the program sends its next request."""


@dataclass(frozen=True)
class Settings:
    """What holds for all requests of a program."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters by name, where a call does not give them."""
    chat_template: str | None = None
    """Takes the place of the model's."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further names that the template knows."""
    lora: LoRARequest | None = None
    """The adapter."""
    cache_salt: str | None = None
    """Separates the prefix cache of tenants."""
    priority: int = 0
    """Lower goes first, with scheduling_policy "priority"."""

    @property
    def of_requests(self) -> dict[str, Any]:
        return {"lora": self.lora, "cache_salt": self.cache_salt, "priority": self.priority}


class Engine(Protocol):
    """Completes prompts of token ids; a cancelled call aborts its request."""

    @property
    def frontend(self) -> TextFrontend: ...

    async def complete(
        self,
        token_ids: list[int],
        params: SamplingParams,
        settings: Settings,
        pictures: Sequence[Picture] = (),
    ) -> RequestOutput:
        """The finished output. params: with output_kind FINAL_ONLY. pictures: one for each placeholder among
        the tokens. Raises RequestError and EngineDeadError."""

    async def read_images(self, images: PromptImages, sources: list[Any]) -> list[Picture]:
        """What ``images.read`` returns, which decodes them."""


class StreamingEngine:
    """An ``AsyncLLM``, which other tasks may use as well."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.frontend: TextFrontend = llm

    async def complete(
        self,
        token_ids: list[int],
        params: SamplingParams,
        settings: Settings,
        pictures: Sequence[Picture] = (),
    ) -> RequestOutput:
        stream = self._llm.generate(_prompt(token_ids, pictures), params, **settings.of_requests)
        async with aclosing(stream):
            output = await anext(stream)  # the only one
        return output

    async def read_images(self, images: PromptImages, sources: list[Any]) -> list[Picture]:
        return await self._llm.in_image_thread(images.read, sources, None)


class SteppedEngine:
    """An ``LLM``: one task steps its engine while requests are unfinished. Steps block the event loop."""

    def __init__(self, llm: LLM) -> None:
        self.frontend = self._engine = llm.llm_engine
        self._waiting: dict[str, asyncio.Future[RequestOutput]] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._loras: set[LoRARequest] = set()

    async def complete(
        self,
        token_ids: list[int],
        params: SamplingParams,
        settings: Settings,
        pictures: Sequence[Picture] = (),
    ) -> RequestOutput:
        prompt = _prompt(token_ids, pictures)
        prepared = self._engine.prepare(None, prompt, params, **settings.of_requests)
        if settings.lora is not None and settings.lora not in self._loras:
            self._engine.add_lora(settings.lora)
            self._loras.add(settings.lora)
        self._engine.submit(prepared)
        future = self._waiting[prepared.request_id] = asyncio.get_running_loop().create_future()
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        try:
            return await future
        finally:
            self._waiting.pop(prepared.request_id, None)
            with suppress(EngineDeadError):
                self._engine.abort_request([prepared.internal_id])

    async def read_images(self, images: PromptImages, sources: list[Any]) -> list[Picture]:
        return images.read(sources, None)

    async def _step(self) -> None:
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            if not self._waiting:
                return
            try:
                outputs = self._engine.step()
            except Exception as error:
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(error)
                return
            for output in outputs:
                waiting = self._waiting.get(output.request_id)
                if output.finished and waiting is not None and not waiting.done():
                    waiting.set_result(output)


def _prompt(token_ids: list[int], pictures: Sequence[Picture]) -> dict[str, Any]:
    images = {"multi_modal_data": {"image": list(pictures)}} if pictures else {}
    return {"prompt_token_ids": token_ids, **images}


def engine_of(llm: AsyncLLM | Engine) -> Engine:
    """Raises RequestError for what programs cannot run on."""
    from minivllm.frontend.async_llm import AsyncLLM

    if isinstance(llm, AsyncLLM):
        return StreamingEngine(llm)
    if hasattr(llm, "complete") and hasattr(llm, "frontend"):
        return llm
    raise RequestError(
        f"A program runs on an AsyncLLM, but was given a {type(llm).__name__}: for an LLM call run_offline."
    )
