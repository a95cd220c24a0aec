"""Access to this engine's blocks:
the connector's settings about peers, checked, and connections made by them."""

from __future__ import annotations

import socket
import ssl
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec

from minivllm.config import KVTransferConfig
from minivllm.distributed.key_file import read_key
from minivllm.errors import ConfigError
from minivllm.kv_transfer.connector import TransferContext
from minivllm.kv_transfer.lookup.handshake import Purpose, admit, greet, identity_of
from minivllm.kv_transfer.lookup.pipe import Address, Pipe, accepted

HANDSHAKE_SECONDS = 5.0


class LookupBufferOptions(msgspec.Struct, forbid_unknown_fields=True):
    """address: where a producer listens, unix:///path or tcp://host:port; its worker of rank r at path.r, or
    at port + r. peers: addresses of the producers that a consumer asks. buffer_bytes: most memory of a
    producer's buffer, over all workers. timeout: seconds that a load may take; then the rest is recomputed.
    key_file: a secret of 32 bytes or more that only the user can read; needed off this host. tls_certificate,
    tls_key: PEM files of a producer on TCP. tls_authority: PEM file of whom a consumer trusts."""

    address: str = ""
    peers: list[str] = []
    buffer_bytes: Annotated[int, msgspec.Meta(ge=1)] = 2**30
    timeout: Annotated[float, msgspec.Meta(gt=0, le=600)] = 5.0
    key_file: str = ""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_authority: str = ""


@dataclass(frozen=True)
class Gate:
    """Arguments for connections of one worker to that of the same rank. server_tls, client_tls: None without
    TLS."""

    identity: bytes
    key: bytes
    timeout: float
    server_tls: ssl.SSLContext | None
    client_tls: ssl.SSLContext | None

    @classmethod
    def of(cls, context: TransferContext, rank: int) -> Gate:
        """Raises ConfigError."""
        options: LookupBufferOptions = context.options
        return cls(
            identity_of(context, rank), read_key(options.key_file), options.timeout, *tls_contexts(options)
        )

    def connect(self, address: Address, purpose: Purpose, deadline: float) -> Pipe:
        """A connection to a producer that has proved itself. Raises HandshakeError, or OSError."""
        pipe = address.connect(deadline, self.client_tls)
        try:
            greet(pipe, purpose, self.identity, self.key, deadline)
        except BaseException:
            pipe.close()
            raise
        return pipe

    def accept(self, pipe: Pipe) -> Purpose:
        """Let a consumer prove itself. Raises HandshakeError, or OSError."""
        return admit(pipe, self.identity, self.key, time.monotonic() + HANDSHAKE_SECONDS)

    def wrap(self, connection: socket.socket) -> Pipe:
        """The producer's end of what was accepted. Raises OSError."""
        return accepted(connection, self.server_tls, HANDSHAKE_SECONDS)


def check_room(context: TransferContext) -> None:
    """Raises ConfigError for a producer's buffer without room for a block,
    and for a state where layers keep one."""
    num_bytes, block, state = context.options.buffer_bytes, context.block_bytes, context.state_bytes
    if num_bytes < block + state:
        what = f"one block takes {block}" + (f" and one state {state}" if state else "")
        raise ConfigError(
            f"buffer_bytes is {num_bytes}, but {what}: give {context.config.kv_connector} more."
        )


def addresses_of(
    config: KVTransferConfig, options: LookupBufferOptions
) -> tuple[Address | None, list[Address]]:
    """Where this engine listens, and whom it asks. Raises ConfigError for what does not suit its role."""
    if config.saves != bool(options.address) or config.loads != bool(options.peers):
        raise ConfigError(
            f"{config.kv_connector} needs an 'address' to listen at as kv_producer, 'peers' to ask as "
            "kv_consumer, and "
            f"both as kv_both; with kv_role {config.kv_role!r} it got address {options.address!r} and peers "
            f"{options.peers!r}."
        )
    return Address.parse(options.address) if options.address else None, list(
        map(Address.parse, options.peers)
    )


def check(config: KVTransferConfig, options: LookupBufferOptions) -> None:
    """Raises ConfigError for addresses, keys and certificates that cannot work,
    or that would let anybody in."""
    own, peers = addresses_of(config, options)
    has_key = bool(read_key(options.key_file))
    for address in [*peers, *([own] if own else [])]:
        if not address.is_local and not has_key:
            raise ConfigError(
                f"{address.text} is not on this host: give the connector a 'key_file', the same on both "
                "sides, "
                "so that nobody else can read or send keys and values."
            )
    server, client = tls_contexts(options)
    if bool(own and not own.path and options.tls_authority and server is None):
        raise ConfigError("tls_authority is given, so the address needs a tls_certificate and a tls_key too.")
    if any(not peer.path for peer in peers) and options.tls_certificate and client is None:
        raise ConfigError("tls_certificate is given, so the peers need a tls_authority too.")


def tls_contexts(options: LookupBufferOptions) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """For connections that come, and for those that go. Raises ConfigError."""
    if bool(options.tls_certificate) != bool(options.tls_key):
        raise ConfigError("tls_certificate and tls_key belong together: give both of them.")
    server = client = None
    try:
        if options.tls_certificate:
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.load_cert_chain(options.tls_certificate, options.tls_key)
        if options.tls_authority:
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            client.load_verify_locations(options.tls_authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The TLS files of the connector cannot be used: {error}.") from None
    for context in (server, client):
        if context is not None:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
    return server, client
