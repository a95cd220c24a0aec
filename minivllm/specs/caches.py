"""What a layer keeps of tokens and of requests: keys and values, or a state."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kernels_triton_free.packed.rows import MAX_ROWS
from kernels_triton_free.state.rows import StateRows
from kernels_triton_free.strips.layout import has_strips, strip_shapes
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.specs.layers import StateMixerSpec

TOKENS, ROWS = Size("tokens", 13, single=1, few=MAX_ROWS), Size("rows", 9, single=1, few=MAX_ROWS)
"""Tokens of a step, and those of them whose logits are wanted, as regions declare them."""


STATE_ROWS, STATE_SLOTS = Size("state rows", 7, single=1), Size("state slots", 5)
"""Rows of a step whose states are updated, and slots that states lie in."""


class LayerCache(NamedTuple):
    """K and V of one layer, [blocks, block_size, kv_heads, head_dim] each or in strips (see
    ``kernels_triton_free.strips.layout``), and where the tokens of a step go.

    V may be empty, see CacheSpec. slots: int32 [tokens], block * block_size + offset; padding goes to slot 0.
    Layers whose blocks are not the same have other slots. Empty between steps. NO_CACHE is that of a layer
    that keeps a state.
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

    keeps_values: False where keys hold their values (AttentionSpec.value_dim): then V is [kv_heads, 0].
    in_strips: they are stored so; it is the engine's choice, where attention can read them.
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
        k, v = (
            TensorSpec((num_blocks, *shape), self.dtype, device) for shape in self.block_shapes(block_size)
        )
        slots: Any = TensorSpec((TOKENS,), torch.int32, device)
        return LayerCache(cast(Any, k), cast(Any, v), slots)


class StateSpec(NamedTuple):
    """What one layer keeps of a request, however long that is: tensors of these shapes and dtypes. dtype: of
    what the update is given, and gives."""

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
        """Inputs of a region that updates states, as it declares them. width: values per token. weights:
        shapes of the weights, which are float32."""

        def spec(*shape: int | Size, dtype: torch.dtype = torch.int32) -> TensorSpec:
            return TensorSpec(shape, dtype, self.device)

        rows: Any = [spec(STATE_ROWS)] * 4 + [spec(TOKENS)] * 2
        return {
            "x": spec(TOKENS, width, dtype=self.dtype),
            "state": tuple(
                spec(STATE_SLOTS, *shape, dtype=kind) for shape, kind in zip(self.shapes, self.dtypes)
            ),
            "rows": StateRows(*rows),
            "weights": tuple(spec(*shape, dtype=torch.float32) for shape in weights),
        }


StateTensors = tuple[Tensor, ...]
"""The states of one layer: tensors [slots, …], the last slot for what padding writes."""
