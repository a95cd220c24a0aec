"""What a mixer is: the first half of a layer, cut in two where attention is computed, or a state is updated.

    ahead:   what the layer reads -> q or x         traced into a region, together with the layer before
    the cut: attention(q), or the update of a state -> o
    behind:  o -> what is added to the residual stream

The update of a state is a ``StateUpdate``. It is called once for all requests of a step, whose tokens lie one after the
other; there is no loop over requests. A mixer that keeps a state is added with a spec (``StateMixerSpec``), a ``Mixer``
and a ``StateUpdate``, and a line each in ``registry.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.state.rows import StateRows
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearMethod
from minivllm.models.decoder_config import AttentionSpec
from minivllm.models.layer_specs import StateMixerSpec
from minivllm.models.model import Given, LayerCache, TokenInputs

Vectors = Mapping[str, Tensor]
"""All weights of a layer that are no linear layers, by the names that ``DecoderLayer.load`` gives them."""


class Mixer(Protocol):
    """The projections of a mixer. block: its name in the checkpoint ("self_attn"). linears: all of them.
    ahead_methods, behind_methods: how the products in front of the cut and behind it are computed. output_shape: of o,
    for one token. attends: how the layer attends, or its spec as one that keeps a state: of this worker's part of it.
    reads_again: ``behind`` needs what ``ahead`` has read."""

    block: str
    reads_again: bool

    @property
    def linears(self) -> Sequence[Linear]: ...
    @property
    def ahead_methods(self) -> tuple[LinearMethod, ...]: ...
    @property
    def behind_methods(self) -> tuple[LinearMethod, ...]: ...
    @property
    def output_shape(self) -> tuple[int, ...]: ...
    @property
    def attends(self) -> AttentionSpec | StateMixerSpec: ...

    def own(self, name: str, vector: Tensor) -> Tensor:
        """This worker's part of a weight that is to be one of ``Vectors``: the whole, if nobody divides the layer."""

    def ahead_weights(self, vectors: Vectors) -> tuple[Any, ...]:
        """What ``ahead`` reads: nested tuples of tensors, and None."""

    def given(self, vectors: Vectors) -> Given:
        """What the cut is given besides q: attention's sinks, or the weights that a state is updated with, all
        of them float32."""

    def behind_weights(self, vectors: Vectors) -> tuple[Any, ...]:
        """What ``behind`` reads."""

    def ahead(self, x: Tensor, tokens: TokenInputs, cos_sin: Tensor, cache: LayerCache | None, weights: Any) -> Tensor:
        """x [tokens, hidden] -> q [tokens, …] in attention_dtype. weights: ``ahead_weights`` of any equal layer. cache:
        K and V, which are written; None where the layer keeps a state."""

    def behind(self, o: Tensor, x: Tensor | None, adapters: RowAdapters | None, weights: Any) -> Tensor:
        """o [tokens, *output_shape] -> [tokens, hidden]. x: what ``ahead`` has read, if ``reads_again``."""


class StateUpdate(Protocol):
    """Moves the states of one kind of layer on by the tokens of a step. Shared by the layers with equal specs."""

    def prepare(self, counts: np.ndarray) -> Any:
        """What only depends on how many tokens each row has (int64 [rows], as ``StateRows.counts``), and is the same
        for all layers: called once for a step. None where no row has more than one token: of such steps a graph may be
        captured."""

    def __call__(
        self, x: Tensor, state: tuple[Tensor, ...], rows: StateRows, prepared: Any, weights: tuple[Tensor, ...]
    ) -> Tensor:
        """x [tokens, widths[0]] -> o [tokens, widths[1]], both in attention_dtype.

        state: the tensors of the spec, [slots, *shape] each. For every row it is read at ``rows.read`` and written,
        after the row's last token, at ``rows.write``. No row reads what another one writes in the same step, so all may
        be read before any is written. weights: what ``Mixer.given`` returned. Nothing may wait for the device.
        """
