"""One answer of a conversation as it grows:
text, reasoning and tool calls out of the pieces that the model writes."""

from collections.abc import Iterable, Iterator
from typing import Any

from minivllm.processing.outputs import CompletionOutput
from minivllm.server.answers.chat_messages import text_for_custom_tool
from minivllm.server.answers.ending import ending
from minivllm.server.bodies.ids import new_id
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


class ChatAnswer:
    """Collects the pieces of one answer, and says what is new as deltas.

    single_call: the answer is over with its first tool call (parallel_tool_calls: false). is_named: the
    client chose the tool, so calling it is no news and the answer ends with "stop", as OpenAI's does. ending:
    the fields that say why it is over, None while it is not. custom_names: tools that take a text, which is
    told once it is complete. shows_reasoning: False leaves it out. echoed: text that the answer begins with.
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
        """The deltas of a new piece of text; the first one carries the role. None once the answer is over."""
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
        message = chat.AnswerMessage(
            role="assistant", content=None if calls and not content else content, refusal=None
        )
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
