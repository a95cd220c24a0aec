"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import CompletionOutput, PositionLogprobMap, RequestOutput
from minivllm.sampling_params import OutputKind, SamplingParams
from minivllm.server.answers.logprobs import completion_logprobs, written
from minivllm.server.answers.streaming import DONE, data_frame, error_frames
from minivllm.server.protocol import completions as protocol
from minivllm.server.service.service import Service, new_id
from minivllm.server.wire.errors import invalid, unsupported
from minivllm.server.wire.fields import as_prompt, prompt_list

DEFAULT_MAX_TOKENS = 16


class CompletionRun:
    """One request for text completions, checked; then either ``complete`` or ``stream``."""

    error_frames = staticmethod(error_frames)

    def __init__(self, service: Service, request: protocol.CompletionRequest) -> None:
        self._service = service
        self._request = request
        self._model = service.models.find(request.model)
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._prompts = prompt_list(request.prompt)
        self._last_outputs: dict[int, RequestOutput] = {}
        self._choices: dict[int, protocol.CompletionChoice] = {}
        self._lengths: dict[int, int] = {}
        # With echo and no tokens asked for, one is generated all the same, and not shown.
        self._hides_answer = request.max_tokens == 0
        if request.stream_options is not None and not request.stream:
            raise unsupported("stream_options", "is only allowed together with stream: true.")
        if self._hides_answer and not request.echo:
            raise invalid("max_tokens", "is 0, but must be at least 1 unless echo is true.")
        if request.stream and request.echo and request.logprobs is not None and (request.n or 1) > 1:
            raise unsupported("n", "must be 1 where stream, echo and logprobs come together.")
        if request.stream and (request.best_of or 1) > (request.n or 1):
            raise unsupported("best_of", "above n cannot stream: which ones are best is known at the end only.")
        self._params = self._sampling_params()

    async def complete(self) -> protocol.Completion:
        """All completions at once, those of the first prompt first."""
        choices: dict[int, protocol.CompletionChoice] = {}
        async with aclosing(self._outputs()) as outputs:
            async for prepared, number, output in outputs:
                for completion in output.outputs:
                    make = partial(self._choice, prepared, number, output, completion)
                    if self._request.logprobs is None:
                        choice = make()
                    else:
                        choice = await self._service.in_text_thread(make, written)
                    choices[choice["index"]] = choice
        completion_object = self._object([choices[index] for index in sorted(choices)])
        completion_object["usage"] = self._usage()
        return completion_object

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames: text as it comes, a finish reason per choice, usage if asked for, [DONE]."""
        async with aclosing(self._outputs()) as outputs:
            async for prepared, number, output in outputs:
                for completion in output.outputs:
                    choice = self._choice(prepared, number, output, completion)
                    if choice["text"] or choice["finish_reason"] or choice["logprobs"]:
                        yield data_frame(self._object([choice]))
        if self._request.wants_usage_chunk:
            yield data_frame({**self._object([]), "usage": self._usage()})
        yield DONE

    def _sampling_params(self) -> SamplingParams:
        request = self._request
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        return request.sampling_params(
            self._service.engine.get_default_sampling_params(),
            n=request.n or 1,
            best_of=request.best_of,
            max_tokens=max(1, max_tokens),
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
            output_kind=OutputKind.FINAL_ONLY if self._hides_answer else request.output_kind,
        )

    def _prepare(self) -> Sequence[PreparedRequest]:
        """Runs in the text thread."""
        request, engine = self._request, self._service.engine
        prepared = []
        for number, given in enumerate(self._prompts):
            prompt = as_prompt(given, request.cache_salt)
            prepared.append(
                engine.prepare(
                    f"{self._id}-{number}", prompt, self._params, priority=request.priority or 0, lora=self._model.lora
                )
            )
        return prepared

    async def _outputs(self) -> AsyncGenerator[tuple[PreparedRequest, int, RequestOutput], None]:
        async with aclosing(
            self._service.run(len(self._prompts) * self._params.num_sequences, self._prepare)
        ) as outputs:
            async for prepared, number, output in outputs:
                self._last_outputs[number] = output
                yield prepared, number, output

    def _choice(
        self,
        prepared: PreparedRequest,
        number: int,
        output: RequestOutput,
        completion: CompletionOutput,
        write: Callable[[Any], Any] = dict,
    ) -> protocol.CompletionChoice:
        """What is new of one completion; the first time with the prompt before it, if that is wanted.

        write: makes of log-probabilities what goes into the answer.
        """
        index = number * self._params.n + completion.index
        text, token_ids = completion.text, list(completion.token_ids)
        positions: list[PositionLogprobMap | None] = list(completion.logprobs or [])
        if self._hides_answer:
            text, token_ids, positions = "", [], []
        if self._request.echo and index not in self._lengths:
            text = self._prompt_text(prepared) + text
            token_ids = [*prepared.prompt_token_ids, *token_ids]
            positions = [*(output.prompt_logprobs or []), *positions]
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(text)
        logprobs: protocol.CompletionLogprobs | None = None
        if self._request.logprobs is not None and token_ids:
            logprobs = write(completion_logprobs(token_ids, positions, offset, self._service.token_decoder))
        choice = protocol.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=None)
        if completion.finish_reason is not None:
            choice["finish_reason"] = "length" if completion.finish_reason == "length" else "stop"
        if completion.stop_reason is not None:
            choice["stop_reason"] = completion.stop_reason
        return choice

    def _prompt_text(self, prepared: PreparedRequest) -> str:
        if prepared.prompt is not None:
            return prepared.prompt
        engine = self._service.engine
        return engine.tokenizer.decode(prepared.prompt_token_ids, False) if engine.has_tokenizer else ""

    def _object(self, choices: list[protocol.CompletionChoice]) -> protocol.Completion:
        completion = protocol.Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model.name, choices=choices
        )
        if self._request.wants_usage_chunk:
            completion["usage"] = None
        return completion

    def _usage(self) -> protocol.Usage:
        outputs = self._last_outputs.values()
        generated = 0 if self._hides_answer else sum(output.metrics.num_generation_tokens for output in outputs)
        return protocol.usage(
            sum(len(output.prompt_token_ids) for output in outputs),
            generated,
            sum(output.num_cached_tokens for output in outputs),
        )
