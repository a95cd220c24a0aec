"""Grouped-query attention: from a layer's input to queries, keys and values, and from attention's output on."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import rms_norm
from kernels_triton_free.paged_cache import write_kv
from kernels_triton_free.rotary import apply_rotary
from minivllm.linear.methods.method import LinearMethod, LinearTensors, largest_inputs
from minivllm.models.decoder_config import AttentionSpec
from minivllm.models.layer_specs import SelfAttentionSpec
from minivllm.models.linear_factory import LinearFactory
from minivllm.models.mixers.mixer import Vectors
from minivllm.models.model import LayerCache, TokenInputs
from minivllm.models.shards import own_heads, times


class QueryWeights(NamedTuple):
    """Weights up to the queries. q_norm, k_norm: None in layers that have none."""

    qkv: LinearTensors
    q_norm: Tensor | None
    k_norm: Tensor | None


class SelfAttention:
    """A ``Mixer`` around attention."""

    block = "self_attn"

    def __init__(
        self, spec: SelfAttentionSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype
    ) -> None:
        self.spec, self._dtype, self._attention_dtype = spec, factory.dtype, attention_dtype
        own = own_heads(spec, factory.shard)
        self.heads, self.kv_heads = (heads.stop - heads.start for heads in own[:2])
        queries, keys = (times(heads, spec.head_dim) for heads in own[:2])
        self._own, self._own_values = own, (queries, keys)
        kv_size = spec.kv_heads * spec.head_dim
        parts = {"q_proj": spec.heads * spec.head_dim, "k_proj": kv_size, "v_proj": kv_size}
        ranges, width = {"q_proj": queries, "k_proj": keys, "v_proj": keys}, spec.heads * spec.head_dim
        self.qkv = factory.make(parts, hidden_size * spec.qkv_inputs, spec.qkv_bias, "column", ranges)
        self.o = factory.make({"o_proj": hidden_size}, width, spec.o_bias, "row", {"o_proj": queries})
        gate = partial(factory.make, {"g_proj": width}, hidden_size, spec.qkv_bias, "column", {"g_proj": queries})
        self.gate = gate() if spec.output_gate else None
        self.linears = (self.qkv, self.o) if self.gate is None else (self.qkv, self.gate, self.o)
        self.reads_again = spec.output_gate

    @property
    def norms_whole_width(self) -> bool:
        """Whether q and k of all heads are normed together, so that workers have to add up their squares."""
        return self.spec.qk_norm == "whole width"

    @property
    def ahead_methods(self) -> tuple[LinearMethod, ...]:
        return (self.qkv.method,)

    @property
    def behind_methods(self) -> tuple[LinearMethod, ...]:
        return tuple(linear.method for linear in self.linears[1:])

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Of the queries of a token, and of attention's output: (kv_heads, G, D)."""
        return self.kv_heads, self.heads // self.kv_heads, self.spec.head_dim

    @property
    def attends(self) -> AttentionSpec:
        return self.spec.attend._replace(query_group=self.heads // self.kv_heads)

    def own(self, name: str, vector: Tensor) -> Tensor:
        if name == "sinks":
            return vector[self._own.heads]
        if self.norms_whole_width and name in ("q_norm", "k_norm"):
            return vector[self._own_values[name == "k_norm"]]
        return vector

    def ahead_weights(self, vectors: Vectors) -> QueryWeights:
        return QueryWeights(self.qkv.arguments, vectors.get("q_norm"), vectors.get("k_norm"))

    def given(self, vectors: Vectors) -> Tensor | None:
        """float32 [heads]: a logit of each head that has no value, where the layer has some."""
        return vectors.get("sinks")

    def behind_weights(self, vectors: Vectors) -> tuple[LinearTensors, ...]:
        return tuple(linear.arguments for linear in self.linears[1:])

    def ahead(
        self, x: Tensor, tokens: TokenInputs, cos_sin: Tensor, cache: LayerCache | None, weights: QueryWeights
    ) -> Tensor:
        """Project to q, k, v, rotate, store k and v, and return q [tokens, kv_heads, G, D] in attention_dtype."""
        return self.rotated(self.projected(x, tokens.adapters, weights), None, tokens, cos_sin, cache, weights)

    def projected(self, x: Tensor, adapters: RowAdapters | None, weights: QueryWeights) -> Tensor:
        """x [tokens, hidden] -> q, k and v of the own heads, side by side."""
        return self.qkv.apply(x, weights.qkv, adapters)

    def mean_squares(self, qkv: Tensor) -> Tensor:
        """This worker's part of the mean squares of the queries and the keys of all heads: float32 [tokens, 2]."""
        q, k, _ = self._split(qkv)
        of_q = q.float().square().sum(-1) / (self.spec.heads * self.spec.head_dim)
        of_k = k.float().square().sum(-1) / (self.spec.kv_heads * self.spec.head_dim)
        return torch.stack([of_q, of_k if self._own.is_first else torch.zeros_like(of_k)], dim=-1)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = (own.stop - own.start for own in self._own_values)
        q, k, v = qkv.split([queries, keys, keys], dim=-1)
        return q, k, v

    def rotated(
        self,
        qkv: Tensor,
        mean_squares: Tensor | None,
        tokens: TokenInputs,
        cos_sin: Tensor,
        cache: LayerCache | None,
        weights: QueryWeights,
    ) -> Tensor:
        """The rest of ``ahead``. mean_squares: of all heads, where workers divide heads that are normed together."""
        assert cache is not None
        spec, heads, kv_heads, dim = self.spec, self.heads, self.kv_heads, self.spec.head_dim
        q, k, v = self._split(qkv)
        if spec.qk_norm == "whole width":
            q, k = self._normed(q, k, weights, mean_squares)
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        if spec.qk_norm == "per head":
            q, k = self._normed(q, k, weights)
        if spec.rotary is not None:
            table = cos_sin[tokens.positions]
            q, k = apply_rotary(q, table), apply_rotary(k, table)
        if spec.query_scaling is not None:
            steps = torch.floor(tokens.positions / spec.query_scaling.interval)
            q = q * (1 + spec.query_scaling.beta * torch.log1p(steps)).to(q.dtype)[:, None, None]
        write_kv(cache.k, cache.v, k, v, cache.slots)
        # FlexAttention wants q as a real four-dimensional buffer.
        return q.to(self._attention_dtype).reshape(-1, *self.output_shape).contiguous()

    def _normed(
        self, q: Tensor, k: Tensor, weights: QueryWeights, mean_squares: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        assert weights.q_norm is not None and weights.k_norm is not None
        of_q, of_k = (None, None) if mean_squares is None else mean_squares.split(1, dim=-1)
        eps = self.spec.qk_norm_eps
        return rms_norm(q, weights.q_norm, eps, of_q), rms_norm(k, weights.k_norm, eps, of_k)

    @property
    def scales_outputs(self) -> bool:
        """See LinearMethod.scales_tokens, of the product behind attention."""
        return self.o.method.scales_tokens

    def largest(self, o: Tensor) -> Tensor:
        """float32 [tokens, 1]: of this worker's part of what that product reads, without a gate."""
        return largest_inputs(o.to(self._dtype).flatten(1))

    def behind(
        self,
        o: Tensor,
        x: Tensor | None,
        adapters: RowAdapters | None,
        weights: tuple[LinearTensors, ...],
        largest: Tensor | None = None,
    ) -> Tensor:
        """See Mixer. largest: see ``Linear.apply``."""
        o = o.to(self._dtype).flatten(1)
        if self.gate is not None:
            # Computed from the layer's input once more, so that nothing but o has to outlive attention.
            assert x is not None
            o = o * torch.sigmoid(self.gate.apply(x, weights[0], adapters))
        return self.o.apply(o, weights[-1], adapters, largest)
