"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"), absorbed:
queries and outputs live among latents.

Key and value of a head are made of the latent by matrices, k = K c and v = V c. Since q . (K c) = (K^T q) .
c, and the sum of weighted values is V times the sum of weighted latents, both matrices move to the other side
of attention: a token keeps its latent and its rotated key, once for all heads, and attention has a single KV
head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import rms_norm
from kernels_triton_free.paged_cache import write_rows
from kernels_triton_free.rotary import apply_rotary
from minivllm.compilation.regions import TensorSpec
from minivllm.linear.factory import LinearFactory
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearTensors
from minivllm.linear.product import Product
from minivllm.models.mixers.mixer import LayerContext, Vectors, projected
from minivllm.models.shards import times
from minivllm.program.program import Name, Piece, Program
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import TOKENS, LayerCache
from minivllm.specs.layers import LatentSpec


@dataclass(frozen=True)
class LatentQueries:
    """Stores [latent | rotated key], and gives absorbed queries [tokens, 1, heads, kv_rank + rope_dim]."""

    query_down: Product | None
    """To the latent that queries are made of; None: they are made of the hidden state."""
    query: Product
    latent: Product
    heads: int
    nope_dim: int
    rope_dim: int
    kv_rank: int
    norm_eps: float
    interleaved: bool
    attention_dtype: torch.dtype

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        adapters: RowAdapters | None,
        cache: LayerCache,
        cos_sin: Tensor,
        query_down: LinearTensors | None,
        query_norm: Tensor | None,
        query: LinearTensors,
        latent: LinearTensors,
        latent_norm: Tensor,
        to_keys: Tensor,
    ) -> Tensor:
        """to_keys [heads, nope_dim, kv_rank]: from the latent to the heads' keys."""
        c, k = self.latent(x, latent, adapters).split([self.kv_rank, self.rope_dim], dim=-1)
        c = rms_norm(c, latent_norm, self.norm_eps)
        if self.query_down is not None:
            assert query_down is not None and query_norm is not None
            x = rms_norm(self.query_down(x, query_down, adapters), query_norm, self.norm_eps)
        q = self.query(x, query, adapters).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        table = cos_sin[positions]
        q_rope, k = self._rotated(q_rope, table), self._rotated(k, table)
        write_rows(cache.k, torch.cat([c, k], dim=-1)[:, None], cache.slots)
        absorbed = torch.bmm(q_nope.transpose(0, 1), to_keys).transpose(0, 1)
        return torch.cat([absorbed, q_rope], dim=-1)[:, None].to(self.attention_dtype).contiguous()

    def _rotated(self, x: Tensor, table: Tensor) -> Tensor:
        """Pairs of neighbours become pairs of halves, in queries and keys alike,
        which leaves every score as it is."""
        if self.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(x, table)


@dataclass(frozen=True)
class LatentValues:
    """From attention's output among latents to the heads' values: [tokens, heads * value_dim]."""

    dtype: torch.dtype

    def __call__(self, o: Tensor, to_values: Tensor) -> Tensor:
        """to_values [heads, value_dim, kv_rank]: from the latent to the heads' values."""
        values = torch.bmm(o[:, 0].to(self.dtype).transpose(0, 1), to_values.transpose(1, 2))
        return values.transpose(0, 1).flatten(1)


class LatentAttention:
    """A ``Mixer``; see LatentSpec. What makes keys and values of the latent (``kv_b_proj``) is no linear
    layer: it is multiplied head by head, in the dtype of the model."""

    block = "self_attn"
    reads_again = False

    def __init__(
        self, spec: LatentSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self._dtype = factory.dtype
        self._attention_dtype = attention_dtype
        self._own = factory.shard.own(spec.heads)
        self.heads = self._own.stop - self._own.start
        # What is the same for all heads is computed by every shard.
        whole = LinearFactory(factory.dtype, factory.device, factory.choose)
        self.q_a: Linear | None = None
        name, inputs = "q_proj", hidden_size
        if spec.query_rank is not None:
            self.q_a = whole.make({"q_a_proj": spec.query_rank}, hidden_size, spec.bias, "column")
            name, inputs = "q_b_proj", spec.query_rank
        width = spec.nope_dim + spec.rope_dim
        self.q = factory.make(
            {name: spec.heads * width}, inputs, False, "column", {name: times(self._own, width)}
        )
        self.kv_a = whole.make({"kv_a_proj_with_mqa": spec.head_dim}, hidden_size, spec.bias, "column")
        own = {"o_proj": times(self._own, spec.value_dim)}
        self.o = factory.make({"o_proj": hidden_size}, spec.heads * spec.value_dim, spec.bias, "row", own)
        self.linears = tuple(linear for linear in (self.q_a, self.q, self.kv_a, self.o) if linear is not None)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        return 1, self.heads, self.spec.kv_rank

    @property
    def attends(self) -> AttentionSpec:
        return self.spec.attend._replace(query_group=self.heads)

    def own(self, name: str, vector: Tensor) -> Tensor:
        return vector[times(self._own, len(vector) // self.spec.heads)] if name == "kv_b_proj" else vector

    def _of_heads(self, vectors: Vectors) -> Tensor:
        """[heads of this worker, nope_dim + value_dim, kv_rank]."""
        return vectors["kv_b_proj"].unflatten(0, (self.heads, -1))

    def attend_weights(self, vectors: Vectors) -> None:
        return None

    def before_attention(self, context: LayerContext, read: Name) -> Program:
        spec, q_a = self.spec, self.q_a
        code = LatentQueries(
            None if q_a is None else q_a.product,
            self.q.product,
            self.kv_a.product,
            self.heads,
            spec.nope_dim,
            spec.rope_dim,
            spec.kv_rank,
            spec.norm_eps,
            spec.interleaved,
            self._attention_dtype,
        )

        def weights() -> tuple[Any, ...]:
            vectors = context.vectors()
            return (
                context.rotary_table()[0],
                None if q_a is None else q_a.arguments,
                vectors.get("q_a_layernorm"),
                self.q.arguments,
                self.kv_a.arguments,
                vectors["kv_a_layernorm"],
                self._of_heads(vectors)[:, : spec.nope_dim],
            )

        q = TensorSpec((TOKENS, 1, self.heads, spec.head_dim), self._attention_dtype, context.stream.device)
        return [Piece(code, (read, "positions", "adapters", f"cache.{context.cache}"), {"q": q}, weights)]

    def after_attention(self, context: LayerContext, read: Name) -> Program:
        values = context.activation(self.o.in_features)

        def to_values() -> tuple[Tensor]:
            return (self._of_heads(context.vectors())[:, self.spec.nope_dim :],)

        return [
            Piece(LatentValues(self._dtype), ("o",), {"values": values}, to_values),
            projected(self.o, "values", context),
        ]
