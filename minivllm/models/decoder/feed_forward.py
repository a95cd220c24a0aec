"""What a layer computes for every token by itself: the protocol, and the gated MLP of dense models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels_triton_free.activation import gated_product
from kernels_triton_free.lora import RowAdapters
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearTensors
from minivllm.linear.methods.stored_weight import StoredWeight
from minivllm.models.layer_specs import MlpSpec
from minivllm.models.linear_factory import LinearFactory, Stored
from minivllm.models.shards import own_inner


class FeedForward(Protocol):
    """The second half of a layer. linears: products that adapters may change. stored: all that keeps weights.
    methods: how its products are computed; equal ones share a region. weights: what ``apply`` reads.
    weights_per_token: how many weights computing a token reads."""

    @property
    def linears(self) -> Sequence[Linear]: ...
    @property
    def stored(self) -> Sequence[Stored]: ...
    @property
    def methods(self) -> tuple[object, ...]: ...
    @property
    def weights(self) -> tuple[LinearTensors, ...]: ...
    @property
    def weights_per_token(self) -> int: ...

    def load(self, name: str, tensor: StoredWeight) -> None:
        """Take ``gate_proj.weight``, … by its name in the layer's ``mlp``."""

    def apply(self, x: Tensor, weights: tuple[LinearTensors, ...], adapters: RowAdapters | None) -> Tensor:
        """x [tokens, hidden] -> the same shape. weights: ``weights`` of any equal layer."""


class GatedMlp:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, spec: MlpSpec, hidden_size: int, factory: LinearFactory) -> None:
        self._activation = spec.activation
        parts = {"gate_proj": spec.inner, "up_proj": spec.inner}
        own = own_inner(spec.inner, factory.shard)
        self._gate_up = factory.make(parts, hidden_size, spec.bias, "column", {name: own for name in parts})
        self._down = factory.make({"down_proj": hidden_size}, spec.inner, spec.bias, "row", {"down_proj": own})
        self.linears = (self._gate_up, self._down)
        self.stored = self.linears

    @property
    def methods(self) -> tuple[object, ...]:
        return tuple(linear.method for linear in self.linears)

    @property
    def weights(self) -> tuple[LinearTensors, ...]:
        return tuple(linear.arguments for linear in self.linears)

    @property
    def weights_per_token(self) -> int:
        return sum(linear.in_features * linear.out_features for linear in self.linears)

    def load(self, name: str, tensor: StoredWeight) -> None:
        part, kind = name.split(".")
        (self._down if part == "down_proj" else self._gate_up).load(part, kind, tensor)

    def apply(self, x: Tensor, weights: tuple[LinearTensors, ...], adapters: RowAdapters | None) -> Tensor:
        return self.down(self.inner(x, weights, adapters), None, weights, adapters)

    def inner(self, x: Tensor, weights: tuple[LinearTensors, ...], adapters: RowAdapters | None) -> Tensor:
        """x [tokens, hidden] -> [tokens, own values between the products]."""
        return gated_product(*self._gate_up.apply_halves(x, weights[0], adapters), self._activation)

    def down(
        self, x: Tensor, largest: Tensor | None, weights: tuple[LinearTensors, ...], adapters: RowAdapters | None
    ) -> Tensor:
        """x, from ``inner`` -> [tokens, hidden]. largest: see ``Linear.apply``."""
        return self._down.apply(x, weights[1], adapters, largest)

    @property
    def inner_size(self) -> int:
        """Values between the products that are this worker's."""
        return self._down.in_features

    @property
    def scales_inner(self) -> bool:
        """See LinearMethod.scales_tokens, of the second product."""
        return self._down.method.scales_tokens
