"""How the experts of a layer are multiplied: in a loop on a CPU, all at once on a GPU.

An expert's two products are those of a ``LinearMethod``. Every ``ExpertsMethod`` can be traced into a region:
where only running it tells which experts are hit, it is one operator to the compiler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.activation import clamped_swiglu, gated_activation
from kernels_triton_free.experts.products import (
    FewRows,
    SortedRows,
    define_loop,
    gathered_product,
    grouped_product,
    loop,
    run_loop,
    sort_by_expert,
    weighted_sum,
)
from kernels_triton_free.linear import pack_weight, packed_linear
from kernels_triton_free.packed.memory import memory_of, packed_in
from kernels_triton_free.packed.rows import MAX_ROWS, few_rows_products, is_readable, words_shape
from minivllm.compilation.regions import CompileRegion, Region, Size, TensorSpec
from minivllm.linear.methods.exact import PlainLinear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.specs.layers import ClampedSwiglu
from minivllm.weights.stored_weight import StoredWeight

_few_rows: dict[str, Callable] = {}
"""The compiled loops of ``LoopedExperts.compile_few_rows``, by what tells one method from another."""
_packed: dict[tuple[int, int, int], Tensor] = {}
"""Packed weights by the address of their bytes and their shape: making them takes longer than finding them.
They do not keep the bytes; one whose bytes have gone is never asked for, unless another one of this shape
lies there now."""

ExpertActivation = str | ClampedSwiglu
"""A name that ``gated_activation`` knows, or gpt-oss' own."""


