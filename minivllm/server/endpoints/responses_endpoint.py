"""``POST /v1/responses``: a chat completion told as items and typed events."""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError

from minivllm.server.answers.responses_input import FUNCTION_FIELDS, as_chat_request
from minivllm.server.answers.streaming import event_frame
from minivllm.server.endpoints.chat_endpoint import ChatRun
from minivllm.server.protocol.chat import Delta, ToolCallDelta
from minivllm.server.protocol.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputItem,
    OutputTextPart,
    OutputTokensDetails,
    ReasoningTextPart,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
    Status,
)
from minivllm.server.service.service import Service, new_id
from minivllm.server.wire.errors import ApiError, validation_error

Tell = Callable[..., None]
"""``tell(event type, **fields)``"""


class ResponseItems:
    """The answer's items as they grow out of chat deltas; every change is told as an event."""

    def __init__(self, tell: Tell) -> None:
        self.items: list[OutputItem] = []
        self._tell = tell

    def add(self, delta: Delta) -> None:
        if delta.get("reasoning_content"):
            self._add_text("reasoning", delta["reasoning_content"])
        if delta.get("content"):
            self._add_text("message", delta["content"] or "")
        for call in delta.get("tool_calls", ()):
            self._add_call(call)

    def close(self, status: Status) -> None:
        """End the item that is open, if any; ``status`` is "incomplete" where the length limit cut it."""
        item = self._open_item()
        if item is None:
            return
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        if item["type"] == "function_call":
            self._tell("response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            logprobs: dict[str, list[Any]] = {"logprobs": []} if item["type"] == "message" else {}
            self._tell(f"response.{kind}.done", **place, content_index=0, text=part["text"], **logprobs)
            self._tell("response.content_part.done", **place, content_index=0, part=part)
        self._tell("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _open_item(self) -> OutputItem | None:
        return self.items[-1] if self.items and self.items[-1]["status"] == "in_progress" else None

    def _begin(self, item: OutputItem) -> None:
        self.close("completed")
        self.items.append(item)
        self._tell("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _add_text(self, kind: str, text: str) -> None:
        item = self._open_item()
        if item is None or item["type"] != kind:
            item = self._begin_text(kind)
        item["content"][0]["text"] += text
        place = {"item_id": item["id"], "output_index": len(self.items) - 1, "content_index": 0}
        if kind == "message":
            self._tell("response.output_text.delta", **place, delta=text, logprobs=[])
        else:
            self._tell("response.reasoning_text.delta", **place, delta=text)

    def _begin_text(self, kind: str) -> OutputItem:
        part: OutputTextPart | ReasoningTextPart
        if kind == "message":
            item = OutputItem(id=new_id("msg"), type="message", status="in_progress", role="assistant", content=[])
            part = OutputTextPart(type="output_text", text="", annotations=[])
        else:
            item = OutputItem(id=new_id("rs"), type="reasoning", status="in_progress", summary=[], content=[])
            part = ReasoningTextPart(type="reasoning_text", text="")
        self._begin(item)
        item["content"].append(part)
        self._tell(
            "response.content_part.added",
            item_id=item["id"],
            output_index=len(self.items) - 1,
            content_index=0,
            part=part,
        )
        return item

    def _add_call(self, call: ToolCallDelta) -> None:
        function = call["function"]
        if "name" in function:
            self._begin(
                OutputItem(
                    id=new_id("fc"),
                    type="function_call",
                    status="in_progress",
                    call_id=call["id"],
                    name=function["name"],
                    arguments="",
                )
            )
        if function["arguments"]:
            item = self.items[-1]
            item["arguments"] += function["arguments"]
            self._tell(
                "response.function_call_arguments.delta",
                item_id=item["id"],
                output_index=len(self.items) - 1,
                delta=function["arguments"],
            )


class ResponseRun:
    """One request for a response, checked; then either ``complete`` or ``stream``."""

    def __init__(self, service: Service, request: ResponseRequest) -> None:
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

    async def complete(self) -> ResponseObject:
        """The whole response at once."""
        async with aclosing(self._chat.deltas()) as deltas:
            async for _, delta in deltas:
                self._items.add(delta)
        return await self._end()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames of typed events: created, in_progress, the items' own, completed or incomplete."""
        async with aclosing(self._chat.deltas()) as deltas:
            async for _, delta in deltas:
                if self._num_events == 0:
                    self._tell("response.created", response=self._object("in_progress"))
                    self._tell("response.in_progress", response=self._object("in_progress"))
                self._items.add(delta)
                for frame in self._take_frames():
                    yield frame
        response = await self._end()
        self._tell(f"response.{response['status']}", response=response)
        for frame in self._take_frames():
            yield frame

    def error_frames(self, error: ApiError) -> bytes:
        """How a stream ends that fails in the middle."""
        detail = error.detail
        self._tell("error", code=detail["code"], message=detail["message"], param=detail["param"], error=detail)
        return b"".join(self._take_frames())

    async def _end(self) -> ResponseObject:
        status: Status = "incomplete" if self._chat.answer(0).finish_reason == "length" else "completed"
        self._items.close(status)
        response = self._object(status)
        if status == "incomplete":
            response["incomplete_details"] = IncompleteDetails(reason="max_output_tokens")
        response["usage"] = await self._usage()
        return response

    def _tell(self, kind: str, **fields: Any) -> None:
        if self._request.stream:
            event = {"type": kind, "sequence_number": self._num_events, **fields}
            self._frames.append(event_frame(kind, event))
            self._num_events += 1

    def _take_frames(self) -> list[bytes]:
        frames, self._frames = self._frames, []
        return frames

    async def _usage(self) -> ResponseUsage:
        used = self._chat.usage()
        return ResponseUsage(
            input_tokens=used["prompt_tokens"],
            input_tokens_details=InputTokensDetails(cached_tokens=used["prompt_tokens_details"]["cached_tokens"]),
            output_tokens=used["completion_tokens"],
            output_tokens_details=OutputTokensDetails(reasoning_tokens=await self._num_reasoning_tokens()),
            total_tokens=used["total_tokens"],
        )

    async def _num_reasoning_tokens(self) -> int:
        """The reasoning's length when tokenized by itself."""
        texts = [item["content"][0]["text"] for item in self._items.items if item["type"] == "reasoning"]
        encode = self._service.engine.tokenizer.encode
        return sum([len(await self._service.in_text_thread(encode, text, False)) for text in texts])

    def _object(self, status: Status) -> ResponseObject:
        request, params = self._request, self._chat.params
        wanted = request.text.format if request.text is not None else None
        choice = request.tool_choice or "auto"
        return ResponseObject(
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
            top_p=params.top_p,
            truncation="disabled",
            usage=None,
            user=request.user,
        )
