"""Grouped-query attention: from a layer's input to queries, keys and values,
and from attention's output on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import rms_norm, unit_norm
from kernels_triton_free.paged_cache import write_kv
from kernels_triton_free.rotary import apply_rotary
from minivllm.compilation.regions import TensorSpec
from minivllm.linear.factory import LinearFactory
from minivllm.linear.methods.method import LinearTensors
from minivllm.linear.product import Product
from minivllm.models.mixers.mixer import LayerContext, Vectors, projected
from minivllm.models.pieces import Flatten, Largest, Project
from minivllm.models.shards import own_heads, times
from minivllm.program.program import Name, Piece, Program, Seam
from minivllm.program.seams import Agree
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import TOKENS, LayerCache
from minivllm.specs.layers import PositionScaling, QueryKeyNorm, SelfAttentionSpec


@dataclass(frozen=True)
class MeanSquares:
    """A rank's part of the mean squares of the queries and the keys of all heads: float32 [tokens, 2]."""

    widths: tuple[int, int, int]
    """Of q, k and v here."""
    whole_widths: tuple[int, int]
    """Of q and k of all ranks."""
    counts_keys: bool
    """Of the ranks with the same KV heads, one counts them."""

    def __call__(self, qkv: Tensor) -> Tensor:
        q, k, _ = qkv.split(self.widths, dim=-1)
        of_q = q.float().square().sum(-1) / self.whole_widths[0]
        of_k = k.float().square().sum(-1) / self.whole_widths[1]
        return torch.stack([of_q, of_k if self.counts_keys else torch.zeros_like(of_k)], dim=-1)


def table_rows(cos_sin: Tensor, positions: Tensor, axes: Tensor | None) -> Tensor:
    """Rows of a rotary table float32 [positions, dim] -> [tokens, dim].

    positions: int32 [tokens], or [tokens, 3] with ``axes``: which of the three turns each column (int64
    [dim]).
    """
    if axes is None:
        return cos_sin[positions]
    return cos_sin[positions[:, axes], torch.arange(len(axes), device=axes.device)]


@dataclass(frozen=True)
class RotateQueries:
    """Norms q and rotates it, in a layer that reads the keys and values of an earlier one. Gives q [tokens,
    kv_heads, G, D] in attention_dtype."""

    shape: tuple[int, int, int]
    attention_dtype: torch.dtype
    norms: bool
    norm_eps: float

    def __call__(
        self, q: Tensor, positions: Tensor, cos_sin: Tensor | None, axes: Tensor | None, weight: Any
    ) -> Tensor:
        """q [tokens, heads * D]. positions, cos_sin, axes: see ``table_rows``. weight: of the norm, if
        there is one."""
        kv_heads, group, dim = self.shape
        q = q.view(-1, kv_heads * group, dim)
        if self.norms:
            q = rms_norm(q, weight, self.norm_eps)
        if cos_sin is not None:
            q = apply_rotary(q, table_rows(cos_sin, positions, axes))
        return q.to(self.attention_dtype).reshape(-1, *self.shape).contiguous()


