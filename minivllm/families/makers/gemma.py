"""Gemma 2 and Gemma 3: norms before and after both sublayers, scaled embeddings, windows that alternate with
full attention; Gemma 2 caps scores and logits, Gemma 3 rotates by two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from minivllm.families.dense import Description, dense
from minivllm.families.entries import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Entries
from minivllm.families.family import IMAGE_PARTS, TEXT_PREFIXES, Family, defaults, text_part
from minivllm.families.rotary import read_rotary_by_type
from minivllm.specs.attention import RotaryConfig

_RENAMED = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


def _types(entries: Entries) -> list[str]:
    """Every so many layers one attends to everything."""
    pattern = entries.whole("sliding_window_pattern", 1, MAX_LAYERS)
    layers = range(entries.num_layers)
    return entries.layer_types() or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in layers
    ]


def _windows(entries: Entries) -> Sequence[int | None]:
    return entries.windows_by_type(
        _types(entries), entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
    )


def _two_tables(entries: Entries, head_dim: int) -> tuple[RotaryConfig, ...]:
    thetas = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    return tuple(read_rotary_by_type(entries, kind, theta, head_dim) for kind, theta in thetas.items())


def _table_by_type(entries: Entries) -> Sequence[int | None]:
    return tuple(1 if kind == "sliding_attention" else 0 for kind in _types(entries))


_gemma = partial(
    dense,
    activation="hidden_activation",
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    norms="both",
    windows=_windows,
)
_gemma3 = partial(_gemma, qk_norm="per head", rotary=_two_tables, tables=_table_by_type)


def _describe(layers: Callable[[Entries], Description], entries: Entries) -> Description:
    if entries.get("use_bidirectional_attention"):
        raise entries.refuse(
            "use_bidirectional_attention", True, "must be false: every token sees only those before it"
        )
    scale = entries.number("query_pre_attn_scalar") ** -0.5
    soft_cap = entries.optional_number("attn_logit_softcapping")
    return replace(
        layers(entries).attending(scale=scale, soft_cap=soft_cap),
        embedding_scale=entries.whole("hidden_size", 1, MAX_WIDTH) ** 0.5,
        logits_soft_cap=entries.optional_number("final_logit_softcapping"),
    )


def _describe_with_images(entries: Entries) -> Description:
    return _describe(_gemma3, entries).looking_ahead()


def _from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any], *, largest: int) -> dict[str, Any]:
    """largest: layers of the one published model whose scale is that of heads of hidden_size / heads
    elements."""
    scalar = entries["head_dim"]
    if entries["num_hidden_layers"] == largest:
        scalar = entries["hidden_size"] / entries["num_attention_heads"]
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {"query_pre_attn_scalar": scalar, **{name: metadata[name] for name in names if name in metadata}}


def _gemma3_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """What stretches the context stretches it in layers of full attention only."""
    local = (
        {"rope_local_base_freq": metadata["rope.freq_base_swa"]} if "rope.freq_base_swa" in metadata else {}
    )
    rope = {"rope_scaling": entries["rope_parameters"], "rope_parameters": None}
    return {**_from_gguf(metadata, entries, largest=62), **rope, **local}


_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    gguf_architecture="gemma2",
    defaults=defaults(
        **_DEFAULTS,
        vocab_size=256000,
        max_position_embeddings=8192,
        sliding_window_pattern=2,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    ),
    describe=partial(_describe, _gemma),
    has_windows=True,
    renamed=_RENAMED,
    norm_offset=1.0,
    from_gguf=partial(_from_gguf, largest=46),
)
_GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    gguf_architecture="gemma3",
    defaults=defaults(
        **_DEFAULTS,
        vocab_size=262208,
        max_position_embeddings=131072,
        sliding_window_pattern=6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
    ),
    describe=partial(_describe, _gemma3),
    has_windows=True,
    renamed=_RENAMED,
    norm_offset=1.0,
    from_gguf=_gemma3_from_gguf,
)
_GEMMA3_IMAGES = replace(
    _GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    gguf_architecture=None,  # its text part is published as "gemma3"
    describe=_describe_with_images,
    rewrite_config=text_part,
    prefixes=TEXT_PREFIXES,
    left_out=IMAGE_PARTS,
)
FAMILIES = (_GEMMA2, _GEMMA3, _GEMMA3_IMAGES)
