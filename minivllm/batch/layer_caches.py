"""The KV cache of a decoder on its device: K and V of every layer, in blocks, and features where a decoder has them."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.device.memory import lazily_zeroed
from minivllm.errors import ConfigError
from minivllm.models.decoder import Decoder, LayerCache


def block_bytes(decoder: Decoder, block_size: int) -> int:
    """Memory of one block over all layers [bytes]."""
    element = torch.empty(0, dtype=decoder.cache_dtype).element_size()
    values = 2 * decoder.config.num_layers * decoder.num_kv_heads * decoder.config.head_dim
    return block_size * (values * element + decoder.feature_size * decoder.dtype.itemsize)


def allocate_caches(decoder: Decoder, num_blocks: int, block_size: int) -> list[LayerCache]:
    """Zeroed K and V of every layer, two tensors each. Raises ConfigError if the memory cannot be had."""
    shape = (num_blocks, block_size, decoder.num_kv_heads, decoder.config.head_dim)

    def zeros() -> Tensor:
        return _zeros(shape, decoder.cache_dtype, decoder.device)

    try:
        return [LayerCache(zeros(), zeros()) for _ in range(decoder.config.num_layers)]
    except (OSError, OverflowError, torch.OutOfMemoryError):
        raise too_large(decoder, num_blocks, block_size) from None


def too_large(decoder: Decoder, num_blocks: int, block_size: int) -> ConfigError:
    """That there is no memory for so many blocks."""
    size = num_blocks * block_bytes(decoder, block_size)
    return ConfigError(
        f"The KV cache of {num_blocks} blocks takes {size / 2**30:.1f} GiB, which this machine does not have: "
        "lower kv_cache_memory_bytes or num_gpu_blocks_override."
    )


def allocate_features(decoder: Decoder, num_blocks: int, block_size: int) -> Tensor:
    """Zeroed features [num_blocks, block_size, feature_size] of a decoder that reads some."""
    return _zeros((num_blocks, block_size, decoder.feature_size), decoder.dtype, decoder.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if device.type != "cpu" else lazily_zeroed(shape, dtype)
