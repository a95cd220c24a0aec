"""One layer of a decoder: its weights, and what is computed in front of attention and behind it.

What a layer is stands in its spec. Everything here is a pure function of the tensors that it is given, which may be
those of any layer with an equal spec: that is how layers share compiled regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import add_rms_norm, rms_norm
from kernels_triton_free.paged_cache import write_kv
from kernels_triton_free.rotary import apply_rotary
from minivllm.linear.layer import Linear, LinearMethod, LinearTensors
from minivllm.linear.stored_weight import StoredWeight
from minivllm.models.decoder.feed_forward import FeedForward, GatedMlp, LinearFactory, Stored
from minivllm.models.decoder.moe import MixtureOfExperts
from minivllm.models.layer_specs import FeedForwardSpec, LayerSpec, MoeSpec
from minivllm.models.model import LayerCache, TokenInputs


class BeforeAttention(NamedTuple):
    """Weights from a layer's input to its queries. norm, q_norm, k_norm: None in layers that have none."""

    norm: Tensor | None
    qkv: LinearTensors
    q_norm: Tensor | None
    k_norm: Tensor | None


class AfterAttention(NamedTuple):
    """Weights from a layer's attention output to its own output. o_norm, norm, mlp_norm: of what attention adds to the
    residual stream, of what the MLP reads, and of what it adds; None in layers that have none."""

    o: LinearTensors
    o_norm: Tensor | None
    norm: Tensor | None
    mlp: tuple[LinearTensors, ...]
    mlp_norm: Tensor | None


class LayerMethods(NamedTuple):
    """How a layer's products are computed. Layers with equal specs and equal methods share their regions."""

    qkv: LinearMethod
    o: LinearMethod
    mlp: tuple[object, ...]


def make_feed_forward(spec: FeedForwardSpec, hidden_size: int, factory: LinearFactory) -> FeedForward:
    """The code behind a spec."""
    if isinstance(spec, MoeSpec):
        return MixtureOfExperts(spec, hidden_size, factory)
    return GatedMlp(spec, hidden_size, factory)


