"""``POST /v1/responses``: a request rewritten as the chat completion it stands for,
told as items and typed events."""

import copy
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from pydantic import ValidationError

from minivllm.errors import MinivllmError
from minivllm.server.answers.response_items import ResponseItems
from minivllm.server.answers.response_messages import FUNCTION_FIELDS, ChatForm
from minivllm.server.answers.streaming import event_frame
from minivllm.server.bodies.errors import ApiError, to_api_error, validation_error
from minivllm.server.bodies.ids import new_id
from minivllm.server.endpoints.chat_endpoint import ChatRun
from minivllm.server.protocol import responses as protocol
from minivllm.server.protocol.chat import ChatCompletionRequest, Delta, TokenLogprob
from minivllm.server.service.service import Service


class ResponseRun:
    """One request for a response, checked; then either ``complete`` or ``stream``."""

    def __init__(self, service: Service, request: protocol.ResponseRequest) -> None:
        self._service = service
        self._request = request
        self._form = form = ChatForm(request)
        try:
            self._chat = ChatRun(service, ChatCompletionRequest.model_validate(form.values))
        except ValidationError as error:  # what only shows when the items are put together
            raise form.renamed(validation_error(error.errors(), form.values)) from None
        except ApiError as error:
            raise form.renamed(error) from None
        self._chat.drops_oldest = request.truncation == "auto"
        self._chat.prompt_field = "input"
        self._id = new_id("resp")
        self._created = int(time.time())
        self._frames: list[bytes] = []
        self._num_events = 0
        self._items = ResponseItems(self._tell)

    async def count(self) -> protocol.InputTokens:
        """Its input, without an answer."""
        try:
            count = await self._service.in_text_thread(self._chat.num_prompt_tokens)
        except (ApiError, MinivllmError) as error:
            raise self._form.renamed(to_api_error(error)) from None
        return protocol.InputTokens(object="response.input_tokens", input_tokens=count)

    async def complete(self) -> protocol.ResponseObject:
        """The whole response at once."""
        async with aclosing(self._deltas()) as deltas:
            async for delta, logprobs in deltas:
                self._items.add(delta, logprobs)
        return await self._end()

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Frames of typed events: created, in_progress, the items' own, completed or incomplete."""
        async with aclosing(self._deltas()) as deltas:
            async for delta, logprobs in deltas:
                if self._num_events == 0:
                    self._tell("response.created", response=self._object("in_progress"))
                    self._tell("response.in_progress", response=self._object("in_progress"))
                self._items.add(delta, logprobs)
                if self._frames:
                    yield self._take_frames()
        response = await self._end()
        self._tell(f"response.{response['status']}", response=response)
        yield self._take_frames()

    async def _deltas(self) -> AsyncGenerator[tuple[Delta, list[TokenLogprob] | None], None]:
        """Those of the chat completion, whose errors name the fields of the response."""
        try:
            async with aclosing(self._chat.deltas()) as deltas:
                async for delta in deltas:
                    yield delta
        except (ApiError, MinivllmError) as error:
            raise self._form.renamed(to_api_error(error)) from None

    def error_frames(self, error: ApiError) -> bytes:
        """How a stream ends that fails in the middle."""
        detail = error.detail
        self._tell(
            "error", code=detail["code"], message=detail["message"], param=detail["param"], error=detail
        )
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
            tools=[
                tool.model_dump(include={"type", "format", *FUNCTION_FIELDS}) for tool in request.tools or ()
            ],
            top_p=params.top_p if request.top_p is None else request.top_p,
            truncation=request.truncation or "disabled",
            usage=None,
            user=request.user,
        )
