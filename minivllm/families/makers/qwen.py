"""Qwen2 and Qwen3, dense and with experts; Qwen3-Next and Qwen3.5, with gated delta nets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.errors import ModelError
from minivllm.families.dense import Description, dense
from minivllm.families.entries import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_TAPS,
    MAX_WIDTH,
    Entries,
)
from minivllm.families.experts import (
    experts_from_gguf,
    experts_of,
    inner_of_experts,
    is_sparse,
    layers_from_gguf,
    shared_mlp,
    with_experts,
)
from minivllm.families.family import IMAGE_PARTS, TEXT_PREFIXES, Family, defaults, tied_text_part
from minivllm.families.gguf_entries import head_dim, layer_kinds
from minivllm.families.languages import QWEN2, QWEN_DEFAULTS, switched_windows
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import GatedDeltaSpec, LayerSpec, MoeSpec, SelfAttentionSpec

_QWEN_FAMILIES = (
    QWEN2,
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf_architecture="qwen3",
        defaults=defaults(**QWEN_DEFAULTS, head_dim=128),
        describe=partial(
            dense,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm="per head",
            windows=switched_windows,
        ),
        has_windows=True,
    ),
)


def _internvl_text(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of an InternVL 3, which is a Qwen2, or of an InternVL 3.5, which is a Qwen3."""
    text = tied_text_part(entries)
    kind = text.get("model_type", "qwen2")
    if kind not in ("qwen2", "qwen3"):
        raise ModelError(
            f"text_config.model_type is {kind!r}, which minivllm's own layers do not serve as the language "
            "model of internvl."
        )
    return {"head_dim": None if kind == "qwen2" else 128, **text, "model_type": kind}


def _internvl(entries: Entries) -> Description:
    """As the language model's family says."""
    family = _QWEN_FAMILIES[entries.get("model_type") == "qwen3"]
    return family.describe(entries)


def _vl(architecture: str, model_type: str) -> Family:
    own = {
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_window_layers": 80,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
    }
    return replace(
        _QWEN_FAMILIES[0],
        architecture=architecture,
        model_type=model_type,
        gguf_architecture=None,
        defaults={**_QWEN_FAMILIES[0].defaults, **own},
        rewrite_config=tied_text_part,
        prefixes=TEXT_PREFIXES,
        left_out=("visual.", "model.visual."),
    )


_VL_FAMILIES = (
    _vl("Qwen2VLForConditionalGeneration", "qwen2_vl"),
    _vl("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"),
)


def _rotated_in_turns(sections: Sequence[int]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """The language model of a checkpoint whose frequencies belong to time, row and column in turns, as
    transformers does whatever the configuration says. sections: how many, where it does not say."""

    def rewritten(entries: Mapping[str, Any]) -> Mapping[str, Any]:
        text = tied_text_part(entries)
        name = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
        given = text.get(name) or {}
        if not isinstance(given, Mapping):
            return text  # refused where it is read
        return {**text, name: {"mrope_section": [*sections], **given, "mrope_interleaved": True}}

    return rewritten


_VL3 = replace(
    _QWEN_FAMILIES[1],
    architecture="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    gguf_architecture=None,
    defaults={
        **_QWEN_FAMILIES[1].defaults,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    },
    describe=partial(dense, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="per head"),
    has_windows=False,
    rewrite_config=_rotated_in_turns((24, 20, 20)),
    prefixes=TEXT_PREFIXES,
    left_out=("model.visual.",),
)
_INTERNVL = replace(
    _QWEN_FAMILIES[0],
    architecture="InternVLForConditionalGeneration",
    model_type="internvl",
    gguf_architecture=None,
    defaults={**_QWEN_FAMILIES[0].defaults, "attention_bias": False},
    describe=_internvl,
    rewrite_config=_internvl_text,
    prefixes=TEXT_PREFIXES,
    left_out=IMAGE_PARTS,
    texts=("qwen2", "qwen3"),
)


def qwen_experts(entries: Entries, layer: int, *, has_shared: bool = False) -> MoeSpec | None:
    """has_shared: an MLP of ``shared_expert_intermediate_size`` with a gate of its own stands beside them."""
    if not is_sparse(entries, layer):
        return None
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=inner_of_experts(entries),
        routing=Routing(top_k=top_k, normalized=entries.flag("norm_topk_prob")),
        activation=entries.activation("hidden_act"),
        shared=shared_mlp(entries, entries.whole("shared_expert_intermediate_size", 1, MAX_WIDTH))
        if has_shared
        else None,
        shared_gate=has_shared,
    )


def _qwen2_moe(entries: Entries) -> Description:
    """Biases of q, k and v are an entry of their own here."""
    return with_experts(
        entries,
        partial(qwen_experts, has_shared=True),
        qkv_bias="always" if entries.flag("qkv_bias") else "never",
        windows=_qwen2_moe_windows,
    )


