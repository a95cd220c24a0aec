"""Tensors and records between workers of several hosts, over encrypted sockets that require a key.

gloo and TCPStore, torch's own means for this, accept every connection and send plain text. Here every worker
listens at one address and all others send to it. A worker that waits for one peer keeps messages of the
others for later.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import torch
import zmq
from torch import Tensor

from minivllm.distributed.communicator import Communicator
from minivllm.distributed.secure_sockets import Network, SecureSockets, tcp_address
from minivllm.distributed.stage import RemoteLinks

_TENSORS, _STREAM, _TOKENS = range(3)
"""What a record is: part of an exchange, the residual stream, sampled tokens."""
_HEADER = struct.Struct("<IB")
"""In front of every record: the rank that sends it, and what it is."""


class Mesh:
    """One worker's end. Used by one thread."""

    def __init__(self, rank: int, network: Network) -> None:
        """Raises zmq.ZMQError if nothing can listen there."""
        self.rank = rank
        self._sockets = SecureSockets(network.secret)
        self._inbox = self._sockets.bound(zmq.PULL, tcp_address(network.host, "*"))
        self.address = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._outboxes: dict[int, zmq.Socket[bytes]] = {}
        self._waiting: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def connect(self, addresses: Mapping[int, str]) -> None:
        """Find the others. addresses: by rank."""
        for rank, address in addresses.items():
            if rank != self.rank:
                self._outboxes[rank] = self._sockets.client(zmq.PUSH, address)
                self._outboxes[rank].connect(address)

    def send(self, rank: int, kind: int, record: bytes | memoryview) -> None:
        """Append a record to those on their way to a rank."""
        self._outboxes[rank].send_multipart([_HEADER.pack(self.rank, kind), record])

    def receive(self, rank: int, kind: int) -> bytes:
        """The next record of that kind from a rank; waits for it."""
        waiting = self._waiting[rank, kind]
        while not waiting:
            header, *parts = self._inbox.recv_multipart()
            if len(header) != _HEADER.size or len(parts) != 1:
                raise RuntimeError(
                    f"A record with {len(parts)} parts and a header of {len(header)} bytes came."
                )
            self._waiting[_HEADER.unpack(header)].append(parts[0])
        return waiting.popleft()

    def close(self) -> None:
        """The last call."""
        for socket in (self._inbox, *self._outboxes.values()):
            socket.close()
        self._sockets.close()


class MeshLink:
    """Records to or from one worker: what ``Link`` is within a host."""

    def __init__(self, mesh: Mesh, peer: int, kind: int) -> None:
        self._mesh = mesh
        self._peer = peer
        self._kind = kind

    def send(self, record: bytes | memoryview) -> None:
        self._mesh.send(self._peer, self._kind, record)

    def receive(self) -> bytearray:
        return bytearray(self._mesh.receive(self._peer, self._kind))


class MeshCommunicator(Communicator):
    """group: the ranks that divide the layers, in order; the mesh's own is one of them."""

    def __init__(self, mesh: Mesh, group: Sequence[int]) -> None:
        self._mesh = mesh
        self._group = group
        self.rank = group.index(mesh.rank)
        self.size = len(group)

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.num_exchanges += 1
        mine = x.reshape(-1).view(torch.uint8)
        if len(mine) == 0:
            return [x] * self.size
        others = [rank for rank in self._group if rank != self._mesh.rank]
        for rank in others:
            self._mesh.send(rank, _TENSORS, mine.numpy().data)
        received = {rank: bytearray(self._mesh.receive(rank, _TENSORS)) for rank in others}
        parts = [
            torch.frombuffer(received[rank], dtype=torch.uint8) if rank in received else mine
            for rank in self._group
        ]
        return [part.view(x.dtype).view(x.shape) for part in parts]

    def close(self) -> None:
        self._mesh.close()


def remote_links(mesh: Mesh, size: int, num_workers: int, local: range) -> RemoteLinks:
    """How a worker reaches those of stages on other nodes. size: workers of a stage.
    local: the ranks of its node."""
    rank, last = mesh.rank, num_workers - size
    source, sink = (
        MeshLink(mesh, peer, _STREAM) if 0 <= peer < num_workers and peer not in local else None
        for peer in (rank - size, rank + size)
    )
    place = rank % size
    ends = range(place, last, size) if rank >= last else [last + place]
    tokens = tuple(MeshLink(mesh, peer, _TOKENS) for peer in ends if peer not in local)
    return RemoteLinks(source=source, sink=sink, tokens=tokens)
