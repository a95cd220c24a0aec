"""``POST /v1/responses``: a request rewritten as the chat completion it stands for, told as items and typed events."""

import copy
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError

from minivllm.server.answers.chat_messages import text_of
from minivllm.server.answers.streaming import event_frame
from minivllm.server.endpoints.chat_endpoint import ChatRun
from minivllm.server.protocol import responses as protocol
from minivllm.server.protocol.chat import ChatCompletionRequest, Delta
from minivllm.server.service.service import Service, new_id
from minivllm.server.wire.errors import ApiError, validation_error
from minivllm.server.wire.fields import SamplingFields

FUNCTION_FIELDS = {"name", "description", "parameters", "strict"}


def as_chat_request(request: protocol.ResponseRequest) -> ChatCompletionRequest:
    """Raises ApiError 400 for what the chat form cannot say."""
    values: dict[str, Any] = {name: getattr(request, name) for name in SamplingFields.model_fields}
    for name in ("model", "stream", "user", "priority", "cache_salt", "parallel_tool_calls"):
        values[name] = getattr(request, name)
    values["messages"] = _messages(request)
    values["max_completion_tokens"] = request.max_output_tokens
    values["reasoning_effort"] = request.reasoning.effort if request.reasoning is not None else None
    values["response_format"] = _response_format(request)
    if request.tools is not None:
        values["tools"] = [
            {"type": "function", "function": tool.model_dump(include=FUNCTION_FIELDS, exclude_none=True)}
            for tool in request.tools
        ]
    values["tool_choice"] = _tool_choice(request)
    return ChatCompletionRequest.model_validate(values)


def _tool_choice(request: protocol.ResponseRequest) -> Any:
    choice = request.tool_choice
    if isinstance(choice, protocol.AllowedFunctionTools):
        tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    if isinstance(choice, protocol.NamedFunctionTool):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def _response_format(request: protocol.ResponseRequest) -> dict[str, Any] | None:
    wanted = request.text.format if request.text is not None else None
    if wanted is None:
        return None
    if isinstance(wanted, protocol.ResponseTextJsonSchema):
        schema = wanted.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        return {"type": "json_schema", "json_schema": schema}
    return {"type": wanted.type}


def _messages(request: protocol.ResponseRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    reasoning: str | None = None
    for index, item in enumerate(request.input):
        if isinstance(item, protocol.ReasoningItem):
            reasoning = "\n".join(part.text for part in item.content or ())
            continue
        _add_item(f"input.{index}", item, messages)
        if reasoning is not None and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = None
    return messages


def _add_item(path: str, item: protocol.InputItem, messages: list[dict[str, Any]]) -> None:
    """Append a message; calls of one turn go together, into the assistant message before them if there is one."""
    if isinstance(item, protocol.MessageItem):
        messages.append({"role": item.role, "content": text_of(f"{path}.content", item.content)})
    elif isinstance(item, protocol.FunctionCallOutputItem):
        output = text_of(f"{path}.output", item.output)
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
    elif isinstance(item, protocol.FunctionCallItem):
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)


Tell = Callable[..., None]
"""``tell(event type, **fields)``"""

_TEXTS: dict[str, tuple[str, dict[str, Any], protocol.OutputPart, dict[str, Any]]] = {
    "message": ("msg", {"role": "assistant"}, {"type": "output_text", "text": "", "annotations": []}, {"logprobs": []}),
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}, {}),
}
"""Kind of an item with text -> prefix of its id, fields of its own, its part, further fields of events of the text."""