def _qwen2_moe_windows(entries: Entries) -> Sequence[int | None]:
    """In every other layer below ``max_window_layers``, or as listed;
    none at all unless they are switched on."""
    window = (
        entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
        if entries.flag("use_sliding_window")
        else None
    )
    types, last = entries.layer_types(), entries.whole("max_window_layers", 0, 2**31)
    if types is not None:
        return entries.windows_by_type(types, window)
    return tuple(window if layer % 2 == 0 and layer < last else None for layer in range(entries.num_layers))


def _qwen2_moe_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """llama.cpp leaves the weights of the chosen experts as they are in this family."""
    found = experts_from_gguf(metadata)
    if "expert_shared_feed_forward_length" in metadata:
        found["shared_expert_intermediate_size"] = metadata["expert_shared_feed_forward_length"]
    return {**found, "norm_topk_prob": False, "qkv_bias": entries["attention_bias"]}


def _qwen3_moe_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights of the chosen experts are always normalised in llama.cpp."""
    return {**experts_from_gguf(metadata), "norm_topk_prob": True}


def _qwen3_moe_windows(entries: Entries) -> tuple[int | None, ...]:
    window = entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
    return (window if entries.flag("use_sliding_window") else None,) * entries.num_layers


_QWEN_MOE_FAMILIES = (
    Family(
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        gguf_architecture="qwen2moe",
        defaults=defaults(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=24,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=32768,
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            decoder_sparse_step=1,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts_per_tok=4,
            num_experts=60,
            norm_topk_prob=False,
            mlp_only_layers=None,
            qkv_bias=True,
        ),
        describe=_qwen2_moe,
        has_windows=True,
        from_gguf=_qwen2_moe_from_gguf,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        gguf_architecture="qwen3moe",
        defaults=defaults(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=24,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            use_sliding_window=False,
            sliding_window=4096,
            decoder_sparse_step=1,
            moe_intermediate_size=768,
            num_experts_per_tok=8,
            num_local_experts=128,
            norm_topk_prob=False,
            mlp_only_layers=None,
        ),
        describe=partial(
            with_experts,
            experts=qwen_experts,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            qk_norm="per head",
            windows=_qwen3_moe_windows,
        ),
        has_windows=True,
        from_gguf=_qwen3_moe_from_gguf,
    ),
)


def _next_types(entries: Entries) -> Sequence[str]:
    """As listed, or every so many layers one of attention."""
    listed = entries.layer_types(("linear_attention", "full_attention"))
    if listed is not None:
        return listed
    interval = entries.whole("full_attention_interval", 1, MAX_LAYERS)
    layers = range(entries.num_layers)
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]


def _gated_delta(entries: Entries) -> GatedDeltaSpec:
    heads = entries.whole("linear_num_value_heads", 1, MAX_HEADS)
    key_heads = entries.whole("linear_num_key_heads", 1, MAX_HEADS)
    if heads % key_heads:
        raise entries.refuse("linear_num_key_heads", key_heads, f"must divide linear_num_value_heads {heads}")
    if entries.activation("hidden_act") != "silu":
        raise entries.refuse(
            "hidden_act", entries.get("hidden_act"), "must be silu, which the gates here are made of"
        )
    return GatedDeltaSpec(
        key_heads=key_heads,
        key_dim=entries.whole("linear_key_head_dim", 1, MAX_HEAD_DIM),
        heads=heads,
        value_dim=entries.whole("linear_value_head_dim", 1, MAX_HEAD_DIM),
        taps=entries.whole("linear_conv_kernel_dim", 2, MAX_TAPS),
        norm_eps=entries.norm_eps,
    )


_NEXT_ATTENTION: Mapping[str, Any] = {
    "qkv_bias": "attention_bias",
    "o_bias": "attention_bias",
    "qk_norm": "per head",
}


def _next_describe(entries: Entries) -> Description:
    if entries.get("num_experts"):
        described = with_experts(entries, partial(qwen_experts, has_shared=True), **_NEXT_ATTENTION)
    else:
        described = dense(entries, **_NEXT_ATTENTION)
    types = _next_types(entries)
    if "full_attention" not in types:
        raise entries.refuse(
            "layer_types", types, "must hold full_attention: states lie beside keys and values"
        )
    gated_delta = _gated_delta(entries) if "linear_attention" in types else None

    def mixed(layer: LayerSpec, kind: str) -> LayerSpec:
        if kind == "linear_attention":
            assert gated_delta is not None
            return replace(layer, mixer=gated_delta)
        return replace(layer, mixer=replace(layer.attention, output_gate=True))

    layers = tuple(mixed(layer, kind) for layer, kind in zip(described.layers, types, strict=True))
    return replace(described, layers=layers)


def _next_by_head(family: Family, config: DecoderConfig) -> Family:
    """Queries and gates of a head lie together,
    and in Qwen3-Next all that belongs to a key of the gated delta net."""
    groups = {}
    for layer in config.layers:
        if isinstance(layer.mixer, SelfAttentionSpec):
            groups["q_proj"] = layer.mixer.heads
        elif isinstance(layer.mixer, GatedDeltaSpec):
            groups["in_proj_qkvz"] = groups["in_proj_ba"] = layer.mixer.key_heads
    return replace(family, groups=groups)


def _next_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The weights of the chosen experts are always normalised in llama.cpp."""
    return {
        "num_experts": 0,
        **experts_from_gguf(metadata),
        "shared_expert_intermediate_size": metadata.get("expert_shared_feed_forward_length"),
        "norm_topk_prob": True,
        "num_hidden_layers": layers_from_gguf(metadata, entries),
        "layer_types": layer_kinds(metadata, "linear_attention"),
        "full_attention_interval": metadata.get("full_attention_interval", 4),
        "linear_num_key_heads": metadata.get("ssm.group_count"),
        "linear_num_value_heads": metadata.get("ssm.time_step_rank"),
        "linear_key_head_dim": metadata.get("ssm.state_size"),
        "linear_value_head_dim": head_dim(metadata),
        "linear_conv_kernel_dim": metadata.get("ssm.conv_kernel"),
    }


