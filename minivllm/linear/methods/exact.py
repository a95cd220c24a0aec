"""Methods that multiply every weight as it is, and the choice among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.linear import can_pack, linear, pack_weight, packed_linear
from kernels_triton_free.loops.code_words import (
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
    for_few_rows,
    has_few_rows,
    is_readable,
    words_of,
)
from kernels_triton_free.packed.tiles import (
    can_halve,
    can_tile,
    most_rows_by_words,
    tiled_linear,
    tiled_linear_halves,
    tiles_of,
    words_in,
)
from minivllm.linear.methods.method import LinearMethod, LinearTensors, kept_weights, uncompiled_copies, with_bias
from minivllm.linear.methods.stored_weight import StoredWeight

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

    read_as: how compiled code reads the memory of the packed weight, which is the second tensor then: as "words" where
    rows are few, as "tiles" where they are more too, or None.
    """

    out_features: int
    read_as: Literal["words", "tiles"] | None = None

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is restored before"
        packed = pack_weight(weight)
        return (packed,) if bias is None else (packed, bias)

    def kept(self, tensors: LinearTensors) -> LinearTensors:
        packed, *bias = tensors
        packed = moved(packed, kept_weights.copy)
        memory = () if self.read_as is None else (words_of(packed) if self.read_as == "words" else tiles_of(packed),)
        return packed, *memory, *bias

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        packed, *others = tensors
        memory = others.pop(0) if self.read_as else None
        bias = others[0] if others else None
        if memory is not None and torch.compiler.is_compiling():
            if self._reads_words(x):
                return few_rows_linear(x, words_in(memory) if self.read_as == "tiles" else memory, bias)
            if self.read_as == "tiles":
                return tiled_linear(x, memory, bias)
        return packed_linear(x, packed, bias, self.out_features)

    def apply_halves(self, x: Tensor, tensors: LinearTensors) -> tuple[Tensor, Tensor]:
        _, *memory = tensors
        reads_tiles = self.read_as == "tiles" and torch.compiler.is_compiling() and not self._reads_words(x)
        if reads_tiles and len(memory) == 1 and can_halve(memory[0]):
            return tiled_linear_halves(x, memory[0])
        return super().apply_halves(x, tensors)

    def _reads_words(self, x: Tensor) -> bool:
        """Whether compiled code multiplies the rows of x so."""
        return has_few_rows(x, MAX_ROWS if self.read_as == "words" else most_rows_by_words())


@dataclass(frozen=True)
class LoopedLinear(LinearMethod):
    """The weight in words of 16 or 32 bits, which compiled loops read for any number of rows (see
    ``kernels_triton_free.loops.code_words``). Tensors: words, bias.

    For CPUs with AVX2 and no more, whose library reads a weight of float32 for one row at half the speed of memory, and
    has no fast product of bfloat16. Code that is not compiled, for as long as that takes, multiplies a copy.
    """

    out_features: int
    bits: int
    dtype: torch.dtype
    gathers_rows: ClassVar[bool] = True

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        values = weight if isinstance(weight, Tensor) else weight.restore(self.dtype)
        narrow = values.to(torch.bfloat16 if self.bits == 16 else torch.float32)
        padding = 0, self._missing(narrow.shape[1]), 0, -self.out_features % LANES
        return with_bias((for_few_rows(floats_in_words(F.pad(narrow, padding))),), bias)

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


def choose_linear_method(out_features: int, in_features: int, dtype: torch.dtype, device: torch.device) -> LinearMethod:
    """The fastest exact method for unquantised weights [out_features, in_features] on this device that needs not know
    their values (see ``looped``)."""
    if device.type == "cpu" and can_pack(dtype):
        if can_tile(out_features, in_features):
            return PackedLinear(out_features, "tiles")
        return PackedLinear(out_features, "words" if is_readable(out_features, in_features) else None)
    return PlainLinear()


def looped(weight: StoredWeight, dtype: torch.dtype) -> LoopedLinear | None:
    """How compiled loops multiply weight [out, in] in ``dtype``; None: they do not. A weight's values tell its bits:
    those of a checkpoint of bfloat16 are as exact in 16 where everything is computed in float32."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    rows, inputs = weight.shape
    is_narrow = dtype == torch.bfloat16 or (
        isinstance(weight, Tensor)
        and all(torch.equal(part, part.bfloat16().to(part.dtype)) for part in weight.split(COMPARED_ROWS))
    )
    return LoopedLinear(rows, 16 if is_narrow and inputs % 2 == 0 else 32, dtype)
