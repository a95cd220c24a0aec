"""Per-layer embeddings (Gemma 3n, Gemma 4); see PerLayerSpec.

They are computed once, before the first layer, and kept in a register of the program: "per_layer" [tokens,
layers, width]. Tensor parallelism divides the rows of the table; the projections are replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.activation import gated_product
from kernels_triton_free.compiler.materialize import materialize
from kernels_triton_free.norm import rms_norm
from kernels_triton_free.packed.code_words import can_put_in_words
from minivllm.compilation.regions import TensorSpec
from minivllm.linear.factory import LinearFactory
from minivllm.linear.layer import Linear
from minivllm.linear.methods.exact import PlainLinear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.linear.methods.words import LoopedInt4Linear
from minivllm.models.mixers.mixer import LayerContext
from minivllm.models.pieces import Add
from minivllm.program.program import Code, Name, Piece, Program
from minivllm.program.seams import Sum
from minivllm.specs.caches import TOKENS
from minivllm.specs.layers import Activation, PerLayerSpec
from minivllm.weights.stored_weight import GroupedWeight, QuantizedWeight, StoredWeight

PER_LAYER = ("model.embed_tokens_per_layer.", "model.per_layer_")
"""Prefixes of their tensors' names outside the layers."""


@dataclass(frozen=True)
class MakeValues:
    """The sum of a token's row of the table and a projection of the model's input, scaled by 1 / sqrt(2)."""

    method: LinearMethod
    scale: float
    norm_eps: float

    def __call__(
        self, table_rows: Tensor, stream: Tensor, projection: LinearTensors, weight: Tensor
    ) -> Tensor:
        """table_rows [tokens, layers, width], stream [tokens, hidden], weight [width] of the norm
        -> [tokens, layers, width]."""
        made = (self.method.apply(stream, projection) * self.scale).view_as(table_rows)
        return (rms_norm(made, weight, self.norm_eps) + table_rows) * 2**-0.5


@dataclass(frozen=True)
class Unflatten:
    """[tokens, layers * width] -> [tokens, layers, width].

    The input is materialised: fused with the code that follows, decoding a row of 4 bits takes Inductor
    minutes.
    """

    width: int

    def __call__(self, x: Tensor) -> Tensor:
        return materialize(x).unflatten(-1, (-1, self.width))


@dataclass(frozen=True)
class ReadValues:
    """back(activation(gate(x)) * per-layer embedding)."""

    gate: LinearMethod
    back: LinearMethod
    activation: Activation

    def __call__(
        self, stream: Tensor, values: Tensor, number: Tensor, gate: LinearTensors, back: LinearTensors
    ) -> Tensor:
        """stream [tokens, hidden], values [tokens, layers, width] -> [tokens, hidden]. number: of the layer,
        int64 [1]; a tensor, so that all layers share a region."""
        own = values.index_select(1, number)[:, 0]
        return self.back.apply(gated_product(self.gate.apply(stream, gate), own, self.activation), back)


