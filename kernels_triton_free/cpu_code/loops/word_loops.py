"""The loops over codes in words (see ``code_words``), put together from Inductor's own operations.

Each is a sum for every output, as Inductor knows sums, whose terms are those of some codes at once. Several
such sums over the same words become one loop, in which each word is read once and each code made a float
once.
"""

from __future__ import annotations

from functools import lru_cache, reduce
from math import gcd
from typing import Any

import torch

from kernels_triton_free.compiler.changes import try_to_change
from kernels_triton_free.cpu_code.loops.row_sums import rows_together, sum_up, sum_up_rows
from kernels_triton_free.packed.code_words import (
    AT_16,
    AT_256,
    BITS_OF_16,
    BITS_OF_256,
    CHAINS,
    CODES_AT_ONCE,
    ROWS_TOGETHER,
    STEP,
    has_exact_codes,
    words_of_scales,
)
from kernels_triton_free.packed.rows import UPPER_HALF


@lru_cache(maxsize=1)
def generate_word_loops() -> None:
    """Have Inductor generate the operators over words. Once per process, before it compiles."""
    try_to_change(_lower_code_words_row)
    try_to_change(_lower_code_words_rows)


def _lower_code_words_row() -> None:
    """One row: a step of a group at a time, whose sum is multiplied with the scale."""
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import ops

    @register_lowering(torch.ops.kernels_triton_free.code_words_row.default, type_promotion_kind=None)
    def lower(_: Any, x: Any, added: Any, sums: Any, words: Any, bits: int) -> Any:
        # x is what codes meet in their places; the inputs themselves are for code that is not compiled.
        blocks, groups, depth, outputs = map(int, words.get_size())
        x, added, sums, words = (argument.make_loader() for argument in (x, added, sums, words))
        codes_of = _placed_codes if has_exact_codes(depth, bits) else _codes_of
        steps = depth // bits  # of a group; a step has as many words as a code has bits

        def of_step(index: Any, reduced: Any) -> Any:
            (block, output), (group, step) = index, reduced
            place = group * steps + step
            chains: list[Any] = [None] * CHAINS
            for word in range(bits):
                codes = codes_of(words([block, group, step * bits + word, output]), bits)
                for code, (value, _) in enumerate(codes):
                    term, chain = ops.mul(x([place * STEP + word * 32 // bits + code]), value), code % CHAINS
                    chains[chain] = term if chains[chain] is None else ops.add(chains[chain], term)
            scale, zero = _scale_and_zero(words, (block, group, output), depth, bits)
            product = ops.sub(reduce(ops.add, chains), added([place]))
            return ops.add(ops.mul(scale, product), ops.mul(zero, sums([place])))

        out = sum_up(of_step, [blocks, outputs], [groups, steps], torch.float32)
        out.realize()
        return lowerings[torch.ops.aten.view.default](out, [blocks * outputs])


def _lower_code_words_rows() -> None:
    """Several rows, ROWS_TOGETHER at a time: words whose codes become weights before they are multiplied."""
    from torch._inductor.lowering import register_lowering
    from torch._inductor.virtualized import ops

    @register_lowering(torch.ops.kernels_triton_free.code_words_rows.default, type_promotion_kind=None)
    def lower(x: Any, words: Any, bits: int) -> Any:
        blocks, groups, depth, outputs = map(int, words.get_size())
        of_codes = depth - words_of_scales(depth, bits)
        at_once = gcd(of_codes, CODES_AT_ONCE * bits // 32)  # words
        words, together = words.make_loader(), rows_together(x.get_size()[0], ROWS_TOGETHER)

        def term(load: Any, row: Any, block: Any, output: Any, reduced: Any) -> Any:
            group, step = reduced
            first = (group * of_codes + step * at_once) * (32 // bits)
            # A single row alternates, since a sum waits for the one before; of several, each has its own.
            chains: list[Any] = [None] * (2 if together == 1 else 1)
            places = [(block, group, step * at_once + word, output) for word in range(at_once)]
            weights = [weight for place in places for weight in _weights_of(words, place, depth, bits)]
            for code, weight in enumerate(weights):
                product, chain = ops.mul(load([row, first + code]), weight), code % len(chains)
                chains[chain] = product if chains[chain] is None else ops.add(chains[chain], product)
            return chains[0] if len(chains) == 1 else ops.add(*chains)

        return sum_up_rows(x, together, (blocks, outputs), [groups, of_codes // at_once], torch.float32, term)


def _weights_of(words: Any, place: tuple[Any, Any, Any, Any], depth: int, bits: int) -> list[Any]:
    from torch._inductor.virtualized import ops

    block, group, _, output = place
    word = words(list(place))
    if bits == 32:
        return [_float_of(word)]
    if bits == 16:
        return [*bfloat16_pair(word)]
    scale, zero = _scale_and_zero(words, (block, group, output), depth, bits)
    weights = []
    for value, added in (_exact_codes if has_exact_codes(depth, bits) else _codes_of)(word, bits):
        middle = ops.mul(scale, ops.constant(added + 2.0 ** (bits - 1), torch.float32))
        weights.append(ops.add(ops.mul(value, scale), ops.sub(zero, middle)))
    return weights


def _placed_codes(word: Any, bits: int) -> list[tuple[Any, float]]:
    """As ``_exact_codes``, of inputs from ``_for_placed_codes``."""
    halves, places = (word, _shifted(word, -16)), range(0, 16, bits)
    return [(_converted(half, (2**bits - 1) << place), 0.0) for half in halves for place in places]


def _exact_codes(word: Any, bits: int) -> list[tuple[Any, float]]:
    """The floats of a word's codes, converted, to which nothing is added."""
    return [(_converted(_shifted(word, -place), 2**bits - 1), 0.0) for place in range(0, 32, bits)]


def _codes_of(word: Any, bits: int) -> list[tuple[Any, float]]:
    """The floats of a word's codes, each with what it is more than the code."""
    at_256 = [_shifted(word, AT_256 - place) for place in range(0, 32, 8)]
    if bits == 8:
        return [(_masked(byte, 255 << AT_256, BITS_OF_256), 256.0) for byte in at_256]
    halves = (15 << AT_256, BITS_OF_256, 256.0), (15 << AT_16, BITS_OF_16, 16.0)
    return [(_masked(byte, mask, own_bits), added) for byte in at_256 for mask, own_bits, added in halves]


def _scale_and_zero(words: Any, place: tuple[Any, Any, Any], depth: int, bits: int) -> tuple[Any, Any]:
    block, group, output = place
    last = words([block, group, depth - 1, output])
    if words_of_scales(depth, bits) == 1:
        return bfloat16_pair(last)
    return _float_of(words([block, group, depth - 2, output])), _float_of(last)


def bfloat16_pair(word: Any) -> tuple[Any, Any]:
    """The floats of both halves of a word, the lower one first."""
    return _float_of(_shifted(word, 16)), _masked(word, UPPER_HALF)


def _converted(word: Any, mask: int) -> Any:
    from torch._inductor.virtualized import ops

    part = ops.bitwise_and(word, ops.constant(mask, torch.int32))
    return ops.to_dtype(part, torch.float32, src_dtype=torch.int32)


def _float_of(bits_of_floats: Any) -> Any:
    from torch._inductor.virtualized import ops

    return ops.to_dtype_bitcast(bits_of_floats, torch.float32, torch.int32)


def _masked(word: Any, mask: int, own_bits: int = 0) -> Any:
    from torch._inductor.virtualized import ops

    part = ops.bitwise_and(word, ops.constant(mask, torch.int32))
    return _float_of(ops.bitwise_or(part, ops.constant(own_bits, torch.int32)) if own_bits else part)


def _shifted(word: Any, places: int) -> Any:
    from torch._inductor.virtualized import ops

    shift = ops.bitwise_left_shift if places > 0 else ops.bitwise_right_shift
    return shift(word, ops.constant(abs(places), torch.int32))
