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
from math import prod
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.packed.rows import MAX_ROWS
from kernels_triton_free.state.rows import StateRows
from kernels_triton_free.strips.layout import has_strips, strip_shapes
from minivllm.compilation.regions import CompileRegion, Size, TensorSpec
from minivllm.linear.layer import Linear
from minivllm.linear.methods.stored_weight import StoredWeight
from minivllm.models.decoder_config import AttentionSpec
from minivllm.models.layer_specs import StateMixerSpec

TOKENS, ROWS = Size("tokens", 13, single=1, few=MAX_ROWS), Size("rows", 9, single=1, few=MAX_ROWS)
"""Tokens of a step, and those of them whose logits are wanted, as regions declare them."""
STATE_ROWS, STATE_SLOTS = Size("state rows", 7, single=1), Size("state slots", 5)
"""Rows of a step whose states are updated, and slots that states lie in."""

Hidden = tuple[Tensor, ...]
"""What a model computed of a step: tensors [tokens, …], whose meaning is its own business."""

Given = Tensor | tuple[Tensor, ...] | None
"""What a layer hands over beside its queries: attention's sinks, or the weights that a state is updated with."""


class Attend(Protocol):
    """Attention of one layer over everything that the caches hold; in layers that keep a state, its update."""

    def __call__(self, layer: int, q: Tensor, given: Given = None) -> Tensor:
        """q [tokens, kv_heads, G, D] -> o of the same dtype, and shape: only with the spec's value_dim in the place of
        D, if it has one. given: sinks, float32 [query heads], where the layer's spec has them. In a layer that keeps a
        state: q [tokens, widths[0]] -> o [tokens, widths[1]], and given are the weights of the update."""


class ImageRows(NamedTuple):
    """Tokens that stand for parts of images.

    features: [tokens, hidden], in the rows of these tokens what takes the place of their embeddings. is_image: bool
    [tokens].
    """

    features: Tensor
    is_image: Tensor


class TokenInputs(NamedTuple):
    """What every layer needs of the tokens in this step.

    positions: in the sequence, int32 [tokens]. adapters: that of each token; None where the linear layers have no
    adapters. images: None in a step without images.
    """

    positions: Tensor
    adapters: RowAdapters | None = None
    images: ImageRows | None = None


class LayerCache(NamedTuple):
    """K and V of one layer, [blocks, block_size, kv_heads, head_dim] each or in strips (see
    ``kernels_triton_free.strips.layout``), and where the tokens of a step go.

    V may be empty, see CacheSpec. slots: int32 [tokens], block * block_size + offset; padding goes to slot 0. Layers
    whose blocks are not the same have other slots. Empty between steps. NO_CACHE is that of a layer that keeps a
    state.
    """

    k: Tensor
    v: Tensor
    slots: Tensor = torch.empty(0, dtype=torch.int32)

    def at(self, slots: Tensor) -> LayerCache:
        """The same memory in a step whose tokens go there."""
        return LayerCache(self.k, self.v, slots)

    @property
    def blocks(self) -> tuple[int, int]:
        """How many there are, and the tokens of each."""
        return self.k.shape[0], self.v.shape[3] if has_strips(self.v) else self.k.shape[1]


NO_CACHE = LayerCache(torch.empty(0), torch.empty(0))


class CacheSpec(NamedTuple):
    """What one layer keeps of a token: K and V, [kv_heads, head_dim] of ``dtype`` each.

    keeps_values: False where keys hold their values (AttentionSpec.value_dim): then V is [kv_heads, 0]. in_strips: they
    are stored so; it is the engine's choice, where attention can read them.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    keeps_values: bool = True
    in_strips: bool = False

    @property
    def value_dim(self) -> int:
        """Last dimension of V."""
        return self.head_dim if self.keeps_values else 0

    @property
    def bytes_per_token(self) -> int:
        """Of K and V."""
        return self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def block_shapes(self, block_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a block of K, and of V."""
        if self.in_strips:
            return strip_shapes(block_size, self.kv_heads, self.head_dim, self.dtype)
        return (block_size, self.kv_heads, self.head_dim), (block_size, self.kv_heads, self.value_dim)

    def declare(self, num_blocks: int | Size, block_size: int, device: torch.device) -> LayerCache:
        """The layer's cache as regions declare it."""
        k, v = (TensorSpec((num_blocks, *shape), self.dtype, device) for shape in self.block_shapes(block_size))
        slots: Any = TensorSpec((TOKENS,), torch.int32, device)
        return LayerCache(cast(Any, k), cast(Any, v), slots)


class StateSpec(NamedTuple):
    """What one layer keeps of a request, however long that is: tensors of these shapes and dtypes. dtype: of what the
    update is given, and gives."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, spec: StateMixerSpec, dtype: torch.dtype, device: torch.device) -> StateSpec:
        """As a mixer's spec says, in a model that attends in ``dtype``."""
        dtypes = tuple(torch.float32 if tensor.is_float32 else dtype for tensor in spec.state)
        return cls(tuple(tensor.shape for tensor in spec.state), dtypes, dtype, device)

    @property
    def num_bytes(self) -> int:
        """Of one state."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes))

    def update_inputs(self, width: int, weights: Sequence[tuple[int, ...]]) -> dict[str, Any]:
        """Inputs of a region that updates states, as it declares them. width: values per token. weights: shapes of the
        weights, which are float32."""

        def spec(*shape: int | Size, dtype: torch.dtype = torch.int32) -> TensorSpec:
            return TensorSpec(shape, dtype, self.device)

        rows: Any = [spec(STATE_ROWS)] * 4 + [spec(TOKENS)] * 2
        return {
            "x": spec(TOKENS, width, dtype=self.dtype),
            "state": tuple(spec(STATE_SLOTS, *shape, dtype=kind) for shape, kind in zip(self.shapes, self.dtypes)),
            "rows": StateRows(*rows),
            "weights": tuple(spec(*shape, dtype=torch.float32) for shape in weights),
        }


StateTensors = tuple[Tensor, ...]
"""The states of one layer: tensors [slots, …], the last slot for what padding writes."""


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
    attention's output. attention_specs, cache_specs: how each layer attends, and what it keeps; of a layer that keeps a
    state, its mixer's spec, and what the state is made of. feature_size: values
    of ``dtype`` that are kept for every token beside keys and values. linears: the layers that LoRA adapters may
    change, by the block they lie in ("model.layers.0.mlp"). linear_shapes: [out, in] of their parts in the whole model,
    those of other stages included, by name ("model.layers.0.mlp.up_proj"). tap: hands out hidden
    states, if they are wanted; a model without taps never looks at it.
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
