"""``POST /v1/chat/completions``: the request, and its answers as they grow."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from minivllm.errors import ContextLengthError
from minivllm.processing.input_processor import PreparedRequest
from minivllm.processing.outputs import CompletionOutput, RequestOutput
from minivllm.server.answers.chat_answer import ChatAnswer
from minivllm.server.answers.chat_messages import (
    have_images,
    template_messages,
    template_options,
)
from minivllm.server.answers.constraints import constraint, offered_tools
from minivllm.server.answers.logprobs import TokenNames, chat_logprobs, token_logprobs
from minivllm.server.bodies.errors import invalid, unsupported
from minivllm.server.endpoints.completion_run import CompletionRun
from minivllm.server.protocol import chat
from minivllm.server.service.service import Service


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
        self._messages = template_messages(request.messages, service.chat_template, sees=service.sees)
        self._has_images = service.sees and have_images(request.messages)
        if self._has_images and request.use_beam_search:
            raise unsupported("use_beam_search", "takes no images yet: leave them out, or sample.")
        self._template_options = template_options(
            request,
            [] if self._offered is None else self._offered.tools,
            service.chat_template,
            trusts_templates=service.settings.trust_request_chat_template,
        )

    def num_prompt_tokens(self) -> int:
        """As generation counts them; images are measured, not decoded. To be called in the text thread."""
        engine = self._service.engine
        rendered = engine.render_chat(self._messages, **self._template_options, measures_images=True)
        return len(engine.expanded(rendered))

    async def deltas(self) -> AsyncGenerator[tuple[chat.Delta, list[chat.TokenLogprob] | None], None]:
        """New parts of the answer, for endpoints of another form; logprobs go with the first text."""
        gathered: list[chat.TokenLogprob] = []
        async with aclosing(self._completions()) as completions:
            async for _, _, completion in completions:
                gathered += token_logprobs(
                    completion.logprobs or (), self._request.top_logprobs or 0, self._names
                )
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
        starts = [
            index for index in range(first, len(self._messages)) if self._messages[index]["role"] != "tool"
        ]
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
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": logprobs,
            **(answer.ending or {}),
        }
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
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": None,
        }
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
