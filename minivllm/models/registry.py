"""The supported decoder families: how their published configurations and weights differ from one another.

One config-driven decoder runs all of them. A family is a row of this table, never a subclass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from minivllm.errors import ConfigError, ModelError
from minivllm.plugins import Plugins

if TYPE_CHECKING:
    from torch import Tensor

    from minivllm.models.decoder_config import DecoderConfig

BiasRule = Literal["never", "always", "attention_bias"]
WindowRule = Literal["never", "every layer", "from max_window_layers", "layers without rotary"]

SHARED_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the table.

    model_type: the family's name in config.json. gguf_architecture: its name in GGUF files.
    defaults: what an entry that config.json leaves out stands for (the values transformers assumes).
    qkv_bias, o_bias: when the attention projections carry a bias. reads_mlp_bias: whether ``mlp_bias`` is looked at.
    qk_norm: RMSNorm over each head of q and k. windows: which layers attend within a sliding window.
    has_no_rope_layers: some layers use no rotary embedding (SmolLM3).
    gguf_permutes_rotary: GGUF files store the q and k rows of this family interleaved (see ``gguf_file``).
    rewrite_config: config.json's entries -> the same under the names and in the values that the table understands.
    rewrite_weight: (name, tensor, configuration) -> the tensor this decoder needs in its place; constants of a family
        that can be multiplied into its weights cost nothing when the model runs.
    """

    architecture: str
    model_type: str
    gguf_architecture: str | None
    defaults: Mapping[str, Any]
    qkv_bias: BiasRule = "never"
    o_bias: BiasRule = "never"
    reads_mlp_bias: bool = False
    qk_norm: bool = False
    windows: WindowRule = "never"
    has_no_rope_layers: bool = False
    gguf_permutes_rotary: bool = False
    rewrite_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    rewrite_weight: Callable[[str, Tensor, DecoderConfig], Tensor] | None = None


def _defaults(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType({**SHARED_DEFAULTS, **values})


_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_TABLE = (
    Family(
        architecture="LlamaForCausalLM",  # Llama 2, Llama 3.x, SmolLM2
        model_type="llama",
        gguf_architecture="llama",
        defaults=_defaults(
            vocab_size=32000,
            intermediate_size=11008,
            max_position_embeddings=2048,
            bos_token_id=1,
            eos_token_id=2,
        ),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        reads_mlp_bias=True,
        gguf_permutes_rotary=True,
    ),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        gguf_architecture=None,  # published as "llama"
        defaults=_defaults(
            vocab_size=32000,
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            sliding_window=4096,
            bos_token_id=1,
            eos_token_id=2,
        ),
        windows="every layer",
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        gguf_architecture="smollm3",
        defaults=_defaults(
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
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        reads_mlp_bias=True,
        windows="layers without rotary",
        has_no_rope_layers=True,
        gguf_permutes_rotary=True,
    ),
    Family(
        architecture="Qwen2ForCausalLM",  # Qwen2, Qwen2.5
        model_type="qwen2",
        gguf_architecture="qwen2",
        defaults=_defaults(**_QWEN_DEFAULTS),
        qkv_bias="always",
        windows="from max_window_layers",
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        gguf_architecture="qwen3",
        defaults=_defaults(**_QWEN_DEFAULTS, head_dim=128),
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        windows="from max_window_layers",
    ),
)

_PLUGINS = Plugins("family", {family.architecture: family for family in _TABLE})
FAMILIES: Mapping[str, Family] = _PLUGINS.known


def register_family(family: Family) -> None:
    """Add a row to the table from outside, before a model of the family is loaded: config.json finds it by its
    architecture, which is an identifier. Tutorial 14 adds one.

    The same architecture again replaces what was registered. Raises ConfigError for one of this table.
    """
    if not isinstance(family, Family):
        raise ConfigError(f"The family {family!r} must be a minivllm.Family.")
    _PLUGINS.register(family.architecture, family)


def load_family(name: str) -> Family:
    """The row that the engine argument ``family`` names: an architecture, or "package.module:FAMILY", which is
    registered. Raises ConfigError."""
    family = _PLUGINS.load(name)
    if FAMILIES.get(getattr(family, "architecture", "")) is not family:
        register_family(family)
    return family


def find_family(architectures: Sequence[str], model_type: str | None, source: str) -> Family:
    """The family that config.json names: by ``architectures`` when it has any, else by ``model_type``.

    Raises ModelError that lists the supported architectures; ``source`` is the file to name in it.
    """
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    if not architectures:
        for family in FAMILIES.values():
            if family.model_type == model_type:
                return family
    given = ", ".join(architectures) or (f"model_type {model_type!r}" if model_type else "none")
    raise ModelError(
        f"{source} names the architecture {given}, but supported are: {', '.join(FAMILIES)}; "
        "family='package.module:FAMILY' names your own."
    )


def find_gguf_family(gguf_architecture: str, source: str) -> Family:
    """The family behind ``general.architecture`` of a GGUF file; ModelError lists the supported names."""
    for family in FAMILIES.values():
        if family.gguf_architecture == gguf_architecture:
            return family
    known = ", ".join(family.gguf_architecture for family in FAMILIES.values() if family.gguf_architecture)
    raise ModelError(
        f"{source} holds a model of the GGUF architecture {gguf_architecture!r}, but supported are: {known}."
    )