class ResponseItems:
    """The answer's items as they grow out of chat deltas; every change is told as an event."""

    def __init__(self, tell: Tell) -> None:
        self.items: list[protocol.OutputItem] = []
        self._tell = tell

    def add(self, delta: Delta) -> None:
        self._add_text("reasoning", delta.get("reasoning_content"))
        self._add_text("message", delta.get("content"))
        for call in delta.get("tool_calls", ()):
            self._add_call(call)

    def close(self, status: protocol.Status) -> None:
        """End the item that is open, if any; ``status`` is "incomplete" where the answer stopped inside it."""
        if not self._is_open():
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            self._tell_of_item("function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            fields = _TEXTS[item["type"]][3]
            self._tell_of_item(f"{part['type']}.done", content_index=0, text=part["text"], **fields)
            self._tell_of_item("content_part.done", content_index=0, part=part)
        self._tell("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _is_open(self) -> bool:
        return bool(self.items) and self.items[-1]["status"] == "in_progress"

    def _tell_of_item(self, kind: str, **fields: Any) -> None:
        self._tell(f"response.{kind}", item_id=self.items[-1]["id"], output_index=len(self.items) - 1, **fields)

    def _begin(self, kind: str, id_prefix: str, **fields: Any) -> None:
        self.close("completed")
        item: Any = {"id": new_id(id_prefix), "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._tell("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _add_text(self, kind: str, text: str | None) -> None:
        if not text:
            return
        id_prefix, own_fields, empty_part, event_fields = _TEXTS[kind]
        if not self._is_open() or self.items[-1]["type"] != kind:
            self._begin(kind, id_prefix, content=[], **own_fields)
            self.items[-1]["content"].append(empty_part.copy())
            self._tell_of_item("content_part.added", content_index=0, part=empty_part)
        part = self.items[-1]["content"][0]
        part["text"] += text
        self._tell_of_item(f"{part['type']}.delta", content_index=0, delta=text, **event_fields)

    def _add_call(self, call: dict[str, Any]) -> None:
        function = call["function"]
        if "name" in function:
            self._begin("function_call", "fc", arguments="", call_id=call["id"], name=function["name"])
        if function["arguments"]:
            self.items[-1]["arguments"] += function["arguments"]
            self._tell_of_item("function_call_arguments.delta", delta=function["arguments"])


class ResponseRun:
    """One request for a response, checked; then either ``complete`` or ``stream``."""

    def __init__(self, service: Service, request: protocol.ResponseRequest) -> None:
        self._service = service
        self._request = request
        try:
            self._chat = ChatRun(service, as_chat_request(request))
        except ValidationError as error:  # what only shows when the items are put together
            raise validation_error(error.errors(), None) from None
        self._id = new_id("resp")
        self._created = int(time.time())
        self._frames: list[bytes] = []
        self._num_events = 0
        self._items = ResponseItems(self._tell)

    async def complete(self) -> protocol.ResponseObject:
        """The whole response at once."""
        async with aclosing(self._chat.deltas()) as deltas:
            async for delta in deltas:
                self._items.add(delta)
        return await self._end()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames of typed events: created, in_progress, the items' own, completed or incomplete."""
        async with aclosing(self._chat.deltas()) as deltas:
            async for delta in deltas:
                if self._num_events == 0:
                    self._tell("response.created", response=self._object("in_progress"))
                    self._tell("response.in_progress", response=self._object("in_progress"))
                self._items.add(delta)
                if self._frames:
                    yield self._take_frames()
        response = await self._end()
        self._tell(f"response.{response['status']}", response=response)
        yield self._take_frames()

    def error_frames(self, error: ApiError) -> bytes:
        """How a stream ends that fails in the middle."""
        detail = error.detail
        self._tell("error", code=detail["code"], message=detail["message"], param=detail["param"], error=detail)
        return self._take_frames()

    async def _end(self) -> protocol.ResponseObject:
        answer = self._chat.answer(0)
        is_cut = (answer.ending or {}).get("finish_reason") == "length"
        status: protocol.Status = "incomplete" if is_cut else "completed"
        self._items.close(status if answer.broken_call is None else "incomplete")
        response = self._object(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = await self._usage()
        return response

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._request.stream:
            event = {"type": kind, "sequence_number": self._num_events, **fields}
            self._frames.append(event_frame(kind, event))
            self._num_events += 1

    def _take_frames(self) -> bytes:
        frames, self._frames = self._frames, []
        return b"".join(frames)

    async def _usage(self) -> protocol.ResponseUsage:
        """Reasoning is counted as when it is tokenized by itself."""
        used, num_reasoning_tokens = self._chat.usage(), 0
        for item in self._items.items:
            if item["type"] == "reasoning":
                encode, text = self._service.engine.tokenizer.encode, item["content"][0]["text"]
                num_reasoning_tokens += len(await self._service.in_text_thread(encode, text, False))
        return protocol.ResponseUsage(
            input_tokens=used["prompt_tokens"],
            input_tokens_details=used["prompt_tokens_details"],
            output_tokens=used["completion_tokens"],
            output_tokens_details={"reasoning_tokens": num_reasoning_tokens},
            total_tokens=used["total_tokens"],
        )

    def _object(self, status: protocol.Status) -> protocol.ResponseObject:
        request, params = self._request, self._chat.params
        wanted = request.text.format if request.text is not None else None
        choice = request.tool_choice or "auto"
        return protocol.ResponseObject(
            id=self._id,
            object="response",
            created_at=self._created,
            status=status,
            error=None,
            incomplete_details=None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            model=self._chat.model,
            output=copy.deepcopy(self._items.items),
            parallel_tool_calls=request.parallel_tool_calls is not False,
            previous_response_id=None,
            reasoning={"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
            store=False,
            temperature=params.temperature,
            text={"format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True)},
            tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
            tools=[tool.model_dump(include={"type", *FUNCTION_FIELDS}) for tool in request.tools or ()],
            top_p=params.top_p if request.top_p is None else request.top_p,
            truncation="disabled",
            usage=None,
            user=request.user,
        )
