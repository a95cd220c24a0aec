"""One answer of a conversation as it grows: text taken apart, tool calls numbered, the reason why it ended."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.processing.outputs import CompletionOutput
from minivllm.server.parsers.events import CallArguments, CallEnd, CallStart, Content, Event, Parser, Reasoning
from minivllm.server.protocol.chat import (
    AnswerMessage,
    ChatFinishReason,
    Delta,
    FunctionCallDelta,
    FunctionCallOut,
    ToolCallDelta,
    ToolCallOut,
)
from minivllm.server.service.service import new_id


class ChatAnswer:
    """Collects the pieces of one answer, and says what is new as deltas.

    single_call: the answer is over with its first tool call (parallel_tool_calls: false).
    """

    def __init__(self, parser: Parser, *, single_call: bool = False) -> None:
        self._parser = parser
        self._single_call = single_call
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallOut] = []
        self._has_begun = False
        self.finish_reason: ChatFinishReason | None = None
        self.stop_reason: int | str | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None

    def take_in(self, completion: CompletionOutput) -> list[Delta]:
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
            deltas.insert(0, Delta(role="assistant", content=""))
        return deltas

    def message(self) -> AnswerMessage:
        content = "".join(self._content)
        message = AnswerMessage(
            role="assistant", content=None if self._calls and not content else content, refusal=None
        )
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return message

    def _deltas(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        for event in events:
            if self.is_over:
                break
            match event:
                case Content(text):
                    self._content.append(text)
                    deltas.append(Delta(content=text))
                case Reasoning(text):
                    self._reasoning.append(text)
                    deltas.append(Delta(reasoning_content=text))
                case CallStart(name):
                    deltas.append(Delta(tool_calls=[self._begin_call(name)]))
                case CallArguments(text):
                    self._calls[-1]["function"]["arguments"] += text
                    call = ToolCallDelta(index=len(self._calls) - 1, function=FunctionCallDelta(arguments=text))
                    deltas.append(Delta(tool_calls=[call]))
                case CallEnd():
                    if self._single_call:
                        self.finish_reason = "tool_calls"
        return deltas

    def _begin_call(self, name: str) -> ToolCallDelta:
        call_id = new_id("call")
        function = FunctionCallOut(name=name, arguments="")
        self._calls.append(ToolCallOut(id=call_id, type="function", function=function))
        return ToolCallDelta(
            index=len(self._calls) - 1,
            id=call_id,
            type="function",
            function=FunctionCallDelta(name=name, arguments=""),
        )
