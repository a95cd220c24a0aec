"""Qwen2 (with Qwen2.5) and Qwen3: biases of q, k and v; norms of the heads of q and k."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minivllm.models.entries.entries import MAX_POSITIONS, Entries
from minivllm.models.families.dense import dense
from minivllm.models.families.family import Family, defaults


def _windows(entries: Entries) -> Sequence[int | None]:
    """From layer ``max_window_layers`` on, or as ``layer_types`` says; none at all unless they are switched on."""
    num_layers = entries.num_layers
    window = entries.optional_whole("sliding_window", 1, MAX_POSITIONS) if entries.flag("use_sliding_window") else None
    types = entries.layer_types()
    if types is not None:
        return entries.windows_by_type(types, window)
    if window is None:
        return (None,) * num_layers
    first = entries.whole("max_window_layers", 0, 2**31)
    return tuple(window if layer >= first else None for layer in range(num_layers))


_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES = (
    Family(
        architecture="Qwen2ForCausalLM",  # Qwen2, Qwen2.5
        model_type="qwen2",
        gguf_architecture="qwen2",
        defaults=defaults(**_DEFAULTS),
        describe=partial(dense, qkv_bias="always", windows=_windows),
        has_windows=True,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf_architecture="qwen3",
        defaults=defaults(**_DEFAULTS, head_dim=128),
        describe=partial(
            dense, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="per head", windows=_windows
        ),
        has_windows=True,
    ),
)
