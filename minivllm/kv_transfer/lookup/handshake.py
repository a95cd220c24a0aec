"""Two engines make sure of each other before either reads anything else:
same secret, same model, same settings.

Everything here has a fixed length, so nothing is parsed. Both sides send a number that is used once, and
prove with an HMAC over both of them that they hold the key; with an empty key that proves nothing, which is
for one host only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from enum import IntEnum

import msgspec

from minivllm import __version__
from minivllm.kv_transfer.connector import TransferContext
from minivllm.kv_transfer.lookup.pipe import Pipe

MAGIC = b"mvllmKV2"
NONCE_BYTES = DIGEST_BYTES = 32


class HandshakeError(ValueError):
    """The other end is not one to exchange blocks with; a sentence."""


class Purpose(IntEnum):
    """The purpose of a consumer's connection."""

    BLOCKS = 0
    NEWS = 1


class Verdict(IntEnum):
    """The answer of a producer."""

    WELCOME = 0
    WRONG_KEY = 1
    OTHER_MODEL = 2


def identity_of(context: TransferContext, rank: int) -> bytes:
    """Digest of all that must be equal on both sides for a rank's part of a block to mean the same, 32 bytes.

    The fingerprint has the model's files, its layers, heads and rotary embedding, dtypes, quantisation,
    attention, block size and how layers are divided among workers; adapters and salts are part of the blocks'
    hashes.
    """
    groups = [[group.name, group.block_size] for group in context.groups]
    parts = [context.block_bytes, context.state_bytes, context.num_ranks, rank]
    return hashlib.sha256(
        msgspec.json.encode([__version__, context.config.fingerprint, groups, parts])
    ).digest()


def _proof(key: bytes, *parts: bytes) -> bytes:
    return hmac.new(key, MAGIC + b"".join(parts), hashlib.sha256).digest()


def greet(pipe: Pipe, purpose: Purpose, identity: bytes, key: bytes, deadline: float) -> None:
    """The consumer's side. Raises HandshakeError, or OSError."""
    hello = pipe.receive(len(MAGIC) + NONCE_BYTES, deadline)
    if not hello.startswith(MAGIC):
        raise HandshakeError("it is no connector of this version")
    nonces = hello[len(MAGIC) :] + secrets.token_bytes(NONCE_BYTES)
    claim = identity + bytes([purpose])
    pipe.send(MAGIC + nonces[NONCE_BYTES:] + claim + _proof(key, b"consumer", nonces, claim), deadline)
    answer = pipe.receive(1 + 2 * DIGEST_BYTES, deadline)
    verdict, theirs, proof = answer[:1], answer[1 : 1 + DIGEST_BYTES], answer[1 + DIGEST_BYTES :]
    if verdict[0] == Verdict.WRONG_KEY or not hmac.compare_digest(
        proof, _proof(key, b"producer", nonces, verdict, theirs)
    ):
        raise HandshakeError("it has another key_file")
    if verdict[0] != Verdict.WELCOME or theirs != identity:
        raise HandshakeError(
            "it has another model, version or settings; model, dtype, kv_cache_dtype, block_size, "
            "max_model_len, "
            "quantization, attention_backend, tensor_parallel_size and pipeline_parallel_size must be equal"
        )


def admit(pipe: Pipe, identity: bytes, key: bytes, deadline: float) -> Purpose:
    """The producer's side: what the consumer wants. Raises HandshakeError, or OSError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    pipe.send(MAGIC + nonce, deadline)
    greeting = pipe.receive(len(MAGIC) + NONCE_BYTES + DIGEST_BYTES + 1 + DIGEST_BYTES, deadline)
    if not greeting.startswith(MAGIC):
        raise HandshakeError("it is no connector of this version")
    body, proof = greeting[len(MAGIC) : -DIGEST_BYTES], greeting[-DIGEST_BYTES:]
    nonces, claim = nonce + body[:NONCE_BYTES], body[NONCE_BYTES:]
    verdict = Verdict.WELCOME
    if not hmac.compare_digest(proof, _proof(key, b"consumer", nonces, claim)):
        verdict = Verdict.WRONG_KEY
    elif claim[:-1] != identity or claim[-1] not in list(Purpose):
        verdict = Verdict.OTHER_MODEL
    answer = bytes([verdict])
    own = bytes(DIGEST_BYTES) if verdict == Verdict.WRONG_KEY else identity
    pipe.send(answer + own + _proof(key, b"producer", nonces, answer, own), deadline)
    if verdict != Verdict.WELCOME:
        raise HandshakeError(
            "it has another key_file" if verdict == Verdict.WRONG_KEY else "it has another model"
        )
    return Purpose(claim[-1])
