"""The gated short convolution of LFM2: its projections, and the update of its state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels_triton_free.state.rows import StateRows
from kernels_triton_free.state.short_conv import short_conv
from minivllm.compilation.regions import CompileRegion, Region
from minivllm.linear.factory import LinearFactory
from minivllm.models.mixers.mixer import LayerContext, Vectors, projected, projected_for_update
from minivllm.models.pieces import Cast
from minivllm.models.shards import own_inner
from minivllm.program.program import Name, Piece, Program
from minivllm.specs.caches import StateSpec
from minivllm.specs.layers import ShortConvSpec


class ShortConv:
    """A ``Mixer``: x holds b, c and the input of every channel, o their convolution, gated.
    Workers divide channels."""

    block = "conv"
    reads_again = False

    def __init__(
        self, spec: ShortConvSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype
    ) -> None:
        self._dtype = factory.dtype
        self._attention_dtype = attention_dtype
        self._own = own_inner(spec.channels, factory.shard)
        self.attends = replace(spec, channels=self._own.stop - self._own.start)
        into = torch.arange(spec.widths[0]).unflatten(0, (3, -1))[:, self._own].flatten()
        self._in = factory.make(
            {"in_proj": spec.widths[0]}, hidden_size, spec.bias, "column", {"in_proj": into}
        )
        self._out = factory.make(
            {"o_proj": hidden_size}, spec.widths[1], spec.bias, "row", {"o_proj": self._own}
        )
        self.linears = (self._in, self._out)

    @property
    def output_shape(self) -> tuple[int]:
        return (self.attends.channels,)

    def own(self, name: str, vector: Tensor) -> Tensor:
        return vector[self._own]

    def attend_weights(self, vectors: Vectors) -> tuple[Tensor, ...]:
        """Weight [channels, taps], bias [channels]."""
        names = ("conv", "conv.bias") if self.attends.bias else ("conv",)
        return tuple(vectors[name] for name in names)

    def before_attention(self, context: LayerContext, read: Name) -> Program:
        return [projected_for_update(self._in, read, self._attention_dtype)]

    def after_attention(self, context: LayerContext, read: Name) -> Program:
        values = context.activation(self._out.in_features)
        return [Piece(Cast(self._dtype), ("o",), {"values": values}), projected(self._out, "values", context)]


class ShortConvUpdate:
    """A ``StateUpdate``, compiled as one region."""

    def __init__(self, spec: ShortConvSpec, state: StateSpec, compile_region: CompileRegion) -> None:
        weights = ((spec.channels, spec.taps), *[(spec.channels,)] * spec.bias)
        inputs = state.update_inputs(spec.widths[0], weights)
        self._region = compile_region(Region("short convolution", _update, inputs, spec))

    def prepare(self, counts: object) -> None:
        return None

    def __call__(
        self,
        x: Tensor,
        state: tuple[Tensor, ...],
        rows: StateRows,
        prepared: None,
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        o: Tensor = self._region(x, state, rows, weights)
        return o


def _update(x: Tensor, state: tuple[Tensor, ...], rows: StateRows, weights: tuple[Tensor, ...]) -> Tensor:
    b, c, inner = x.chunk(3, dim=-1)
    weight, bias = (*weights, None)[:2]
    assert weight is not None
    return c * short_conv(b * inner, state[0], rows, weight, bias)
