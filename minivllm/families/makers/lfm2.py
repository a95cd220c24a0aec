"""LFM2: gated short convolutions, and between them a few layers of attention with normed heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from minivllm.families.dense import Description, dense
from minivllm.families.entries import MAX_FACTOR, MAX_TAPS, MAX_WIDTH, Entries
from minivllm.families.family import Family, defaults
from minivllm.families.gguf_entries import layer_kinds
from minivllm.specs.layers import LayerSpec, ShortConvSpec


def _describe(entries: Entries) -> Description:
    types = entries.layer_types(("full_attention", "conv")) or ["full_attention"] * entries.num_layers
    if "full_attention" not in types:
        raise entries.refuse(
            "layer_types", types, "must hold full_attention: states lie beside keys and values"
        )
    conv = ShortConvSpec(
        channels=entries.whole("hidden_size", 1, MAX_WIDTH),
        taps=entries.whole("conv_L_cache", 2, MAX_TAPS),
        bias=entries.flag("conv_bias"),
    )
    described = dense(entries, qk_norm="per head")

    def of_type(layer: LayerSpec, kind: str) -> LayerSpec:
        return replace(layer, mixer=conv) if kind == "conv" else layer

    return replace(described, layers=tuple(map(of_type, described.layers, types)))


def _rewrite_config(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Entries that have names of their own, layers of attention given by their indices, and the width of the
    MLP, which the first checkpoints give before it is cut to two thirds and rounded up."""
    entries = dict(entries)
    for own, name in (("block_ff_dim", "intermediate_size"), ("tie_embedding", "tie_word_embeddings")):
        if own in entries:
            entries[name] = entries.pop(own)
    if "norm_eps" in entries:
        entries["rms_norm_eps"] = entries["norm_eps"]
    attending, layers = entries.get("full_attn_idxs"), entries.get("num_hidden_layers", 32)
    if entries.get("layer_types") is None and isinstance(attending, list) and isinstance(layers, int):
        entries["layer_types"] = [
            "full_attention" if index in attending else "conv" for index in range(layers)
        ]
    if entries.get("block_auto_adjust_ff_dim", True):
        given = Entries(entries, _MLP_DEFAULTS, "config.json")
        width = int(2 * given.whole("intermediate_size", 1, MAX_WIDTH) / 3)
        if given.get("block_ffn_dim_multiplier") is not None:
            multiple = given.whole("block_multiple_of", 1, MAX_WIDTH)
            width = int(given.number("block_ffn_dim_multiplier", 0.0, MAX_FACTOR) * width)
            width = -(-width // multiple) * multiple
        entries["intermediate_size"] = width
    return entries


def _from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """Widths are final there."""
    return {
        "layer_types": layer_kinds(metadata, "conv"),
        "conv_L_cache": metadata.get("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


_MLP_DEFAULTS = {"intermediate_size": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
FAMILIES = (
    Family(
        architecture="Lfm2ForCausalLM",
        model_type="lfm2",
        gguf_architecture="lfm2",
        defaults=defaults(
            **_MLP_DEFAULTS,
            vocab_size=65536,
            hidden_size=2560,
            num_key_value_heads=8,
            max_position_embeddings=128000,
            rms_norm_eps=1e-5,
            rope_theta=1000000.0,
            tie_word_embeddings=True,
            conv_bias=False,
            conv_L_cache=3,
            bos_token_id=1,
            eos_token_id=2,
        ),
        describe=_describe,
        rewrite_config=_rewrite_config,
        from_gguf=_from_gguf,
        renamed={
            "operator_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "embedding_norm": "norm",
            "feed_forward": "mlp",
            "w1": "gate_proj",
            "w2": "down_proj",
            "w3": "up_proj",
            "out_proj": "o_proj",
            "q_layernorm": "q_norm",
            "k_layernorm": "k_norm",
        },
    ),
)
