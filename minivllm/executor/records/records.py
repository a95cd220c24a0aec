"""What crosses between an executor and its worker processes:
typed msgpack messages, and nothing else is decoded.

To all workers, through the ring: ``Step`` (then ``Masks``, where it says so), ``Call`` and ``Stop``. From
each worker, through its socket: ``Output`` of the output rank, ``Answer`` to every call, ``Report``, ``Log``
and ``Died``. It brings each worker its ``Start`` too, and a ``Probe`` where it seems to hang, which it
answers with ``Whereabouts``. Workers of several nodes say where they are ``Listening``, hear of their
``Peers``, and tell what they ``Sampled``.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

import msgspec

from minivllm.config import EngineConfig
from minivllm.distributed.link import StageLinks
from minivllm.distributed.lockstep import EngineSeat
from minivllm.distributed.secure_sockets import Network
from minivllm.executor.records.child_reports import ErrorInfo, Log
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks


def output_rank(config: EngineConfig) -> int:
    """Whose outputs count: the first one of the last stage, whose ranks sample alike."""
    return config.num_workers - config.tensor_parallel_size


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """The first message to a worker, through its socket.

    rank: its place among ``size`` workers. segment: the descriptors by which they share tensors (see
    ``open_segment``). rendezvous: instead of that, the descriptor of a file where they find one another
    through gloo. links: to the workers of other stages. seat: of its engine among those that share experts.
    shared: all descriptors of these. network: where there are other nodes.
    """

    config: EngineConfig
    rank: int
    size: int
    log_level: int
    segment: tuple[int, list[list[int]]] | None = None
    rendezvous: int | None = None
    links: StageLinks = StageLinks()
    seat: EngineSeat | None = None
    shared: list[int] = []
    network: Network | None = None


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """A step takes very long: say where you are."""


class Peers(msgspec.Struct, frozen=True, tag="peers"):
    """Where the workers of all ranks listen."""

    addresses: dict[int, str]


ToWorker = Start | Probe | Peers


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Run a step. has_masks: the next record is its Masks."""

    step: SchedulerOutput
    has_masks: bool


class Masks(msgspec.Struct, frozen=True, tag="masks"):
    """Which tokens may come next in the step before."""

    masks: TokenMasks


class Call(msgspec.Struct, frozen=True, tag="call"):
    """Call a method of every worker that is on the list of allowed ones."""

    method: str
    args: list[Any]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End, after what came before."""


ToWorkers = Step | Masks | Call | Stop


class Output(msgspec.Struct, frozen=True, tag="output"):
    """Results of the oldest step that has none yet."""

    output: ModelRunnerOutput


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """What a call returned, or the error it raised."""

    value: Any = None
    error: ErrorInfo | None = None


class Report(msgspec.Struct, frozen=True, tag="report"):
    """What a connector has moved."""

    output: KVConnectorOutput


class Whereabouts(msgspec.Struct, frozen=True, tag="whereabouts"):
    """Where a worker's main thread is.
    num_exchanges: how often it has come to where ranks wait for one another. num_handed: see ``Stage``."""

    num_exchanges: int
    stack: str
    num_handed: int = 0


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Where other workers can connect."""

    address: str


class Sampled(msgspec.Struct, frozen=True, tag="sampled"):
    """What a worker of another node than the first sampled: the number of its step, and a digest."""

    step: int
    digest: int


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The last message of a worker that cannot go on."""

    error: ErrorInfo


FromWorker = Output | Answer | Report | Log | Whereabouts | Listening | Sampled | Died

_LENGTH = struct.Struct("<I")
_RECEIVED_BYTES = 2**18


class Channel:
    """One end of a worker's socket: messages with their length in front.
    Any thread may send, one may receive."""

    def __init__(self, end: socket.socket, received: Any) -> None:
        """received: the type of what comes in."""
        self._socket = end
        self._decoder = msgspec.msgpack.Decoder(received)
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Raises OSError if the other side has gone."""
        data = msgspec.msgpack.encode(message)
        with self._lock:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> list[Any] | None:
        """Wait for bytes; the messages that are complete now.
        None at the end: the other side has closed, or ended."""
        try:
            received = self._socket.recv(_RECEIVED_BYTES)
        except ConnectionError:
            received = b""
        if not received:
            return None
        self._buffer += received
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(memoryview(self._buffer)[_LENGTH.size : end].tobytes()))
            del self._buffer[:end]
        return messages

    def receive_one(self) -> Any:
        """Wait for a first message that nothing follows; None at the end."""
        while (messages := self.receive()) is not None:
            if messages:
                return messages[0]
        return None

    def shut_down(self) -> None:
        """Say nothing more: the other side hears of the end."""
        with contextlib.suppress(OSError):  # that one has gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
