"""The KV cache of a model on its device: K and V of every layer, in blocks, and features where a model has them."""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.device.memory import lazily_zeroed
from minivllm.errors import ConfigError
from minivllm.models.model import LayerCache, Model


def block_bytes(model: Model, block_size: int) -> int:
    """Memory of one block over all layers [bytes]."""
    in_layers = sum(2 * spec.kv_heads * spec.head_dim * spec.dtype.itemsize for spec in model.cache_specs)
    return block_size * (in_layers + model.feature_size * model.dtype.itemsize)


def allocate_caches(model: Model, num_blocks: int, block_size: int) -> list[LayerCache]:
    """Zeroed K and V of every layer, two tensors each. Raises ConfigError if the memory cannot be had."""

    def zeros(kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        return _zeros((num_blocks, block_size, kv_heads, head_dim), dtype, model.device)

    try:
        return [LayerCache(zeros(*spec), zeros(*spec)) for spec in model.cache_specs]
    except (OSError, OverflowError, torch.OutOfMemoryError):
        raise too_large(model, num_blocks, block_size) from None


def too_large(model: Model, num_blocks: int, block_size: int) -> ConfigError:
    """That there is no memory for so many blocks."""
    size = num_blocks * block_bytes(model, block_size)
    return ConfigError(
        f"The KV cache of {num_blocks} blocks takes {size / 2**30:.1f} GiB, which this machine does not have: "
        "lower kv_cache_memory_bytes or num_gpu_blocks_override."
    )


def allocate_features(model: Model, num_blocks: int, block_size: int) -> Tensor:
    """Zeroed features [num_blocks, block_size, feature_size] of a model that reads some."""
    return _zeros((num_blocks, block_size, model.feature_size), model.dtype, model.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device) if device.type != "cpu" else lazily_zeroed(shape, dtype)
