"""What stands for attention, products and experts while a model is traced,
and what each layer asks of attention.

None of these operators is ever run: a trace is cut at attention and where workers exchange tensors, and the
others become calls of the engine's linear layers and experts, whose weights a trace need not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.distributed.communicator import Communicator
from minivllm.distributed.shard import Shard
from minivllm.models.model import Attend, TokenInputs
from minivllm.models.shards import OwnHeads
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import LayerCache


@dataclass(frozen=True)
class LayerAttention:
    """What one layer told of itself. value_dim: of v, where it is less than that of q and k (it is padded).

    module: the attention module that calls, by its name in the model. own: the heads that this worker attends
    with, if the module computes those of all workers.
    """

    module: str
    kv_heads: int
    head_dim: int
    value_dim: int
    spec: AttentionSpec
    own: OwnHeads | None = None

    @property
    def shapes(self) -> LayerAttention:
        """Equal for layers whose tensors have equal shapes, however they attend."""
        return replace(self, module="", spec=AttentionSpec(None, 1.0, query_group=self.query_group), own=None)

    @property
    def cache_dim(self) -> int:
        """K and V are stored as wide as the wider of them."""
        return max(self.head_dim, self.value_dim)

    def own_part(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """q [1, heads, tokens, D], k, v [1, kv_heads, tokens, D],
        sinks [heads] of the heads that this worker has."""
        if self.own is None:
            return q, k, v, sinks
        heads, kv_heads = self.own.heads, self.own.kv_heads
        return q[:, heads], k[:, kv_heads], v[:, kv_heads], None if sinks is None else sinks[heads]

    def keys_and_values(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [1, kv_heads, tokens, D] -> [tokens, kv_heads, cache_dim] each,
        zeros behind what is narrower."""
        width = self.cache_dim
        k, v = (x if x.shape[-1] == width else nn.functional.pad(x, (0, width - x.shape[-1])) for x in (k, v))
        return k[0].transpose(0, 1), v[0].transpose(0, 1)

    def queries(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """q [1, heads, tokens, D] -> [tokens, kv_heads, G, cache_dim], a buffer of its own."""
        q = q if q.shape[-1] == self.cache_dim else nn.functional.pad(q, (0, self.cache_dim - q.shape[-1]))
        return q[0].transpose(0, 1).to(dtype).reshape(-1, *self.query_shape).contiguous()

    def output(self, o: Tensor, dtype: torch.dtype) -> Tensor:
        """o [tokens, kv_heads, G, cache_dim] -> [1, tokens, heads, D of v], as transformers wants it."""
        return o.flatten(1, 2)[None, :, :, : self.value_dim].to(dtype)

    @property
    def query_group(self) -> int:
        """Query heads for each KV head."""
        return self.spec.query_group

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """Of the queries of a token, and of attention's output: (kv_heads, G, D)."""
        return self.kv_heads, self.spec.query_group, self.cache_dim


class Step:
    """What the layers need of the step that is being computed, or of none:
    attend is None while they are traced."""

    def __init__(self, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend | None) -> None:
        self.tokens = tokens
        self.caches = caches
        self.attend = attend


class StepHolder:
    """The place of the current step. Models are run by one thread."""

    def __init__(self) -> None:
        self.step: Step | None = None

    @contextmanager
    def running(self, step: Step) -> Iterator[None]:
        before, self.step = self.step, step
        try:
            yield
        finally:
            self.step = before

    @property
    def is_traced(self) -> bool:
        """Whether layers should say what they would compute, instead of computing it."""
        return self.step is not None and self.step.attend is None


class Ranks:
    """The workers that divide a model, as its layers reach them."""

    def __init__(self, communicator: Communicator, holder: StepHolder) -> None:
        self.shard = Shard(communicator.rank, communicator.size)
        self._communicator = communicator
        self._holder = holder

    def add(self, x: Tensor) -> Tensor:
        """The sum of what all workers have."""
        if self._holder.is_traced:
            added: Tensor = torch.ops.minivllm.add_ranks(x)
            return added
        return self._communicator.all_reduce(x)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [..., widths[rank]] of all workers, side by side."""
        if self._holder.is_traced:
            gathered: Tensor = torch.ops.minivllm.gather_ranks(x, list(widths))
            return gathered
        rows = self._communicator.gather_columns(x.reshape(-1, x.shape[-1]), widths)
        return rows.reshape(*x.shape[:-1], sum(widths))


_library = torch.library.Library("minivllm", "DEF")
_library.define("attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer) -> Tensor")
_library.define("product(Tensor x, int index, int out_features) -> Tensor")
_library.define("experts(Tensor x, Tensor ids, Tensor weights, int index) -> Tensor")
_library.define("add_ranks(Tensor x) -> Tensor")
_library.define("gather_ranks(Tensor x, int[] widths) -> Tensor")


def _attend_shape(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: int) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _product_shape(x: Tensor, index: int, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _experts_shape(x: Tensor, ids: Tensor, weights: Tensor, index: int) -> Tensor:
    return x.new_empty(x.shape)


def _sum_shape(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _gathered_shape(x: Tensor, widths: Sequence[int]) -> Tensor:
    return x.new_empty(*x.shape[:-1], sum(widths))


torch.library.register_fake("minivllm::attend", _attend_shape, lib=_library)
torch.library.register_fake("minivllm::product", _product_shape, lib=_library)
torch.library.register_fake("minivllm::experts", _experts_shape, lib=_library)
torch.library.register_fake("minivllm::add_ranks", _sum_shape, lib=_library)
torch.library.register_fake("minivllm::gather_ranks", _gathered_shape, lib=_library)
