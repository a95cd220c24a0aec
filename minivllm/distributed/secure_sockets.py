"""Encrypted sockets between hosts, open only to peers that know the same secret.

The mechanism is CurveZMQ (RFC 26 of ZeroMQ). Both key pairs are made from the secret, so a server knows the
one key that it accepts, and a client the one server that it talks to. A process that knows the secret can be
either.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import zmq
from zmq.utils import z85

MAX_MESSAGE_BYTES = 2**31 - 1
"""A peer that announces more loses its connection before memory is taken."""
HEARTBEAT_MILLISECONDS, SILENCE_MILLISECONDS = 1000, 5000
"""How often the other side is asked for a sign of life, and after how long without one the connection is
given up. The end of a process is seen at once; this is for hosts and cables. libzmq's own thread answers,
however busy the others."""
_DOMAIN = b"minivllm"
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_OK, _REFUSED = (b"200", b"OK"), (b"400", b"unknown key")


@dataclass(frozen=True)
class Network:
    """Where a worker listens for those of other nodes, and the secret that they share."""

    host: str
    secret: bytes


def _key_pair(secret: bytes, role: bytes) -> tuple[bytes, bytes]:
    """Public and secret key of one side."""
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=role).digest())
    return zmq.curve_public(private), private


class SecureSockets:
    """Makes sockets of both sides. To be closed when all of them are."""

    def __init__(self, secret: bytes) -> None:
        self._server = _key_pair(secret, b"minivllm server")
        self._client = _key_pair(secret, b"minivllm client")
        self._context = zmq.Context()
        gate = self._context.socket(zmq.REP)
        gate.setsockopt(zmq.LINGER, 0)
        gate.bind(_ZAP_ADDRESS)
        threading.Thread(target=self._admit, args=(gate,), name="gate", daemon=True).start()

    def _admit(self, gate: zmq.Socket[bytes]) -> None:
        """Answer libzmq's question whether to let in who is at the door (ZAP, RFC 27),
        until the context ends."""
        try:
            while True:
                version, request_id, domain, _, _, mechanism, *credentials = gate.recv_multipart()
                known = [z85.decode(self._client[0])]
                is_known = (domain, mechanism, credentials) == (_DOMAIN, b"CURVE", known)
                gate.send_multipart([version, request_id, *(_OK if is_known else _REFUSED), b"", b""])
        except zmq.ContextTerminated:
            gate.close()

    def _new(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IPV6, int("[" in address)),
            (zmq.SNDHWM, 0),  # nothing is dropped: what is under way is bounded by the steps in flight
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MILLISECONDS),
            (zmq.HEARTBEAT_TIMEOUT, SILENCE_MILLISECONDS),
        ):
            socket.setsockopt(option, value)
        return socket

    def bound(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """A server. Raises zmq.ZMQError if the address cannot be bound."""
        socket = self._new(kind, address)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._server[1])
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def client(self, kind: int, address: str) -> zmq.Socket[bytes]:
        """A client, which is to be connected to that address."""
        socket = self._new(kind, address)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server[0])
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._client[0])
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._client[1])
        return socket

    def close(self) -> None:
        """The last call."""
        self._context.term()


def tcp_address(host: str, port: int | str) -> str:
    """As ZeroMQ writes it. host: a name or an IP address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
