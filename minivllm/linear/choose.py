"""Which method multiplies a layer:
by what the user asked for, what the checkpoint holds and what the device can do."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from kernels_triton_free.packed.code_words import can_put_in_words
from kernels_triton_free.packed.int4_tiles import can_tile_int4
from kernels_triton_free.packed.int8_tiles import can_tile_int8
from kernels_triton_free.packed.tiles import can_tile
from kernels_triton_free.quantized_linear import INT4_GROUP_SIZES, INT4_LANES
from minivllm.device.policy import FLOAT8_CAPABILITY, DevicePolicy
from minivllm.errors import ConfigError
from minivllm.linear.methods.exact import looped, tiled
from minivllm.linear.methods.float8 import Float8Linear
from minivllm.linear.methods.groups import DequantizedGroupLinear, OrderedInputs, SpreadGroups
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.int8 import DequantizedInt8Linear, Int8Linear, RoundedInputs, WholeInt8Linear
from minivllm.linear.methods.method import LinearMethod
from minivllm.linear.methods.words import (
    LoopedInt4Linear,
    RestoredInt4Linear,
    RoundedInt4Linear,
    TiledInt4Linear,
    WholeInt4Linear,
)
from minivllm.weights.stored_weight import GroupedWeight, RowScaledWeight, StoredWeight

logger = logging.getLogger(__name__)

ROUNDING_GROUP = 32
"""Inputs that share a scale where weights are rounded to 4 bits here: the finest the operators know."""
FLOAT8_MULTIPLE = 16
BEAR_ROUNDING = frozenset({"q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj", "lm_head"})
"""Layers of 4 bits, and heads of 8, that multiply 8 bits where rows are several.

