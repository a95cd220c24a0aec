"""Completions of texts and of conversations: an answer in one piece, or chunk by chunk."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, ClassVar

from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import PoolingParams, SamplingParams
from minivllm.server.answers.logprobs import prompt_logprobs
from minivllm.server.answers.streaming import DONE, data_frame
from minivllm.server.bodies.errors import ApiError, named_in, unsupported
from minivllm.server.bodies.fields import RequestFields
from minivllm.server.bodies.ids import new_id
from minivllm.server.endpoints.beams import check_beams, search_beams
from minivllm.server.protocol.completions import Usage
from minivllm.server.protocol.completions import usage as count_usage
from minivllm.server.service.service import Service


class CompletionRun(ABC):
    """One request, checked; then either ``complete`` or ``stream``. Raises ApiError 400 or 404.

    id_prefix: of the answer's id. prompt_field: what a prompt that is too long is blamed on.
    pooling: given where nothing is generated.
    """

    id_prefix: ClassVar[str]
    prompt_field = "prompt"
    params: SamplingParams
    pooling: PoolingParams | None = None
    _has_images = False
    _object_name: str
    _num_completions: int

    def __init__(self, service: Service, request: RequestFields) -> None:
        self._service = service
        self._fields = request
        self._served = service.models.find(request.model)
        self.model = self._served.name
        chosen = request.request_id
        self._id = new_id(self.id_prefix) if chosen is None else f"{self.id_prefix}-{chosen}"
        self._created = int(time.time())
        self._last_outputs: dict[int, RequestOutput] = {}
        if request.stream_options is not None and not request.stream:
            raise unsupported("stream_options", "is only allowed together with stream: true.")
        if request.stream and request.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "cannot stream: leave stream out.")
        if request.stream and (request.best_of or 1) > (request.n or 1):
            raise unsupported(
                "best_of", "above n cannot stream: which ones are best is known at the end only."
            )
        check_beams(request)

    async def complete(self) -> dict[str, Any]:
        """The whole answer at once, its choices in the order of their indices."""
        choices: dict[int, dict[str, Any]] = {}
        async with aclosing(self._completions()) as completions:
            async for place in completions:
                has_logprobs = place[2].logprobs is not None
                choice = (
                    await self._service.in_text_thread(self._choice, *place)
                    if has_logprobs
                    else self._choice(*place)
                )
                choices[choice["index"]] = choice
        return {**self._object([choices[index] for index in sorted(choices)]), "usage": self.usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames: chunks as text comes, a finish reason per choice, usage if asked for, [DONE]."""
        async with aclosing(self._completions()) as completions:
            async for place in completions:
                for choice in self._chunk_choices(*place):
                    yield data_frame(self._object([choice]))
        if self._fields.wants_usage_chunk:
            yield data_frame({**self._object([]), "usage": self.usage()})
        yield DONE

    def error_frames(self, error: ApiError) -> bytes:
        """How a stream ends that fails in the middle."""
        return data_frame(error.body) + DONE

    def _usage_so_far(self) -> Usage | None:
        options = self._fields.stream_options
        return self.usage() if options is not None and options.continuous_usage_stats else None

    def usage(self) -> Usage:
        outputs = self._last_outputs.values()
        return count_usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            sum(output.metrics.num_generation_tokens for output in outputs),
            sum(output.num_cached_tokens for output in outputs),
        )

    @abstractmethod
    def _prepare(self) -> Sequence[PreparedRequest]:
        """One request per prompt. Runs in the text thread."""

    @abstractmethod
    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        """A completion of the prompt of this number. With logprobs it is made in the text thread."""

    @abstractmethod
    def _chunk_choices(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterable[dict[str, Any]]:
        """The new parts of a completion, each for a separate chunk."""

    def _is_over(self) -> bool:
        """True if what the model has written is the whole answer, though it writes on."""
        return False

    async def _completions(self) -> AsyncGenerator[tuple[int, RequestOutput, CompletionOutput], None]:
        """(number of the prompt, its output, what is new of one completion) as they come."""
        if self._fields.use_beam_search:
            found = await search_beams(self._service, self._fields, self.params, self._blaming_the_prompt)
            for number, output in enumerate(found):
                self._last_outputs[number] = output
                for completion in output.outputs:
                    yield number, output, completion
            return
        async with aclosing(
            self._service.run(
                self._num_completions,
                self._blaming_the_prompt,
                self._is_over,
                has_images=self._has_images,
            )
        ) as outputs:
            async for number, output in outputs:
                self._last_outputs[number] = output
                for completion in output.outputs:
                    yield number, output, completion

    def _blaming_the_prompt(self) -> Sequence[PreparedRequest]:
        with named_in(self.prompt_field):
            return self._prepare()

    def _prepared(
        self, request_id: str, prompt: str | dict[str, Any], *, add_special_tokens: bool = True
    ) -> PreparedRequest:
        fields = self._fields
        room = self._service.max_model_len - (0 if self.pooling is not None else self.params.max_tokens or 1)
        return self._service.engine.prepare(
            request_id,
            self._service.cut_prompt(prompt, fields.truncate_prompt_tokens, room, add_special_tokens),
            self.params,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt,
            lora=self._served.lora,
            pooling=self.pooling,
        )

    def _told_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """The fields of the answer about the prompt, if they were asked for."""
        told: dict[str, Any] = {}
        if self._fields.return_token_ids:
            told["prompt_token_ids"] = output.prompt_token_ids
        if self._fields.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs or [])
        return told

    def _told_tokens(self, completion: CompletionOutput) -> dict[str, Any]:
        return {"token_ids": list(completion.token_ids)} if self._fields.return_token_ids else {}

    def _object(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": self._object_name,
            "created": self._created,
            "model": self.model,
            "choices": choices,
            **({"usage": self._usage_so_far()} if self._fields.wants_usage_chunk else {}),
        }
