"""What the mixers share whose state is a matrix for every head:
their projections, and the update of their states.

An update is three steps: a short convolution of what the projections gave, which has a state of its own, then
the scan, and then the gated output. Where every row has one token, they are one region. Where rows are
longer, the first and the last step are regions, and the scan, whose shape depends on the longest row, is
computed as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.norm import rms_norm
from kernels_triton_free.state.rows import StateRows
from kernels_triton_free.state.tiles import ScanPlan, plan_scan
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec
from minivllm.linear.factory import LinearFactory
from minivllm.models.mixers.mixer import LayerContext, Vectors, projected, projected_for_update
from minivllm.models.mixers.own_scan import OwnScan, ScanSpec, own_scan
from minivllm.models.pieces import Cast
from minivllm.program.program import Name, Piece, Program, Seam
from minivllm.program.seams import Agree
from minivllm.specs.caches import TOKENS, StateSpec
from minivllm.specs.layers import Mamba2Spec


@dataclass(frozen=True)
class MeanSquare:
    """A rank's part of the mean square of the outputs of all heads: float32 [tokens, 1]."""

    width: int
    """Of the outputs of all ranks."""

    def __call__(self, o: Tensor) -> Tensor:
        return o.float().square().sum(-1, keepdim=True) / self.width


@dataclass(frozen=True)
class NormApart:
    """The norm of the outputs of all heads, of which a rank has some."""

    eps: float

    def __call__(self, o: Tensor, mean_square: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(o.float(), weight, self.eps, mean_square)


class ScanMixer:
    """A ``Mixer``: x holds what all projections gave, side by side; o is projected back.
    Workers divide heads."""

    reads_again = False

    def __init__(
        self, spec: ScanSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype
    ) -> None:
        self.block = spec.block
        self._dtype = factory.dtype
        self._attention_dtype = attention_dtype
        own = OwnScan(spec, {}, slice(0, spec.widths[1]), {})
        if factory.shard.size > 1:
            own = own_scan(spec, factory.shard)
        self.attends = own.spec
        self._own = own
        self._width = spec.widths[1]
        into, out = own.projections or None, {"out_proj": own.values}
        self._in = factory.make(dict(spec.projections), hidden_size, spec.bias, "column", into)
        self._out = factory.make({"out_proj": hidden_size}, spec.widths[1], spec.bias, "row", out)
        self.linears = (self._in, self._out)

    @property
    def output_shape(self) -> tuple[int]:
        return (self.attends.widths[1],)

    def own(self, name: str, vector: Tensor) -> Tensor:
        return vector[self._own.vectors[name]] if name in self._own.vectors else vector

    @property
    def norms_apart(self) -> bool:
        """See Mamba2Spec."""
        return isinstance(self.attends, Mamba2Spec) and self.attends.norms_apart

    def attend_weights(self, vectors: Vectors) -> tuple[Tensor, ...]:
        """In the order of ``spec.parameters``."""
        return tuple(vectors[name.removesuffix(".weight")] for name in self.attends.parameters)

    def before_attention(self, context: LayerContext, read: Name) -> Program:
        return [projected_for_update(self._in, read, self._attention_dtype)]

    def after_attention(self, context: LayerContext, read: Name) -> Program:
        values = context.activation(self._out.in_features)
        items: list[Piece | Seam] = []
        source = "o"
        if self.norms_apart:
            mean_square = TensorSpec((TOKENS, 1), torch.float32, values.device)
            code = MeanSquare(self._width)
            items.append(Agree("mean_square", mean_square, largest=False, source="o", code=code))
            norm = NormApart(self.attends.norm_eps)
            normed = TensorSpec((TOKENS, self._out.in_features), torch.float32, values.device)
            items.append(
                Piece(norm, ("o", "mean_square"), {"normed": normed}, lambda: (context.vectors()["norm"],))
            )
            source = "normed"
        items.append(Piece(Cast(self._dtype), (source,), {"values": values}))
        items.append(projected(self._out, "values", context))
        return items


Parameters = Mapping[str, Tensor]
"""A mixer's small weights, float32, by their names in ``spec.parameters``."""


class ScanSteps(NamedTuple):
    """The three steps of an update."""

    inputs: Callable[
        [Any, Tensor, Tensor, StateRows, Parameters], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    ]
    """(spec, x [tokens, widths[0]], state of the convolution, rows, parameters) -> what the scan takes, and
    what ``output`` takes besides its result."""
    scan: Callable[..., Tensor]
    """(*inputs, states, read, write, plan) -> float32 [tokens, heads, …]; see ``kernels_triton_free.state``.
    """
    output: Callable[[Any, Tensor, tuple[Tensor, ...], Parameters], Tensor]
    """(spec, result of the scan, the rest from ``inputs``, parameters) -> float32 [tokens, widths[1]]."""


class ScanUpdate:
    """A ``StateUpdate``."""

    def __init__(
        self, spec: ScanSpec, state: StateSpec, compile_region: CompileRegion, steps: ScanSteps
    ) -> None:
        self._spec = spec
        self._steps = steps
        self._dtype = state.dtype
        self._device = state.device
        declared = state.update_inputs(spec.widths[0], ())
        declared["weights"] = tuple(self._float32(*shape) for shape in spec.parameters.values())
        one_each = StateRows(*[TensorSpec((TOKENS,), torch.int32, state.device)] * len(StateRows._fields))  # type: ignore
        name = type(spec).__name__.removesuffix("Spec")
        self._single = compile_region(
            Region(f"{name} step", self._whole, {**declared, "rows": one_each}, spec)
        )
        of_conv = {**declared, "state": declared["state"][0]}
        self._inputs_region = compile_region(Region(f"{name} inputs", self._scan_inputs, of_conv, spec))
        of_output = {
            "scanned": self._float32(TOKENS, *spec.output_heads),
            "rest": tuple(self._float32(TOKENS, *shape) for shape in spec.rest),
            "weights": declared["weights"],
        }
        self._output_region = compile_region(Region(f"{name} output", self._output, of_output, spec))

    def _float32(self, *shape: Any) -> TensorSpec:
        return TensorSpec(shape, torch.float32, self._device)

    def prepare(self, counts: np.ndarray) -> ScanPlan | None:
        plan = plan_scan(torch.from_numpy(counts))
        return None if plan is None else plan.to(self._device)

    def __call__(
        self,
        x: Tensor,
        state: tuple[Tensor, ...],
        rows: StateRows,
        prepared: ScanPlan | None,
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        o: Tensor
        if prepared is None:
            o = self._single(x, state, rows, weights)
            return o
        values = self._inputs_region(x, state[0], rows, weights)
        count = len(values) - len(self._spec.rest)
        scanned = self._steps.scan(*values[:count], state[1], rows.read, rows.write, prepared)
        o = self._output_region(scanned, tuple(values[count:]), weights)
        return o

    # The regions.

    def _whole(
        self, x: Tensor, state: tuple[Tensor, ...], rows: StateRows, weights: tuple[Tensor, ...]
    ) -> Tensor:
        inputs, rest = self._steps.inputs(self._spec, x, state[0], rows, self._named(weights))
        return self._output(self._steps.scan(*inputs, state[1], rows.read, rows.write), rest, weights)

    def _scan_inputs(
        self, x: Tensor, state: Tensor, rows: StateRows, weights: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        inputs, rest = self._steps.inputs(self._spec, x, state, rows, self._named(weights))
        return (*inputs, *(one.contiguous() for one in rest))  # as the region after the scan takes them

    def _output(self, scanned: Tensor, rest: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> Tensor:
        return self._steps.output(self._spec, scanned, rest, self._named(weights)).to(self._dtype)

    def _named(self, weights: tuple[Tensor, ...]) -> Parameters:
        return dict(zip(self._spec.parameters, weights, strict=True))