class DecoderLayer:
    """The weights of one layer, and its arithmetic."""

    def __init__(self, spec: LayerSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype) -> None:
        self.spec, self._dtype, self._attention_dtype = spec, factory.dtype, attention_dtype
        mixer, size = spec.mixer, factory.shard.size
        self.heads, self.kv_heads = mixer.heads // size, max(1, mixer.kv_heads // size)
        kv_size = mixer.kv_heads * mixer.head_dim
        self.qkv = factory.make(
            {"q_proj": mixer.heads * mixer.head_dim, "k_proj": kv_size, "v_proj": kv_size},
            hidden_size * mixer.qkv_inputs,
            mixer.qkv_bias,
            "column",
        )
        self.o = factory.make({"o_proj": hidden_size}, mixer.heads * mixer.head_dim, mixer.o_bias, "row")
        self.mlp = make_feed_forward(spec.mlp, hidden_size, factory)
        self.vectors: dict[str, Tensor] = {}  # norms and sinks
        self.linears = (self.qkv, self.o, *self.mlp.linears)
        self._linear_of = {part: linear for linear in (self.qkv, self.o) for part in linear.sizes}

    def load(self, name: str, tensor: StoredWeight, device: torch.device) -> None:
        """Take ``self_attn.q_proj.weight``, ``input_layernorm.weight``, … of this layer."""
        *_, module, kind = name.split(".")
        if name.startswith("mlp."):
            self.mlp.load(name.removeprefix("mlp."), tensor)
        elif module in self._linear_of:
            self._linear_of[module].load(module, kind, tensor)
        else:
            assert isinstance(tensor, Tensor)
            if kind == "sinks":
                self.vectors[kind] = tensor.to(device, torch.float32)
            else:
                self.vectors[module] = tensor.to(device)

    @property
    def stored(self) -> Sequence[Stored]:
        """All that keeps weights, but for the norms."""
        return (self.qkv, self.o, *self.mlp.stored)

    @property
    def weights_per_token(self) -> int:
        """How many weights computing a token reads."""
        projections = sum(linear.in_features * linear.out_features for linear in (self.qkv, self.o))
        return projections + self.mlp.weights_per_token

    @property
    def named_linears(self) -> list[tuple[str, Linear]]:
        """The linear layers by the block that they lie in."""
        return [("self_attn", self.qkv), ("self_attn", self.o), *(("mlp", linear) for linear in self.mlp.linears)]

    @property
    def methods(self) -> LayerMethods:
        return LayerMethods(self.qkv.method, self.o.method, self.mlp.methods)

    @property
    def query_shape(self) -> tuple[int, int, int]:
        """Of the queries of a token, and of attention's output: (kv_heads, G, D)."""
        return self.kv_heads, self.heads // self.kv_heads, self.spec.mixer.head_dim

    @property
    def sinks(self) -> Tensor | None:
        """float32 [heads]: a logit of each head that has no value, where the layer has some."""
        return self.vectors.get("sinks")

    @property
    def before(self) -> BeforeAttention:
        norms = self.vectors.get
        return BeforeAttention(norms("input_layernorm"), self.qkv.arguments, norms("q_norm"), norms("k_norm"))

    @property
    def after(self) -> AfterAttention:
        norms = self.vectors.get
        return AfterAttention(
            self.o.arguments,
            norms("post_self_attn_layernorm"),
            norms("post_attention_layernorm"),
            self.mlp.weights,
            norms("post_mlp_layernorm"),
        )

    def enter(self, x: Tensor | None, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x, where there is some, to the residual stream: (what the next sublayer reads, the stream)."""
        eps = self.spec.norms.eps
        if x is None:
            return (residual if norm is None else rms_norm(residual, norm, eps)), residual
        if norm is None:
            residual = residual + x
            return residual, residual
        return add_rms_norm(x, residual, norm, eps)

    def queries(
        self, x: Tensor, tokens: TokenInputs, cos_sin: Tensor, cache: LayerCache, weights: BeforeAttention
    ) -> Tensor:
        """Project to q, k, v, rotate, store k and v, and return q [tokens, kv_heads, G, D] in attention_dtype."""
        mixer, heads, kv_heads, dim = self.spec.mixer, self.heads, self.kv_heads, self.spec.mixer.head_dim
        qkv = self.qkv.apply(x, weights.qkv, tokens.adapters)
        q, k, v = qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=-1)
        if mixer.qk_norm == "whole width":
            q, k = self._normed(q, k, weights)
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        if mixer.qk_norm == "per head":
            q, k = self._normed(q, k, weights)
        if mixer.rotary is not None:
            table = cos_sin[tokens.positions]
            q, k = apply_rotary(q, table), apply_rotary(k, table)
        if mixer.query_scaling is not None:
            steps = torch.floor(tokens.positions / mixer.query_scaling.interval)
            q = q * (1 + mixer.query_scaling.beta * torch.log1p(steps)).to(q.dtype)[:, None, None]
        write_kv(cache.k, cache.v, k, v, cache.slots)
        # FlexAttention wants q as a real four-dimensional buffer.
        return q.to(self._attention_dtype).reshape(-1, *self.query_shape).contiguous()

    def _normed(self, q: Tensor, k: Tensor, weights: BeforeAttention) -> tuple[Tensor, Tensor]:
        assert weights.q_norm is not None and weights.k_norm is not None
        eps = self.spec.mixer.qk_norm_eps
        return rms_norm(q, weights.q_norm, eps), rms_norm(k, weights.k_norm, eps)

    def output(
        self, o: Tensor, residual: Tensor, adapters: RowAdapters | None, weights: AfterAttention
    ) -> tuple[Tensor, Tensor]:
        """From attention's output o [tokens, kv_heads, G, D] to what the layer still has to add to the residual stream,
        and the stream without it."""
        x = self.o.apply(o.to(self._dtype).flatten(1), weights.o, adapters)
        x, residual = self.enter(self._leaving(x, weights.o_norm), residual, weights.norm)
        return self._leaving(self.mlp.apply(x, weights.mlp, adapters), weights.mlp_norm), residual

    def _leaving(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What a sublayer adds to the residual stream."""
        return x if norm is None else rms_norm(x, norm, self.spec.norms.after_eps)
