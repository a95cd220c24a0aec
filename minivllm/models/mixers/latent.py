"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"), absorbed: queries and outputs live among latents.

Key and value of a head are made of the latent by matrices, k = K c and v = V c. Since q . (K c) = (K^T q) . c, and
the sum of weighted values is V times the sum of weighted latents, both matrices move to the other side of attention: a
token keeps its latent and its rotated key, once for all heads, and attention has a single KV head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import rms_norm
from kernels_triton_free.paged_cache import write_rows
from kernels_triton_free.rotary import apply_rotary
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.models.decoder_config import AttentionSpec
from minivllm.models.layer_specs import LatentSpec
from minivllm.models.linear_factory import LinearFactory
from minivllm.models.mixers.mixer import Vectors
from minivllm.models.model import LayerCache, TokenInputs
from minivllm.models.shards import times


class QueryWeights(NamedTuple):
    """Weights up to the queries. q_a, q_norm: None where queries are made of the hidden state. to_keys [heads,
    nope_dim, kv_rank]: from the latent to the heads' keys."""

    q_a: LinearTensors | None
    q_norm: Tensor | None
    q: LinearTensors
    kv_a: LinearTensors
    kv_norm: Tensor
    to_keys: Tensor


class OutputWeights(NamedTuple):
    """to_values [heads, value_dim, kv_rank]: from the latent to the heads' values."""

    to_values: Tensor
    o: LinearTensors


class LatentAttention:
    """A ``Mixer``; see LatentSpec. What makes keys and values of the latent (``kv_b_proj``) is no linear layer: it is
    multiplied head by head, in the dtype of the model."""

    block = "self_attn"
    reads_again = False

    def __init__(
        self, spec: LatentSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype
    ) -> None:
        self.spec, self._dtype, self._attention_dtype = spec, factory.dtype, attention_dtype
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
        self.q = factory.make({name: spec.heads * width}, inputs, False, "column", {name: times(self._own, width)})
        self.kv_a = whole.make({"kv_a_proj_with_mqa": spec.head_dim}, hidden_size, spec.bias, "column")
        own = {"o_proj": times(self._own, spec.value_dim)}
        self.o = factory.make({"o_proj": hidden_size}, spec.heads * spec.value_dim, spec.bias, "row", own)
        self.linears = tuple(linear for linear in (self.q_a, self.q, self.kv_a, self.o) if linear is not None)

    @property
    def ahead_methods(self) -> tuple[LinearMethod, ...]:
        return tuple(linear.method for linear in self.linears[:-1])

    @property
    def behind_methods(self) -> tuple[LinearMethod, ...]:
        return (self.o.method,)

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

    def ahead_weights(self, vectors: Vectors) -> QueryWeights:
        return QueryWeights(
            None if self.q_a is None else self.q_a.arguments,
            vectors.get("q_a_layernorm"),
            self.q.arguments,
            self.kv_a.arguments,
            vectors["kv_a_layernorm"],
            self._of_heads(vectors)[:, : self.spec.nope_dim],
        )

    def given(self, vectors: Vectors) -> None:
        return None

    def behind_weights(self, vectors: Vectors) -> OutputWeights:
        return OutputWeights(self._of_heads(vectors)[:, self.spec.nope_dim :], self.o.arguments)

    def ahead(
        self, x: Tensor, tokens: TokenInputs, cos_sin: Tensor, cache: LayerCache | None, weights: QueryWeights
    ) -> Tensor:
        """Store [latent | rotated key], and return absorbed queries [tokens, 1, heads, kv_rank + rope_dim]."""
        assert cache is not None
        spec, adapters = self.spec, tokens.adapters
        latent, k = self.kv_a.apply(x, weights.kv_a, adapters).split([spec.kv_rank, spec.rope_dim], dim=-1)
        latent = rms_norm(latent, weights.kv_norm, spec.norm_eps)
        if self.q_a is not None:
            assert weights.q_a is not None and weights.q_norm is not None
            x = rms_norm(self.q_a.apply(x, weights.q_a, adapters), weights.q_norm, spec.norm_eps)
        q = self.q.apply(x, weights.q, adapters).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split([spec.nope_dim, spec.rope_dim], dim=-1)
        table = cos_sin[tokens.positions]
        q_rope, k = self._rotated(q_rope, table), self._rotated(k, table)
        write_rows(cache.k, torch.cat([latent, k], dim=-1)[:, None], cache.slots)
        absorbed = torch.bmm(q_nope.transpose(0, 1), weights.to_keys).transpose(0, 1)
        return torch.cat([absorbed, q_rope], dim=-1)[:, None].to(self._attention_dtype).contiguous()

    def _rotated(self, x: Tensor, table: Tensor) -> Tensor:
        """Pairs of neighbours become pairs of halves, in queries and keys alike, which leaves every score as it is."""
        if self.spec.interleaved:
            x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rotary(x, table)

    def behind(self, o: Tensor, x: Tensor | None, adapters: RowAdapters | None, weights: OutputWeights) -> Tensor:
        values = torch.bmm(o[:, 0].to(self._dtype).transpose(0, 1), weights.to_values.transpose(1, 2))
        return self.o.apply(values.transpose(0, 1).flatten(1), weights.o, adapters)
