"""GGML block formats: what a block of quantised weights looks like and how it becomes float32 again.

Formats follow llama.cpp's ``ggml-quants``: blocks of 32 with one scale (and offset), or super-blocks of 256
with quantised scales. A quantised type is a row of ``BLOCK_LAYOUTS`` and one function that takes its bits
apart, vectorised over blocks; every one of them is groups of small whole numbers with a scale, and an offset
in some, for each group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Groups(NamedTuple):
    """A value is number * scale + offset. numbers int8 or uint8 [blocks, groups, group size]; scale and
    offset float32 [blocks, groups], offset None where it is 0."""

    numbers: NDArray[np.int8] | Bytes
    scale: Floats
    offset: Floats | None = None


@dataclass(frozen=True)
class BlockLayout:
    """A GGML type: its name, the weights in one block, the bytes of one block; then, for quantised types:

    unpack: uint8 [blocks, num_bytes] -> the groups of the blocks. group_size: weights that share a scale.
    lowest: the smallest number there is. bits: those that hold a number less the lowest one.
    """

    name: str
    elements: int
    num_bytes: int
    unpack: Callable[[Bytes], Groups] | None = None
    group_size: int = 32
    lowest: int = 0
    bits: int = 0


def dequantize_blocks(data: bytes, type_name: str) -> Floats:
    """Whole blocks of a GGML type as float32 ``[blocks, elements per block]``."""
    if type_name == "F32":
        return np.frombuffer(data, dtype="<f4").astype(np.float32).reshape(-1, 1)
    if type_name == "F16":
        return np.frombuffer(data, dtype="<f2").astype(np.float32).reshape(-1, 1)
    if type_name == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32).reshape(-1, 1)
    with np.errstate(
        invalid="ignore", over="ignore"
    ):  # a damaged scale may be infinite; that is data, not an error
        groups = _unpack(data, LAYOUT_OF[type_name])
        values = groups.numbers.astype(np.float32)
        values *= groups.scale[
            :, :, None
        ]  # in place: a start of the default model spends most of its time on this
        if groups.offset is not None:
            values += groups.offset[:, :, None]
        return values.reshape(values.shape[0], -1)


def group_blocks(data: bytes, type_name: str) -> tuple[Bytes, Floats, Floats]:
    """Whole blocks of a quantised type as (codes uint8 ``[groups, size]``, scale ``[groups]``,
    offset ``[groups]``).

    A value is code * scale + offset, and no code is negative.
    """
    layout = LAYOUT_OF[type_name]
    with np.errstate(invalid="ignore", over="ignore"):
        numbers, scale, offset = _unpack(data, layout)
        codes = numbers.view(np.uint8) - np.uint8(
            layout.lowest % 256
        )  # bytes wrap around, which is what is wanted
        lowest = np.float32(layout.lowest) * scale
        offset = lowest if offset is None else lowest + offset
    return codes.reshape(-1, layout.group_size), scale.reshape(-1), offset.reshape(-1)


def _unpack(data: bytes, layout: BlockLayout) -> Groups:
    assert layout.unpack is not None, f"{layout.name} is not quantised"
    return layout.unpack(np.frombuffer(data, dtype=np.uint8).reshape(-1, layout.num_bytes))


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of every block, as float32 ``[blocks, 1]``."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """``[blocks, n]`` bytes to ``[blocks, 1, 2n]`` values of 4 bits:
    all low halves first, then all high halves."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1)[:, None]


def _fifth_bits(packed: Bytes) -> Bytes:
    """``[blocks, 4]`` bytes to ``[blocks, 1, 32]``: bit i of the little-endian word, moved to bit 4."""
    return (np.unpackbits(packed, axis=1, bitorder="little") * np.uint8(16))[:, None]


def _planes(packed: Bytes, run: int, width: int, group_size: int) -> Bytes:
    """Numbers of ``width`` bits, laid over one another in runs of so many bytes: every run of bytes holds the
    lowest bits of ``run`` numbers, then the next higher bits of the next ``run``. Gives ``[blocks, groups,
    group_size]``."""
    runs = packed.reshape(packed.shape[0], -1, 1, run)
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (runs >> shifts & np.uint8(2**width - 1)).reshape(packed.shape[0], -1, group_size)


