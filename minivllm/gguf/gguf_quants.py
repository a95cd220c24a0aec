"""GGML block formats: what a block of quantised weights looks like and how it becomes float32 again.

Formats follow llama.cpp's ``ggml-quants``: blocks of 32 with one scale (and offset), or super-blocks of 256 with
quantised scales. All functions are vectorised over blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class BlockLayout:
    """A GGML type: its name, the weights in one block, the bytes of one block."""

    name: str
    elements: int
    num_bytes: int


# number in the file -> layout
BLOCK_LAYOUTS: dict[int, BlockLayout] = {
    0: BlockLayout("F32", 1, 4),
    1: BlockLayout("F16", 1, 2),
    2: BlockLayout("Q4_0", 32, 18),
    3: BlockLayout("Q4_1", 32, 20),
    6: BlockLayout("Q5_0", 32, 22),
    7: BlockLayout("Q5_1", 32, 24),
    8: BlockLayout("Q8_0", 32, 34),
    12: BlockLayout("Q4_K", 256, 144),
    14: BlockLayout("Q6_K", 256, 210),
    30: BlockLayout("BF16", 1, 2),
}
GROUPED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q8_0": 8}
"""Types that are groups of 32 whole numbers with one scale and offset each -> the bits that hold such a number."""
GROUP_SIZE = 32
_BYTES_OF = {layout.name: layout.num_bytes for layout in BLOCK_LAYOUTS.values()}


def dequantize_blocks(data: bytes, type_name: str) -> Floats:
    """Whole blocks of a GGML type as float32 ``[blocks, elements per block]``."""
    if type_name == "F32":
        return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(-1, 1)
    if type_name == "F16":
        return np.frombuffer(data, dtype="<f2").astype(np.float32).reshape(-1, 1)
    if type_name == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32).reshape(-1, 1)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be infinite; that is data, not an error
        if type_name == "Q6_K":
            return _q6_k(np.frombuffer(data, dtype=np.uint8).reshape(-1, _BYTES_OF[type_name]))
        codes, scale, offset = group_blocks(data, type_name)
        values = codes.astype(np.float32)
        values *= scale[:, None]  # in place: a start of the default model spends most of its time on this
        values += offset[:, None]
        return values.reshape(-1, 256 if type_name == "Q4_K" else GROUP_SIZE)


def group_blocks(data: bytes, type_name: str) -> tuple[Bytes, Floats, Floats]:
    """Whole blocks of a type in GROUPED_BITS as (codes ``[groups, 32]``, scale ``[groups]``, offset ``[groups]``).

    A value is code * scale + offset.
    """
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(-1, _BYTES_OF[type_name])
    with np.errstate(invalid="ignore", over="ignore"):
        if type_name == "Q4_K":
            codes, scale, minimum = _q4_k_groups(blocks)
            return codes.reshape(-1, GROUP_SIZE), scale.reshape(-1), -minimum.reshape(-1)
        scale = _half(blocks, 0)[:, 0]
        if type_name == "Q4_0":
            return _nibbles(blocks[:, 2:]), scale, -8 * scale
        if type_name == "Q4_1":
            return _nibbles(blocks[:, 4:]), scale, _half(blocks, 2)[:, 0]
        if type_name == "Q5_0":
            return _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale
        if type_name == "Q5_1":
            return _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), scale, _half(blocks, 2)[:, 0]
        return blocks[:, 2:] ^ np.uint8(128), scale, -128 * scale  # two's complement, moved up by 128


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of every block, as float32 ``[blocks, 1]``."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """``[blocks, n]`` bytes to ``[blocks, 2n]`` values of 4 bits: all low halves first, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """``[blocks, 4]`` bytes to ``[blocks, 32]``: bit i of the little-endian word, moved to bit 4."""
    return np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16)


def _q4_k_groups(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Eight groups of 32: a 6-bit scale and a 6-bit minimum each, packed into 12 bytes, times two float16 factors.

    Returns codes ``[blocks, 8, 32]``, scales and minima ``[blocks, 8]``; a value is code * scale - minimum.
    """
    packed = blocks[:, 4:16]
    low_scales, low_minima, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low_scales & 0x3F, (rest & 0x0F) | (low_scales >> 6 << 4)], axis=1)
    minima = np.concatenate([low_minima & 0x3F, (rest >> 4) | (low_minima >> 6 << 4)], axis=1)
    quarters = blocks[:, 16:].reshape(-1, 4, 32)  # each byte serves two groups: low half the even, high half the odd
    codes = np.stack([quarters & 0x0F, quarters >> 4], axis=2).reshape(-1, 8, 32)
    return codes, _half(blocks, 0) * scales.astype(np.float32), _half(blocks, 2) * minima.astype(np.float32)


def _q6_k(blocks: Bytes) -> Floats:
    """Sixteen groups of 16 with an 8-bit scale each; low 4 and high 2 bits are stored apart, in two halves of 128."""
    low = blocks[:, 0:128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 0x0F, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=2) * np.uint8(16)
    values = (low | high).astype(np.float32) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * values.reshape(-1, 16, 16)).reshape(-1, 256)
