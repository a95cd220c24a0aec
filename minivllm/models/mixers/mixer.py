"""A mixer is the first half of a layer, cut in two where attention is computed, or a state is updated.

    before_attention   what the layer reads -> q or x    pieces, joined with those of the layer before
    the seam Attend    attention(q), or the update of a state -> o
    after_attention    o -> what is added to the residual stream

The update of a state is a ``StateUpdate``. It is called once for all requests of a step, whose tokens lie one
after the other; there is no loop over requests. A mixer that keeps a state is added with a spec
(``StateMixerSpec``), a ``Mixer`` and a ``StateUpdate``, and a line each in ``factory.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.state.rows import StateRows
from minivllm.compilation.regions import TensorSpec
from minivllm.linear.layer import Linear
from minivllm.models.model import AttendWeights
from minivllm.models.pieces import Project, ProjectCast, ProjectPart
from minivllm.program.program import Name, Piece, Program
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import TOKENS
from minivllm.specs.layers import StateMixerSpec

Vectors = Mapping[str, Tensor]
"""All weights of a layer that are no linear layers, by the names that ``DecoderLayer.load`` gives them."""


class LayerContext(NamedTuple):
    """What a layer's pieces need to know of the program around them."""

    number: int
    """Of the layer in its stage."""
    cache: int
    """Number of its cache, which is the register ``cache.<number>``. Layers that share a cache have the
    same number."""
    vectors: Callable[[], Vectors]
    rotary_table: Callable[[], tuple[Tensor, Tensor | None]]
    """float32 [positions, dim], and which position turns each column (int64 [dim]), if there are several."""
    stream: TensorSpec
    """The residual stream."""

    def activation(self, width: int) -> TensorSpec:
        """Of so many values for each token, in the dtype of the model."""
        return TensorSpec((TOKENS, width), self.stream.dtype, self.stream.device)


def projected(linear: Linear, register: Name, context: LayerContext, agrees: bool = False) -> Piece:
    """The product that gives "x", which is added to the residual stream.
    agrees: ranks have agreed on "largest"."""
    reads = (register, "adapters", "largest") if agrees else (register, "adapters")
    code = ProjectPart(linear.product) if agrees else Project(linear.product)
    return Piece(code, reads, {"x": context.stream}, lambda: (linear.arguments,))


def projected_for_update(linear: Linear, register: Name, dtype: torch.dtype) -> Piece:
    """The product that gives "q", which a state is updated with, in the dtype of the update."""
    q = TensorSpec((TOKENS, linear.out_features), dtype, linear.device)
    return Piece(
        ProjectCast(linear.product, dtype), (register, "adapters"), {"q": q}, lambda: (linear.arguments,)
    )


class Mixer(Protocol):
    """The projections of a mixer."""

    block: str
    """Its name in the checkpoint ("self_attn")."""
    reads_again: bool
    """``after_attention`` needs what ``before_attention`` has read."""

    @property
    def linears(self) -> Sequence[Linear]: ...
    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of o, for one token."""

    @property
    def attends(self) -> AttentionSpec | StateMixerSpec:
        """How the layer attends, or its spec as one that keeps a state: of this worker's part of it."""

    def own(self, name: str, vector: Tensor) -> Tensor:
        """This worker's part of a weight that is to be one of ``Vectors``:
        the whole, if no other divides the layer."""

    def attend_weights(self, vectors: Vectors) -> AttendWeights:
        """What attention reads besides q: its sinks, or the weights that a state is updated with, all of them
        float32."""

    def before_attention(self, context: LayerContext, read: Name) -> Program:
        """From the register ``read`` [tokens, hidden] to "q" [tokens, …] in attention_dtype.
        Layers that attend also write their cache."""

    def after_attention(self, context: LayerContext, read: Name) -> Program:
        """From "o" [tokens, *output_shape] to "x" [tokens, hidden]. read: holds what ``before_attention``
        has read, if ``reads_again``."""


class StateUpdate(Protocol):
    """Moves the states of one kind of layer on by the tokens of a step.
    Shared by the layers with equal specs."""

    def prepare(self, counts: np.ndarray) -> Any:
        """What only depends on how many tokens each row has (int64 [rows], as ``StateRows.counts``), and is
        the same for all layers: called once for a step. None where no row has more than one token: of such
        steps a graph may be captured."""

    def __call__(
        self,
        x: Tensor,
        state: tuple[Tensor, ...],
        rows: StateRows,
        prepared: Any,
        weights: tuple[Tensor, ...],
    ) -> Tensor:
        """x [tokens, widths[0]] -> o [tokens, widths[1]], both in attention_dtype.

        state: the tensors of the spec, [slots, *shape] each. For every row it is read at ``rows.read`` and
        written, after the row's last token, at ``rows.write``. No row reads what another one writes in the
        same step, so all may be read before any is written. weights: what ``Mixer.attend_weights``
        returned. o is valid until the next call. Nothing may wait for the device.
        """
