"""Names for block contents: SHA-256 chained over the whole prefix.

The key and value vectors in a block depend on every token before it, so a block's hash covers its parent's
hash. It is a cryptographic hash because a collision would hand the keys and values of one user's text to
another user.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

from minivllm.request import Request

Extra = bytes | str | int
"""What besides tokens decides a block's contents:
a cache salt, a LoRA identity, an image hash and its offset."""

_TAGS = {bytes: b"b", str: b"s", int: b"i"}


def hash_block(parent: bytes, token_ids: Sequence[int], extras: tuple[Extra, ...] = ()) -> bytes:
    """Hash of one full block: 32 bytes.

    parent: hash of the block before it, empty for the first one.
    token_ids: the block's tokens, each below 2**32.
    The hashed bytes are canonical and can be parsed in one way only: every part is preceded by its length,
    numbers are little-endian with a fixed width, and extras carry their type.
    """
    digest = hashlib.sha256(_header(len(parent), len(token_ids)))
    digest.update(parent)
    digest.update(token_bytes(token_ids))
    for extra in extras:
        data = extra if isinstance(extra, bytes) else str(extra).encode("utf-8", "surrogatepass")
        digest.update(_TAGS[type(extra)] + struct.pack("<Q", len(data)))
        digest.update(data)
    return digest.digest()


TOKEN_BYTES = 4


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, so that beginnings can be compared in one call."""
    return _token_layout(len(token_ids)).pack(*token_ids)


def state_name(block_hash: bytes) -> bytes:
    """Name of the states after the tokens of a block, 32 bytes: they are kept beside its keys and values."""
    return hashlib.sha256(b"state" + block_hash).digest()


def block_extras(request: Request, start: int, end: int) -> tuple[Extra, ...]:
    """Extras of the block that holds the tokens from ``start`` to ``end`` of a request.

    The chain carries the salt and the adapter of a first block into all blocks after it. An image is named in
    every block that its span overlaps, with the distance from the block's start to the span's, negative in
    later blocks: placeholders are equal tokens wherever they stand.
    """
    extras: tuple[Extra, ...] = ()
    for image in request.images:
        if image.offset < end and image.offset + image.length > start:
            extras += ("image", image.digest, image.offset - start)
    if start > 0:
        return extras
    if request.engine_request.cache_salt is not None:
        extras += ("cache_salt", request.engine_request.cache_salt)
    if request.lora_digest is not None:
        extras += ("lora", request.lora_digest)
    return extras


def beginning_name(parent: bytes, extras: tuple[Extra, ...]) -> bytes:
    """Name of what comes before the tokens of a block and decides its contents with them.
    parent, extras: of the block; see hash_block."""
    return hash_block(parent, (), extras) if extras else parent


def extend_block_hashes(request: Request, block_size: int) -> None:
    """Hash the blocks of ``request`` that became full since the last call and append them to
    ``block_hashes``.

    Only known tokens count: drafts are never hashed.
    """
    hashes = request.block_hashes
    token_ids = request.all_token_ids
    parent = hashes[-1] if hashes else b""
    for index in range(len(hashes), len(token_ids) // block_size):
        start = index * block_size
        parent = hash_block(
            parent, token_ids[start : start + block_size], block_extras(request, start, start + block_size)
        )
        hashes.append(parent)


@lru_cache(maxsize=64)
def _header(parent_length: int, num_tokens: int) -> bytes:
    return struct.pack("<QQ", parent_length, num_tokens)


@lru_cache(maxsize=64)
def _token_layout(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<{num_tokens}I")
