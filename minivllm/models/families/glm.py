"""GLM-4: norms before and after both sublayers, and rotary embedding of neighbouring elements in half of each head."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from minivllm.models.decoder_config import DecoderConfig
from minivllm.models.families.dense import dense
from minivllm.models.families.family import FUSED_MLP, Family, defaults


def pairs_to_halves(name: str, tensor: Tensor, config: DecoderConfig) -> Tensor:
    """Rows of q and k in another order: pairs of elements 2i and 2i + 1, which GLM-4 rotates, become i and i + half.

    The same order in q and k leaves every score as it is.
    """
    module = name.split(".")[-2]
    if module not in ("q_proj", "k_proj"):
        return tensor
    mixer, dim = config.layers[0].attention, config.rotary[0].dim
    heads = tensor.unflatten(0, (-1, mixer.head_dim)).clone()
    heads[:, : dim // 2], heads[:, dim // 2 : dim] = heads[:, 0:dim:2].clone(), heads[:, 1:dim:2].clone()
    return heads.flatten(0, 1)


FAMILIES = (
    Family(
        architecture="Glm4ForCausalLM",
        model_type="glm4",
        gguf_architecture="glm4",
        defaults=defaults(
            vocab_size=151552,
            intermediate_size=13696,
            num_hidden_layers=40,
            num_key_value_heads=2,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1.5625e-07,
            partial_rotary_factor=0.5,
            attention_bias=True,
            eos_token_id=[151329, 151336, 151338],
        ),
        describe=partial(dense, qkv_bias="attention_bias", norms="both"),
        fused=FUSED_MLP,
        rewrite_weight=pairs_to_halves,
    ),
)
