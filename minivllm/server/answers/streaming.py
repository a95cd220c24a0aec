"""Server-sent events, and noticing that the client has left, streaming or not."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from minivllm.server.bodies.errors import ApiError, to_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


class ClientLeft(Exception):
    """The client closed the connection before its answer was complete."""


def data_frame(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def event_frame(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\n" + data_frame(value)


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves. Raises ClientLeft then.

    The body must have been read: what comes next is the end of the connection.
    """
    task = asyncio.ensure_future(work)
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        await _disconnected(receive)
        # At once: a pending send goes on when the connection ends, and would write without a reader.
        has_left = not task.done()
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if has_left or not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for pending in (task, watcher):
            if not pending.done():
                pending.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await pending


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends frames as they come. An error after the first frame becomes ``on_error``'s frames,
    then the stream ends.

    frames: an asynchronous generator, always closed. first: its first frame, already taken from it.
    """

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, frames: AsyncGenerator[bytes, None], on_error: Callable[[ApiError], bytes]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._send_frames(scope, send))
        except (ClientLeft, OSError):
            scope["minivllm.client_left"] = True
        finally:
            await self._frames.aclose()

    async def _send_frames(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        try:
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except OSError:
            raise
        except Exception as error:
            api_error = to_api_error(error)
            scope["minivllm.stream_error"] = api_error.error_class
            await send({"type": "http.response.body", "body": self._on_error(api_error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def event_stream(
    request: Request, frames: AsyncGenerator[bytes, None], on_error: Callable[[ApiError], bytes]
) -> Response:
    """Answer with a stream once its first frame is there:
    whatever fails before that is an ordinary error response."""
    try:
        first = await while_connected(request.receive, anext(frames))
    except BaseException:
        await frames.aclose()
        raise
    return EventStream(first, frames, on_error)