_NEXT_FUSED = {
    "q_proj": ("q_proj", "g_proj"),
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_NEXT_HEAD = {
    "mtp.pre_fc_norm_embedding.": "model.layers.0.enorm.",
    "mtp.pre_fc_norm_hidden.": "model.layers.0.hnorm.",
    "mtp.layers.0.": "model.layers.0.",
    "mtp.layers.": "",
    "mtp.": "model.",
}
_next_family = partial(
    Family,
    describe=_next_describe,
    fused=_NEXT_FUSED,
    fit=_next_by_head,
    norm_offset=1.0,
    whole_norms=("linear_attn.norm.weight",),
    has_drafting_layers=True,
    head_names=_NEXT_HEAD,
    gguf_renamed={
        "post_self_attn_layernorm": "post_attention_layernorm",
        "self_attn.qkv_proj": "linear_attn.in_proj_qkv",
        "mamba.in_proj": "linear_attn.in_proj_qkvz",
        "mamba": "linear_attn",
    },
    from_gguf=_next_from_gguf,
)
_NEXT_DEFAULTS = {
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_NEXT_DRAFTS = ("mtp.",)
_QWEN3_NEXT = _next_family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    gguf_architecture="qwen3next",
    defaults=defaults(
        **_NEXT_DEFAULTS,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=48,
        num_experts=512,
        num_experts_per_tok=10,
    ),
    left_out=_NEXT_DRAFTS,
)
_QWEN3_5 = _next_family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    gguf_architecture="qwen35",
    gguf_tiles_values=True,
    defaults=defaults(
        **{**_NEXT_DEFAULTS, "num_key_value_heads": 4},
        vocab_size=248320,
        intermediate_size=12288,
    ),
    left_out=_NEXT_DRAFTS,
)
_QWEN3_5_MOE = _next_family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    gguf_architecture="qwen35moe",
    gguf_tiles_values=True,
    defaults=defaults(
        **_NEXT_DEFAULTS,
        vocab_size=248320,
        hidden_size=2048,
        intermediate_size=512,
        num_hidden_layers=40,
        num_experts=256,
        num_experts_per_tok=8,
    ),
    left_out=_NEXT_DRAFTS,
)


def _with_images(family: Family, architecture: str, model_type: str) -> Family:
    """The text part of a checkpoint that also sees images."""
    return replace(
        family,
        architecture=architecture,
        model_type=model_type,
        gguf_architecture=None,  # published as the text part alone
        rewrite_config=_rotated_in_turns((11, 11, 10)),
        prefixes={"model.language_model.": "model."},
        left_out=(*_NEXT_DRAFTS, "model.visual."),
    )


_QWEN_NEXT_FAMILIES = (
    _QWEN3_NEXT,
    _QWEN3_5,
    _QWEN3_5_MOE,
    _with_images(_QWEN3_5, "Qwen3_5ForConditionalGeneration", "qwen3_5"),
    _with_images(_QWEN3_5_MOE, "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
)

_VL3_MOE = replace(
    _VL3,
    architecture="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    defaults=defaults(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=128000,
        rope_theta=500000.0,
        decoder_sparse_step=1,
        moe_intermediate_size=1408,
        num_experts_per_tok=4,
        num_experts=60,
        norm_topk_prob=True,
        mlp_only_layers=None,
    ),
    describe=partial(
        with_experts,
        experts=qwen_experts,
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm="per head",
    ),
    may_transpose_experts=True,
)

FAMILIES = (
    *_QWEN_FAMILIES,
    _INTERNVL,
    *_VL_FAMILIES,
    _VL3,
    _VL3_MOE,
    *_QWEN_MOE_FAMILIES,
    *_QWEN_NEXT_FAMILIES,
)
