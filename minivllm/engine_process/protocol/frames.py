"""What crosses the sockets between a frontend and an engine process: one typed msgpack message per frame.

Nothing but data is decoded, into the types named here;
a frame that is anything else raises ``MalformedFrame``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minivllm.config import EngineArgs, EngineConfig
from minivllm.distributed.lockstep import EngineSeat
from minivllm.engine_process.protocol.pixels import WantPixels
from minivllm.executor.records.child_reports import ErrorInfo, Log
from minivllm.kv_cache.specs import GroupSpec
from minivllm.messages import EngineOutput, EngineRequest
from minivllm.multimodal.items import PixelTensors

REQUESTS_SOCKET, OUTPUTS_SOCKET, TRACES_FILE = "requests", "outputs", "traces"
"""Names in the private directory: ROUTER and PULL of the frontend;
where the engine's faulthandler writes stacks."""

GRACE_SECONDS = 3.0
"""How long a running step may delay the engine's end once the frontend has gone."""


class MalformedFrame(Exception):
    """Bytes that are no message of this protocol; the text says what is wrong with them."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The first message, through a pipe. directory: of the sockets; identity: on ROUTER; seat: see
    EngineSeat; number: among engines that share a machine."""

    args: EngineArgs
    directory: str
    identity: bytes
    log_level: int
    seat: EngineSeat | None = None
    number: int = 0


# Frontend -> engine, ROUTER to DEALER.


class Add(msgspec.Struct, frozen=True, tag="add"):
    """A sequence to generate."""

    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End sequences early; ids that are unknown or finished are ignored."""

    request_ids: list[str]


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call one of Administration's methods; a Result with the same call_id answers."""

    call_id: int
    method: str
    args: list[Any] = msgspec.field(default_factory=list)


ToEngine = Add | Abort | Call | PixelTensors


# Engine -> frontend, PUSH to PULL.


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What a step did."""

    outputs: list[EngineOutput]


class Result(msgspec.Struct, frozen=True, tag="result"):
    """The answer to a Call: a value, or the error it raised."""

    call_id: int
    value: Any = None
    error: ErrorInfo | None = None


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The last message of an engine that cannot go on, or could not start."""

    error: ErrorInfo


ToFrontend = Outputs | Result | Log | Died | WantPixels


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The engine serves, with these resolved values.
    Sent once, DEALER to ROUTER, which so learns the way back."""

    config: EngineConfig
    model_vocab_size: int
    eos_token_ids: tuple[int, ...]
    kv_groups: list[GroupSpec]


class Codec:
    """Encoder and decoders of one thread: their buffers are reused."""

    def __init__(self) -> None:
        self.encode = msgspec.msgpack.Encoder().encode
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}

    def decode(self, frame: bytes, kind: Any) -> Any:
        """A message of type ``kind`` (a Struct or a union of tagged ones).
        Raises MalformedFrame for anything else."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = self._decoders[kind] = msgspec.msgpack.Decoder(kind)
        try:
            return decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise MalformedFrame(f"{len(frame)} bytes: {error}") from None

    def request_id_of(self, frame: bytes) -> str | None:
        """Whose request a malformed Add was, if so much of it can be read."""
        try:
            value = msgspec.msgpack.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        request = value.get("request") if isinstance(value, dict) and value.get("type") == "add" else None
        request_id = request.get("request_id") if isinstance(request, dict) else None
        return request_id if isinstance(request_id, str) else None
