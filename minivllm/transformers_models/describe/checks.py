"""Checks of a configuration that transformers does not make, or whose errors are not written for users."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from minivllm.families.entries import MAX_HEAD_DIM, MAX_HEADS, MAX_POSITIONS, MAX_WIDTH, Entries
from minivllm.families.rotary import MAX_THETA

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_SIZES: Mapping[str, int] = {
    "num_attention_heads": MAX_HEADS,
    "num_key_value_heads": MAX_HEADS,
    "head_dim": MAX_HEAD_DIM,
    "intermediate_size": MAX_WIDTH,
    "moe_intermediate_size": MAX_WIDTH,
}
_REACHES: Mapping[str, str] = {
    "sliding_window": "sliding_attention",
    "attention_chunk_size": "chunked_attention",
}
"""Entries, and the layers that need them."""
_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def check_entries(entries: Mapping[str, Any], source: str) -> None:
    """Raises ModelError naming the file, the entry and the value.
    Entries that are left out, or are lists, stay transformers' business."""
    from transformers.activations import ACT2FN

    fields = Entries(entries, {}, source)
    for name, most in _SIZES.items():
        if isinstance(entries.get(name), int | float | str):
            fields.whole(name, 1, most)
    for name in _REACHES:
        if isinstance(entries.get(name), int | float | str):
            fields.whole(name, 0, MAX_POSITIONS)  # 0 stands for none where no layer needs it
    for name in _EPSILONS:
        fields.optional_number(name, 0.0, 1.0)
    for name in _ACTIVATIONS:
        value = entries.get(name)
        if isinstance(value, str) and value not in ACT2FN:
            raise fields.refuse(name, value, "must be an activation that transformers knows")
    heads, kv_heads = entries.get("num_attention_heads"), entries.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise fields.refuse("num_key_value_heads", kv_heads, f"must divide num_attention_heads {heads}")


def check_config(config: PretrainedConfig, source: str) -> None:
    """The same for what transformers made of the entries: the reach of layers, and rotary parameters."""
    kinds = getattr(config, "layer_types", None)
    for name, kind in _REACHES.items():
        value = getattr(config, name, None)
        is_used = (
            kind in kinds if kinds else value is not None and getattr(config, "use_sliding_window", True)
        )
        if is_used and not value:
            raise Entries({}, {}, source).refuse(
                name, value, f"must be at least 1, since there are layers of {kind}"
            )
    for given in rope_sets(getattr(config, "rope_parameters", None)):
        _check_rope(Entries(given, {}, source, "rope_parameters."), config)


def rope_sets(given: Any) -> Iterator[Mapping[str, Any]]:
    """The sets of rotary parameters: one, or one for every type of layer."""
    if isinstance(given, dict):
        by_type = [value for value in given.values() if isinstance(value, dict)]
        yield from by_type or [given]


def _check_rope(rope: Entries, config: PretrainedConfig) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind, known = rope.get("rope_type") or "default", {"default", *ROPE_INIT_FUNCTIONS}
    if kind not in known:
        raise rope.refuse("rope_type", kind, f"must be one of {', '.join(sorted(known))}")
    rope.optional_number("rope_theta", 0.0, MAX_THETA)
    for name in (
        "factor",
        "attention_factor",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
    ):
        if rope.get(name):  # 0 stands for the default
            rope.number(name)
    if kind == "longrope" and not hasattr(config, "qk_rope_head_dim"):
        heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", 0)
        head_dim = getattr(config, "head_dim", None) or (hidden // heads if heads else None)
        pairs = int((head_dim or 0) * (rope.get("partial_rotary_factor") or 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            listed = rope.get(name)
            if pairs and isinstance(listed, list) and len(listed) != pairs:
                raise rope.refuse(name, listed, f"must list {pairs} numbers, one for each pair of elements")
