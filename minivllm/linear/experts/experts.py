"""The weights of a layer's experts, stacked.

Experts are stored and quantised as all linear layers are: the tensors that a ``LinearMethod`` prepares for
each expert are stacked along a first dimension; of weights that oneDNN packs, the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kernels_triton_free.packed.memory import can_restore
from minivllm.compilation.regions import CompileRegion
from minivllm.device.memory import lazily_zeroed
from minivllm.distributed.shard import Shard
from minivllm.errors import ConfigError, ModelError
from minivllm.linear.experts.methods import (
    ExpertActivation,
    ExpertsMethod,
    GroupedExperts,
    LoopedExperts,
    StackedPackedLinear,
)
from minivllm.linear.layer import ChooseMethod, Linear, never_quantized
from minivllm.linear.methods.exact import LoopedLinear, PackedLinear, PlainLinear, TiledLinear
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.weights.stored_weight import StoredWeight

GROUPED_MULTIPLE = 8
"""Sides of the matrices that ``F.grouped_mm`` multiplies are multiples of this: 16 bytes of bfloat16."""


class _Stack:
    """One product of all experts of a layer. make: an expert's ``Linear``."""

    def __init__(self, num_experts: int, make: Callable[[], Linear]) -> None:
        self.num_experts = num_experts
        self._make = make
        self.tensors: LinearTensors = ()
        self.method: LinearMethod | None = None
        self._loading: dict[int, Linear] = {}

    def load(self, expert: int, part: str, kind: str, tensor: StoredWeight) -> None:
        """Take one tensor of one expert; an expert that is complete goes to its place in the stack."""
        linear = self._loading.pop(expert, None) or self._make()
        linear.load(part, kind, tensor)
        if not linear.tensors:
            self._loading[expert] = linear
            return
        if self.method is None:
            self.method = linear.method
            self.tensors = tuple(_room(self.num_experts, one) for one in linear.tensors)
        if linear.method != self.method:
            raise ModelError(
                f"The experts of one layer are stored in different ways ({self.method} and {linear.method}), "
                "which "
                f"cannot be multiplied together: use a checkpoint in which all are stored alike."
            )
        for one, other in zip(self.tensors, linear.tensors, strict=True):
            one[expert] = other


def _room(count: int, tensor: Tensor) -> Tensor:
    """For so many tensors like this one, on a CPU in huge pages."""
    shape = count, *tensor.shape
    return lazily_zeroed(shape, tensor.dtype) if tensor.device.type == "cpu" else tensor.new_empty(shape)


class Experts:
    """The MLPs of all experts of a layer: down(activation(gate(x)) * up(x)), with ``inner`` values between.

    split over shards as ``Linear``s are: every shard has a part of every expert. own: its range of the
    ``inner`` values; left out, they are divided evenly. is_part: see ExpertsMethod. Raises
    ConfigError where the device cannot multiply them.
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
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.inner = own.stop - own.start
        self._has_bias = bias
        self._activation = activation
        self._device = device
        self._is_part = is_part
        if device.type not in ("cpu", "meta"):  # a layout may be looked at without a device
            _check_grouped(hidden_size, self.inner, dtype, device)

        def make(parts: dict[str, int], in_features: int, is_column: bool) -> Linear:
            linear = Linear(
                parts,
                in_features,
                bias=bias,
                split="column" if is_column else "row",
                shard=shard,
                dtype=dtype,
                device=device,
                choose=partial(_choose_looped if device.type == "cpu" else _choose_restorable, choose),
                own=dict.fromkeys(parts, own),
                is_stacked=True,
            )
            if isinstance(linear.method, PackedLinear):
                stacked = StackedPackedLinear(linear.out_features, linear.in_features)
                linear.method = stacked if can_restore() else PlainLinear()
            return linear

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

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to each tensor."""
        self.tensors = tuple(map(change, self.tensors))

    @property
    def method(self) -> ExpertsMethod:
        """How they are computed, once all weights are there."""
        kind = LoopedExperts if self._device.type == "cpu" else GroupedExperts
        gate_up, down = self._gate_up.method, self._down.method
        assert gate_up is not None and down is not None, "load comes first"
        count = len(self._gate_up.tensors)
        return kind(self.num_experts, gate_up, down, count, self._has_bias, self._activation, self._is_part)

    def compile_few_rows(self, compile_region: CompileRegion) -> None:
        """See ``LoopedExperts``."""
        method = self.method
        if isinstance(method, LoopedExperts):
            method.compile_few_rows(compile_region, self.hidden_size, self.inner)


def _choose_looped(choose: ChooseMethod, name: str, weight: StoredWeight) -> LinearMethod | None:
    """As ``choose``, without tiles and words: the loop over experts is not compiled."""
    method = choose(name, weight)
    if isinstance(method, LoopedLinear | TiledLinear):
        return None
    return method.without_tiles() if isinstance(method, Int4Linear) else method


def _choose_restorable(choose: ChooseMethod, name: str, weight: StoredWeight) -> LinearMethod | None:
    """As ``choose``, but only methods whose matrices can be restored for a grouped product."""
    method = choose(name, weight)
    if method is None or method.gathers_rows:
        return method
    if isinstance(weight, Tensor):
        raise ConfigError(
            f"Experts cannot be rounded to the format of {type(method).__name__}: use quantization='int8' or "
            "'int4'."
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
