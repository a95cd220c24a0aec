"""Phi-3 and Phi-4: q, k and v in one matrix, gate and up in another;
rotary embedding of a part of each head, and LongRoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from minivllm.families.dense import dense, window_in_every_layer
from minivllm.families.family import FUSED_MLP, Family, defaults


def _longrope_by_its_name(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first checkpoints call it "su", some "yarn"."""
    entries = dict(entries)
    for name in ("rope_scaling", "rope_parameters"):
        rope = entries.get(name)
        if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
            entries[name] = {**rope, "rope_type": "longrope"}
    return entries


FAMILIES = (
    Family(
        architecture="Phi3ForCausalLM",  # Phi-3, Phi-3.5, Phi-4
        model_type="phi3",
        gguf_architecture="phi3",
        defaults=defaults(
            vocab_size=32064,
            hidden_size=3072,
            intermediate_size=8192,
            max_position_embeddings=4096,
            original_max_position_embeddings=4096,
            rms_norm_eps=1e-5,
            sliding_window=None,
            bos_token_id=1,
            eos_token_id=32000,
        ),
        describe=partial(dense, windows=window_in_every_layer),
        has_windows=True,
        rewrite_config=_longrope_by_its_name,
        fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), **FUSED_MLP},
    ),
)