def activate(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """gate_up [tokens, 2 * inner], gates in the first half -> [tokens, inner]."""
    if isinstance(activation, ClampedSwiglu):
        return clamped_swiglu(gate_up, activation.alpha, activation.limit)
    return gated_activation(gate_up, activation)


@dataclass(frozen=True)
class StackedPackedLinear(LinearMethod):
    """As ``PackedLinear``, of bytes that can be stacked."""

    out_features: int
    in_features: int

    def prepare(self, weight: StoredWeight, bias: Tensor | None) -> LinearTensors:
        assert isinstance(weight, Tensor), "a quantised weight is restored before"
        memory = memory_of(pack_weight(weight))
        return (memory,) if bias is None else (memory, bias)

    def apply(self, x: Tensor, tensors: LinearTensors) -> Tensor:
        memory, *bias = tensors
        key = memory.data_ptr(), self.out_features, self.in_features
        packed = _packed.get(key)
        if packed is None:
            packed = _packed[key] = packed_in(memory, self.out_features, self.in_features)
        return packed_linear(x, packed, bias[0] if bias else None, self.out_features)


@dataclass(frozen=True)
class ExpertsMethod(ABC):
    """How the experts of a layer are computed. Immutable and compared by value, as a LinearMethod is.

    gate_up, down: how each expert's products are. num_gate_up: tensors that the first one has. has_bias:
    whether the last tensor of each product is its bias. is_part: other workers have more experts, whose id
    here is num_experts.
    """

    num_experts: int
    gate_up: LinearMethod
    down: LinearMethod
    num_gate_up: int
    has_bias: bool
    activation: ExpertActivation
    is_part: bool = False

    @abstractmethod
    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """x [tokens, hidden], ids int64 and weights float32 [tokens, top_k] -> [tokens, hidden].

        tensors: of gate_up, then of down, each with the experts along its first dimension.
        A pure function of tensors.
        """


@dataclass(frozen=True)
class LoopedExperts(ExpertsMethod):
    """One hit expert after the other, each with the linear methods' own products.
    For CPUs, and for all formats."""

    def __post_init__(self) -> None:
        define_loop(repr(self), self._loop)

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return run_loop(x, ids, weights, tensors, repr(self))

    def _loop(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        first, second = tuple(tensors[: self.num_gate_up]), tuple(tensors[self.num_gate_up :])

        def gate_up(rows: Tensor, expert: int) -> Tensor:
            return self.gate_up.apply(rows, tuple(stacked[expert] for stacked in first))

        def down(rows: Tensor, expert: int) -> Tensor:
            return self.down.apply(rows, tuple(stacked[expert] for stacked in second))

        run = _few_rows.get(repr(self))
        few = (
            None
            if run is None
            else FewRows(MAX_ROWS, lambda rows, experts: run(rows, experts, first, second))
        )
        nobody = self.num_experts if self.is_part else None
        return loop(
            x, ids, weights, gate_up, partial(activate, activation=self.activation), down, nobody, few
        )

    def compile_few_rows(self, compile_region: CompileRegion, hidden: int, inner: int) -> None:
        """Have compiled loops for the experts that few rows of a step go to,
        if their weights can be read so."""
        shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
        if not isinstance(self.gate_up, StackedPackedLinear) or not all(
            is_readable(*own) for own in shapes.values()
        ):
            return

        def product(
            x: Tensor, experts: Tensor, shape: tuple[int, int], memory: Tensor, *bias: Tensor
        ) -> Tensor:
            words = memory.view(-1, *words_shape(*shape))
            return few_rows_products(x, words[experts], *(stacked[experts] for stacked in bias))

        def apply(x: Tensor, experts: Tensor, gate_up: LinearTensors, down: LinearTensors) -> Tensor:
            values = activate(product(x, experts, shapes["gate_up"], *gate_up), self.activation)
            return product(values, experts, shapes["down"], *down)

        def declare(*shape: int | Size, dtype: torch.dtype = torch.bfloat16) -> TensorSpec:
            return TensorSpec(shape, dtype, torch.device("cpu"))

        hit = Size("hit experts", 8)
        inputs: dict[str, Any] = {
            "x": declare(Size("rows", MAX_ROWS, single=1, varies=False), hit, hidden),
            "experts": declare(hit, dtype=torch.int64),
        }
        for name, (out_features, in_features) in shapes.items():
            memory = declare(self.num_experts, out_features * in_features // 2, dtype=torch.int32)
            inputs[name] = (memory, declare(self.num_experts, out_features)) if self.has_bias else (memory,)
        region = Region("experts of few rows", apply, inputs, (self.activation,))
        compiled = compile_region(region)
        if compiled is not region.function:
            _few_rows[repr(self)] = compiled


@dataclass(frozen=True)
class GroupedExperts(ExpertsMethod):
    """All at once, without asking the device which experts are hit: a single token's matrices are read where
    they are, several tokens are sorted and multiplied in groups. Quantised matrices are restored for the
    call."""

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        first, second = tuple(tensors[: self.num_gate_up]), tuple(tensors[self.num_gate_up :])
        choices = ids.flatten()
        if x.shape[0] == 1:
            if self.is_part:  # what is computed elsewhere reads the last matrix, and counts nothing
                weights = torch.where(ids < self.num_experts, weights, 0.0)
                choices = choices.clamp(max=self.num_experts - 1)
            rows = x.expand(choices.shape[0], -1)
            inner = activate(self._gathered(self.gate_up, rows, choices, first), self.activation)
            return weighted_sum(self._gathered(self.down, inner, choices, second), weights)
        by_expert = sort_by_expert(ids, self.num_experts + self.is_part)
        experts = choices[by_expert.order]
        if self.is_part:  # the last group is computed elsewhere: no product writes its rows
            by_expert = by_expert._replace(ends=by_expert.ends[: self.num_experts])
            experts = experts.clamp(max=self.num_experts - 1)
        values = x[by_expert.order // ids.shape[1]]
        inner = activate(self._grouped(self.gate_up, values, by_expert, experts, first), self.activation)
        values = self._grouped(self.down, inner, by_expert, experts, second)
        if self.is_part:
            is_here = torch.arange(len(values), device=x.device) < by_expert.ends[-1]
            values = torch.where(is_here.unsqueeze(-1), values, 0.0)
        return weighted_sum(torch.empty_like(values).index_copy_(0, by_expert.order, values), weights)

    def _gathered(self, method: LinearMethod, x: Tensor, choices: Tensor, tensors: LinearTensors) -> Tensor:
        bias = tensors[-1][choices] if self.has_bias else None
        return gathered_product(x, method.rows(choices, tensors), bias)

    def _grouped(
        self, method: LinearMethod, x: Tensor, by_expert: SortedRows, experts: Tensor, tensors: LinearTensors
    ) -> Tensor:
        every = torch.arange(self.num_experts, device=x.device)
        matrices = tensors[0] if isinstance(method, PlainLinear) else method.rows(every, tensors)
        return grouped_product(x, matrices, tensors[-1][experts] if self.has_bias else None, by_expert.ends)
