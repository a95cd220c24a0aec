"""``POST /v1/chat/completions``: the request, and its answers as they grow."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, cast

import msgspec

from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import CompletionOutput, RequestOutput
from minivllm.sampling_params import SamplingParams, StructuredOutputs
from minivllm.server.answers.chat_messages import template_messages, template_names, template_tools
from minivllm.server.answers.constraints import constraint, offered_tools
from minivllm.server.answers.logprobs import chat_logprobs, written
from minivllm.server.answers.streaming import DONE, data_frame, error_frames
from minivllm.server.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Parser, Reasoning
from minivllm.server.protocol import chat
from minivllm.server.protocol.completions import Usage
from minivllm.server.protocol.completions import usage as count_usage
from minivllm.server.service.service import Service, new_id
from minivllm.server.wire.errors import invalid, unsupported


class ChatAnswer:
    """Collects the pieces of one answer, and says what is new as deltas.

    single_call: the answer is over with its first tool call (parallel_tool_calls: false).
    """

    def __init__(self, parser: Parser, *, single_call: bool = False) -> None:
        self._parser = parser
        self._single_call = single_call
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[chat.ToolCallOut] = []
        self._has_begun = False
        self.finish_reason: chat.ChatFinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def take_in(self, completion: CompletionOutput) -> list[chat.Delta]:
        """What a new piece of text adds; the first delta carries the role. Nothing once the answer is over."""
        if self.is_over:
            return []
        events = self._parser.feed(completion.text)
        if completion.finished:
            events += self._parser.finish()
        deltas = self._deltas(events)
        if completion.finished and not self.is_over:
            self.finish_reason = "length" if completion.finish_reason == "length" else "stop"
            self.stop_reason = completion.stop_reason
            if self._calls and self.finish_reason == "stop":
                self.finish_reason = "tool_calls"
        if not self._has_begun:
            self._has_begun = True
            deltas.insert(0, chat.Delta(role="assistant", content=""))
        return deltas

    def message(self) -> chat.AnswerMessage:
        content = "".join(self._content)
        message = chat.AnswerMessage(
            role="assistant", content=None if self._calls and not content else content, refusal=None
        )
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _deltas(self, events: Iterable[Event]) -> list[chat.Delta]:
        deltas: list[chat.Delta] = []
        for event in events:
            if self.is_over:
                break
            match event:
                case Content(text):
                    self._content.append(text)
                    deltas.append(chat.Delta(content=text))
                case Reasoning(text):
                    self._reasoning.append(text)
                    deltas.append(chat.Delta(reasoning_content=text))
                case CallStart(name):
                    deltas.append(chat.Delta(tool_calls=[self._begin_call(name)]))
                case CallArguments(text):
                    self._calls[-1]["function"]["arguments"] += text
                    call = chat.ToolCallDelta(
                        index=len(self._calls) - 1, function=chat.FunctionCallDelta(arguments=text)
                    )
                    deltas.append(chat.Delta(tool_calls=[call]))
                case CallEnd():
                    if self._single_call:
                        self.finish_reason = "tool_calls"
        return deltas

    def _begin_call(self, name: str) -> chat.ToolCallDelta:
        call_id = new_id("call")
        function = chat.FunctionCallOut(name=name, arguments="")
        self._calls.append(chat.ToolCallOut(id=call_id, type="function", function=function))
        return chat.ToolCallDelta(
            index=len(self._calls) - 1,
            id=call_id,
            type="function",
            function=chat.FunctionCallDelta(name=name, arguments=""),
        )


class ChatRun:
    """One request for a chat completion, checked; then either ``complete`` or ``stream``."""

    error_frames = staticmethod(error_frames)

    def __init__(self, service: Service, request: chat.ChatCompletionRequest) -> None:
        self._service = service
        self._request = request
        self._served = service.models.find(request.model)
        self.model = self._served.name
        self._id = new_id("chatcmpl")
        self._created = int(time.time())
        self._prompt_text: str | None = None
        self._answers: dict[int, ChatAnswer] = {}
        self._logprobs: dict[int, chat.ChoiceLogprobs | None] = {}
        self._last_output: RequestOutput | None = None
        _check_combinations(request)
        self._offered = offered_tools(request)
        self._constraint = constraint(request, self._offered, service.answer_format.call_parser)
        self.params = _sampling_params(service, request, self._constraint.structure)
        self._messages = template_messages(request.messages, service.chat_template)
        self._template_kwargs: dict[str, Any] = template_names(request, service.chat_template)
        if self._offered is not None:
            self._template_kwargs["tools"] = template_tools(self._offered.tools, service.chat_template)

    async def complete(self) -> chat.ChatCompletion:
        """The whole answer at once."""
        async with aclosing(self._completions()) as completions:
            async for completion in completions:
                self.answer(completion.index).take_in(completion)
                self._logprobs[completion.index] = None
                if completion.logprobs is not None:
                    logprobs = await self._service.in_text_thread(self._written_logprobs, completion)
                    self._logprobs[completion.index] = cast(chat.ChoiceLogprobs, logprobs)
        choices = []
        for index, answer in sorted(self._answers.items()):
            choice = chat.ChatChoice(
                index=index,
                message=answer.message(),
                logprobs=self._logprobs[index],
                finish_reason=answer.finish_reason or "stop",
            )
            if answer.stop_reason is not None:
                choice["stop_reason"] = answer.stop_reason
            choices.append(choice)
        return chat.ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self.model,
            choices=choices,
            usage=self.usage(),
        )

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames: the role first, deltas, a finish reason per choice, usage if asked for, [DONE]."""
        async with aclosing(self._completions()) as completions:
            async for completion in completions:
                for choice in self._chunk_choices(completion):
                    yield data_frame(self._chunk([choice]))
        if self._request.wants_usage_chunk:
            yield data_frame({**self._chunk([]), "usage": self.usage()})
        yield DONE

    async def deltas(self) -> AsyncGenerator[tuple[int, chat.Delta], None]:
        """(index of the answer, what is new in it), for endpoints that tell it in another form."""
        async with aclosing(self._completions()) as completions:
            async for completion in completions:
                for delta in self.answer(completion.index).take_in(completion):
                    yield completion.index, delta

    async def _completions(self) -> AsyncGenerator[CompletionOutput, None]:
        """What is new, until every answer is over, which may be before the model stops."""
        async with aclosing(self._service.run(self.params.n, self._prepare)) as outputs:
            async for _, _, output in outputs:
                self._last_output = output
                for completion in output.outputs:
                    yield completion
                if len(self._answers) == self.params.n and all(answer.is_over for answer in self._answers.values()):
                    return

    def _prepare(self) -> Sequence[PreparedRequest]:
        """Runs in the text thread."""
        request, engine = self._request, self._service.engine
        prompt = engine.render_chat(
            self._messages,
            add_generation_prompt=request.add_generation_prompt is not False,
            chat_template_kwargs=self._template_kwargs,
            parse_special_tokens=bool(request.parse_special_tokens),
        )
        self._prompt_text = prompt.get("prompt")
        if request.cache_salt is not None:
            prompt = {**prompt, "cache_salt": request.cache_salt}
        priority = request.priority or 0
        return [engine.prepare(self._id, prompt, self.params, priority=priority, lora=self._served.lora)]

    def answer(self, index: int) -> ChatAnswer:
        """The answer of this number, begun if it is new. A forced form leaves no room for reasoning."""
        if index not in self._answers:
            if self._constraint.make_parser is not None:
                parser = self._constraint.make_parser()
            else:
                has_tools = self._offered is not None
                parser = self._service.answer_format.parser(self._prompt_text, has_tools=has_tools)
            self._answers[index] = ChatAnswer(parser, single_call=self._request.parallel_tool_calls is False)
        return self._answers[index]

    def _chunk_choices(self, completion: CompletionOutput) -> list[chat.ChunkChoice]:
        """Chunks for what is new in one answer. Logprobs go with the first of them that has text, or alone."""
        answer = self.answer(completion.index)
        if answer.is_over:
            return []
        deltas = answer.take_in(completion)
        logprobs = self._logprobs_of(completion)
        if logprobs is not None and logprobs["content"] and all("role" in delta for delta in deltas):
            deltas.append(chat.Delta(content=""))
        choices: list[chat.ChunkChoice] = []
        for delta in deltas:
            carried = None if "role" in delta else logprobs
            choices.append(self._chunk_choice(completion, delta, carried))
            logprobs = None if carried is not None else logprobs
        if answer.is_over:
            last = self._chunk_choice(completion, chat.Delta(), None)
            last["finish_reason"] = answer.finish_reason
            if answer.stop_reason is not None:
                last["stop_reason"] = answer.stop_reason
            choices.append(last)
        return choices

    def _chunk_choice(
        self, completion: CompletionOutput, delta: chat.Delta, logprobs: chat.ChoiceLogprobs | None
    ) -> chat.ChunkChoice:
        return chat.ChunkChoice(index=completion.index, delta=delta, logprobs=logprobs, finish_reason=None)

    def _chunk(self, choices: list[chat.ChunkChoice]) -> chat.ChatCompletionChunk:
        chunk = chat.ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self.model,
            choices=choices,
        )
        if self._request.wants_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _logprobs_of(self, completion: CompletionOutput) -> chat.ChoiceLogprobs | None:
        if completion.logprobs is None:
            return None
        return chat_logprobs(completion.logprobs, self._request.top_logprobs or 0, self._service.token_decoder)

    def _written_logprobs(self, completion: CompletionOutput) -> msgspec.Raw:
        return written(self._logprobs_of(completion) or {})

    def usage(self) -> Usage:
        output = self._last_output
        if output is None:
            return count_usage(0, 0, 0)
        return count_usage(len(output.prompt_token_ids), output.metrics.num_generation_tokens, output.num_cached_tokens)


def _check_combinations(request: chat.ChatCompletionRequest) -> None:
    """What single fields cannot know. Raises ApiError 400."""
    if request.stream_options is not None and not request.stream:
        raise unsupported("stream_options", "is only allowed together with stream: true.")
    if request.top_logprobs and not request.logprobs:
        raise unsupported("top_logprobs", "is only allowed together with logprobs: true.")
    both = request.max_tokens, request.max_completion_tokens
    if None not in both and both[0] != both[1]:
        why = f"is {both[0]} and max_completion_tokens is {both[1]}, but both mean the same: give one."
        raise invalid("max_tokens", why)


def _sampling_params(
    service: Service, request: chat.ChatCompletionRequest, structure: StructuredOutputs | None
) -> SamplingParams:
    defaults = msgspec.structs.replace(service.engine.get_default_sampling_params(), max_tokens=None)
    max_tokens = request.max_completion_tokens
    return request.sampling_params(
        defaults,
        n=request.n or 1,
        max_tokens=request.max_tokens if max_tokens is None else max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        output_kind=request.output_kind,
        structured_outputs=structure,
    )
