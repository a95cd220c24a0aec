"""Gemma 4: norms and windows as in Gemma 3, and larger heads in layers with full attention.

E2B and E4B have per-layer embeddings, and their last layers read keys and values of earlier ones. 26B-A4B and
31B use keys as values in layers with full attention; 26B-A4B has experts in parallel with the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from kernels_triton_free.experts.routing import Routing
from minivllm.families.dense import Description
from minivllm.families.entries import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
    MAX_WIDTH,
    Entries,
)
from minivllm.families.experts import experts_from_gguf, experts_of
from minivllm.families.family import IMAGE_PARTS, TEXT_PREFIXES, Family, defaults, text_part
from minivllm.families.rotary import read_rotary_set
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import (
    FeedForwardSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    PerLayerSpec,
    SelfAttentionSpec,
)

_TYPES = ("full_attention", "sliding_attention")
"""Types of layers, in the order of their rotary tables."""
_ROTARY: Mapping[str, Mapping[str, Any]] = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


_KEYS_IN_GGUF = ("attn_k", "attn_v", "attn_k_norm")


class _Heads(NamedTuple):
    """Of layers of one type."""

    kv_heads: int
    head_dim: int


def _types(entries: Entries) -> list[str]:
    """Every sixth layer attends to everything, if they are not listed. The last one always does."""
    types = entries.layer_types(_TYPES) or [
        "sliding_attention" if (layer + 1) % 6 else "full_attention" for layer in range(entries.num_layers)
    ]
    return [*types[:-1], "full_attention"]


def _heads(entries: Entries, types: Sequence[str]) -> Mapping[str, _Heads]:
    """KV heads and head_dim of both types of layers. For full attention they stand in ``per_layer_config``,
    or, in published checkpoints, in ``global_head_dim`` and ``num_global_key_value_heads``."""
    _, kv_heads, head_dim = entries.heads()
    own = {"head_dim": entries.get("global_head_dim")}
    if entries.flag("attention_k_eq_v"):
        own["num_key_value_heads"] = entries.get("num_global_key_value_heads")
    listed = entries.get("per_layer_config")
    if listed is not None:
        own = _listed(entries, listed, [layer for layer, kind in enumerate(types) if kind == _TYPES[0]])
    given = {name: value for name, value in own.items() if value is not None}
    full = Entries(
        given, {"head_dim": head_dim, "num_key_value_heads": kv_heads}, entries.source, "full_attention."
    )
    whole = _Heads(full.whole("num_key_value_heads", 1, MAX_HEADS), full.whole("head_dim", 1, MAX_HEAD_DIM))
    heads = entries.whole("num_attention_heads", 1, MAX_HEADS)
    if heads % whole.kv_heads:
        raise full.refuse("num_key_value_heads", whole.kv_heads, f"must divide num_attention_heads {heads}")
    return {"full_attention": whole, "sliding_attention": _Heads(kv_heads, head_dim)}


def _listed(entries: Entries, listed: Any, layers: Sequence[int]) -> dict[str, Any]:
    """Entries of ``per_layer_config`` for full attention. Raises ModelError unless it names these layers, no
    others, and the same values for all."""
    rule = "must name the layers of full attention, with the same head_dim and num_key_value_heads for all"
    if not isinstance(listed, Mapping) or {str(key) for key in listed} != {str(layer) for layer in layers}:
        raise entries.refuse("per_layer_config", listed, rule)
    first, *others = listed.values()
    if not isinstance(first, Mapping) or any(other != first for other in others):
        raise entries.refuse("per_layer_config", listed, rule)
    if not set(first) <= {"head_dim", "num_key_value_heads"}:
        raise entries.refuse("per_layer_config", listed, rule)
    return dict(first)


def _shared(entries: Entries, types: Sequence[str]) -> list[int | None]:
    """For each layer the one that it reads keys and values from, or None. The last layers read those of the
    last layer of their type that computes any."""
    first = len(types) - entries.whole("num_kv_shared_layers", 0, len(types))
    found: list[int | None] = [None] * first
    for kind in types[first:]:
        before = [layer for layer in range(first) if types[layer] == kind]
        if not before:
            count = entries.get("num_kv_shared_layers")
            raise entries.refuse("num_kv_shared_layers", count, f"must leave a layer of {kind} to read from")
        found.append(before[-1])
    return found


def _experts(entries: Entries, mlp: MlpSpec, eps: float) -> MoeSpec:
    """Experts in parallel with the MLP."""
    named = Entries(
        {**entries.entries, "num_experts_per_tok": entries.get("top_k_experts")}, {}, entries.source
    )
    num_experts, top_k = experts_of(named)
    return MoeSpec(
        num_experts=num_experts,
        inner=entries.whole("moe_intermediate_size", 1, MAX_WIDTH),
        routing=Routing(top_k=top_k, normalized=True),
        activation=mlp.activation,
        beside=mlp,
        norm_eps=eps,
    )


def _per_layer(entries: Entries, eps: float) -> PerLayerSpec | None:
    width = entries.whole("hidden_size_per_layer_input", 0, MAX_WIDTH)
    if width == 0:
        return None
    vocab_size = entries.whole("vocab_size", 1, MAX_VOCAB_SIZE)
    if (rows := entries.whole("vocab_size_per_layer_input", 1, MAX_VOCAB_SIZE)) != vocab_size:
        raise entries.refuse("vocab_size_per_layer_input", rows, f"must be vocab_size, which is {vocab_size}")
    return PerLayerSpec(width=width, activation=entries.activation("hidden_activation"), norm_eps=eps)


_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


def _text_part(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's entries, and the placeholder tokens of images, videos and audio."""
    ids = {name: entries[name] for name in _PLACEHOLDERS if entries.get(name) is not None}
    return {**text_part(entries), **ids}


