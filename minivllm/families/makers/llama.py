"""Llama and families that hardly differ from it: Mistral, Mixtral, Ministral 3, SmolLM3."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kernels_triton_free.experts.routing import Routing
from minivllm.errors import ModelError
from minivllm.families.dense import Description, dense, window_in_every_layer
from minivllm.families.entries import MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, Entries
from minivllm.families.experts import experts_from_gguf, experts_of, with_experts
from minivllm.families.family import (
    IMAGE_PARTS,
    SMOLVLM_IMAGE_PARTS,
    SMOLVLM_PREFIXES,
    TEXT_PREFIXES,
    Family,
    defaults,
    text_part,
    tied_text_part,
)
from minivllm.families.languages import LLAMA, MISTRAL
from minivllm.specs.layers import LayerSpec, MoeSpec, PositionScaling

logger = logging.getLogger(__name__)


def _ministral3_windows(entries: Entries) -> Sequence[int | None]:
    if entries.entries.get("layer_types") is not None:
        logger.warning(
            "%s: layer_types is not used by this family; sliding_window is that of all.", entries.source
        )
    return window_in_every_layer(entries)


def _ministral3(entries: Entries) -> Description:
    """Queries grow with their position, by entries of the rotary embedding."""
    plain = dense(entries, windows=_ministral3_windows)
    given = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    rope = Entries(given, {}, entries.source, "rope_parameters.")
    beta = rope.optional_number("llama_4_scaling_beta")
    if beta is None:
        return plain
    scaling = PositionScaling(
        beta=beta, interval=rope.whole("original_max_position_embeddings", 1, MAX_POSITIONS)
    )

    def scaled(layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixer=replace(layer.attention, query_scaling=scaling))

    return replace(plain, layers=tuple(map(scaled, plain.layers)))


def _ministral3_rotary(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotary embedding of a Ministral 3 whose configuration names none."""
    if entries.get("rope_parameters") or entries.get("rope_scaling"):
        return entries
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    return {**entries, "rope_parameters": yarn}


def _ministral3_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Also Mistral Small 3.1 and later, whose queries do not grow.
    One of both magnitudes of YaRN is always 1."""
    rope, log = dict(entries["rope_parameters"]), metadata.get("rope.scaling.yarn_log_multiplier")
    if rope["rope_type"] == "yarn" and log:
        rope.update({"mscale": 1.0, "mscale_all_dim": log})
    if metadata.get("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = metadata["attention.temperature_scale"]
    return {"rope_parameters": rope}


def _mistral3_text(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model is a Mistral or a Ministral 3; only the second has a rotary embedding by default."""
    text = text_part(entries)
    return _ministral3_rotary(text) if text.get("model_type") == "ministral3" else text


def _smollm3_tables(entries: Entries) -> Sequence[int | None]:
    """Every fourth layer, or as listed, has no rotary embedding."""
    num_layers, listed = entries.num_layers, entries.get("no_rope_layers")
    if listed is None:
        interval = entries.whole("no_rope_layer_interval", 1, MAX_LAYERS)
        return tuple(0 if (layer + 1) % interval else None for layer in range(num_layers))
    if not isinstance(listed, list) or len(listed) < num_layers or not all(flag in (0, 1) for flag in listed):
        raise entries.refuse(
            "no_rope_layers", listed, f"must list 0 or 1 for each of the {num_layers} layers"
        )
    return tuple(0 if flag else None for flag in listed[:num_layers])


def _smollm3_windows(entries: Entries) -> Sequence[int | None]:
    window = entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
    enabled, types = entries.flag("use_sliding_window"), entries.layer_types()
    if types is not None:
        return entries.windows_by_type(types, window)
    return tuple(window if enabled and table is None else None for table in _smollm3_tables(entries))


_MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    gguf_architecture="mistral3",
    defaults=defaults(
        vocab_size=131072,
        intermediate_size=14336,
        num_hidden_layers=34,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=262144,
        rms_norm_eps=1e-5,
        sliding_window=None,
        bos_token_id=1,
        eos_token_id=2,
    ),
    describe=_ministral3,
    rewrite_config=_ministral3_rotary,
    has_windows=True,
    gguf_permutes_rotary=True,
    from_gguf=_ministral3_from_gguf,
)
_MINISTRAL3_IMAGES = replace(
    _MINISTRAL3,
    architecture="Mistral3ForConditionalGeneration",  # Mistral Small 3.1 and later, Ministral 3
    model_type="mistral3",
    gguf_architecture=None,  # published as the text part alone
    rewrite_config=_mistral3_text,
    prefixes=TEXT_PREFIXES,
    left_out=IMAGE_PARTS,
    texts=("mistral", "ministral3"),
)


def _llama_text(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of a checkpoint that sees images."""
    text = tied_text_part(entries)
    kind = text.get("model_type", "llama")
    if kind != "llama":
        raise ModelError(
            f"text_config.model_type is {kind!r}, which minivllm's own layers do not serve as the language "
            f"model of {entries.get('model_type')}."
        )
    return text


def _seeing(architecture: str, model_type: str) -> Family:
    return replace(
        LLAMA,
        architecture=architecture,
        model_type=model_type,
        gguf_architecture=None,
        windowed=None,
        with_experts=None,
        rewrite_config=_llama_text,
        prefixes=SMOLVLM_PREFIXES,
        left_out=SMOLVLM_IMAGE_PARTS,
        texts=("llama",),
    )


_LLAMA_FAMILIES = (
    LLAMA,
    _seeing("Idefics3ForConditionalGeneration", "idefics3"),
    _seeing("SmolVLMForConditionalGeneration", "smolvlm"),
    MISTRAL,
    _MINISTRAL3,
    _MINISTRAL3_IMAGES,
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        gguf_architecture="smollm3",
        defaults=defaults(
            vocab_size=128256,
            hidden_size=2048,
            intermediate_size=11008,
            num_hidden_layers=36,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=32768,
            rope_theta=2000000.0,
            tie_word_embeddings=True,
            use_sliding_window=False,
            sliding_window=None,
            no_rope_layers=None,
            no_rope_layer_interval=4,
            bos_token_id=128000,
            eos_token_id=128001,
        ),
        describe=partial(
            dense,
            qkv_bias="attention_bias",
            o_bias="attention_bias",
            reads_mlp_bias=True,
            windows=_smollm3_windows,
            tables=_smollm3_tables,
        ),
        has_windows=True,
        gguf_permutes_rotary=True,
    ),
)


def _mixtral(entries: Entries, layer: int) -> MoeSpec:
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        routing=Routing(top_k=top_k, normalized=True),
        activation=entries.activation("hidden_act"),
    )


_MIXTRAL_FAMILIES = (
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        gguf_architecture=None,  # published as "llama"
        defaults=defaults(
            vocab_size=32000,
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            sliding_window=None,
            num_experts_per_tok=2,
            num_local_experts=8,
            bos_token_id=1,
            eos_token_id=2,
        ),
        describe=partial(with_experts, experts=_mixtral, windows=window_in_every_layer),
        has_windows=True,
        gguf_permutes_rotary=True,
        from_gguf=lambda metadata, entries: experts_from_gguf(metadata),
    ),
)

FAMILIES = (*_LLAMA_FAMILIES, *_MIXTRAL_FAMILIES)
