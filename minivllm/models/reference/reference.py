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
    NORMS_BESIDE_EXPERTS,
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
KeysAndValues = tuple[Tensor, Tensor]
"""Of one layer, [tokens, kv_heads, head_dim] each."""


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
    if config.placeholder_ids:
        other = config.placeholder_text_id
        token_ids = [other if token in config.placeholder_ids else token for token in token_ids]
    x = weights["model.embed_tokens.weight"][list(token_ids)] * config.embedding_scale
    rotations: list[Rotation] = []
    for rotary in config.rotary:
        frequencies = rotary_frequencies(rotary, max_model_len or len(x))
        angles = torch.outer(torch.arange(len(x), dtype=torch.float64), frequencies)
        cos, sin = ((f(angles) * rotary.attention_factor).to(x.dtype) for f in (torch.cos, torch.sin))
        rotations.append((cos, sin))
    values = None if config.per_layer is None else per_layer_values(config, weights, x, token_ids)
    kept: dict[int, KeysAndValues | None] = {}
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}."
        own = {
            name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)
        }
        shared = None if layer.shares_cache_of is None else kept[layer.shares_cache_of]
        x, kept[index] = reference_layer(
            layer, own, x, rotations, shared, None if values is None else values[:, index]
        )
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    logits = norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ head.T * config.logits_scale
    cap = config.logits_soft_cap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def reference_layer(
    layer: LayerSpec,
    weights: Mapping[str, Tensor],
    x: Tensor,
    rotations: Sequence[Rotation],
    shared: KeysAndValues | None = None,
    values: Tensor | None = None,
) -> tuple[Tensor, KeysAndValues | None]:
    """One decoder layer: x [tokens, hidden] -> the same shape, and the keys and values that it has read.

    weights: by their names in the layer. shared: keys and values of an earlier layer, which this one reads.
    values: the layer's embeddings [tokens, width].
    """
    norms, kept = layer.norms, shared

    def normed(x: Tensor, name: str, eps: float) -> Tensor:
        """A norm, where the layer has one of this name."""
        return norm(x, weights[f"{name}.weight"], eps) if f"{name}.weight" in weights else x

    # The mixer: every token learns of those before it.
    h = normed(x, "input_layernorm", norms.eps)
    if isinstance(layer.mixer, SelfAttentionSpec):
        out, kept = self_attention(h, layer.mixer, weights, rotations, shared)
    elif isinstance(layer.mixer, LatentSpec):
        out = latent_attention(h, layer.mixer, weights, rotations)
    else:
        out = STATE_MIXERS[type(layer.mixer)](h, layer.mixer, weights)
    x = x + normed(out, "post_self_attn_layernorm", norms.after_eps)

    # MLP: every token by itself.
    h = normed(x, "post_attention_layernorm", norms.eps)
    if not isinstance(layer.mlp, MoeSpec):
        out = mlp(h, layer.mlp, "mlp", weights)
    elif layer.mlp.beside is None:
        out = mixture(h, layer.mlp, weights)
    else:
        out = mlp(h, layer.mlp.beside, "mlp", weights)
        before, after_mlp, after = NORMS_BESIDE_EXPERTS
        eps = layer.mlp.norm_eps
        experts = mixture(normed(x, before, eps), layer.mlp, weights, reads=norm(x, 1.0, eps))
        out = normed(out, after_mlp, eps) + normed(experts, after, eps)
    x = x + normed(out, "post_mlp_layernorm", norms.after_eps)

    if layer.per_layer is not None and values is not None:
        gate = activate(F.linear(x, weights["per_layer_input_gate.weight"]), layer.per_layer.activation)
        out = F.linear(gate * values, weights["per_layer_projection.weight"])
        x = x + normed(out, "post_per_layer_input_norm", layer.per_layer.norm_eps)
    return x * weights["output_scale.weight"] if layer.output_scale else x, kept


def per_layer_values(
    config: DecoderConfig, weights: Mapping[str, Tensor], x: Tensor, token_ids: Sequence[int]
) -> Tensor:
    """Embeddings of a text for every layer [tokens, layers, width]. x: the model's input [tokens, hidden]."""
    assert config.per_layer is not None
    width = config.per_layer.width
    of_tokens = weights["model.embed_tokens_per_layer.weight"][list(token_ids)] * width**0.5
    made = F.linear(x, weights["model.per_layer_model_projection.weight"]) * config.hidden_size**-0.5
    scale, eps = weights["model.per_layer_projection_norm.weight"], config.per_layer.norm_eps
    made = norm(made.unflatten(-1, (-1, width)), scale, eps)
    return (made + of_tokens.unflatten(-1, (-1, width))) * 2**-0.5


def self_attention(
    x: Tensor,
    spec: SelfAttentionSpec,
    weights: Mapping[str, Tensor],
    rotations: Sequence[Rotation],
    shared: KeysAndValues | None = None,
) -> tuple[Tensor, KeysAndValues]:
    """Attention with its projections, head by head: x [tokens, hidden] -> the same shape, and its keys and
    values. shared: those of an earlier layer, which are read in place of its own."""

    def project(x: Tensor, part: str) -> Tensor:
        return F.linear(
            x, weights[f"self_attn.{part}_proj.weight"], weights.get(f"self_attn.{part}_proj.bias")
        )

    def normed(x: Tensor, part: str) -> Tensor:
        return norm(x, weights[f"self_attn.{part}_norm.weight"], spec.qk_norm_eps)

    def turned(x: Tensor, part: str) -> Tensor:
        """Heads of q or k, normed and rotated."""
        x = normed(x, part) if spec.qk_norm == "whole width" else x
        x = x.unflatten(-1, (-1, spec.head_dim))
        x = normed(x, part) if spec.qk_norm == "per head" else x
        return x if spec.rotary is None else rotate(x, *rotations[spec.rotary])

    q = turned(project(x, "q"), "q")
    if shared is None:
        k = project(x, "k")
        v = k if spec.keys_are_values else project(x, "v")
        k, v = turned(k, "k"), v.unflatten(-1, (-1, spec.head_dim))
        v = norm(v, 1.0, spec.qk_norm_eps) if spec.value_norm else v
    else:
        k, v = shared
    if spec.query_scaling is not None:
        steps = torch.arange(len(x)) // spec.query_scaling.interval
        q = q * (1 + spec.query_scaling.beta * torch.log1p(steps.to(q.dtype)))[:, None, None]
    o = attention(q, k, v, spec.attend, weights.get("self_attn.sinks"))
    o = o.flatten(1)
    if spec.output_gate:
        o = o * torch.sigmoid(project(x, "g"))
    return project(o, "o"), (k, v)


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


def mixture(x: Tensor, spec: MoeSpec, weights: Mapping[str, Tensor], reads: Tensor | None = None) -> Tensor:
    """Every token asks its own experts, and adds up what they say. reads: what the router reads in place of
    x."""
    if reads is None:
        reads = x
    if "mlp.scale" in weights:
        reads = reads * weights["mlp.scale"] * x.shape[-1] ** -0.5
    logits = F.linear(reads, weights["mlp.gate.weight"], weights.get("mlp.gate.bias"))
    chosen, factors = route(logits, spec.routing, weights.get("mlp.gate.e_score_correction_bias"))
    if "mlp.per_expert_scale" in weights:
        factors = factors * weights["mlp.per_expert_scale"][chosen]
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


def norm(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
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
