"""A whole forward pass in plain PyTorch:
what ``Decoder`` computes, without blocks, caches, regions or fused products.

Read this first. It is also the judge of the tests:
transformers gives the same in float32, and so does the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.experts.routing import route
from minivllm.models.reference.states import STATE_MIXERS
from minivllm.models.rotary import rotary_frequencies
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import (
    Activation,
    ClampedSwiglu,
    LatentSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    SelfAttentionSpec,
)

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [tokens, rotary dim / 2] of every position."""


def reference_forward(
    config: DecoderConfig,
    weights: Mapping[str, Tensor],
    token_ids: Sequence[int],
    max_model_len: int | None = None,
) -> Tensor:
    """Logits [tokens, vocab] of a text from its beginning, in the dtype of the weights.

    weights: by their names in the decoder, as ``iterate_weights`` gives them. max_model_len: what rotary
    embedding is scaled for, where that depends on it; the text's own length if it is None.
    """
    x = weights["model.embed_tokens.weight"][list(token_ids)] * config.embedding_scale
    rotations: list[Rotation] = []
    for rotary in config.rotary:
        frequencies = rotary_frequencies(rotary, max_model_len or len(x))
        angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies)
        cos, sin = ((f(angles) * rotary.attention_factor).to(x.dtype) for f in (torch.cos, torch.sin))
        rotations.append((cos, sin))
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        own = {
            name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)
        }
        x = reference_layer(layer, own, x, rotations)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    logits = norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ head.T * config.logits_scale
    cap = config.logits_soft_cap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def reference_layer(
    layer: LayerSpec, weights: Mapping[str, Tensor], x: Tensor, rotations: Sequence[Rotation]
) -> Tensor:
    """One decoder layer: x [tokens, hidden] -> the same shape. weights: by their names in the layer."""
    norms = layer.norms

    def normed(x: Tensor, name: str, eps: float) -> Tensor:
        """A norm, where the layer has one of this name."""
        return norm(x, weights[f"{name}.weight"], eps) if f"{name}.weight" in weights else x

    # The mixer: every token learns of those before it.
    h = normed(x, "input_layernorm", norms.eps)
    if isinstance(layer.mixer, SelfAttentionSpec):
        out = self_attention(h, layer.mixer, weights, rotations)
    elif isinstance(layer.mixer, LatentSpec):
        out = latent_attention(h, layer.mixer, weights, rotations)
    else:
        out = STATE_MIXERS[type(layer.mixer)](h, layer.mixer, weights)
    x = x + normed(out, "post_self_attn_layernorm", norms.after_eps)

    # MLP: every token by itself.
    h = normed(x, "post_attention_layernorm", norms.eps)
    out = (
        mixture(h, layer.mlp, weights)
        if isinstance(layer.mlp, MoeSpec)
        else mlp(h, layer.mlp, "mlp", weights)
    )
    return x + normed(out, "post_mlp_layernorm", norms.after_eps)


def self_attention(
    x: Tensor, spec: SelfAttentionSpec, weights: Mapping[str, Tensor], rotations: Sequence[Rotation]
) -> Tensor:
    """Attention with its projections, head by head: x [tokens, hidden] -> the same shape."""

    def project(x: Tensor, part: str) -> Tensor:
        return F.linear(
            x, weights[f"self_attn.{part}_proj.weight"], weights.get(f"self_attn.{part}_proj.bias")
        )

    def normed(x: Tensor, part: str) -> Tensor:
        return norm(x, weights[f"self_attn.{part}_norm.weight"], spec.qk_norm_eps)

    q, k, v = (project(x, part) for part in "qkv")
    if spec.qk_norm == "whole width":
        q, k = normed(q, "q"), normed(k, "k")
    q, k, v = (y.unflatten(-1, (-1, spec.head_dim)) for y in (q, k, v))
    if spec.qk_norm == "per head":
        q, k = normed(q, "q"), normed(k, "k")
    if spec.rotary is not None:
        q, k = rotate(q, *rotations[spec.rotary]), rotate(k, *rotations[spec.rotary])
    if spec.query_scaling is not None:
        steps = torch.arange(len(x)) // spec.query_scaling.interval
        q = q * (1 + spec.query_scaling.beta * torch.log1p(steps.to(q.dtype)))[:, None, None]
    o = attention(q, k, v, spec.attend, weights.get("self_attn.sinks"))
    o = o.flatten(1)
    if spec.output_gate:
        o = o * torch.sigmoid(project(x, "g"))
    return project(o, "o")