def _describe(entries: Entries) -> Description:
    ahead = entries.get("use_bidirectional_attention")
    if ahead not in (None, "vision"):
        rule = 'must be null or "vision": every token of a text sees only those before it'
        raise entries.refuse("use_bidirectional_attention", ahead, rule)
    types, eps = _types(entries), entries.norm_eps
    heads, shared = _heads(entries, types), _shared(entries, types)
    windows = entries.windows_by_type(types, entries.optional_whole("sliding_window", 1, MAX_POSITIONS))
    inner, wide = entries.whole("intermediate_size", 1, MAX_WIDTH), entries.flag("use_double_wide_mlp")
    per_layer, bias = _per_layer(entries, eps), entries.flag("attention_bias")
    vocab_size = entries.whole("vocab_size", 1, MAX_VOCAB_SIZE)

    def feed_forward(is_shared: bool) -> FeedForwardSpec:
        mlp = MlpSpec(
            inner=inner * (2 if wide and is_shared else 1), activation=entries.activation("hidden_activation")
        )
        return _experts(entries, mlp, eps) if entries.flag("enable_moe_block") else mlp

    def layer(kind: str, window: int | None, source: int | None) -> LayerSpec:
        is_full = kind == "full_attention"
        return LayerSpec(
            mixer=SelfAttentionSpec(
                heads=entries.whole("num_attention_heads", 1, MAX_HEADS),
                kv_heads=heads[kind].kv_heads,
                head_dim=heads[kind].head_dim,
                attend=AttentionSpec(window, 1.0, looks_ahead=ahead is not None and not is_full),
                rotary=_TYPES.index(kind),
                qk_norm="per head",
                qk_norm_eps=eps,
                qkv_bias=bias,
                o_bias=bias,
                value_norm=True,
                keys_are_values=is_full and entries.flag("attention_k_eq_v"),
                shares_cache_of=source,
            ),
            mlp=feed_forward(source is not None),
            norms=NormSpec(place="both", eps=eps, after_eps=eps),
            per_layer=per_layer,
            output_scale=True,
        )

    given = entries.entries.get("rope_parameters") or _ROTARY
    if not isinstance(given, Mapping) or not all(isinstance(given.get(kind), Mapping) for kind in set(types)):
        raise entries.refuse("rope_parameters", given, "must hold one set of values for each type of layer")
    rotary = tuple(
        read_rotary_set(entries, given.get(kind) or _ROTARY[kind], None, heads[kind].head_dim)
        for kind in _TYPES
    )
    return Description(
        layers=tuple(map(layer, types, windows, shared)),
        rotary=rotary,
        norm_eps=eps,
        embedding_scale=entries.whole("hidden_size", 1, MAX_WIDTH) ** 0.5,
        logits_soft_cap=entries.optional_number("final_logit_softcapping"),
        per_layer=per_layer,
        placeholder_ids=tuple(
            entries.whole(name, 0, vocab_size - 1) for name in _PLACEHOLDERS if entries.get(name) is not None
        ),
        placeholder_text_id=entries.optional_whole("pad_token_id", 0, vocab_size - 1) or 0,
    )