@dataclass(frozen=True)
class RotateAndStore:
    """Norms q and k, rotates both, stores k and v, and gives q [tokens, kv_heads, G,
    D] in attention_dtype. keys_are_values: v is k, before norm and rotary. norms_values: v is normed, without
    a weight."""

    heads: int
    kv_heads: int
    head_dim: int
    attention_dtype: torch.dtype
    norm: QueryKeyNorm | None
    norm_eps: float
    query_scaling: PositionScaling | None
    keys_are_values: bool = False
    norms_values: bool = False

    def __call__(self, qkv: Tensor, positions: Tensor, cache: LayerCache, *values: Any) -> Tensor:
        """positions: int32 [tokens], or [tokens, 3]. values: [mean squares of q and k over the heads of all
        ranks], rotary table, which position turns each column of it (int64 [dim]), weights of the norms of q
        and k; None where there is no such thing."""
        *mean_squares, cos_sin, axes, q_weight, k_weight = values
        heads, kv_heads, dim = self.heads, self.kv_heads, self.head_dim
        widths = [heads * dim, kv_heads * dim, kv_heads * dim][: 2 if self.keys_are_values else 3]
        q, k, *others = qkv.split(widths, dim=-1)
        v = others[0] if others else k
        if self.norm == "whole width":
            of_q, of_k = (
                mean_squares[0].split(1, dim=-1)
                if mean_squares and mean_squares[0] is not None
                else (None, None)
            )
            q, k = rms_norm(q, q_weight, self.norm_eps, of_q), rms_norm(k, k_weight, self.norm_eps, of_k)
        q, k, v = q.view(-1, heads, dim), k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim)
        if self.norm == "per head":
            q, k = rms_norm(q, q_weight, self.norm_eps), rms_norm(k, k_weight, self.norm_eps)
        if self.norms_values:
            v = unit_norm(v, self.norm_eps)
        if cos_sin is not None:
            table = table_rows(cos_sin, positions, axes)
            q, k = apply_rotary(q, table), apply_rotary(k, table)
        if self.query_scaling is not None:
            steps = torch.floor(positions / self.query_scaling.interval)
            q = q * (1 + self.query_scaling.beta * torch.log1p(steps)).to(q.dtype)[:, None, None]
        write_kv(cache.k, cache.v, k, v, cache.slots)
        # FlexAttention wants q as a real four-dimensional buffer.
        return q.to(self.attention_dtype).reshape(-1, kv_heads, heads // kv_heads, dim).contiguous()


@dataclass(frozen=True)
class GateOutput:
    """Attention's output times the sigmoid of a projection of the layer's input.

    That is computed once more here, so that nothing but o has to outlive attention.
    """

    product: Product

    def __call__(
        self, values: Tensor, read: Tensor, adapters: RowAdapters | None, arguments: LinearTensors
    ) -> Tensor:
        return values * torch.sigmoid(self.product(read, arguments, adapters))


class SelfAttention:
    """A ``Mixer`` around attention."""

    block = "self_attn"

    def __init__(
        self, spec: SelfAttentionSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self._dtype = factory.dtype
        self._attention_dtype = attention_dtype
        own = own_heads(spec, factory.shard)
        self.heads, self.kv_heads = (heads.stop - heads.start for heads in own[:2])
        queries, keys = (times(heads, spec.head_dim) for heads in own[:2])
        self._own = own
        self._own_values = (queries, keys)
        width, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = {"q_proj": width, "k_proj": kv_size, "v_proj": kv_size}
        parts = {part: sizes[part] for part in spec.projected}
        ranges = {part: queries if part == "q_proj" else keys for part in parts}
        self.qkv = factory.make(parts, hidden_size * spec.qkv_inputs, spec.qkv_bias, "column", ranges)
        self.o = factory.make({"o_proj": hidden_size}, width, spec.o_bias, "row", {"o_proj": queries})
        gate = partial(
            factory.make, {"g_proj": width}, hidden_size, spec.qkv_bias, "column", {"g_proj": queries}
        )
        self.gate = gate() if spec.output_gate else None
        self.linears = (self.qkv, self.o) if self.gate is None else (self.qkv, self.gate, self.o)
        self.reads_again = spec.output_gate
        self._is_divided = factory.shard.size > 1

    @property
    def norms_whole_width(self) -> bool:
        """Whether q and k of all heads are normed together, so that workers have to add up their squares."""
        return self.spec.qk_norm == "whole width"

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

    def attend_weights(self, vectors: Vectors) -> Tensor | None:
        """float32 [heads]: a logit of each head that has no value, where the layer has some."""
        return vectors.get("sinks")

    def before_attention(self, context: LayerContext, read: Name) -> Program:
        spec, dim, vectors = self.spec, self.spec.head_dim, context.vectors
        qkv = context.activation(self.qkv.out_features)

        def weights() -> tuple[Tensor | None, ...]:
            table, axes = (None, None) if spec.rotary is None else context.rotary_table()
            return table, axes, vectors().get("q_norm"), vectors().get("k_norm")

        items: list[Piece | Seam] = [
            Piece(Project(self.qkv.product), (read, "adapters"), {"qkv": qkv}, lambda: (self.qkv.arguments,))
        ]
        q = TensorSpec((TOKENS, *self.output_shape), self._attention_dtype, qkv.device)
        if spec.shares_cache_of is not None:
            turn = RotateQueries(
                self.output_shape, self._attention_dtype, spec.qk_norm is not None, spec.qk_norm_eps
            )
            return [*items, Piece(turn, ("qkv", "positions"), {"q": q}, lambda: weights()[:3])]
        reads: tuple[Name, ...] = ("qkv", "positions", f"cache.{context.cache}")
        if self.norms_whole_width and self._is_divided:
            sizes = (self.heads * dim, self.kv_heads * dim, self.kv_heads * dim)
            wholes = (spec.heads * dim, spec.kv_heads * dim)
            squares = TensorSpec((TOKENS, 2), torch.float32, qkv.device)
            items.append(
                Piece(MeanSquares(sizes, wholes, self._own.is_first), ("qkv",), {"squares": squares})
            )
            items.append(Agree("squares", squares, largest=False))
            reads = (*reads, "squares")
        rotate = RotateAndStore(
            self.heads,
            self.kv_heads,
            dim,
            self._attention_dtype,
            spec.qk_norm,
            spec.qk_norm_eps,
            spec.query_scaling,
            spec.keys_are_values,
            spec.value_norm,
        )
        items.append(Piece(rotate, reads, {"q": q}, weights))
        return items

    def after_attention(self, context: LayerContext, read: Name) -> Program:
        width = context.activation(self.o.in_features)
        items: list[Piece | Seam] = []
        if agrees := self._is_divided and self.o.method.scales_tokens:
            largest = TensorSpec((TOKENS, 1), torch.float32, width.device)
            items.append(Agree("largest", largest, largest=True, source="o", code=Largest(self._dtype)))
        items.append(Piece(Flatten(self._dtype), ("o",), {"values": width}))
        if self.gate is not None:
            gate = self.gate
            code = GateOutput(gate.product)
            items.append(
                Piece(code, ("values", read, "adapters"), {"values": width}, lambda: (gate.arguments,))
            )
        items.append(projected(self.o, "values", context, agrees))
        return items
