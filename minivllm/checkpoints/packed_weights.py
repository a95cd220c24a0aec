"""Quantised safetensors checkpoints: which tensors make up one weight, and how they are unpacked.

AWQ (Lin et al. 2023, the layout of AutoAWQ's GEMM kernels) and GPTQ (Frantar et al. 2022, the layout of AutoGPTQ) put
eight codes of 4 bits into one int32; fp8 checkpoints hold float8_e4m3fn with one scale per tensor, row or block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minivllm.errors import ModelError
from minivllm.linear.stored_weight import GroupedWeight, RestoredWeight, RowScaledWeight, StoredWeight
from minivllm.models.decoder_config import StoredQuantization

CODES_PER_WORD = 8
SUPPORTED = "awq and gptq with 4 bits, and fp8"
# AutoAWQ puts outputs 0 2 4 6 1 3 5 7 of every eight into the nibbles of a word, the lowest first.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_PARTS = {
    "awq": {"qweight": "I32", "qzeros": "I32", "scales": ""},
    "gptq": {"qweight": "I32", "qzeros": "I32", "scales": "", "g_idx": "I32"},
    "fp8": {"weight": "F8_E4M3", "weight_scale": "", "weight_scale_inv": ""},
}
# Scales of activations that were measured beforehand, and of a quantised KV cache: neither is used here.
_UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")


def read_quantization(entry: Any, source: str) -> StoredQuantization | None:
    """config.json's quantization_config; ModelError names the file, the setting and what is supported."""
    if not entry:
        return None
    if not isinstance(entry, Mapping):
        raise ModelError(f"{source}: quantization_config is {entry!r}, but must be an object.")
    method = entry.get("quant_method")
    if method == "fp8":
        return StoredQuantization(method="fp8", block=_block(entry.get("weight_block_size"), source))
    if method not in ("awq", "gptq"):
        raise ModelError(
            f"{source}: quantization_config names {method!r}, but supported are {SUPPORTED}; use the unquantised model "
            f"(with quantization='int8' or 'int4' if you like) or a GGUF file of it."
        )
    bits = entry.get("bits", entry.get("w_bit", 4))
    if bits != 4:
        raise ModelError(
            f"{source}: {method} with {bits!r} bits is not supported, only with 4: use another checkpoint."
        )
    version = str(entry.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        raise ModelError(f"{source}: awq of version {version!r} is not supported, only 'gemm': use another checkpoint.")
    size = entry.get("group_size", entry.get("q_group_size", 128))
    if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
        raise ModelError(f"{source}: group_size is {size!r}, but must be a positive number, or -1 for whole rows.")
    return StoredQuantization(
        method=method,
        group_size=max(size, 0),
        zeros_minus_one=method == "gptq" and entry.get("checkpoint_format", "gptq") != "gptq_v2",
    )


def _block(entry: Any, source: str) -> tuple[int, int] | None:
    if entry is None:
        return None
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not all(isinstance(n, int) and n > 0 for n in entry):
        raise ModelError(f"{source}: weight_block_size is {entry!r}, but must be two positive numbers.")
    return entry[0], entry[1]


class PackedWeights:
    """Names, types, shapes and unpacking of one quantised checkpoint's tensors."""

    def __init__(self, quantization: StoredQuantization) -> None:
        self.quantization = quantization
        self._parts = _PARTS[quantization.method]

    def place(self, name: str) -> tuple[str, str] | None:
        """(weight, part) that a stored tensor belongs to; None if it is a tensor by itself or of no use."""
        module, _, part = name.rpartition(".")
        if part not in self._parts or (part == "weight" and not module.endswith(("_proj", "lm_head"))):
            return None
        return f"{module}.weight", part

    def is_unused(self, name: str) -> bool:
        return name.rpartition(".")[2] in _UNUSED

    def stored_type(self, part: str) -> str:
        """The safetensors type a part has; empty for any float type."""
        return self._parts[part]

    def shape(self, weight: str, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """[out, in] of the weight these parts make up. Raises ModelError if they do not fit together."""
        shapes = ", ".join(f"{part} {list(shape)}" for part, shape in sorted(parts.items()))
        refused = ModelError(f"The parts of {weight!r} do not make up a {self.quantization.method} weight: {shapes}.")
        if any(len(shape) != 2 for part, shape in parts.items() if part in ("qweight", "qzeros", "scales", "weight")):
            raise refused
        if self.quantization.method == "fp8":
            if "weight" not in parts or len(parts) > 2:
                raise refused
            rows, columns = parts["weight"]
            scale = next((shape for part, shape in parts.items() if part != "weight"), None)
            if scale is not None and scale not in self._scale_shapes(rows, columns):
                raise refused
            return rows, columns
        if not {"qweight", "qzeros", "scales"} <= set(parts):
            raise refused
        first, second = parts["qweight"]
        if self.quantization.method == "awq":
            inputs, outputs = first, second * CODES_PER_WORD
        else:
            inputs, outputs = first * CODES_PER_WORD, second
        groups = inputs // (self.quantization.group_size or inputs)
        fits = groups * (self.quantization.group_size or inputs) == inputs and outputs % CODES_PER_WORD == 0
        if (
            not fits
            or parts["scales"] != (groups, outputs)
            or parts["qzeros"] != (groups, outputs // CODES_PER_WORD)
            or parts.get("g_idx", (inputs,)) != (inputs,)
        ):
            raise refused
        return outputs, inputs

    def _scale_shapes(self, rows: int, columns: int) -> set[tuple[int, ...]]:
        shapes: set[tuple[int, ...]] = {(), (1,), (1, 1), (rows,), (rows, 1)}
        if self.quantization.block is not None:
            high, wide = self.quantization.block
            shapes = {(-(-rows // high), -(-columns // wide))}
        return shapes

    def assemble(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> StoredWeight:
        """The weight of these parts, whose shapes have been checked. dtype: of values that have to be restored."""
        if self.quantization.method == "fp8":
            return self._assemble_float8(parts, dtype)
        scale = parts["scales"].float().T.contiguous()
        if self.quantization.method == "awq":
            codes, zeros = (_unpack(parts[part], _AWQ_ORDER).T for part in ("qweight", "qzeros"))
        else:
            in_order = tuple(range(CODES_PER_WORD))
            codes, zeros = _unpack(parts["qweight"].T, in_order), _unpack(parts["qzeros"], in_order).T
            if self.quantization.zeros_minus_one:
                zeros = (zeros + 1) & 15
        codes, offset = codes.contiguous(), -zeros.float() * scale
        inputs = codes.shape[1]
        group_of = parts.get("g_idx")
        in_order_groups = torch.arange(inputs) // (inputs // scale.shape[1])
        if group_of is None or torch.equal(group_of.long(), in_order_groups):
            return GroupedWeight(codes, scale, offset, bits=4)
        if int(group_of.min()) < 0 or int(group_of.max()) >= scale.shape[1]:
            raise ModelError(f"A gptq weight's g_idx names groups outside 0 to {scale.shape[1] - 1}.")
        # Ordered by activation: neighbouring inputs belong to different groups, which no operator here multiplies.
        index = group_of.long()
        return RestoredWeight((codes.float() * scale[:, index] + offset[:, index]).to(dtype))

    def _assemble_float8(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> StoredWeight:
        values = parts["weight"]
        scale = next((tensor.float() for part, tensor in parts.items() if part != "weight"), None)
        if scale is None and values.dtype != torch.float8_e4m3fn:
            return values.to(dtype)  # one of the layers that were left as they are
        if scale is None or values.dtype != torch.float8_e4m3fn:
            raise ModelError(
                "The checkpoint holds a float8 weight without its scale, or a scale without such a weight."
            )
        rows, columns = values.shape
        if self.quantization.block is None:
            per_row = scale.reshape(-1, 1).expand(rows, 1)
            return RowScaledWeight(values, per_row.contiguous(), rounds_inputs=True)
        high, wide = self.quantization.block
        out = torch.empty(rows, columns, dtype=dtype)
        for block_row in range(scale.shape[0]):
            piece = slice(block_row * high, (block_row + 1) * high)
            factors = scale[block_row].repeat_interleave(wide)[:columns]
            out[piece] = values[piece].float() * factors
        return RestoredWeight(out)


def _unpack(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """int32 [rows, n] -> uint8 [rows, 8 n]: output i of every eight is the nibble order[i], the lowest being 0."""
    shifts = torch.tensor([4 * place for place in order], dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(1)