def _from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes that differ between layers are lists. ``rope_freqs`` applies to full attention; layers with a
    window rotate whole heads."""
    pattern = metadata.get("attention.sliding_window_pattern")
    flags = pattern if isinstance(pattern, list) else []
    types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in flags]
    found: dict[str, Any] = {
        "layer_types": types or None,
        "global_head_dim": entries.get("head_dim"),
        "head_dim": metadata.get("attention.key_length_swa", entries.get("head_dim")),
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": entries["vocab_size"],
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "enable_moe_block": bool(metadata.get("expert_count")),
        "rope_parameters": {
            "full_attention": entries["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.get("rope.freq_base_swa", 10000.0),
            },
        },
        "partial_rotary_factor": None,
        **experts_from_gguf(metadata),
    }
    found["top_k_experts"] = found.get("num_experts_per_tok")
    kv_heads, inner = metadata.get("attention.head_count_kv"), metadata.get("feed_forward_length")
    if isinstance(kv_heads, list):
        of_type = dict(zip(types, kv_heads))
        found["num_key_value_heads"] = of_type.get("sliding_attention", kv_heads[-1])
        found["num_global_key_value_heads"] = of_type.get("full_attention")
    if isinstance(inner, list):
        found["intermediate_size"], found["use_double_wide_mlp"] = inner[0], inner[0] != inner[-1]
    return found


def _without_shared_keys(family: Family, config: DecoderConfig) -> Family:
    """Leaves out K and V projections that checkpoints may hold for layers that read those of others."""
    unused = tuple(
        f"{prefix}layers.{number}.{part}."
        for number, layer in enumerate(config.layers)
        if layer.shares_cache_of is not None
        for prefix in ("model.", "model.language_model.")
        for part in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", *_KEYS_IN_GGUF)
    )
    return replace(family, left_out=(*family.left_out, *unused))


_GEMMA4 = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    gguf_architecture="gemma4",
    defaults=defaults(
        vocab_size=262144,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        global_head_dim=512,
        num_global_key_value_heads=None,
        hidden_activation="gelu_pytorch_tanh",
        max_position_embeddings=131072,
        sliding_window=512,
        tie_word_embeddings=True,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        attention_k_eq_v=False,
        num_kv_shared_layers=0,
        use_double_wide_mlp=False,
        enable_moe_block=False,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    ),
    describe=_describe,
    has_windows=True,
    renamed={
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
        "layer_scalar": "output_scale.weight",
        "router": "mlp",
        "proj": "gate",
        "experts": "mlp.experts",
    },
    gguf_by_layer=frozenset({"num_key_value_heads", "intermediate_size"}),
    from_gguf=_from_gguf,
    fit=_without_shared_keys,
)
_GEMMA4_IMAGES = replace(
    _GEMMA4,
    architecture="Gemma4ForConditionalGeneration",
    model_type="gemma4",
    gguf_architecture=None,  # its text part is published as "gemma4"
    rewrite_config=_text_part,
    prefixes=TEXT_PREFIXES,
    left_out=(*IMAGE_PARTS, "model.embed_vision.", "model.audio_tower.", "model.embed_audio."),
)
FAMILIES = (_GEMMA4, _GEMMA4_IMAGES)
