"""What a model is to the engine:
the protocol that the worker is written against, and the types that it speaks.

A model computes in two moves, so that logits are made only for the tokens whose logits are needed:

    hidden = model.forward(token_ids, tokens, caches, attend)      layer by layer; attend(layer, q) in between
    logits = model.logits(hidden, rows, tokens)                    of the picked rows

It knows nothing of requests, blocks or schedules: ``tokens`` says where each token stands and where its keys
and values go, and ``attend`` is the attention over everything that the caches hold. ``Decoder`` is one model,
``models/reference/reference.py`` the same arithmetic without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from minivllm.compilation.regions import CompileRegion, TensorSpec
from minivllm.linear.layer import Linear
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import TOKENS, CacheSpec, LayerCache, StateSpec
from minivllm.specs.layers import StateMixerSpec
from minivllm.weights.stored_weight import StoredWeight

Hidden = tuple[Tensor, ...]
"""What a model computed of a step: tensors [tokens, …], whose meaning is its own business."""

AttendWeights = Tensor | tuple[Tensor, ...] | None
"""What a layer hands over beside its queries:
attention's sinks, or the weights that a state is updated with."""


class Attend(Protocol):
    """Attention of one layer over everything that the caches hold;
    in layers that keep a state, its update."""

    def __call__(self, layer: int, q: Tensor, weights: AttendWeights = None) -> Tensor:
        """q [tokens, kv_heads, G, D] -> o of the same dtype, and shape: only with the spec's value_dim in the
        place of D, if it has one. weights: sinks, float32 [query heads], where its spec has them. In a layer
        that keeps a state: q [tokens, widths[0]] -> o [tokens, widths[1]]; weights are those of its update.
        """


class ImageRows(NamedTuple):
    """Tokens that stand for parts of images.

    features: [tokens, hidden], in the rows of these tokens what takes the place of their embeddings.
    is_image: bool [tokens]. deeper: of each level that the model adds after one of its first layers, what is
    added: [tokens, hidden], with zeros in the rows of all other tokens.
    """

    features: Tensor
    is_image: Tensor
    deeper: tuple[Tensor, ...] = ()


class TokenInputs(NamedTuple):
    """What every layer needs of the tokens in this step.

    positions: in the sequence, int32 [tokens]; of a model that rotates images in space, int32 [tokens, 3],
    see ``position_axes``. adapters: that of each token; None where the linear layers
    have no adapters. images: None in a step without images.
    """

    positions: Tensor
    adapters: RowAdapters | None = None
    images: ImageRows | None = None


class HiddenTap(NamedTuple):
    """Hands out what a model computes on its way, to a drafter that reads it.

    layers: those whose inputs are wanted, ascending. take: called at the end of every ``forward`` with these
    inputs [tokens, hidden] each, what ``forward`` returns, the tokens and the caches.
    """

    layers: tuple[int, ...]
    take: Callable[[Sequence[Tensor], Hidden, TokenInputs, Sequence[LayerCache]], None]


class Model(Protocol):
    """A model on one device. The worker runs whatever has these members; nothing else of it is looked at.

    vocab_size: tokens that there are logits of. dtype: of weights and activations. attention_dtype: of
    queries and of attention's output. attention_specs, cache_specs: how each layer attends, and what it
    keeps; of a layer that keeps a state, its mixer's spec, and what the state is made of. feature_size:
    values
    of ``dtype`` that are kept for every token beside keys and values. linears: the layers that LoRA adapters
    may change, by the block they lie in ("model.layers.0.mlp"). linear_shapes: [out, in] of their parts in
    the whole model, those of other stages included, by name ("model.layers.0.mlp.up_proj"). tap: hands out
    hidden
    states, if they are wanted; a model without taps never looks at it. position_axes: positions of each
    token, 1, or 3 if images are rotated in space.
    """

    tap: HiddenTap | None

    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def attention_dtype(self) -> torch.dtype: ...
    @property
    def position_axes(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def attention_specs(self) -> Sequence[AttentionSpec | StateMixerSpec]: ...
    @property
    def cache_specs(self) -> Sequence[CacheSpec | StateSpec]: ...
    @property
    def feature_size(self) -> int: ...
    @property
    def linears(self) -> Sequence[tuple[str, Linear]]: ...
    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]: ...

    @property
    def weights_per_token(self) -> int:
        """Weights that computing a token reads, from which the cost of a draft is estimated."""

    def load_weights(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Take tensors under their names in the checkpoint.
        Raises ModelError for a name that has no place."""

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight by ``change(weight)``:
        to count them, move them away and back, or drop them."""

    def take_weights(self, other: Any) -> None:
        """Take over the weights of a model that was loaded in the same way.
        Raises ModelError if they do not fit."""

    def build_regions(
        self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        """Have ``compile_region`` compile what lies between attentions. It comes before the first
        ``forward``, and again when the engine changes over to compiled code.

        tokens, caches: TensorSpecs of what ``forward`` will be given, in the places of the tensors.
        """

    def forward(
        self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend
    ) -> Hidden:
        """Compute a step, token_ids int32 [tokens], for ``logits`` and ``hidden_states``.

        Before each layer attends, its keys and values are in its cache, at its ``slots``.
        """

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab_size] of the picked rows (int32) of what ``forward`` returned for these
        tokens."""

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden size], normalised, of the picked rows; for embeddings."""


@runtime_checkable
class StagedModel(Protocol):
    """A model of which this worker may have only some layers."""

    @property
    def all_attention_specs(self) -> Sequence[AttentionSpec | StateMixerSpec]:
        """How each layer of the whole model attends, layers of other stages included."""


def token_specs(
    device: torch.device, adapters: RowAdapters | None = None, position_axes: int = 1
) -> TokenInputs:
    """The tokens of a step as regions declare them. adapters: specs as well. position_axes: see Model."""
    shape = (TOKENS,) if position_axes == 1 else (TOKENS, position_axes)
    each: Any = TensorSpec(shape, torch.int32, device)
    return TokenInputs(each, adapters)