def _q4_0(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Groups:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Groups(numbers.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Groups:
    return Groups(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Groups:
    return Groups(np.ascontiguousarray(blocks[:, None, 2:]).view(np.int8), _half(blocks, 0))


def _q2_k(blocks: Bytes) -> Groups:
    """Sixteen groups of 16: a byte holds a 4-bit scale and a 4-bit minimum,
    times two float16 factors each."""
    scale, minimum = blocks[:, :16] & 0x0F, blocks[:, :16] >> 4
    numbers = _planes(blocks[:, 16:80], 32, 2, 16)
    return Groups(numbers, _half(blocks, 80) * scale.astype(np.float32), -_half(blocks, 82) * minimum)


def _q3_k(blocks: Bytes) -> Groups:
    """Sixteen groups of 16 with a 6-bit scale each;
    the third bit of every number is stored apart, where 0 stands for a number that is 4 less."""
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 0x0F, packed[:, :8] >> 4], axis=1)
    high = np.concatenate([packed[:, 8:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scale = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    numbers = _planes(blocks[:, 32:96], 32, 2, 16) | _planes(blocks[:, :32], 32, 1, 16) << np.uint8(2)
    return Groups(numbers.view(np.int8) - np.int8(4), _half(blocks, 108) * scale.astype(np.float32))


def _scales_and_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Of the eight groups of 32 in Q4_K and Q5_K: 6 bits each in 12 bytes, times two float16 factors."""
    low_scales, low_minima, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low_scales & 0x3F, (rest & 0x0F) | (low_scales >> 6 << 4)], axis=1)
    minima = np.concatenate([low_minima & 0x3F, (rest >> 4) | (low_minima >> 6 << 4)], axis=1)
    return _half(blocks, 0) * scales.astype(np.float32), -(_half(blocks, 2) * minima.astype(np.float32))


def _q4_k(blocks: Bytes) -> Groups:
    return Groups(_planes(blocks[:, 16:], 32, 4, 32), *_scales_and_minima(blocks))


def _q5_k(blocks: Bytes) -> Groups:
    fifth = _planes(blocks[:, 16:48], 32, 1, 32) << np.uint8(4)
    return Groups(_planes(blocks[:, 48:], 32, 4, 32) | fifth, *_scales_and_minima(blocks))


def _q6_k(blocks: Bytes) -> Groups:
    """Sixteen groups of 16 with an 8-bit scale each;
    low 4 and high 2 bits are stored apart, in two halves of 128."""
    numbers = _planes(blocks[:, :128], 64, 4, 16) | _planes(blocks[:, 128:192], 32, 2, 16) << np.uint8(4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Groups(numbers.view(np.int8) - np.int8(32), _half(blocks, 208) * scales)


_IQ4_NUMBERS = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8
)
"""Values of the 16 codes of IQ4_NL and IQ4_XS: closer together around zero, where most weights are."""
_MXFP4_NUMBERS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Twice the values of the 16 floats of 4 bits (2 of exponent, 1 of mantissa)."""


def _iq4_nl(blocks: Bytes) -> Groups:
    return Groups(_IQ4_NUMBERS[_nibbles(blocks[:, 2:])], _half(blocks, 0))


def _iq4_xs(blocks: Bytes) -> Groups:
    """Eight groups of 32 with a 6-bit scale each, whose upper 2 bits are stored apart from the lower 4."""
    low = np.stack([blocks[:, 4:8] & 0x0F, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    high = np.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(-1, 8)
    scale = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return Groups(
        _IQ4_NUMBERS[_planes(blocks[:, 8:], 16, 4, 32)], _half(blocks, 0) * scale.astype(np.float32)
    )


def _mxfp4(blocks: Bytes) -> Groups:
    """A byte e is the scale 2^(e - 127), halved here because the numbers are doubled."""
    return Groups(
        _MXFP4_NUMBERS[_nibbles(blocks[:, 1:])], np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    )


# number in the file -> layout
BLOCK_LAYOUTS: dict[int, BlockLayout] = {
    0: BlockLayout("F32", 1, 4),
    1: BlockLayout("F16", 1, 2),
    2: BlockLayout("Q4_0", 32, 18, _q4_0, lowest=-8, bits=4),
    3: BlockLayout("Q4_1", 32, 20, _q4_1, bits=4),
    6: BlockLayout("Q5_0", 32, 22, _q5_0, lowest=-16, bits=8),
    7: BlockLayout("Q5_1", 32, 24, _q5_1, bits=8),
    8: BlockLayout("Q8_0", 32, 34, _q8_0, lowest=-128, bits=8),
    10: BlockLayout("Q2_K", 256, 84, _q2_k, group_size=16, bits=4),
    11: BlockLayout("Q3_K", 256, 110, _q3_k, group_size=16, lowest=-4, bits=4),
    12: BlockLayout("Q4_K", 256, 144, _q4_k, bits=4),
    13: BlockLayout("Q5_K", 256, 176, _q5_k, bits=8),
    14: BlockLayout("Q6_K", 256, 210, _q6_k, group_size=16, lowest=-32),
    20: BlockLayout("IQ4_NL", 32, 18, _iq4_nl, lowest=-127, bits=8),
    23: BlockLayout("IQ4_XS", 256, 136, _iq4_xs, lowest=-127, bits=8),
    30: BlockLayout("BF16", 1, 2),
    39: BlockLayout("MXFP4", 32, 17, _mxfp4, lowest=-12, bits=8),
}
LAYOUT_OF = {layout.name: layout for layout in BLOCK_LAYOUTS.values()}
GROUPED_BITS = {layout.name: layout.bits for layout in BLOCK_LAYOUTS.values() if layout.bits}
"""Types whose numbers are multiplied as they are -> the bits that hold such a number. Q6_K is none of them: 8
bits in groups of 16 would take more memory on a CPU than bfloat16 does."""
