"""What a step must at least read and compute: the bytes and operations behind the roofline (Williams et al. 2009)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_iter

from minivllm.batch.layer_caches import block_bytes
from minivllm.models.decoder import Decoder
from minivllm.models.decoder_config import DecoderConfig


def tensor_bytes(tensors: Any) -> int:
    """Bytes of all tensors in a nested structure, each once; packed weights at the size of their elements."""
    unique = {id(tensor): tensor for tensor in tree_iter(tensors) if isinstance(tensor, torch.Tensor)}
    return sum(tensor.numel() * tensor.element_size() for tensor in unique.values())


def weight_bytes(decoder: Decoder) -> int:
    """What every step reads of the weights [bytes]: all of them but the embedding, of which a few rows are read."""
    return tensor_bytes([decoder._weights, decoder.final_norm, decoder.head.tensors])


def kv_bytes_per_token(decoder: Decoder) -> int:
    """K and V of one token over all layers [bytes]."""
    return block_bytes(decoder, 1)


def kv_tokens_read(config: DecoderConfig, context: float) -> float:
    """Tokens of KV that one decoding request reads per layer, on average over layers: windows cut them."""
    seen = [context if window is None else min(context, window) for window in config.layer_windows]
    return sum(seen) / len(seen)


def prefill_flops(config: DecoderConfig, tokens: int) -> float:
    """Operations to compute a prompt and the logits of its last token: two per weight and token, and attention.

    After the attention of the last layer only the last token is still needed.
    """
    heads, kv_heads, dim, hidden = config.num_heads, config.num_kv_heads, config.head_dim, config.hidden_size
    before_attention = hidden * (heads + 2 * kv_heads) * dim
    after_attention = heads * dim * hidden + 3 * hidden * config.intermediate_size
    tokens_after = tokens * (config.num_layers - 1) + 1
    products = 2.0 * tokens * config.num_layers * before_attention
    products += 2.0 * tokens_after * after_attention + 2.0 * hidden * config.vocab_size
    attention = 0.0
    for window in config.layer_windows:
        reach = tokens if window is None else min(window, tokens)
        # Query i sees min(i, reach) keys; each costs a product with K and one with V.
        keys = reach * (reach + 1) / 2 + (tokens - reach) * reach
        attention += 4.0 * heads * dim * keys
    return products + attention
