"""What runs on every node but the first: it starts its workers when all nodes are there, and relays for them.

The connection to the first node is its life line: when that is lost, its workers end, and so does it. They
end with it in the same way, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from minivllm.config import EngineConfig
from minivllm.distributed.key_file import read_key
from minivllm.distributed.secure_sockets import Network, SecureSockets, tcp_address
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.executor.local_workers import WORKER_COMMAND, LocalWorkers
from minivllm.executor.nodes import messages
from minivllm.executor.nodes.messages import Begin, Ended, Failed, Hello, Kill, Record, Refused, find_host
from minivllm.executor.records.broadcast_ring import PeerGone
from minivllm.executor.records.child_reports import ErrorInfo, describe_exit

logger = logging.getLogger(__name__)

FLUSH_MILLISECONDS = 2000
"""How long the last messages may take to leave."""
LAST_WORDS_MILLISECONDS = 200
"""How long after the end of a connection something may be found that was said before."""
EXIT_SECONDS = 3.0
"""How long a worker may take to end whose socket has closed."""
_BAD_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class NodeAgent:
    """One node's side. command: of its workers. secret: in place of that of the key file."""

    def __init__(
        self,
        config: EngineConfig,
        settings: Mapping[str, str],
        command: Sequence[str] = WORKER_COMMAND,
        secret: bytes = b"",
    ) -> None:
        """Raises ConfigError for an address or a key that cannot be."""
        assert config.nodes is not None
        self._config = config
        self._command = command
        self._node = config.nodes
        self._hello = Hello(config.nodes.node_rank, messages.versions(), dict(settings))
        self._host = find_host(config.nodes.master_addr)
        self._secret = secret or read_key(config.nodes.key_file)
        self._where = f"{config.nodes.master_addr}, port {config.nodes.master_port}"
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder = msgspec.msgpack.Decoder(messages.ToNode)
        self._records: SimpleQueue[bytes | None] = SimpleQueue()
        self._was_told = False

    def run(self) -> int:
        """Until the first node ends; the exit status: 0 after an orderly end. Raises ConfigError if this node
        cannot take part, EngineDeadError if the first one is lost."""
        sockets = SecureSockets(self._secret)
        address = tcp_address(self._host, self._node.master_port)
        dealer = sockets.client(zmq.DEALER, address)
        monitor = dealer.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CONNECT_RETRIED
            | _BAD_HANDSHAKES
        )
        try:
            dealer.connect(address)
            config = messages.on_this_node(self._join(dealer, monitor), self._config)
            try:
                workers = LocalWorkers(
                    config, msgspec.Raw, self._command, Network(self._own_host(), self._secret)
                )
            except BaseException as error:
                dealer.send(self._encode(Failed(ErrorInfo.of(error))))
                raise
            return self._serve(dealer, monitor, workers)
        finally:
            dealer.disable_monitor()
            monitor.close(linger=0)
            dealer.close(linger=FLUSH_MILLISECONDS)
            sockets.close()

    def _own_host(self) -> str:
        """The address of this host on the way to the first node."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((self._host, self._node.master_port))
            return str(probe.getsockname()[0])

    def _join(self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> EngineConfig:
        """Wait until all nodes are there; the first one's configuration."""
        dealer.send(self._encode(self._hello))
        is_connected = has_waited = False
        while True:
            for source in zmq.select([dealer, monitor], [], [])[0]:
                if source is dealer:
                    answer = self._decoder.decode(dealer.recv())
                    if isinstance(answer, Refused):
                        raise ConfigError(answer.reason)
                    if isinstance(answer, Begin):
                        return answer.config
                    continue
                event = recv_monitor_message(monitor)["event"]
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    is_connected = True
                    logger.info("Node 0 is there; waiting until all are …")
                elif event == zmq.EVENT_CONNECT_RETRIED and not has_waited:
                    has_waited = True
                    logger.info("Waiting for node 0 at %s …", self._where)
                elif event == zmq.EVENT_DISCONNECTED and is_connected:
                    if dealer.poll(LAST_WORDS_MILLISECONDS):
                        break  # it has said why
                    raise EngineDeadError(f"Node 0 at {self._where} ended before all nodes were there.")
                elif event == zmq.EVENT_DISCONNECTED or event & _BAD_HANDSHAKES:
                    raise ConfigError(
                        f"What listens at {self._where} does not answer as a first node with the same key "
                        "does: "
                        "node_key_file must hold the same secret on all nodes, and master_addr and "
                        "master_port be "
                        "those of the first one."
                    )

    def _serve(self, dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], workers: LocalWorkers) -> int:
        logger.info(
            "Node %d runs the workers of ranks %s.", self._node.node_rank, ", ".join(map(str, workers.ranks))
        )
        writer = threading.Thread(target=self._write, args=(workers,), name="records", daemon=True)
        writer.start()
        ranks = {channel.fileno(): rank for channel, rank in zip(workers.channels, workers.ranks)}
        poller = zmq.Poller()
        for source in (dealer, monitor, *ranks):
            poller.register(source, zmq.POLLIN)
        statuses = []
        try:
            while ranks:
                events = dict(poller.poll())
                if monitor in events and recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                    raise EngineDeadError(f"The connection to node 0 at {self._where} was lost.")
                if dealer in events:
                    self._obey(self._decoder.decode(dealer.recv()), workers)
                for descriptor in ranks.keys() & events.keys():
                    rank = ranks[descriptor]
                    said = workers.channels[rank - workers.ranks.start].receive()
                    for message in said or ():
                        dealer.send(self._encode(messages.FromWorker(rank, message)))
                    if said is None:
                        poller.unregister(descriptor)
                        del ranks[descriptor]
                        statuses.append(self._status(workers.processes[rank - workers.ranks.start], rank))
                        dealer.send(self._encode(Ended(rank, statuses[-1])))
        finally:
            workers.kill()
            self._records.put(None)
            writer.join()
            workers.close()
        if self._was_told:
            logger.error("Node 0 ended the workers of this node; its log says why.")
        elif not any(statuses):
            logger.info("Node 0 has ended, and so does this node.")
        return int(self._was_told or any(statuses))

    def _status(self, process: subprocess.Popen[bytes], rank: int) -> int:
        try:
            status = process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if status and not self._was_told:
            logger.error("%s", describe_exit(f"worker of rank {rank}", status))
        return status

    def _obey(self, message: messages.ToNode, workers: LocalWorkers) -> None:
        if isinstance(message, Record):
            self._records.put(message.data)
        elif isinstance(message, messages.ToWorker):
            with contextlib.suppress(OSError):  # its end will be heard of next
                workers.channels[message.rank - workers.ranks.start].send(message.message)
        elif isinstance(message, Kill):
            self._was_told = True
            workers.processes[message.rank - workers.ranks.start].kill()

    def _write(self, workers: LocalWorkers) -> None:
        """A thread of its own brings records to the ring, where it may have to wait for room."""
        watched = [channel.fileno() for channel in workers.channels]
        while (record := self._records.get()) is not None:
            try:
                workers.ring.write(record, watched)
            except PeerGone:
                return
