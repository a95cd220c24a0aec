"""Quantised safetensors checkpoints: which tensors make up one weight, and how they are put together.

Most are whole numbers in groups: w = (number - zero) * scale. AWQ (the layout of AutoAWQ's GEMM kernels),
GPTQ (that of AutoGPTQ) and compressed-tensors' pack-quantized put several numbers into one int32, each in
another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.weights.mxfp4 import GROUP as MXFP4_GROUP
from minivllm.weights.mxfp4 import group_mxfp4
from minivllm.weights.quantization_config import Layout, StoredQuantization, WeightFormat
from minivllm.weights.stored_weight import GroupedWeight, RestoredWeight, RowScaledWeight, StoredWeight

Shape = tuple[int, ...]

FLOATS = ("F64", "F32", "F16", "BF16")
PARTS: dict[Layout, dict[str, tuple[str, ...]]] = {
    "awq": {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS},
    "gptq": {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": ("I32",)},
    "packed": {
        "weight_packed": ("I32",),
        "weight_scale": FLOATS,
        "weight_zero_point": ("I32",),
        "weight_g_idx": ("I32",),
        "weight_shape": ("I64", "I32"),
    },
    "int8": {"weight": ("I8", *FLOATS), "weight_scale": FLOATS, "weight_zero_point": ("I8",)},
    "float8": {"weight": ("F8_E4M3", *FLOATS), "weight_scale": FLOATS},
    "mxfp4": {"blocks": ("U8",), "scales": ("U8",)},
}
"""Layout -> its parts, the one that gives the shape first -> the safetensors types that each may have."""
# AutoAWQ puts outputs 0 2 4 6 1 3 5 7 of every eight into the nibbles of a word, the lowest first.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_OTHER_NAMES = {
    "weight_scale_inv": "weight_scale"
}  # what DeepSeek and Qwen call it; it is multiplied all the same
# Scales of activations that were measured beforehand, and of a quantised KV cache: neither is used here.
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale", "input_zero_point")


class StoredPart(NamedTuple):
    """Entry of a tensor in a file's header: its safetensors type and its shape."""

    type: str
    shape: Shape


class PackedWeights:
    """Names, types, shapes and contents of one quantised checkpoint's tensors."""

    def __init__(self, quantization: StoredQuantization) -> None:
        self.quantization = quantization
        self._formats: dict[str, WeightFormat] = {}

    def place(self, name: str, stored: str) -> tuple[str, str] | None:
        """(weight, part) that a tensor belongs to; None if it is a tensor by itself or of no use.

        stored: its name in the model that was quantised,
        which is what the configuration's lists of layers mean.
        """
        for separator, ending in ((".", ".weight"), ("_", "")):  # only experts' parts are named with a line
            module, _, part = name.rpartition(separator)
            part = _OTHER_NAMES.get(part, part)
            described = self.quantization.format_of(stored.rpartition(separator)[0])
            if described is None or (described.layout == "mxfp4") is (separator == "."):
                continue
            if part in PARTS[described.layout] and (
                part != "weight" or module.endswith(("_proj", "lm_head"))
            ):
                self._formats[module + ending] = described
                return module + ending, part
        return None

    def is_unused(self, name: str) -> bool:
        return name.rpartition(".")[2] in _UNUSED

    def stored_types(self, weight: str, part: str) -> tuple[str, ...]:
        """The safetensors types a part of a weight may have."""
        return PARTS[self._formats[weight].layout][part]

    def shape(self, weight: str, parts: Mapping[str, StoredPart]) -> Shape:
        """[out, in] of the weight these parts make up. Raises ModelError if they do not fit together."""
        stored = self._formats[weight]
        main = next(iter(PARTS[stored.layout]))
        if main in parts and parts[main].type in FLOATS and len(parts) == 1:
            return parts[main].shape  # one of the layers that were left as they are
        is_quantized = main in parts and parts[main].type not in FLOATS
        fitting = _fitting(stored, parts[main].shape) if is_quantized else None
        if (
            fitting is not None
            and fitting.required <= parts.keys()
            and all(part.shape in fitting.parts.get(name, ()) for name, part in parts.items())
        ):
            return fitting.shape
        given = ", ".join(f"{name} {part.type} {list(part.shape)}" for name, part in sorted(parts.items()))
        raise ModelError(
            f"The parts of {weight!r} do not make up a weight of {self.quantization.method}: {given}."
        )

    def assemble(self, weight: str, parts: Mapping[str, Tensor], dtype: torch.dtype) -> StoredWeight:
        """The weight of these parts, whose shapes have been checked.
        dtype: of values that have to be restored."""
        stored = self._formats[weight]
        if parts.keys() == {"weight"}:
            return parts["weight"].to(dtype)
        if stored.layout == "mxfp4":
            return group_mxfp4(parts["blocks"], parts["scales"])
        if stored.layout == "float8":
            return _float8(stored, parts, dtype)
        if stored.layout == "int8" and not stored.group_size:
            zeros = parts.get("weight_zero_point")
            if zeros is None or not bool(zeros.any()):
                return RowScaledWeight(parts["weight"], _per_row(stored, parts), stored.rounds_inputs)
            if stored.rounds_inputs:
                raise ModelError(
                    f"{weight!r} has zero points, but rounded inputs are multiplied with symmetric weights."
                )
        return _grouped(weight, stored, parts, dtype)


