"""Methods that multiply every weight as it is, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.linear import can_pack, linear, pack_weight, packed_linear
from kernels_triton_free.packed.code_words import (
    LANES,
    code_words_linear,
    floats_in,
    floats_in_words,
    rows_of_words,
)
from kernels_triton_free.packed.memory import moved
from kernels_triton_free.packed.rows import (
    MAX_ROWS,
    few_rows_linear,
    has_few_rows,
    is_readable,
    words_of,
)
from kernels_triton_free.packed.tiles import (
    can_halve,
    can_tile,
    most_rows_by_words,
    tile,
    tiled_linear,
    tiled_linear_halves,
    weight_in,
    words_in,
)
from minivllm.linear.methods.method import (
    LinearMethod,
    LinearTensors,
    kept_weights,
    uncompiled_copies,
    with_bias,
)
from minivllm.weights.stored_weight import StoredWeight

COMPARED_ROWS = 1024
"""Of a weight at a time."""


@dataclass(frozen=True)
class PlainLinear(LinearMethod):
    """The weight as it is."""

    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is restored before"
        return (weight,) if bias is None else (weight, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        return linear(x, *tensors)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return tensors[0][indices]


@dataclass(frozen=True)
class PackedLinear(LinearMethod):
    """The weight packed for this CPU by oneDNN.

    reads_words: compiled code for a few rows reads the memory of the packed weight,
    which is the second tensor then.
    """

    out_features: int
    reads_words: bool = False

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is restored before"
        packed = pack_weight(weight)
        return (packed,) if bias is None else (packed, bias)

    def kept(self, tensors: LinearTensors) -> LinearTensors:
        packed, *bias = tensors
        packed = moved(packed, kept_weights.copy)
        return packed, *((words_of(packed),) if self.reads_words else ()), *bias

    @property
    def has_loops(self) -> bool:
        return self.reads_words

    def read_by(self, rows: int, tensors: LinearTensors) -> LinearTensors:
        packed, *others = tensors
        return packed, *others[self.reads_words :]

    def mapped(self, tensors: LinearTensors, change: Callable[[Tensor], Tensor]) -> LinearTensors:
        packed, *bias = map(change, self.read_by(1, tensors))
        words = (words_of(packed) if packed.is_mkldnn else packed,) if self.reads_words else ()
        return packed, *words, *bias

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        packed, *others = tensors
        words = others.pop(0) if self.reads_words else None
        bias = others[0] if others else None
        if words is not None and torch.compiler.is_compiling() and has_few_rows(x, MAX_ROWS):
            return few_rows_linear(x, words, bias)
        return packed_linear(x, packed, bias, self.out_features)


@dataclass(frozen=True)
class TiledLinear(LinearMethod):
    """The weight of bfloat16 in tiles, which compiled code multiplies by any number of rows (see
    ``kernels_triton_free.packed.tiles``). Tensors: tiles, bias.

    Code that is not compiled, for as long as that takes, multiplies a copy that oneDNN has packed.
    """

    out_features: int

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        values = weight if isinstance(weight, Tensor) else weight.restore(torch.bfloat16)
        return with_bias((tile(values.bfloat16()),), bias)

    @property
    def has_loops(self) -> bool:
        return most_rows_by_words() > 1

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        tiles, *others = tensors
        bias = others[0] if others else None
        if missing := tiles.shape[1] - x.shape[1]:  # of a shard whose inputs are no multiple of INPUTS
            x = F.pad(x, (0, missing))
        if not torch.compiler.is_compiling():
            if tiles not in uncompiled_copies:
                uncompiled_copies[tiles] = (pack_weight(weight_in(tiles)),)
            (packed,) = uncompiled_copies[tiles]
            return packed_linear(x, packed, bias, self.out_features)
        if has_few_rows(x, most_rows_by_words()):
            return few_rows_linear(x, words_in(tiles), bias)
        return tiled_linear(x, tiles, bias)

    def apply_halves(self, x: Tensor, tensors: LinearTensors) -> tuple[Tensor, Tensor]:
        is_tiled = torch.compiler.is_compiling() and not has_few_rows(x, most_rows_by_words())
        if is_tiled and len(tensors) == 1 and can_halve(tensors[0]) and x.shape[1] == tensors[0].shape[1]:
            return tiled_linear_halves(x, tensors[0])
        return super().apply_halves(x, tensors)


@dataclass(frozen=True)
class LoopedLinear(LinearMethod):
    """The weight in words of 16 or 32 bits, which compiled loops read for any number of rows (see
    ``kernels_triton_free.packed.code_words``). Tensors: words, bias.

    For CPUs with AVX2 and no more, whose library reads a weight of float32 for one row at half the speed of
    memory, and has no fast product of bfloat16. Code that is not compiled, for as long as that takes,
    multiplies a copy.
    """

    out_features: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    @property
    def has_loops(self) -> bool:
        return True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        values = weight if isinstance(weight, Tensor) else weight.restore(self.dtype)
        narrow = values.to(torch.bfloat16 if self.bits == 16 else torch.float32)
        padding = 0, self._missing(narrow.shape[1]), 0, -self.out_features % LANES
        return with_bias((floats_in_words(F.pad(narrow, padding)),), bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        words, *bias = tensors
        x = F.pad(x, (0, self._missing(x.shape[1])))
        if torch.compiler.is_compiling():
            out = code_words_linear(x, words, self.bits)[:, : self.out_features]
            return out + bias[0] if bias else out
        if words not in uncompiled_copies:
            uncompiled_copies[words] = (floats_in(words, self.bits)[: self.out_features].contiguous(),)
        (weight,) = uncompiled_copies[words]
        out = F.linear(x.float(), weight, bias[0].float() if bias else None)
        return out.to(x.dtype)

    def rows(self, indices: Tensor, tensors: LinearTensors) -> Tensor:
        return rows_of_words(tensors[0], indices, self.bits).to(self.dtype)

    def _missing(self, inputs: int) -> int:
        """Zeros that fill up the last word of an output: a shard may have an odd number of inputs."""
        return inputs % 2 if self.bits == 16 else 0


def choose_linear_method(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> LinearMethod:
    """The fastest exact method for unquantised weights [out_features, in_features] on this device, whether
    code is compiled or not. If it is, ``looped`` and ``tiled`` may know a faster one."""
    if device.type == "cpu" and can_pack(dtype):
        return PackedLinear(out_features, reads_words=is_readable(out_features, in_features))
    return PlainLinear()


def looped(weight: StoredWeight, dtype: torch.dtype) -> LoopedLinear | None:
    """How compiled loops multiply weight [out, in] in ``dtype``; None: they do not. A weight's values tell
    its bits: those of a checkpoint of bfloat16 are as exact in 16 where everything is computed in float32."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    rows, inputs = weight.shape
    is_narrow = dtype == torch.bfloat16 or (
        isinstance(weight, Tensor)
        and all(torch.equal(part, part.bfloat16().to(part.dtype)) for part in weight.split(COMPARED_ROWS))
    )
    return LoopedLinear(rows, 16 if is_narrow and inputs % 2 == 0 else 32, dtype)


def tiled(weight: StoredWeight, dtype: torch.dtype) -> TiledLinear | None:
    """How compiled code multiplies weight [out, in] by the products of bfloat16 of this CPU;
    None: it does not."""
    return TiledLinear(weight.shape[0]) if dtype == torch.bfloat16 and can_tile(*weight.shape) else None
