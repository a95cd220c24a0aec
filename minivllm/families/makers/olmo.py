"""OLMo 2 and OLMo 3: norms behind the sublayers instead of before them,
and one over all heads of q and of k; OLMo 3 adds windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from minivllm.families.dense import dense
from minivllm.families.entries import MAX_POSITIONS, Entries
from minivllm.families.family import Family, defaults
from minivllm.families.rotary import read_rotary_by_type
from minivllm.specs.attention import RotaryConfig

_olmo2 = partial(
    dense, qkv_bias="attention_bias", o_bias="attention_bias", qk_norm="whole width", norms="after"
)


def _types(entries: Entries) -> list[str]:
    """Every fourth layer attends to everything, unless others are listed."""
    layers = range(entries.num_layers)
    return entries.layer_types() or ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in layers]


def _windows(entries: Entries) -> Sequence[int | None]:
    return entries.windows_by_type(
        _types(entries), entries.optional_whole("sliding_window", 1, MAX_POSITIONS)
    )


def _two_tables(entries: Entries, head_dim: int) -> tuple[RotaryConfig, ...]:
    """What stretches the context stretches it in layers of full attention only."""
    kinds = ("full_attention", "sliding_attention")
    return tuple(read_rotary_by_type(entries, kind, "rope_theta", head_dim) for kind in kinds)


def _table_by_type(entries: Entries) -> Sequence[int | None]:
    return tuple(1 if kind == "sliding_attention" else 0 for kind in _types(entries))


_DEFAULTS = defaults(
    vocab_size=50304,
    intermediate_size=11008,
    max_position_embeddings=2048,
    rms_norm_eps=1e-5,
    eos_token_id=50279,
)
_RENAMED = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}

FAMILIES = (
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        gguf_architecture="olmo2",
        defaults=_DEFAULTS,
        describe=_olmo2,
        windowed="Olmo3ForCausalLM",
        renamed=_RENAMED,
    ),
    Family(
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        gguf_architecture=None,
        defaults={**_DEFAULTS, "rope_theta": 500000.0, "sliding_window": 4096},
        describe=partial(_olmo2, windows=_windows, rotary=_two_tables, tables=_table_by_type),
        has_windows=True,
        from_gguf=lambda metadata, entries: {
            "rope_scaling": entries["rope_parameters"],
            "rope_parameters": None,
        },
        renamed=_RENAMED,
    ),
)