class _Fitting(NamedTuple):
    """The shape of a weight, the parts that it cannot do without, and the shapes that each part may have."""

    shape: Shape
    required: set[str]
    parts: dict[str, set[Shape]]


def _fitting(stored: WeightFormat, main: Shape) -> _Fitting | None:
    """The parts that belong to a main part of this shape; None if no main part has such a shape."""
    per_word, layout = 32 // stored.bits, stored.layout
    if layout == "mxfp4":
        if len(main) < 3 or main[-1] != MXFP4_GROUP // 2:
            return None
        # Experts are stored as [experts, out, in];
        # unquantised, the same models have them as [experts, in, out].
        shape = (*main[:-3], main[-2] * MXFP4_GROUP, main[-3])
        return _Fitting(shape, {"scales"}, {"blocks": {main}, "scales": {main[:-1]}})
    if len(main) != 2:
        return None
    rows, columns = main
    if layout == "awq":
        rows, columns = columns * per_word, rows
    elif layout == "gptq":
        rows, columns = columns, rows * per_word
    elif layout == "packed":
        columns *= per_word
    size = stored.group_size or columns
    groups = columns // max(size, 1)
    if groups * size != columns:
        return None
    shapes: dict[str, set[Shape]]
    if layout in ("awq", "gptq"):
        zeros: set[Shape] = {(groups, rows // per_word)} if rows % per_word == 0 else set()
        shapes = {"qweight": {main}, "scales": {(groups, rows)}, "qzeros": zeros, "g_idx": {(columns,)}}
        return _Fitting((rows, columns), {"scales", "qzeros"}, shapes)
    scales: set[Shape] = {(rows, groups)}
    if stored.block is not None:
        scales = {(-(-rows // stored.block[0]), -(-columns // stored.block[1]))}
    elif not stored.group_size:
        scales |= {(), (1,), (1, 1), (rows,)}
    shapes = {next(iter(PARTS[layout])): {main}, "weight_scale": scales}
    required = {"weight_scale"}
    if layout != "float8":
        shapes["weight_zero_point"] = {(-(-rows // per_word), groups)} if layout == "packed" else scales
        required |= {"weight_zero_point"} if stored.has_zeros else set()
    if layout == "packed":
        shapes |= {"weight_g_idx": {(columns,)}, "weight_shape": {(2,)}}
        required |= {"weight_g_idx"} if stored.is_ordered else set()
    return _Fitting((rows, columns), required, shapes)


def _grouped(
    weight: str, stored: WeightFormat, parts: Mapping[str, Tensor], dtype: torch.dtype
) -> StoredWeight:
    """Whole numbers in groups of inputs, each with a scale and a zero."""
    bits, group_of = stored.bits, parts.get("g_idx", parts.get("weight_g_idx"))
    zeros: Tensor | None
    if stored.layout == "awq":
        codes, zeros = (_unpack(parts[part], bits, _AWQ_ORDER).T for part in ("qweight", "qzeros"))
        scale = parts["scales"].T
    elif stored.layout == "gptq":
        codes, zeros, scale = (
            _unpack(parts["qweight"].T, bits),
            _unpack(parts["qzeros"], bits).T,
            parts["scales"].T,
        )
        if stored.zeros_minus_one:
            zeros = (zeros + 1) & (2**bits - 1)
    elif stored.layout == "packed":
        codes, scale, zeros = _unpack(parts["weight_packed"], bits), _per_row(stored, parts), None
        if "weight_zero_point" in parts:
            zeros = _unpack(parts["weight_zero_point"].T, bits).T[: codes.shape[0]]
        if "weight_shape" in parts and tuple(parts["weight_shape"].tolist()) != tuple(codes.shape):
            given = parts["weight_shape"].tolist()
            raise ModelError(
                f"weight_shape of {weight!r} is {given}, but its numbers make up {list(codes.shape)}."
            )
    else:
        # Two's complement with the sign's bit turned over counts from the smallest number.
        codes, scale = parts["weight"].view(torch.uint8) ^ 128, _per_row(stored, parts)
        zeros = parts["weight_zero_point"].view(torch.uint8) ^ 128 if "weight_zero_point" in parts else None
        zeros = None if zeros is None else zeros.reshape(-1, scale.shape[1])
    codes, scale = codes.contiguous(), scale.float().contiguous()
    offset = -(2.0 ** (bits - 1) if zeros is None else zeros.float()) * scale
    inputs, groups = codes.shape[1], scale.shape[1]
    if group_of is None or bool((group_of == -1).all()):
        return GroupedWeight(codes, scale, offset, bits=bits)
    group_of, in_order = group_of.long(), torch.arange(inputs) // (inputs // groups)
    if torch.equal(group_of, in_order):
        return GroupedWeight(codes, scale, offset, bits=bits)
    if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
        raise ModelError(f"The g_idx of {weight!r} names groups outside 0 to {groups - 1}.")
    order = torch.argsort(group_of, stable=True)
    if torch.equal(group_of[order], in_order):
        return GroupedWeight(codes[:, order], scale, offset, bits=bits, order=order)
    # Groups of different sizes, which no operator here multiplies.
    return RestoredWeight((codes.float() * scale[:, group_of] + offset[:, group_of]).to(dtype))


def _per_row(stored: WeightFormat, parts: Mapping[str, Tensor]) -> Tensor:
    """Scales float32 [out, groups] of a compressed-tensors weight,
    also where there is one for the whole tensor."""
    rows, scale = parts[next(iter(PARTS[stored.layout]))].shape[0], parts["weight_scale"].float()
    return scale if stored.group_size else scale.reshape(-1, 1).expand(rows, 1).contiguous()


def _float8(stored: WeightFormat, parts: Mapping[str, Tensor], dtype: torch.dtype) -> StoredWeight:
    values = parts["weight"]
    if stored.block is None:
        return RowScaledWeight(values, _per_row(stored, parts), stored.rounds_inputs)
    scale = parts["weight_scale"].float()
    out = torch.empty(values.shape, dtype=dtype)
    high, wide = stored.block
    for block_row in range(scale.shape[0]):
        piece = slice(block_row * high, (block_row + 1) * high)
        factors = scale[block_row].repeat_interleave(wide)[: values.shape[1]]
        out[piece] = values[piece].float() * factors
    return RestoredWeight(out)


def _unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, n * 32 / bits]:
    number i of a word is at place order[i], the lowest being 0."""
    places = torch.tensor(order or tuple(range(32 // bits)), dtype=torch.int32)
    return ((words.unsqueeze(-1) >> (bits * places)) & (2**bits - 1)).to(torch.uint8).flatten(1)
