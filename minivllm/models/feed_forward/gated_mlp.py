"""What a layer computes for every token by itself: the protocol, and the gated MLP of dense models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kernels_triton_free.activation import gated_product
from kernels_triton_free.lora import RowAdapters
from minivllm.compilation.regions import TensorSpec
from minivllm.linear.factory import LinearFactory, Stored
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearTensors
from minivllm.linear.product import Product
from minivllm.models.mixers.mixer import LayerContext, projected
from minivllm.models.pieces import Largest
from minivllm.models.shards import own_inner
from minivllm.program.program import Name, Piece, Program, Seam
from minivllm.program.seams import Agree, Sum
from minivllm.specs.caches import TOKENS
from minivllm.specs.layers import Activation, MlpSpec
from minivllm.weights.stored_weight import StoredWeight


class FeedForward(Protocol):
    """The second half of a layer."""

    @property
    def linears(self) -> Sequence[Linear]:
        """Products that adapters may change."""

    @property
    def stored(self) -> Sequence[Stored]:
        """All that keeps weights."""

    @property
    def methods(self) -> tuple[object, ...]:
        """How its products are computed."""

    @property
    def weights_per_token(self) -> int:
        """Weights that computing a token reads."""

    def load(self, name: str, tensor: StoredWeight) -> None:
        """Take ``gate_proj.weight``, … by its name in the layer's ``mlp``."""

    def program(self, context: LayerContext, read: Name, is_shared: bool) -> Program:
        """From the register ``read`` to "x", both [tokens, hidden]; where ranks divide the layer, their sum.
        is_shared: the workers of several engines divide the experts."""


@dataclass(frozen=True)
class GatedProduct:
    """activation(gate(x)) * up(x): [tokens, hidden] -> [tokens, values here]."""

    product: Product
    activation: Activation

    def __call__(self, x: Tensor, adapters: RowAdapters | None, arguments: LinearTensors) -> Tensor:
        return gated_product(*self.product.halves(x, arguments, adapters), self.activation)


class GatedMlp:
    """down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, spec: MlpSpec, hidden_size: int, factory: LinearFactory) -> None:
        self._activation = spec.activation
        self._is_divided = factory.shard.size > 1
        parts = {"gate_proj": spec.inner, "up_proj": spec.inner}
        own = own_inner(spec.inner, factory.shard)
        self._gate_up = factory.make(parts, hidden_size, spec.bias, "column", {name: own for name in parts})
        self._down = factory.make(
            {"down_proj": hidden_size}, spec.inner, spec.bias, "row", {"down_proj": own}
        )
        self.linears = (self._gate_up, self._down)
        self.stored = self.linears

    @property
    def methods(self) -> tuple[object, ...]:
        return tuple(linear.method for linear in self.linears)

    @property
    def weights_per_token(self) -> int:
        return sum(linear.in_features * linear.out_features for linear in self.linears)

    def load(self, name: str, tensor: StoredWeight) -> None:
        part, kind = name.split(".")
        (self._down if part == "down_proj" else self._gate_up).load(part, kind, tensor)

    def program(self, context: LayerContext, read: Name, is_shared: bool) -> Program:
        items: list[Piece | Seam] = [*self.pieces(context, read)]
        if self._down.method.scales_tokens and self._is_divided:
            largest = TensorSpec((TOKENS, 1), torch.float32, context.stream.device)
            items[-1:] = [
                Piece(Largest(), ("inner",), {"largest": largest}),
                Agree("largest", largest, largest=True),
                projected(self._down, "inner", context, agrees=True),
            ]
        return [*items, Sum("x", context.stream)]

    def pieces(self, context: LayerContext, read: Name, output: Name = "x") -> list[Piece]:
        """The arithmetic alone. output: the register that gets what it makes."""
        inner = context.activation(self._down.in_features)
        enter = Piece(
            GatedProduct(self._gate_up.product, self._activation),
            (read, "adapters"),
            {"inner": inner},
            lambda: (self._gate_up.arguments,),
        )
        return [enter, replace(projected(self._down, "inner", context), gives={output: context.stream})]
