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
from minivllm.linear.layer import LinearMethod, LinearTensors
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
        self.heads, self.kv_heads = (heads.stop - heads.start for heads in own)
        self._own_heads, queries, keys = own.heads, *(times(heads, spec.head_dim) for heads in own)
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
    def ahead_methods(self) -> tuple[LinearMethod, ...]:
        return (self.qkv.method,)

    @property
    def behind_methods(self) -> tuple[LinearMethod, ...]:
        return tuple(linear.method for linear in self.linears[1:])

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Of the queries of a token, and of attention's output: (kv_heads, G, D)."""
        return self.kv_heads, self.heads // self.kv_heads, self.spec.head_dim

    def ahead_weights(self, vectors: Vectors) -> QueryWeights:
        return QueryWeights(self.qkv.arguments, vectors.get("q_norm"), vectors.get("k_norm"))

    def given(self, vectors: Vectors) -> Tensor | None:
        """float32 [heads]: a logit of each head that has no value, where the layer has some."""
        sinks = vectors.get("sinks")
        return None if sinks is None else sinks[self._own_heads]

    def behind_weights(self, vectors: Vectors) -> tuple[LinearTensors, ...]:
        return tuple(linear.arguments for linear in self.linears[1:])

    def ahead(
        self, x: Tensor, tokens: TokenInputs, cos_sin: Tensor, cache: LayerCache | None, weights: QueryWeights
    ) -> Tensor:
        """Project to q, k, v, rotate, store k and v, and return q [tokens, kv_heads, G, D] in attention_dtype."""
        assert cache is not None
        spec, heads, kv_heads, dim = self.spec, self.heads, self.kv_heads, self.spec.head_dim
        qkv = self.qkv.apply(x, weights.qkv, tokens.adapters)
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        if spec.qk_norm == "whole width":
            q, k = self._normed(q, k, weights)
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

    def _normed(self, q: Tensor, k: Tensor, weights: QueryWeights) -> tuple[Tensor, Tensor]:
        assert weights.q_norm is not None and weights.k_norm is not None
        eps = self.spec.qk_norm_eps
        return rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps)

    def behind(
        self, o: Tensor, x: Tensor | None, adapters: RowAdapters | None, weights: tuple[LinearTensors, ...]
    ) -> Tensor:
        o = o.to(self._dtype).flatten(1)
        if self.gate is not None:
            # Computed from the layer's input once more, so that nothing but o has to outlive attention.
            assert x is not None
            o = o * torch.sigmoid(self.gate.apply(x, weights[0], adapters))
        return self.o.apply(o, weights[-1], adapters)
