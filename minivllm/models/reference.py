"""A whole forward pass in plain PyTorch: what ``Decoder`` computes, without blocks, caches, regions or fused products.

Read this first. It is also the judge of the tests: transformers gives the same in float32, and so does the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.models.decoder import rotary_frequencies
from minivllm.models.decoder_config import DecoderConfig


def reference_forward(
    config: DecoderConfig, weights: Mapping[str, Tensor], token_ids: Sequence[int], max_model_len: int | None = None
) -> Tensor:
    """Logits [tokens, vocab] of a text from its beginning, in the dtype of the weights.

    weights: by their Hugging Face names, as ``iterate_weights`` gives them. max_model_len: what "dynamic" rotary
    embedding is scaled for; the text's own length if it is None.
    """
    x = weights["model.embed_tokens.weight"][list(token_ids)]
    positions = torch.arange(len(x), dtype=torch.float64)
    angles = torch.outer(positions, rotary_frequencies(config.rotary, max_model_len or len(x)))
    for layer in range(config.num_layers):
        x = reference_layer(config, weights, layer, x, angles)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return norm(x, weights["model.norm.weight"], config.rms_norm_eps) @ head.T


def reference_layer(
    config: DecoderConfig, weights: Mapping[str, Tensor], layer: int, x: Tensor, angles: Tensor
) -> Tensor:
    """One decoder layer: x [tokens, hidden] -> the same shape. angles float64 [tokens, rotary dim / 2]."""
    name, eps = f"model.layers.{layer}.", config.rms_norm_eps

    def project(x: Tensor, part: str) -> Tensor:
        return F.linear(x, weights[f"{name}{part}.weight"], weights.get(f"{name}{part}.bias"))

    # Attention: every token asks those before it, head by head.
    h = norm(x, weights[f"{name}input_layernorm.weight"], eps)
    q, k, v = (project(h, f"self_attn.{part}_proj").unflatten(-1, (-1, config.head_dim)) for part in "qkv")
    if config.qk_norm:
        q, k = (norm(y, weights[f"{name}self_attn.{part}_norm.weight"], eps) for y, part in ((q, "q"), (k, "k")))
    if config.layer_rotary[layer]:
        q, k = (rotate(y, angles, config.rotary.attention_factor) for y in (q, k))
    k, v = (y.repeat_interleave(config.query_group, dim=1) for y in (k, v))  # a KV head serves several query heads
    scores = torch.einsum("qhd,khd->hqk", q, k) * config.softmax_scale
    distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
    window = config.layer_windows[layer] or len(x)
    scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
    o = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    x = x + project(o.flatten(1), "self_attn.o_proj")

    # MLP: every token by itself.
    h = norm(x, weights[f"{name}post_attention_layernorm.weight"], eps)
    gate = project(h, "mlp.gate_proj")
    if config.hidden_act == "silu":
        gate = F.silu(gate)
    else:
        gate = F.gelu(gate, approximate="none" if config.hidden_act == "gelu" else "tanh")
    return x + project(gate * project(h, "mlp.up_proj"), "mlp.down_proj")


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich 2019)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, angles: Tensor, factor: float) -> Tensor:
    """Rotary embedding (Su et al. 2021) of x [tokens, heads, head_dim]: element i turns with element i + half."""
    cos, sin = ((f(angles) * factor).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
    half = angles.shape[1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
