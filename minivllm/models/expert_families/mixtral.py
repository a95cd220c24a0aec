"""Mixtral: in every layer, the chosen experts weighted by a softmax over their own logits."""

from __future__ import annotations

from functools import partial

from kernels_triton_free.experts.routing import Routing
from minivllm.models.entries.entries import MAX_WIDTH, Entries
from minivllm.models.expert_families.experts import experts_from_gguf, experts_of, with_experts
from minivllm.models.families.family import Family, defaults
from minivllm.models.families.llama import window_in_every_layer
from minivllm.models.layer_specs import MoeSpec


def _mixtral(entries: Entries, layer: int) -> MoeSpec:
    num_experts, top_k = experts_of(entries)
    return MoeSpec(
        num_experts=num_experts,
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        routing=Routing(top_k=top_k, normalized=True),
        activation=entries.activation("hidden_act"),
    )


FAMILIES = (
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
