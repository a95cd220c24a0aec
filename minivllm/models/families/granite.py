"""Granite: Llama with four multipliers, none of which costs anything here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from minivllm.models.entries.entries import Entries
from minivllm.models.families.dense import Description, dense
from minivllm.models.families.family import Family, defaults

MULTIPLIERS: Mapping[str, float] = {
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_layers = partial(dense, qkv_bias="attention_bias", o_bias="attention_bias", reads_mlp_bias=True)


def _describe(entries: Entries) -> Description:
    return folded(entries, _layers(entries))


def folded(entries: Entries, described: Description) -> Description:
    """The same with the multipliers. Every sublayer adds m times its output. Divide the whole residual stream by m
    instead: norms divide by its length, so nothing can tell the difference but their epsilon, which is compared with a
    square, and the embeddings.
    """
    residual = entries.number("residual_multiplier")
    described = described.attending(scale=entries.number("attention_multiplier"))
    eps = described.norm_eps / residual**2
    return replace(
        described,
        norm_eps=eps,
        layers=tuple(replace(layer, norms=replace(layer.norms, eps=eps)) for layer in described.layers),
        embedding_scale=entries.number("embedding_multiplier") / residual,
        logits_scale=1 / entries.number("logits_scaling"),
    )


def multipliers_from_gguf(metadata: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    keys = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {entry: metadata[key] for entry, key in keys.items() if key in metadata}


FAMILIES = (
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        gguf_architecture="granite",
        defaults=defaults(
            **MULTIPLIERS,
            vocab_size=32000,
            intermediate_size=11008,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
        ),
        describe=_describe,
        gguf_permutes_rotary=True,
        from_gguf=multipliers_from_gguf,
    ),
)
