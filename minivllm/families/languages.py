"""Language models that models of several makers are built on: Llama, Mistral, Qwen2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minivllm.families.dense import dense, window_in_every_layer
from minivllm.families.entries import MAX_POSITIONS, Entries
from minivllm.families.family import Family, defaults


def _mistral_windows(entries: Entries) -> Sequence[int | None]:
    """In every layer, or as ``layer_types`` says:
    transformers takes a Mistral with that entry for a Ministral."""
    types = entries.layer_types()
    if types is None:
        return window_in_every_layer(entries)
    return entries.windows_by_type(types, entries.optional_whole("sliding_window", 1, MAX_POSITIONS))


def switched_windows(entries: Entries) -> Sequence[int | None]:
    """From layer ``max_window_layers`` on, or as ``layer_types`` says;
    none at all unless they are switched on."""
    num_layers = entries.num_layers
    window = (
        entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
        if entries.flag("use_sliding_window")
        else None
    )
    types = entries.layer_types()
    if types is not None:
        return entries.windows_by_type(types, window)
    if window is None:
        return (None,) * num_layers
    first = entries.whole("max_window_layers", 0, 2**31)
    return tuple(window if layer >= first else None for layer in range(num_layers))


LLAMA = Family(
    architecture="LlamaForCausalLM",  # Llama 2, Llama 3.x, SmolLM2
    model_type="llama",
    gguf_architecture="llama",
    defaults=defaults(
        vocab_size=32000,
        intermediate_size=11008,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    ),
    describe=partial(dense, qkv_bias="attention_bias", o_bias="attention_bias", reads_mlp_bias=True),
    gguf_permutes_rotary=True,
    windowed="MistralForCausalLM",
    with_experts="MixtralForCausalLM",
)

MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    gguf_architecture=None,  # published as "llama"
    defaults=defaults(
        vocab_size=32000,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
        bos_token_id=1,
        eos_token_id=2,
    ),
    describe=partial(dense, windows=_mistral_windows),
    has_windows=True,
    gguf_permutes_rotary=True,
)

QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",  # Qwen2, Qwen2.5
    model_type="qwen2",
    gguf_architecture="qwen2",
    defaults=defaults(**QWEN_DEFAULTS),
    describe=partial(dense, qkv_bias="always", windows=switched_windows),
    has_windows=True,
)
