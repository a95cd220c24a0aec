"""The KV cache of a decoder on its device: K and V of every layer, in pages."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.models.decoder import Decoder, LayerCache
from minivllm.worker.memory import lazily_zeroed


def page_bytes(decoder: Decoder, page_size: int) -> int:
    """Memory of one page over all layers [bytes]."""
    element = torch.empty(0, dtype=decoder.attention_dtype).element_size()
    return 2 * decoder.config.num_layers * page_size * decoder.num_kv_heads * decoder.config.head_dim * element


def allocate_caches(decoder: Decoder, num_pages: int, page_size: int) -> list[LayerCache]:
    """Zeroed K and V of every layer, two tensors each."""
    shape = (num_pages, page_size, decoder.num_kv_heads, decoder.config.head_dim)
    dtype, device = decoder.attention_dtype, decoder.device

    def zeros() -> Tensor:
        if device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        return lazily_zeroed(shape, dtype)

    return [LayerCache(zeros(), zeros()) for _ in range(decoder.config.num_layers)]
