"""The models, vocabularies and batches that GPU code is compiled for.

Entries are those of the models' config.json, as far as they decide kernels, with a few layers of each kind:
layers that are alike share their regions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ROWS = (1, 8, 64, 256)
"""Numbers of requests that decode at once.
Regions have code for one row and for several; attention for each number."""

VOCABULARIES = (32_000, 49_152, 102_400, 128_256, 151_936, 201_088, 262_144)
"""Entries: Llama 2 and Mistral, SmolLM2, DeepSeek-V2, Llama 3, Qwen3, gpt-oss, Gemma 3."""

BLOCK_SIZE, NUM_BLOCKS = 64, 7000
MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 8192, 8192


@dataclass(frozen=True)
class Shape:
    """A model. quantization: what its weights are rounded to, None for nothing. verify_size: most tokens of a
    row whose drafts are verified, 0 for no drafts. shares: rows may read a prefix together. ranks: that divide
    it, experts whole."""

    config: dict[str, Any]
    quantization: str | None = None
    verify_size: int = 0
    shares: bool = False
    ranks: int = 1


COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "num_hidden_layers": 3,
}
LLAMA_3_8B: dict[str, Any] = COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
QWEN3_8B: dict[str, Any] = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1000000.0,
}
QWEN3_0_6B: dict[str, Any] = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B: dict[str, Any] = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
GEMMA_3_1B: dict[str, Any] = COMMON | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA_4_E2B: dict[str, Any] = COMMON | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 262_144,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "tie_word_embeddings": True,
}
GPT_OSS_20B: dict[str, Any] = COMMON | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "attention_bias": True,
    "hidden_act": "silu",
}
DEEPSEEK_V2_LITE: dict[str, Any] = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}

MODELS: dict[str, Shape] = {
    "Llama 3 8B": Shape(LLAMA_3_8B, verify_size=8, shares=True),
    "Llama 3 8B in int8": Shape(LLAMA_3_8B, quantization="int8"),
    "Llama 3 8B in int4": Shape(LLAMA_3_8B, quantization="int4"),
    "Llama 3 8B in fp8": Shape(LLAMA_3_8B, quantization="fp8"),
    "Qwen3 0.6B": Shape(QWEN3_0_6B),
    "Qwen3 8B": Shape(QWEN3_8B),
    "Qwen3 30B A3B": Shape(QWEN3_30B_A3B),
    "Qwen3 30B A3B on 2 GPUs": Shape(QWEN3_30B_A3B, ranks=2),
    "Gemma 3 1B": Shape(GEMMA_3_1B),
    "Gemma 4 E2B": Shape(GEMMA_4_E2B),
    "gpt-oss 20B": Shape(GPT_OSS_20B, shares=True),
    "DeepSeek V2 Lite": Shape(DEEPSEEK_V2_LITE),
}


def parts() -> list[str]:
    """Names of all that is compiled, each independent of the others."""
    return [*MODELS, *(f"vocabulary of {size}" for size in VOCABULARIES)]