Over four texts of 200 to 700 tokens, against SmolLM2-135M's Q4_1 weights in float32, the mean KL divergence
[nats per token] was 0.0021 with the first of them rounded, 0.0003 with the second, 0.0018 with the third,
0.0029 with the fourth and 0.0018 with the head, 0.0090 with all; perplexity moved by 1.0 %. With inputs that
are not rotated it was 0.0071 with q, k and v, 0.0042 with gate and up, 0.0089 with down and 0.0061 with the
head. On two cores of Zen 4, in place of 4 bits in q, k and v, 8 bits without rotation in the other layers (o,
gate and up in one part, down in four) and bfloat16 in the head, medians of four pairs: a prompt of 512 tokens
took 242 ms in place of 277, a step of two rows 7.4 in place of 8.8, of four 8.2 in place of 8.9, of 16 16.1
in place of 18.6, of 32 30.7 in place of 35.6."""


class MethodChooser:
    """ChooseMethod of one model, which also counts its choices for the log.

    quantization: "int8", "int4", "fp8", or None, which quantises nothing and multiplies what a quantised
    checkpoint holds. stored: the quantisation the checkpoint's configuration names, if any. Raises
    ConfigError where quantization contradicts the checkpoint, the dtype or the device. compiled: what is not
    quantised, only compiled code multiplies.
    """

    def __init__(
        self,
        quantization: str | None,
        stored: str | None,
        dtype: torch.dtype,
        policy: DevicePolicy,
        compiled: bool = False,
    ) -> None:
        self.quantization = quantization
        self.dtype = dtype
        self.policy = policy
        self.compiled = compiled
        self._counts: Counter[str] = Counter()
        if quantization is not None and stored is not None:
            raise ConfigError(
                f"quantization is {quantization!r}, but the checkpoint is quantised with {stored} already: "
                "leave "
                f"quantization out to run it as it is, or give the unquantised model."
            )
        if quantization == "fp8" and not policy.multiplies_float8:
            needs = f"a GPU of compute capability {FLOAT8_CAPABILITY[0]}.{FLOAT8_CAPABILITY[1]} or more"
            raise ConfigError(
                f"quantization 'fp8' needs {needs}, which this {policy.type} is not: use int8 or int4."
            )
        if quantization == "fp8" and dtype != torch.bfloat16:
            raise ConfigError(
                f"quantization 'fp8' computes in bfloat16, but dtype is {dtype}: use dtype='bfloat16'."
            )
        if quantization == "int4" and policy.on_cpu and not policy.multiplies_int4:
            raise ConfigError(
                "quantization 'int4' needs a CPU with AVX2 or AVX-512, whose 4-bit operator PyTorch has: use "
                "int8."
            )

    @property
    def kept_bits(self) -> frozenset[int]:
        """Blocks of a GGUF file that are multiplied as they are (see ``iterate_weights``)."""
        return {"int4": frozenset({4, 8}), "int8": frozenset({8})}.get(self.quantization or "", frozenset())

    def __call__(self, name: str, weight: StoredWeight) -> LinearMethod | None:
        """Raises ConfigError for a weight whose shape the asked-for quantisation cannot have."""
        method, reason = self._choose(name, weight)
        if method is None and self.compiled and self.policy.on_cpu:
            method = (looped if self.policy.multiplies_whole_numbers else tiled)(weight, self.dtype)
        self._counts[f"{type(method).__name__} ({reason})" if method else reason] += 1
        return method

    def log_choices(self) -> None:
        """One line for each method with the layers it got."""
        for choice, count in self._counts.items():
            if self._counts.keys() != {_UNQUANTIZED}:
                logger.info("%d linear layers: %s.", count, choice)

    def _choose(self, name: str, weight: StoredWeight) -> tuple[LinearMethod | None, str]:
        if isinstance(weight, Tensor):
            return self._round(name, weight) if self.quantization else (None, _UNQUANTIZED)
        if isinstance(weight, GroupedWeight):
            return self._multiply_groups(name, weight)
        if isinstance(weight, RowScaledWeight):
            return self._multiply_rows(weight)
        return None, "stored in a format that nothing here multiplies, dequantised"

    def _round(self, name: str, weight: Tensor) -> tuple[LinearMethod, str]:
        """A weight that is not quantised becomes so."""
        rows, inputs = weight.shape
        on_cpu, why = self.policy.on_cpu, f"rounded to {self.quantization}"
        # A head rounded to 4 bits costs more in quality than its bytes are worth,
        # and as an embedding even more so.
        if self.quantization == "int8" or (self.quantization == "int4" and name == "lm_head"):
            return self._int8()(self.dtype), why.replace("int4", "int8")
        if self.quantization == "fp8":
            if name == "lm_head":
                return DequantizedInt8Linear(self.dtype), why.replace("fp8", "int8")
            if rows % FLOAT8_MULTIPLE or inputs % FLOAT8_MULTIPLE:
                raise ConfigError(
                    f"quantization 'fp8' needs matrices whose sides are multiples of {FLOAT8_MULTIPLE}, but "
                    f"{name} "
                    f"is [{rows}, {inputs}]: use int8."
                )
            return Float8Linear(), why
        if inputs % ROUNDING_GROUP:
            raise ConfigError(
                f"quantization 'int4' needs a multiple of {ROUNDING_GROUP} inputs, but {name} has {inputs}: "
                "use int8."
            )
        if on_cpu:
            return self._int4(name, rows, inputs, ROUNDING_GROUP, 4), why
        return DequantizedGroupLinear(ROUNDING_GROUP, 4, self.dtype), why

    def _int8(self) -> type[Int8Linear]:
        if not self.policy.on_cpu:
            return DequantizedInt8Linear
        return WholeInt8Linear if self.policy.multiplies_whole_numbers else Int8Linear

    def _int4(self, name: str, rows: int, inputs: int, group_size: int, bits: int) -> LinearMethod:
        if (
            rows % INT4_LANES == 0
            and can_tile_int4(rows, inputs, self.dtype)
            and self.policy.multiplies_bfloat16
        ):
            method: type[Int4Linear] = TiledInt4Linear
            if bits == 8 and name == "lm_head" and can_tile(rows, inputs):
                method = RestoredInt4Linear
            if name in BEAR_ROUNDING and (bits == 4 or name == "lm_head") and can_tile_int8(rows, inputs):
                return RoundedInt4Linear(rows, group_size, bits, self.dtype)
            return method(rows, group_size, bits, self.dtype)
        return self._int4_without_bfloat16(name, rows, group_size, bits)

    def _int4_without_bfloat16(self, name: str, rows: int, group_size: int, bits: int) -> LinearMethod:
        if self.policy.multiplies_bfloat16 or not can_put_in_words(group_size, self.dtype):
            return Int4Linear(rows, group_size, bits, self.dtype)
        is_head = name == "lm_head"
        if self.policy.multiplies_whole_numbers and (bits == 4 or is_head):
            return WholeInt4Linear(rows, group_size, bits, self.dtype, rounded_bits=10 if is_head else 8)
        return LoopedInt4Linear(rows, group_size, bits, self.dtype)

    def _multiply_groups(self, name: str, weight: GroupedWeight) -> tuple[LinearMethod | None, str]:
        """A weight in groups is multiplied as it is."""
        bits, group = weight.bits, weight.group_size
        method: LinearMethod | None = None
        why = f"{bits} bits as stored, groups of {group}" + (
            "" if weight.order is None else " of inputs in an order"
        )
        if not self.policy.on_cpu:
            method = DequantizedGroupLinear(group, bits, self.dtype)
        elif self.policy.multiplies_int4:
            smallest = min(INT4_GROUP_SIZES)
            size = next((size for size in INT4_GROUP_SIZES if group % size == 0), None)
            if size is not None:
                method = self._int4(name, *weight.shape, size, bits)
            elif (
                bits == 4 and 2 * group == smallest
            ):  # any wider and the values themselves would take less memory
                method = SpreadGroups(
                    self._int4_without_bfloat16(name, weight.shape[0], smallest, bits), group, smallest
                )
        if method is None:
            return None, f"{why}, which this CPU's operator does not multiply, dequantised"
        return (method if weight.order is None else OrderedInputs(method)), why

    def _multiply_rows(self, weight: RowScaledWeight) -> tuple[LinearMethod | None, str]:
        """A weight with a scale per output:
        int8 as it is everywhere, float8 where its inputs may be rounded too."""
        rows, inputs = weight.shape
        if weight.values.dtype == torch.int8:
            why = "int8 as stored"
            if weight.rounds_inputs:
                method = (Int8Linear if self.policy.on_cpu else DequantizedInt8Linear)(self.dtype)
                return RoundedInputs(method), f"{why}, inputs of 8 bits"
            return self._int8()(self.dtype), why
        fits = weight.rounds_inputs and rows % FLOAT8_MULTIPLE == inputs % FLOAT8_MULTIPLE == 0
        if fits and self.policy.multiplies_float8 and self.dtype == torch.bfloat16:
            return Float8Linear(), "float8 as stored"
        return None, "float8, dequantised, since nothing here multiplies it with inputs that are not rounded"


_UNQUANTIZED = "not quantised"
