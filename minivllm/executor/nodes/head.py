"""The first node's side: other hosts' workers look like its own.

Each has a channel, whose far end is served here, and a process that can be waited for and killed. A thread
brings what is said there to the nodes, and back, and every record of the ring, which it reads as one more
reader.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from minivllm.compilation.packaged.package_builds import close_in_children, forget_descriptor
from minivllm.config import EngineConfig
from minivllm.distributed.key_file import read_key
from minivllm.distributed.secure_sockets import Network, SecureSockets, tcp_address
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.executor.nodes import messages
from minivllm.executor.nodes.messages import Begin, Ended, Failed, Hello, Kill, Record, Refused
from minivllm.executor.records import records
from minivllm.executor.records.broadcast_ring import RingReader, RingWriter
from minivllm.executor.records.child_reports import ErrorInfo
from minivllm.executor.records.records import Channel, Died

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 5.0
"""How long to wait for the end of a worker that was killed on another node."""
LOST_STATUS = 1
_BAD_HANDSHAKES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class RemoteWorker:
    """The process of a worker of another node: what ``subprocess.Popen`` has. end: of its channel, which is
    closed for writing to have it killed."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._has_ended = threading.Event()
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Its status. Without a timeout it waits for FAREWELL_SECONDS at most."""
        if not self._has_ended.wait(FAREWELL_SECONDS if timeout is None else timeout) and timeout is not None:
            raise subprocess.TimeoutExpired("worker", timeout)
        return LOST_STATUS if self._status is None else self._status

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # its node has gone
            self._end.shutdown(socket.SHUT_WR)

    def ended(self, status: int) -> None:
        if self._status is None:
            self._status = status
        self._has_ended.set()


@dataclass(frozen=True)
class _Node:
    """identity: on the ROUTER socket. connection: its descriptor there. ranks: of its workers."""

    number: int
    identity: bytes
    connection: int
    address: str
    ranks: range

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.address})"


class NodeStarter(Protocol):
    """Starts the other nodes, unless people start them by hand."""

    def start(self, port: int) -> None:
        """Start them: the first node listens at this port."""

    def fileno(self) -> int:
        """A descriptor that is readable when there is news."""

    def take_news(self) -> None:
        """Raises what keeps a node from taking part."""


class HeadNode:
    """Waits for all nodes. secret: in place of that of the key file. starter: of the other nodes.
    A master_port of 0 takes a free one.

    Raises ConfigError if it cannot listen, or if a node has another model, other settings or versions, which
    that node is told, too; and what the starter raises.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: Mapping[str, str],
        secret: bytes = b"",
        starter: NodeStarter | None = None,
    ) -> None:
        assert config.nodes is not None
        self._config = config
        self._node = config.nodes
        self._settings = dict(settings)
        host, secret = messages.find_host(config.nodes.master_addr), secret or read_key(config.nodes.key_file)
        self.network = Network(host, secret)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(messages.FromNode)
        self._sockets = SecureSockets(secret)
        try:
            self._router = self._sockets.bound(zmq.ROUTER, tcp_address(host, config.nodes.master_port))
        except zmq.ZMQError as error:
            self._sockets.close()
            raise ConfigError(
                f"The first node cannot listen at {config.nodes.master_addr}, port "
                f"{config.nodes.master_port} "
                f"({os.strerror(error.errno or 0)}): master_addr must be an address of this host, and "
                "master_port free."
            ) from None
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED | _BAD_HANDSHAKES)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._has_warned = False
        self._nodes: dict[bytes, _Node] = {}
        self._far: dict[int, Channel] = {}
        self.channels: list[Channel] = []
        self.processes: list[RemoteWorker] = []
        self._reader: RingReader | None = None
        self._thread = threading.Thread(target=self._relay, name="nodes", daemon=True)
        self._poller = zmq.Poller()
        for source in (self._router, self._monitor):
            self._poller.register(source, zmq.POLLIN)
        try:
            self._wait_for_nodes(starter)
        except BaseException:
            self.close()
            raise
        for rank in range(config.local_ranks.stop, config.num_workers):
            near, far = socket.socketpair()
            self.channels.append(Channel(near, records.FromWorker))
            self.processes.append(RemoteWorker(near))
            self._far[rank] = Channel(far, msgspec.Raw)
            for end in (near, far):
                close_in_children(end.fileno())
            self._poller.register(far.fileno(), zmq.POLLIN)

    def _wait_for_nodes(self, starter: NodeStarter | None) -> None:
        expected, named = set(range(1, self._node.nnodes)), set[int]()
        port = int(self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        if starter is not None:
            starter.start(port)
            self._poller.register(starter.fileno(), zmq.POLLIN)
        while missing := expected - {node.number for node in self._nodes.values()}:
            if missing != named:
                names = ", ".join(map(str, sorted(missing)))
                logger.info("Waiting at %s, port %d, for node %s …", self._node.master_addr, port, names)
                named = missing
            events = dict(self._poller.poll())
            if self._monitor in events:
                for node in self._disconnected():
                    del self._nodes[node.identity]
            if self._router in events:
                self._greet()
            if starter is not None and starter.fileno() in events:
                starter.take_news()
        if starter is not None:
            self._poller.unregister(starter.fileno())

    def _greet(self) -> None:
        """Take in a node that says hello."""
        identity, frame = self._router.recv_multipart(copy=False)
        try:
            hello = self._decoder.decode(frame.buffer)
        except msgspec.MsgspecError:
            hello = None
        if not isinstance(hello, Hello):
            self._refuse(
                identity.bytes, "The node is of another version than node 0: install the same on all nodes."
            )
            return
        number, count = hello.node_rank, len(self._config.local_ranks)
        if any(node.number == number for node in self._nodes.values()):
            self._refuse(
                identity.bytes, f"There is a node {number} already: give every node a node_rank of its own."
            )
            return
        problem = messages.difference(hello, messages.versions(), self._settings)
        if problem is not None:
            self._refuse(identity.bytes, problem)
            raise ConfigError(problem)
        self._nodes[identity.bytes] = _Node(
            number,
            identity.bytes,
            connection=int(frame.get(zmq.SRCFD)),
            address=str(frame.get("Peer-Address")),
            ranks=range(number * count, (number + 1) * count),
        )

    def _refuse(self, identity: bytes, reason: str) -> None:
        logger.warning("A node was refused: %s", reason)
        self._router.setsockopt(zmq.LINGER, 1000)
        self._router.send_multipart([identity, self._encode(Refused(reason))])

    def _disconnected(self) -> list[_Node]:
        """What the monitor says."""
        event = recv_monitor_message(self._monitor)
        if event["event"] & _BAD_HANDSHAKES:
            if not self._has_warned:  # once: strangers could fill the log
                logger.warning("A connection without the nodes' key was refused.")
            self._has_warned = True
            return []
        return [node for node in self._nodes.values() if node.connection == event["value"]]

    # -- serving -----------------------------------------------------------------------------------

    def start(self, ring: RingWriter, reader: int) -> None:
        """See OtherNodes."""
        memory, arrived, freed = map(os.dup, ring.descriptors_of(reader))
        self._reader = RingReader(memory, arrived, freed, reader, len(ring.arrived))
        for source in (self._reader.fileno(), self._wake):
            self._poller.register(source, zmq.POLLIN)
        for node in self._nodes.values():
            self._send(node, Begin(self._config))
        self._thread.start()

    def _send(self, node: _Node, message: messages.ToNode) -> None:
        self._router.send_multipart([node.identity, self._encode(message)])

    def _relay(self) -> None:
        """What the thread does until it is woken to end."""
        assert self._reader is not None
        ranks = {channel.fileno(): rank for rank, channel in self._far.items()}
        while True:
            events = dict(self._poller.poll())
            if self._wake in events:
                return
            if self._monitor in events:
                for node in self._disconnected():
                    self._lose(node, "its process has ended, or its host or the network does not answer")
            if self._router in events:
                self._take()
            if self._reader.fileno() in events:
                while self._reader.has_record:
                    record = Record(self._reader.read())
                    for node in self._nodes.values():
                        self._send(node, record)
            for descriptor in ranks.keys() & events.keys():
                self._bring(ranks[descriptor])

    def _bring(self, rank: int) -> None:
        """What the executor says to a worker."""
        channel = self._far[rank]
        [node] = [node for node in self._nodes.values() if rank in node.ranks]
        told = channel.receive()
        if told is None:
            self._poller.unregister(channel.fileno())
            self._send(node, Kill(rank))
        for message in told or ():
            self._send(node, messages.ToWorker(rank, message))

    def _take(self) -> None:
        """What a node says."""
        identity, frame = self._router.recv_multipart()[:2]
        node = self._nodes.get(identity)
        if node is None:
            self._refuse(identity, "Node 0 serves with all of its nodes already.")
            return
        try:
            message = self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            self._lose(node, f"it sent something else than a message, {error}")
            return
        if isinstance(message, messages.FromWorker) and message.rank in node.ranks:
            with contextlib.suppress(OSError):
                self._far[message.rank].send(message.message)
        elif isinstance(message, Ended) and message.rank in node.ranks:
            self._end(message.rank, message.status)
        elif isinstance(message, Failed):
            for rank in node.ranks:
                self._end(rank, LOST_STATUS, message.error)

    def _lose(self, node: _Node, reason: str) -> None:
        error = EngineDeadError(f"The connection to {node.name} was lost: {reason}.")
        for rank in node.ranks:
            self._end(rank, LOST_STATUS, ErrorInfo.of(error))

    def _end(self, rank: int, status: int, error: ErrorInfo | None = None) -> None:
        """Note that a worker has ended, and notify its listener.
        error: the reason, if the worker did not give one."""
        channel, process = self._far[rank], self.processes[rank - self._config.local_ranks.stop]
        if process.poll() is not None:
            return
        process.ended(status)
        with contextlib.suppress(OSError):
            if error is not None:
                channel.send(Died(error))
        with contextlib.suppress(OSError, KeyError):
            self._poller.unregister(channel.fileno())
        channel.shut_down()

    def close(self) -> None:
        """See OtherNodes."""
        if self._thread.ident is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._router.disable_monitor()
        self._monitor.close(linger=0)
        self._router.close()
        self._sockets.close()
        if self._reader is not None:
            self._reader.close()
        os.close(self._wake)
        for channel in (*self.channels, *self._far.values()):
            forget_descriptor(channel.fileno())
            channel.close()