def latent_attention(
    x: Tensor, spec: LatentSpec, weights: Mapping[str, Tensor], rotations: Sequence[Rotation]
) -> Tensor:
    """The same where queries, keys and values are made of latents:
    each head has keys and values of its own here."""

    def project(x: Tensor, part: str) -> Tensor:
        return F.linear(x, weights[f"self_attn.{part}.weight"], weights.get(f"self_attn.{part}.bias"))

    def normed(x: Tensor, name: str) -> Tensor:
        name = f"self_attn.{name}.weight"
        return norm(x, weights[name], spec.norm_eps) if name in weights else x

    if spec.query_rank is None:
        q = project(x, "q_proj")
    else:
        q = project(normed(project(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj")
    q_nope, q = q.unflatten(-1, (spec.heads, -1)).split([spec.nope_dim, spec.rope_dim], dim=-1)
    latent, k = project(x, "kv_a_proj_with_mqa").split([spec.kv_rank, spec.rope_dim], dim=-1)
    made = project(normed(latent, "kv_a_layernorm"), "kv_b_proj").unflatten(-1, (spec.heads, -1))
    k_nope, v = made.split([spec.nope_dim, spec.value_dim], dim=-1)
    turn = rotate_pairs if spec.interleaved else rotate
    q, k = (
        turn(q, *rotations[spec.rotary]),
        turn(k[:, None], *rotations[spec.rotary]).expand(-1, spec.heads, -1),
    )
    o = attention(torch.cat([q_nope, q], dim=-1), torch.cat([k_nope, k], dim=-1), v, spec.attend, None)
    return project(o.flatten(1), "o_proj")


def mlp(x: Tensor, spec: MlpSpec | MoeSpec, name: str, weights: Mapping[str, Tensor]) -> Tensor:
    """A gated MLP (Shazeer 2020): x [tokens, hidden] -> the same shape. name: of its block in the layer."""

    def project(x: Tensor, part: str) -> Tensor:
        return F.linear(x, weights[f"{name}.{part}.weight"], weights.get(f"{name}.{part}.bias"))

    gate, up = project(x, "gate_proj"), project(x, "up_proj")
    if isinstance(spec.activation, ClampedSwiglu):
        gate, up = (
            gate.clamp(max=spec.activation.limit),
            up.clamp(-spec.activation.limit, spec.activation.limit),
        )
        return project((up + 1) * gate * torch.sigmoid(spec.activation.alpha * gate), "down_proj")
    return project(activate(gate, spec.activation) * up, "down_proj")


def mixture(x: Tensor, spec: MoeSpec, weights: Mapping[str, Tensor]) -> Tensor:
    """Every token asks its own experts, and adds up what they say."""
    logits = F.linear(x, weights["mlp.gate.weight"], weights.get("mlp.gate.bias"))
    chosen, factors = route(logits, spec.routing, weights.get("mlp.gate.e_score_correction_bias"))
    rows = [
        sum(factor * mlp(row, spec, f"mlp.experts.{expert}", weights) for expert, factor in zip(experts, own))
        for row, experts, own in zip(x, chosen.tolist(), factors)
    ]
    out = torch.stack(rows)
    if spec.shared is None:
        return out
    shared = mlp(x, spec.shared, "mlp.shared_expert", weights)
    if spec.shared_gate:
        shared = shared * torch.sigmoid(F.linear(x, weights["mlp.shared_expert_gate.weight"]))
    return out + shared


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """q [tokens, heads, head_dim]; k, v [tokens, kv_heads, …] -> o [tokens, heads, size of v]. sinks [heads]:
    logits of keys that every query sees and that have no value."""
    k, v = (
        y.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for y in (k, v)
    )  # a KV head serves several of q
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    query, key = torch.arange(len(q))[:, None], torch.arange(len(q))
    window, chunk = spec.window or len(q), spec.chunk or len(q)
    is_seen = (key <= query) & (key > query - window) & (key // chunk == query // chunk)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(q)], v)


def activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding (Su et al. 2021) of x [tokens, heads, head_dim]:
    element i turns with element i + half."""
    half = cos.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same, but element 2i turns with element 2i + 1."""
    a, b, cos, sin = x[..., 0::2], x[..., 1::2], cos[:, None], sin[:, None]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
