"""The weights of a layer's experts, stacked, and how they are multiplied: in a loop on a CPU, all at once on a GPU.

An expert's two products are those of a ``LinearMethod``, so experts are stored and quantised as all linear layers are:
the tensors that the method prepares for each expert are stacked along a first dimension, but for weights that oneDNN
has packed: those stay one tensor for each expert. Every ``ExpertsMethod`` can be
traced into a region: where only running it tells which experts are hit, it is one operator to the compiler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels_triton_free.activation import clamped_swiglu, gated_activation
from kernels_triton_free.experts.products import (
    SortedRows,
    define_loop,
    gathered_product,
    grouped_product,
    loop,
    run_loop,
    sort_by_expert,
    weighted_sum,
)
from minivllm.errors import ConfigError, ModelError
from minivllm.linear.layer import (
    ChooseMethod,
    Linear,
    LinearMethod,
    LinearTensors,
    PackedLinear,
    PlainLinear,
    Shard,
    never_quantized,
)
from minivllm.linear.stored_weight import StoredWeight

GROUPED_MULTIPLE = 8
"""Sides of the matrices that ``F.grouped_mm`` multiplies are multiples of this: 16 bytes of bfloat16."""


@dataclass(frozen=True)
class ClampedSwiglu:
    """The gated activation of gpt-oss; see ``clamped_swiglu``."""

    alpha: float
    limit: float


ExpertActivation = str | ClampedSwiglu
"""A name that ``gated_activation`` knows, or gpt-oss' own."""


