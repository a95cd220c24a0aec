"""The KV cache of a model on its device:
K and V of every layer, in blocks, and features where a model has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.device.buffers import to_device
from minivllm.device.memory import lazily_zeroed
from minivllm.errors import ConfigError
from minivllm.kv_cache.sizing import local_block_size
from minivllm.kv_cache.specs import GroupKind, GroupSpec
from minivllm.models.model import Model
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import CacheSpec, LayerCache, StateSpec, StateTensors
from minivllm.specs.layers import StateMixerSpec


def block_bytes(model: Model, block_size: int) -> int:
    """Memory of one block over all layers that attend [bytes]."""
    in_layers = sum(spec.bytes_per_token for spec in model.cache_specs if isinstance(spec, CacheSpec))
    return block_size * (in_layers + model.feature_size * model.dtype.itemsize)


def kv_groups(
    model: Model,
    block_size: int,
    max_model_len: int,
    *,
    draft: Model | None = None,
    is_shared: bool = False,
    may_drop: bool = True,
    one_size: bool = False,
    elsewhere: Sequence[AttentionSpec | StateMixerSpec] = (),
) -> list[GroupSpec]:
    """The KV groups of a model, not sized yet: one for all layers with the same window or chunk, full
    attention first, then the longest windows, and layers that keep a state behind them. Groups of a short
    window or chunk have smaller blocks, unless ``one_size`` is wanted.

    A window as long as a request can be is full attention. draft: keeps what it computes in the blocks of the
    first group. is_shared: a draft model does so, here or in another stage; the first group must then be one
    of full attention: without one among the layers, all of them form it. may_drop: False
    where attention reads whatever it likes, so that all layers form one group too. elsewhere: how layers
    attend that other stages of a pipeline have, so that all stages have the same groups; one without layers
    counts a byte.
    """
    of_token = {
        layer: spec.bytes_per_token
        for layer, spec in enumerate(model.cache_specs)
        if isinstance(spec, CacheSpec)
    }
    of_draft = 0 if draft is None else block_bytes(draft, block_size)
    layers: dict[tuple[GroupKind, int | None], list[int]] = {}
    for layer, attention in enumerate(model.attention_specs):
        if isinstance(attention, AttentionSpec):
            layers.setdefault(_kind_of(attention, max_model_len), []).append(layer)
    for attention in elsewhere:
        if isinstance(attention, AttentionSpec):
            layers.setdefault(_kind_of(attention, max_model_len), [])
    has_full = ("full attention", None) in layers
    if len(layers) == has_full or not may_drop or (is_shared and not has_full):
        layers = {("full attention", None): list(of_token)}
    groups: list[GroupSpec] = []
    for kind, reach in sorted(layers, key=lambda group: -(group[1] or max_model_len)):
        own, size = layers[kind, reach], local_block_size(block_size, None if one_size else reach)
        num_bytes = size * sum(of_token[layer] for layer in own) + (0 if groups else of_draft)
        groups.append(
            GroupSpec(
                kind=kind, reach=reach, layers=tuple(own), block_size=size, block_bytes=max(num_bytes, 1)
            )
        )
    states = {
        layer: spec.num_bytes for layer, spec in enumerate(model.cache_specs) if isinstance(spec, StateSpec)
    }
    if states or any(isinstance(spec, StateMixerSpec) for spec in elsewhere):
        num_bytes = max(sum(states.values()), 1)
        groups.append(
            GroupSpec(kind="state", layers=tuple(states), block_size=block_size, block_bytes=num_bytes)
        )
    return groups


def _kind_of(spec: AttentionSpec, max_model_len: int) -> tuple[GroupKind, int | None]:
    if spec.window is not None and spec.window < max_model_len:
        return "sliding window", spec.window
    if spec.chunk is not None and spec.chunk < max_model_len:
        return "chunked attention", spec.chunk
    return "full attention", None


def allocate_caches(
    model: Model,
    num_blocks: int | Sequence[int],
    block_size: int | Sequence[int],
    specs: Sequence[CacheSpec | StateSpec] | None = None,
) -> list[LayerCache | StateTensors]:
    """Zeroed K and V of every layer, two tensors each (V is empty where keys hold the values); in layers that
    keep one, the tensors of a state, and a slot more for what padding writes. num_blocks, block_size: of all
    layers, or of each. specs: those of the model with the layout that was chosen for them.

    Raises ConfigError if the memory cannot be had.
    """
    layers = len(model.cache_specs)
    counts, sizes = (
        [given] * layers if isinstance(given, int) else given for given in (num_blocks, block_size)
    )

    def allocate(count: int, size: int, spec: CacheSpec | StateSpec) -> LayerCache | StateTensors:
        if isinstance(spec, StateSpec):
            parts = zip(spec.shapes, spec.dtypes)
            return tuple(_zeros((count + 1, *shape), dtype, model.device) for shape, dtype in parts)
        shapes = spec.block_shapes(size)
        return LayerCache(*(_zeros((count, *shape), spec.dtype, model.device) for shape in shapes))

    try:
        return [allocate(*pool) for pool in zip(counts, sizes, specs or model.cache_specs, strict=True)]
    except (OSError, OverflowError, torch.OutOfMemoryError):
        num_tokens = max(count * size for count, size in zip(counts, sizes))
        raise too_large(max(counts), num_tokens * block_bytes(model, 1)) from None


def draft_input_bytes(model: Model) -> int:
    """What the updates of all states are given of one token [bytes]."""
    layers = zip(model.cache_specs, model.attention_specs)
    return sum(
        spec.widths[0] * cache.dtype.itemsize
        for cache, spec in layers
        if isinstance(cache, StateSpec) and isinstance(spec, StateMixerSpec)
    )


def allocate_draft_inputs(model: Model, num_drafts: int) -> list[tuple[Tensor, ...]]:
    """Room in every layer that keeps a state for what its update is given of so many drafts: one tensor
    [num_drafts, width]. None for other layers, and without drafts. Raises ConfigError if the memory cannot be
    had."""
    try:
        return [
            (_zeros((num_drafts, spec.widths[0]), cache.dtype, model.device),)
            if num_drafts and isinstance(cache, StateSpec) and isinstance(spec, StateMixerSpec)
            else ()
            for cache, spec in zip(model.cache_specs, model.attention_specs)
        ]
    except (OSError, OverflowError, torch.OutOfMemoryError):
        size = num_drafts * draft_input_bytes(model)
        raise ConfigError(
            f"The inputs of {num_drafts} drafts take {size / 2**30:.1f} GiB, which this machine does not "
            "have: lower max_num_seqs or num_speculative_tokens."
        ) from None


def too_large(num_blocks: int, num_bytes: int) -> ConfigError:
    """That there is no memory for so many blocks."""
    return ConfigError(
        f"The KV cache of {num_blocks} blocks takes {num_bytes / 2**30:.1f} GiB, which this machine does not "
        "have: "
        "lower kv_cache_memory_bytes or num_gpu_blocks_override."
    )


def allocate_features(model: Model, num_blocks: int, block_size: int) -> Tensor:
    """Zeroed features [num_blocks, block_size, feature_size] of a model that reads some."""
    return _zeros((num_blocks, block_size, model.feature_size), model.dtype, model.device)


def copy_blocks(tensors: Sequence[Tensor], sources: np.ndarray, targets: np.ndarray) -> None:
    """Copy blocks of caches [blocks, …] on one device, whatever their layout and dtype:
    sources, targets int64 [copies].

    All sources are read before any target is written, so a block may be both.
    """
    if not tensors:
        return
    source, target = (to_device(places, tensors[0].device) for places in (sources, targets))
    for tensor in tensors:
        if tensor.numel():
            # 8-bit floats cannot be indexed everywhere, bytes can.
            rows = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
            rows.index_copy_(0, target, rows.index_select(0, source))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return lazily_zeroed(shape, dtype)
