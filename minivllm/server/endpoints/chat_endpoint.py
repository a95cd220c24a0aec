"""``POST /v1/chat/completions``: the request, and its answers as they grow."""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from minivllm.errors import ContextLengthError
from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import CompletionOutput, RequestOutput
from minivllm.server.answers.chat_messages import (
    template_messages,
    template_options,
    text_for_custom_tool,
)
from minivllm.server.answers.constraints import constraint, offered_tools
from minivllm.server.answers.logprobs import TokenNames, chat_logprobs, token_logprobs
from minivllm.server.endpoints.completion_run import CompletionRun, ending
from minivllm.server.parsers.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Content,
    Event,
    Parser,
    Reasoning,
)
from minivllm.server.protocol import chat
from minivllm.server.service.service import Service
from minivllm.server.wire.errors import invalid, unsupported
from minivllm.server.wire.ids import new_id


class ChatAnswer:
    """Collects the pieces of one answer, and says what is new as deltas.

    single_call: the answer is over with its first tool call (parallel_tool_calls: false). is_named: the client chose
    the tool, so calling it is no news and the answer ends with "stop", as OpenAI's does. ending: the fields that say
    why it is over, None while it is not. custom_names: tools that take a text, which is told once it is complete.
    shows_reasoning: False leaves it out. echoed: text that the answer begins with.
    broken_call: the text of a call inside of which the answer stopped.
    """

    def __init__(
        self,
        parser: Parser,
        *,
        single_call: bool = False,
        is_named: bool = False,
        custom_names: frozenset[str] = frozenset(),
        shows_reasoning: bool = True,
        echoed: str = "",
    ) -> None:
        self._parser = parser
        self._echoed = echoed
        self._custom_names = custom_names
        self._custom_arguments: list[str] | None = None
        self._shows_reasoning = shows_reasoning
        self._single_call = single_call
        self._reason_of_calls = "stop" if is_named else "tool_calls"
        self.broken_call: str | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[chat.ToolCallOut] = []
        self._has_begun = False
        self.ending: dict[str, Any] | None = None

    def take_in(self, completion: CompletionOutput) -> list[chat.Delta]:
        """What a new piece of text adds; the first delta carries the role. Nothing once the answer is over."""
        if self.ending is not None:
            return []
        events = self._parser.feed(completion.text)
        if completion.finished:
            events += self._parser.finish()
        deltas = list(self._deltas(events))
        if completion.finished and self.ending is None:
            self.ending = ending(completion)
            if self.ending["finish_reason"] != "stop":
                self.broken_call = None  # cut by the limit, as the finish reason tells
            elif self._calls and self.broken_call is None:
                self.ending["finish_reason"] = self._reason_of_calls
        if not self._has_begun:
            self._has_begun = True
            if self._echoed:
                self._content.insert(0, self._echoed)
                deltas.insert(0, chat.Delta(content=self._echoed))
            deltas.insert(0, chat.Delta(role="assistant", content=""))
        return deltas

    def message(self) -> chat.AnswerMessage:
        """The whole answer. A broken call in it is text: no client may run it."""
        content, calls = "".join([*self._content, self.broken_call or ""]), self._calls
        if self.broken_call is not None:
            calls = calls[:-1]
        message = chat.AnswerMessage(role="assistant", content=None if calls and not content else content, refusal=None)
        if self._reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(self._reasoning)
        if calls:
            message["tool_calls"] = calls
        return message

    def _deltas(self, events: Iterable[Event]) -> Iterator[chat.Delta]:
        for event in events:
            match event:
                case Content(text):
                    self._content.append(text)
                    yield chat.Delta(content=text)
                case Reasoning(text):
                    if self._shows_reasoning:
                        self._reasoning.append(text)
                        yield chat.Delta(reasoning_content=text, reasoning=text)
                case CallStart(name):
                    yield self._begin_call(name)
                case CallArguments(text):
                    if self._custom_arguments is not None:
                        self._custom_arguments.append(text)
                        continue
                    self._calls[-1]["function"]["arguments"] += text
                    yield self._call_delta({"function": {"arguments": text}})
                case CallEnd():
                    yield from self._end_custom()
                    if self._single_call:
                        self.ending = {"finish_reason": self._reason_of_calls}
                        return
                case CallBroken(text):
                    yield from self._end_custom()
                    self.broken_call = text

    def _begin_call(self, name: str) -> chat.Delta:
        call_id = new_id("call")
        if name in self._custom_names:
            self._custom_arguments = []
            custom = chat.CustomCallOut(name=name, input="")
            self._calls.append(chat.ToolCallOut(id=call_id, type="custom", custom=custom))
            return self._call_delta({**self._calls[-1], "custom": {**custom}})
        function = chat.FunctionCallOut(name=name, arguments="")
        self._calls.append(chat.ToolCallOut(id=call_id, type="function", function=function))
        return self._call_delta({**self._calls[-1], "function": {**function}})

    def _end_custom(self) -> Iterator[chat.Delta]:
        """The text for a custom tool, out of the arguments that the model wrote."""
        if self._custom_arguments is not None:
            text = text_for_custom_tool("".join(self._custom_arguments))
            self._custom_arguments = None
            self._calls[-1]["custom"]["input"] = text
            yield self._call_delta({"custom": {"input": text}})

    def _call_delta(self, new: Any) -> chat.Delta:
        return chat.Delta(tool_calls=[{"index": len(self._calls) - 1, **new}])


