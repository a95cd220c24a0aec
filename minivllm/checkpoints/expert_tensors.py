"""Experts in checkpoints: one matrix each, or those of a layer in one tensor,
under the names of several families.

The decoder's names are ``model.layers.0.mlp.experts.3.gate_proj.weight`` and so on, [out, in] each.
Stored tensors are

    mlp.experts.gate_up_proj [experts, 2 * inner, hidden]     gates above, as transformers 5 stacks them
    mlp.experts.gate_up_proj [experts, hidden, 2 * inner]     transposed: Qwen3-VL
                                                              and gates and ups in turn: gpt-oss
    mlp.experts.gate_proj.weight [experts, inner, hidden]     as GGUF files hold them

and ``down_proj`` in the same way, biases without the input's dimension.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from minivllm.errors import ModelError
from minivllm.weights.stored_weight import QuantizedWeight, RestoredWeight, StoredWeight

Shape = tuple[int, ...]

_SPELLINGS = (
    (re.compile(r"\.block_sparse_moe\.input_linear\."), ".mlp.experts.gate_up_proj."),  # Granite
    (re.compile(r"\.block_sparse_moe\.output_linear\."), ".mlp.experts.down_proj."),
    (re.compile(r"\.block_sparse_moe\.router\.layer\."), ".mlp.gate."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),  # Mixtral
    (re.compile(r"(\.experts\.\d+\.)w1\."), r"\1gate_proj."),
    (re.compile(r"(\.experts\.\d+\.)w3\."), r"\1up_proj."),
    (re.compile(r"(\.experts\.\d+\.)w2\."), r"\1down_proj."),
    (re.compile(r"\.mlp\.router\."), ".mlp.gate."),  # gpt-oss
    (re.compile(r"\.mlp\.shared_experts\."), ".mlp.shared_expert."),  # DeepSeek, GLM
)
_STACKED = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|gate_proj|up_proj|down_proj)(?:[._](weight|bias))?")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)\d+\.down_proj\.weight")


class _Stack(NamedTuple):
    """One stored tensor of all experts of a layer. prefix: of the experts' names.
    parts: what it holds of each one."""

    prefix: str
    parts: tuple[str, ...]
    kind: str


def expert_name(name: str) -> str:
    """The decoder's spelling of a tensor's name."""
    for pattern, own in _SPELLINGS:
        name = pattern.sub(own, name)
    return name


class ExpertTensors:
    """Stacked tensors of a checkpoint: the experts that they hold, and how they are split.

    expected: shapes of all weights of the decoder.
    is_transposed: stacks lie [in, out], gates and ups in turn. may_be_transposed: they do if their shape says
    so, gates above.
    """

    def __init__(
        self, expected: Mapping[str, Shape], is_transposed: bool = False, may_be_transposed: bool = False
    ) -> None:
        matches = (_EXPERT.fullmatch(name) for name in expected)
        self._counts = Counter(match[1] for match in matches if match is not None)
        self._expected = expected
        self._is_transposed = is_transposed
        self._may_be_transposed = may_be_transposed

    def unstacked(
        self, found: Mapping[str, Shape], file_of: Mapping[str, Path]
    ) -> tuple[dict[str, Shape], dict[str, Path]]:
        """Names and shapes with each stack replaced by its parts, and their files. Raises ModelError, naming
        file and tensor, if a stack does not have the shape that the configuration calls for."""
        shapes: dict[str, Shape] = {}
        files: dict[str, Path] = {}
        for name, shape in found.items():
            stack = self._stack(name)
            if stack is None:
                shapes[name], files[name] = shape, file_of[name]
                continue
            whole = self._shape(stack)
            if shape != whole and not (self._may_be_transposed and shape == (whole[0], *whole[:0:-1])):
                raise ModelError(
                    f"{file_of[name]}: tensor {name!r} has shape {list(shape)}, but {whole[0]} experts of "
                    "this "
                    f"configuration make {list(whole)}."
                )
            for expert in range(whole[0]):
                for part in stack.parts:
                    own = f"{stack.prefix}{expert}.{part}.{stack.kind}"
                    if own in shapes:
                        raise ModelError(
                            f"{file_of[name]}: tensor {name!r} holds {own!r}, which is also in another."
                        )
                    shapes[own], files[own] = self._expected[own], file_of[name]
        return shapes, files

    def split(self, name: str, weight: StoredWeight) -> Iterator[tuple[str, StoredWeight]]:
        """The tensors of every expert in a stack, under their own names; any other tensor as it is.

        A quantised stack has its experts one below the other, [experts * out, in],
        whatever the shape in the file.
        """
        stack = self._stack(name)
        if stack is None:
            yield name, weight
            return
        for expert in range(self._counts[stack.prefix]):
            for index, part in enumerate(stack.parts):
                own = f"{stack.prefix}{expert}.{part}.{stack.kind}"
                if isinstance(weight, Tensor):
                    yield own, self._of_expert(weight[expert], index, len(stack.parts), self._expected[own])
                elif isinstance(weight, RestoredWeight) and weight.values.ndim == 3:
                    values = self._of_expert(
                        weight.values[expert], index, len(stack.parts), self._expected[own]
                    )
                    yield own, RestoredWeight(values)
                else:
                    assert isinstance(weight, QuantizedWeight)
                    if self._may_be_transposed:
                        raise ModelError(
                            f"Tensor {name!r} holds quantised experts, which this family's checkpoints may "
                            "store transposed: they are read unquantised only."
                        )
                    height = self._expected[own][0]
                    first = expert * len(stack.parts) * height
                    if self._is_transposed:
                        rows = slice(first + index, first + len(stack.parts) * height, len(stack.parts))
                    else:
                        rows = slice(first + index * height, first + (index + 1) * height)
                    yield own, weight.part(rows, slice(None))

    def _of_expert(self, whole: Tensor, index: int, count: int, shape: Shape) -> Tensor:
        """Part ``index`` of an expert's tensor that holds ``count`` of them."""
        if self._is_transposed:
            return (whole.T if whole.ndim == 2 else whole)[index::count].contiguous()
        if self._may_be_transposed and whole.shape != (count * shape[0], *shape[1:]):
            whole = whole.T.contiguous()
        return whole[index * shape[0] : (index + 1) * shape[0]]

    def _stack(self, name: str) -> _Stack | None:
        match = _STACKED.fullmatch(name)
        if match is None or match[1] not in self._counts:
            return None
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else (match[2],)
        return _Stack(match[1], parts, match[3] or "weight")

    def _shape(self, stack: _Stack) -> Shape:
        """Of the stored tensor."""
        shapes = [self._expected.get(f"{stack.prefix}0.{part}.{stack.kind}", (0,)) for part in stack.parts]
        rows, inputs = sum(shape[0] for shape in shapes), shapes[0][1:]
        one = (*inputs, rows) if self._is_transposed and inputs else (rows, *inputs)
        return self._counts[stack.prefix], *one
