"""What GGUF files say of models with states in a way of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layer_kinds(metadata: Mapping[str, Any], state: str) -> list[str] | None:
    """ "full_attention" or ``state`` for each layer, where KV heads are counted layer by layer: layers
    without any keep a state. None where one number stands for all layers."""
    kv_heads = metadata.get("attention.head_count_kv")
    return (
        ["full_attention" if heads else state for heads in kv_heads] if isinstance(kv_heads, list) else None
    )


def head_dim(metadata: Mapping[str, Any]) -> int | None:
    """Of the heads of a state, which are counted as llama.cpp counts time steps of Mamba."""
    inner, heads = metadata.get("ssm.inner_size"), metadata.get("ssm.time_step_rank")
    if not isinstance(inner, int) or not isinstance(heads, int) or heads < 1 or inner % heads:
        return None
    return inner // heads