class ChatRun(CompletionRun):
    """A continuation of a conversation. drops_oldest: leave its oldest messages out where it is too long."""

    drops_oldest = False
    id_prefix = "chatcmpl"
    prompt_field = "messages"

    def __init__(self, service: Service, request: chat.ChatCompletionRequest) -> None:
        super().__init__(service, request)
        self._request = request
        self._object_name = "chat.completion.chunk" if request.stream else "chat.completion"
        self._prompt_text: str | None = None
        self._has_told_prompt = False
        self._answers: dict[int, ChatAnswer] = {}
        self._names = TokenNames(service.token_decoder, bool(request.return_tokens_as_token_ids))
        if request.top_logprobs and not request.logprobs:
            raise unsupported("top_logprobs", "is only allowed together with logprobs: true.")
        max_tokens, other = request.max_completion_tokens, request.max_tokens
        if max_tokens is not None and other is not None and max_tokens != other:
            why = f"is {other} and max_completion_tokens is {max_tokens}, but both mean the same: give one."
            raise invalid("max_tokens", why)
        self._offered = offered_tools(request)
        self._constraint = constraint(request, self._offered, service.answer_format.call_parser)
        self.params = request.sampling_params(
            msgspec.structs.replace(service.engine.get_default_sampling_params(), max_tokens=None),
            n=request.n or 1,
            best_of=request.best_of,
            prompt_logprobs=request.prompt_logprobs,
            max_tokens=other if max_tokens is None else max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            output_kind=request.output_kind,
            structured_outputs=self._constraint.structure,
        )
        self._num_completions = self.params.num_sequences
        self._messages = template_messages(request.messages, service.chat_template)
        self._template_options = template_options(
            request,
            [] if self._offered is None else self._offered.tools,
            service.chat_template,
            trusts_templates=service.settings.trust_request_chat_template,
        )

    async def deltas(self) -> AsyncGenerator[tuple[chat.Delta, list[chat.TokenLogprob] | None], None]:
        """What is new in the answer, for endpoints that tell it in another form; logprobs go with the first text."""
        gathered: list[chat.TokenLogprob] = []
        async with aclosing(self._completions()) as completions:
            async for _, _, completion in completions:
                gathered += token_logprobs(completion.logprobs or (), self._request.top_logprobs or 0, self._names)
                for delta in self.answer(completion.index).take_in(completion):
                    carried, gathered = (gathered, []) if delta.get("content") else (None, gathered)
                    yield delta, carried

    def answer(self, index: int) -> ChatAnswer:
        """The answer of this number, begun if it is new. A forced form leaves no room for reasoning."""
        if index not in self._answers:
            if self._constraint.make_parser is not None:
                parser = self._constraint.make_parser()
            else:
                has_tools = self._offered is not None
                parser = self._service.answer_format.parser(self._prompt_text, has_tools=has_tools)
            self._answers[index] = ChatAnswer(
                parser,
                single_call=self._request.parallel_tool_calls is False,
                is_named=self._offered is not None and self._offered.named is not None,
                custom_names=frozenset() if self._offered is None else self._offered.custom_names,
                shows_reasoning=self._request.include_reasoning is not False,
                echoed=self._messages[-1]["content"]
                if self._request.echo and self._messages[-1]["role"] == "assistant"
                else "",
            )
        return self._answers[index]

    def _is_over(self) -> bool:
        answers = self._answers.values()
        return len(answers) == self.params.n and all(answer.ending is not None for answer in answers)

    def _prepare(self) -> Sequence[PreparedRequest]:
        if not self.drops_oldest:
            return [self._prepared_from(0)]
        # Where the rest of a conversation may begin: not with the result of a call that is left out.
        first = next((index for index, one in enumerate(self._messages) if one["role"] != "system"), 0)
        starts = [index for index in range(first, len(self._messages)) if self._messages[index]["role"] != "tool"]
        low, high, shortest = 0, len(starts) - 1, None
        while low < high:
            middle = (low + high) // 2
            try:
                shortest, high = self._prepared_from(starts[middle] - first), middle
            except ContextLengthError:
                low, shortest = middle + 1, None
        return [shortest or self._prepared_from((starts[high] - first) if starts else 0)]

    def _prepared_from(self, num_dropped: int) -> PreparedRequest:
        """The conversation without so many messages that follow the system's."""
        messages = self._messages
        if num_dropped:
            first = next(index for index, one in enumerate(messages) if one["role"] != "system")
            messages = [*messages[:first], *messages[first + num_dropped :]]
        prompt = self._service.engine.render_chat(messages, **self._template_options)
        self._prompt_text = prompt.get("prompt")
        return self._prepared(self._id, prompt)

    def _object(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """With what is told of the prompt, once."""
        told = self._told_prompt(self._last_outputs[0]) if choices and not self._has_told_prompt else {}
        self._has_told_prompt |= bool(choices)
        return super()._object(choices) | told

    def _choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        answer = self.answer(completion.index)
        answer.take_in(completion)
        message, logprobs = answer.message(), self._logprobs_of(completion)
        choice = {"index": completion.index, "message": message, "logprobs": logprobs, **(answer.ending or {})}
        return choice | self._told_tokens(completion)

    def _chunk_choices(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> Iterator[dict[str, Any]]:
        """Logprobs go with the first delta that has text, or alone."""
        answer = self.answer(completion.index)
        if answer.ending is not None:
            return
        deltas = answer.take_in(completion)
        logprobs = self._logprobs_of(completion)
        if completion.logprobs and all("role" in delta for delta in deltas):
            deltas.append(chat.Delta(content=""))
        choice: dict[str, Any] = {"index": completion.index, "delta": {}, "logprobs": None, "finish_reason": None}
        tokens = self._told_tokens(completion)
        if tokens and not deltas and answer.ending is None:
            deltas.append(chat.Delta(content=""))
        for delta in deltas:
            carried = None if "role" in delta else logprobs
            yield {**choice, "delta": delta, "logprobs": carried, **tokens}
            logprobs, tokens = None if carried is not None else logprobs, {}
        if answer.ending is not None:
            yield {**choice, **answer.ending, **tokens}

    def _logprobs_of(self, completion: CompletionOutput) -> msgspec.Raw | None:
        if completion.logprobs is None:
            return None
        return chat_logprobs(completion.logprobs, self._request.top_logprobs or 0, self._names)