def activate(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """gate_up [tokens, 2 * inner], gates in the first half -> [tokens, inner]."""
    if isinstance(activation, ClampedSwiglu):
        return clamped_swiglu(gate_up, activation.alpha, activation.limit)
    return gated_activation(gate_up, activation)


@dataclass(frozen=True)
class ExpertsMethod(ABC):
    """How the experts of a layer are computed. Immutable and compared by value, as a LinearMethod is.

    gate_up, down: how each expert's products are. num_gate_up: tensors that the first one has. has_bias: whether the
    last tensor of each product is its bias. is_part: other workers have more experts, whose id here is num_experts.
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

        tensors: of gate_up, then of down, each with the experts along its first dimension, or as many packed weights as
        there are experts, and what is stacked beside them. A pure function of tensors.
        """


@dataclass(frozen=True)
class LoopedExperts(ExpertsMethod):
    """One hit expert after the other, each with the linear methods' own products. For CPUs, and for all formats."""

    def __post_init__(self) -> None:
        define_loop(repr(self), self._loop)

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        return run_loop(x, ids, weights, tensors, repr(self))

    def _loop(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        first, second = tensors[: self.num_gate_up], tensors[self.num_gate_up :]

        def gate_up(rows: Tensor, expert: int) -> Tensor:
            return self.gate_up.apply(rows, self._of_expert(self.gate_up, first, expert))

        def down(rows: Tensor, expert: int) -> Tensor:
            return self.down.apply(rows, self._of_expert(self.down, second, expert))

        nobody = self.num_experts if self.is_part else None
        return loop(x, ids, weights, gate_up, partial(activate, activation=self.activation), down, nobody)

    def _of_expert(self, method: LinearMethod, tensors: Sequence[Tensor], expert: int) -> LinearTensors:
        """What the method takes of one expert. Packed weights, which cannot be stacked, come one by one."""
        listed = self.num_experts if isinstance(method, PackedLinear) else 0
        return (*tensors[:listed][expert : expert + 1], *(stacked[expert] for stacked in tensors[listed:]))


@dataclass(frozen=True)
class GroupedExperts(ExpertsMethod):
    """All at once, without asking the device which experts are hit: a single token's matrices are read where they are,
    several tokens are sorted and multiplied in groups. Quantised matrices are restored for the call."""

    def apply(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        first, second = tuple(tensors[: self.num_gate_up]), tuple(tensors[self.num_gate_up :])
        choices = ids.flatten()
        if x.shape[0] == 1:
            rows = x.expand(choices.shape[0], -1)
            inner = activate(self._gathered(self.gate_up, rows, choices, first), self.activation)
            return weighted_sum(self._gathered(self.down, inner, choices, second), weights)
        by_expert = sort_by_expert(ids, self.num_experts)
        experts = choices[by_expert.order]
        values = x[by_expert.order // ids.shape[1]]
        inner = activate(self._grouped(self.gate_up, values, by_expert, experts, first), self.activation)
        values = self._grouped(self.down, inner, by_expert, experts, second)
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


class _Stack:
    """One product of all experts of a layer. make: an expert's ``Linear``."""

    def __init__(self, num_experts: int, make: Callable[[], Linear]) -> None:
        self.num_experts, self._make = num_experts, make
        self.tensors: LinearTensors = ()
        self.method: LinearMethod | None = None
        self._loading: dict[int, Linear] = {}
        self._listed = 0  # tensors in front that are those of one expert each

    def load(self, expert: int, part: str, kind: str, tensor: StoredWeight) -> None:
        """Take one tensor of one expert; an expert that is complete goes to its place in the stack."""
        linear = self._loading.pop(expert, None) or self._make()
        linear.load(part, kind, tensor)
        if not linear.tensors:
            self._loading[expert] = linear
            return
        if self.method is None:
            self.method, num_experts = linear.method, self.num_experts
            self._listed = num_experts if isinstance(linear.method, PackedLinear) else 0
            stacked = linear.tensors[1:] if self._listed else linear.tensors
            self.tensors = (
                *(linear.tensors[0],) * self._listed,  # until each one's own comes
                *(one.new_empty(num_experts, *one.shape) for one in stacked),
            )
        if linear.method != self.method:
            raise ModelError(
                f"The experts of one layer are stored in different ways ({self.method} and {linear.method}), which "
                f"cannot be multiplied together: use a checkpoint in which all are stored alike."
            )
        own = linear.tensors
        if self._listed:
            self.tensors = (*self.tensors[:expert], own[0], *self.tensors[expert + 1 :])
            own = own[1:]
        for one, other in zip(self.tensors[self._listed :], own, strict=True):
            one[expert] = other


class Experts:
    """The MLPs of all experts of a layer: down(activation(gate(x)) * up(x)), with ``inner`` values between.

    split over shards as ``Linear``s are: every shard has a part of every expert. own: its range of the ``inner``
    values; left out, they are divided evenly. is_part: see ExpertsMethod, on a CPU only. Raises ConfigError where the
    device cannot multiply them.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        inner: int,
        *,
        bias: bool,
        activation: ExpertActivation,
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        choose: ChooseMethod = never_quantized,
        own: slice | None = None,
        is_part: bool = False,
    ) -> None:
        own = own or shard.own(inner)
        self.num_experts, self.hidden_size, self.inner = num_experts, hidden_size, own.stop - own.start
        self._has_bias, self._activation, self._device, self._is_part = bias, activation, device, is_part
        if device.type != "cpu":
            _check_grouped(hidden_size, self.inner, dtype, device)

        def make(parts: dict[str, int], in_features: int, is_column: bool) -> Linear:
            return Linear(
                parts,
                in_features,
                bias=bias,
                split="column" if is_column else "row",
                shard=shard,
                dtype=dtype,
                device=device,
                choose=choose if device.type == "cpu" else partial(_choose_restorable, choose),
                own=dict.fromkeys(parts, own),
            )

        self._gate_up = _Stack(
            num_experts, partial(make, {"gate_proj": inner, "up_proj": inner}, hidden_size, is_column=True)
        )
        self._down = _Stack(num_experts, partial(make, {"down_proj": hidden_size}, inner, is_column=False))

    def load(self, expert: int, part: str, kind: str, tensor: StoredWeight) -> None:
        """Take "weight" or "bias" of an expert's gate_proj, up_proj or down_proj, as ``Linear.load`` does."""
        (self._down if part == "down_proj" else self._gate_up).load(expert, part, kind, tensor)

    @property
    def tensors(self) -> LinearTensors:
        return (*self._gate_up.tensors, *self._down.tensors)

    @tensors.setter
    def tensors(self, tensors: LinearTensors) -> None:
        count = len(self._gate_up.tensors)
        self._gate_up.tensors, self._down.tensors = tuple(tensors[:count]), tuple(tensors[count:])

    @property
    def method(self) -> ExpertsMethod:
        """How they are computed, once all weights are there."""
        kind = LoopedExperts if self._device.type == "cpu" else GroupedExperts
        gate_up, down = self._gate_up.method, self._down.method
        assert gate_up is not None and down is not None, "load comes first"
        count = len(self._gate_up.tensors)
        return kind(self.num_experts, gate_up, down, count, self._has_bias, self._activation, self._is_part)


def _choose_restorable(choose: ChooseMethod, name: str, weight: StoredWeight) -> LinearMethod | None:
    """As ``choose``, but only methods whose matrices can be restored for a grouped product."""
    method = choose(name, weight)
    if method is None or method.gathers_rows:
        return method
    if isinstance(weight, Tensor):
        raise ConfigError(
            f"Experts cannot be rounded to the format of {type(method).__name__}: use quantization='int8' or 'int4'."
        )
    return None


def _check_grouped(hidden_size: int, inner: int, dtype: torch.dtype, device: torch.device) -> None:
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"Mixtures of experts are computed in bfloat16 on {device.type}, but dtype is {dtype}: use "
            f"dtype='bfloat16', or device='cpu'."
        )
    if hidden_size % GROUPED_MULTIPLE or inner % GROUPED_MULTIPLE:
        raise ConfigError(
            f"Experts on {device.type} need sides that are multiples of {GROUPED_MULTIPLE}, but these are "
            f"[{inner}, {hidden_size}]: use device='cpu'."
        )
