"""What a model is to the engine: the protocol that the worker is written against, and the types that it speaks.

A model computes in two moves, so that logits are made only for the tokens whose logits are needed:

    hidden = model.forward(token_ids, tokens, caches, attend)      layer by layer; attend(layer, q) in between
    logits = model.logits(hidden, rows, tokens)                    of the picked rows

It knows nothing of requests, blocks or schedules: ``tokens`` says where each token stands and where its keys and values
go, and ``attend`` is the attention over everything that the caches hold. ``Decoder`` is one model, ``reference.py`` the
same arithmetic without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from minivllm.compilation.regions import CompileRegion, Size, TensorSpec
from minivllm.linear.layer import Linear
from minivllm.linear.stored_weight import StoredWeight
from minivllm.models.decoder_config import AttentionSpec

TOKENS, ROWS = Size("tokens", 13, single=1), Size("rows", 9, single=1)
"""Tokens of a step, and those of them whose logits are wanted, as regions declare them."""

Hidden = tuple[Tensor, ...]
"""What a model computed of a step: tensors [tokens, …], whose meaning is its own business."""


class Attend(Protocol):
    """Attention of one layer over everything that the caches hold."""

    def __call__(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [tokens, kv_heads, G, D] -> o of the same shape and dtype. sinks: float32 [query heads], where the layer's
        spec has them."""


class TokenInputs(NamedTuple):
    """What every layer needs of the tokens in this step.

    positions: in the sequence, int32 [tokens]. adapters: that of each token; None where the linear layers have no
    adapters.
    """

    positions: Tensor
    adapters: RowAdapters | None = None


class LayerCache(NamedTuple):
    """K and V of one layer, [blocks, block_size, kv_heads, head_dim] each, and where the tokens of a step go.

    slots: int32 [tokens], block * block_size + offset; padding goes to slot 0. Layers whose blocks are not the same
    have other slots. Empty between steps.
    """

    k: Tensor
    v: Tensor
    slots: Tensor = torch.empty(0, dtype=torch.int32)

    def at(self, slots: Tensor) -> LayerCache:
        """The same memory in a step whose tokens go there."""
        return LayerCache(self.k, self.v, slots)


class CacheSpec(NamedTuple):
    """What one layer keeps of a token: K and V, [kv_heads, head_dim] of ``dtype`` each."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def declare(self, num_blocks: int | Size, block_size: int, device: torch.device) -> LayerCache:
        """The layer's cache as regions declare it."""
        each: Any = TensorSpec((num_blocks, block_size, self.kv_heads, self.head_dim), self.dtype, device)
        slots: Any = TensorSpec((TOKENS,), torch.int32, device)
        return LayerCache(each, each, slots)


class HiddenTap(NamedTuple):
    """Hands out what a model computes on its way, to a drafter that reads it.

    layers: those whose inputs are wanted, ascending. take: called at the end of every ``forward`` with these inputs
    [tokens, hidden] each, what ``forward`` returns, the tokens and the caches.
    """

    layers: tuple[int, ...]
    take: Callable[[Sequence[Tensor], Hidden, TokenInputs, Sequence[LayerCache]], None]


class Model(Protocol):
    """A model on one device. The worker runs whatever has these members; nothing else of it is looked at.

    vocab_size: tokens that there are logits of. dtype: of weights and activations. attention_dtype: of queries and of
    attention's output. attention_specs, cache_specs: how each layer attends, and what it keeps. feature_size: values
    of ``dtype`` that are kept for every token beside keys and values. linears: the layers that LoRA adapters may
    change, by the block they lie in ("model.layers.0.mlp"). tap: hands out hidden states, if they are wanted; a model
    without taps never looks at it.
    """

    tap: HiddenTap | None

    @property
    def vocab_size(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def attention_dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def attention_specs(self) -> Sequence[AttentionSpec]: ...
    @property
    def cache_specs(self) -> Sequence[CacheSpec]: ...
    @property
    def feature_size(self) -> int: ...
    @property
    def linears(self) -> Sequence[tuple[str, Linear]]: ...

    @property
    def weights_per_token(self) -> int:
        """Weights that computing a token reads, from which the cost of a draft is estimated."""

    def load_weights(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Take tensors under their names in the checkpoint. Raises ModelError for a name that has no place."""

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight by ``change(weight)``: to count them, move them away and back, or drop them."""

    def take_weights(self, other: Any) -> None:
        """Take over the weights of a model that was loaded in the same way. Raises ModelError if they do not fit."""

    def build_regions(self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]) -> None:
        """Have ``compile_region`` compile what lies between attentions. It comes before the first ``forward``, and
        again when the engine changes over to compiled code.

        tokens, caches: TensorSpecs of what ``forward`` will be given, in the places of the tensors.
        """

    def forward(self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend) -> Hidden:
        """Compute a step, token_ids int32 [tokens], for ``logits`` and ``hidden_states``.

        Before each layer attends, its keys and values are in its cache, at its ``slots``.
        """

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab_size] of the picked rows (int32) of what ``forward`` returned for these tokens."""

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden size], normalised, of the picked rows; for embeddings."""


def token_specs(device: torch.device, adapters: RowAdapters | None = None) -> TokenInputs:
    """The tokens of a step as regions declare them. adapters: specs as well."""
    each: Any = TensorSpec((TOKENS,), torch.int32, device)
    return TokenInputs(each, adapters)