class PerLayerValues:
    """The table, the projection of the model's input, and the pieces that make the register of both."""

    def __init__(
        self, spec: PerLayerSpec, num_layers: int, hidden_size: int, factory: LinearFactory, own: slice
    ) -> None:
        """own: rows of the table on this worker."""
        self._spec = spec
        self._num_layers = num_layers
        self._own = own
        self._code = partial(MakeValues, scale=hidden_size**-0.5, norm_eps=spec.norm_eps)
        self.projection = _whole(factory, "per_layer_model_projection", hidden_size, num_layers * spec.width)
        self._device = factory.device
        self._dtype = factory.dtype
        self._method: LinearMethod = PlainLinear()
        self.tensors: LinearTensors = (torch.empty(0), torch.empty(0))
        """Those of the table's method, and the weight of the norm."""

    @property
    def stored(self) -> Sequence[Any]:
        """See DecoderLayer."""
        return (self, self.projection)

    @property
    def methods(self) -> tuple[object, ...]:
        return (self._method, self.projection.method)

    @property
    def weights_per_token(self) -> int:
        return self.projection.in_features * self.projection.out_features

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """See ``Stored``."""
        self.tensors = tuple(map(change, self.tensors))

    def load(self, name: str, tensor: StoredWeight) -> None:
        """Take ``embed_tokens_per_layer.weight``, … by its name in the model."""
        module, _, kind = name.partition(".")
        if module == "per_layer_model_projection":
            self.projection.load(module, kind, tensor)
            return
        *table, norm = self.tensors
        if module == "embed_tokens_per_layer":
            self.tensors = *self._prepared(tensor), norm
        else:
            assert isinstance(tensor, Tensor)
            self.tensors = *table, tensor.to(self._device)

    def _prepared(self, table: StoredWeight) -> LinearTensors:
        """Rows of the table on this worker. Groups of 4 or 8 bits are kept: the table is larger than all
        layers of a small model together."""
        if isinstance(table, GroupedWeight) and self._can_keep(table):
            own = table.part(self._own, slice(None))
            self._method = LoopedInt4Linear(own.shape[0], table.group_size, table.bits, self._dtype)
            return tuple(part.to(self._device) for part in self._method.prepare(own, None))
        values = table.restore(self._dtype) if isinstance(table, QuantizedWeight) else table
        return (values[self._own].to(self._device),)

    def _can_keep(self, table: GroupedWeight) -> bool:
        return table.order is None and can_put_in_words(table.group_size, self._dtype)

    def program(
        self, embed: Callable[[LinearMethod, float], Code], token_ids: Name, stream: TensorSpec
    ) -> Program:
        """From the register ``token_ids`` and "stream" to "per_layer". embed: (method, scale) -> the code
        that looks up rows of the table."""
        spec, dtype, device = self._spec, stream.dtype, stream.device
        flat = TensorSpec((TOKENS, self._num_layers * spec.width), dtype, device)
        values = TensorSpec((TOKENS, self._num_layers, spec.width), dtype, device)
        make = self._code(self.projection.method)
        return [
            Piece(
                embed(self._method, spec.width**0.5),
                (token_ids,),
                {"per_layer": flat},
                lambda: (self.tensors[:-1],),
            ),
            Sum("per_layer", flat),
            Piece(Unflatten(spec.width), ("per_layer",), {"per_layer": values}),
            Piece(
                make,
                ("per_layer", "stream"),
                {"per_layer": values},
                lambda: (self.projection.tensors, self.tensors[-1]),
            ),
        ]


class PerLayerReader:
    """The part of a layer that reads its per-layer embedding."""

    def __init__(self, spec: PerLayerSpec, hidden_size: int, factory: LinearFactory) -> None:
        self._spec = spec
        self._gate = _whole(factory, "per_layer_input_gate", hidden_size, spec.width)
        self._back = _whole(factory, "per_layer_projection", spec.width, hidden_size)
        self.linears = {"per_layer_input_gate": self._gate, "per_layer_projection": self._back}

    def program(self, context: LayerContext, number: Tensor) -> list[Piece]:
        """From "stream" and "x" to "x", which is still to be normed and added. The old "x" is added to the
        stream first."""
        stream = context.stream
        code = ReadValues(self._gate.method, self._back.method, self._spec.activation)
        return [
            Piece(Add(), ("stream", "x"), {"stream": stream}),
            Piece(
                code,
                ("stream", "per_layer"),
                {"x": stream},
                lambda: (number, self._gate.tensors, self._back.tensors),
            ),
        ]


def _whole(factory: LinearFactory, name: str, inputs: int, outputs: int) -> Linear:
    """A product that tensor parallelism replicates."""
    return LinearFactory(factory.dtype, factory.device, factory.choose).make(
        {name: outputs}, inputs, False, "column"
    )
