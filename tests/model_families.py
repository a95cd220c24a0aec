"""Small random models of every supported family, built by transformers itself:
the references other tests judge by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOKENIZER_SIZE = 384
SHAPE: dict[str, Any] = {
    "vocab_size": 416,  # a little more than the tokenizer has, as published models do
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 5,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": SHAPE["vocab_size"],
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
ALTERNATING = [
    "sliding_attention",
    "full_attention",
    "sliding_attention",
    "sliding_attention",
    "full_attention",
]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}
GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.4,
}

MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MLA_YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "original_max_position_embeddings": 64,
    }
}
GATED_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
GATED_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
MAMBA: dict[str, Any] = {
    **GRANITE,
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
}

# family -> (transformers config class, transformers model class, what differs from SHAPE)
FAMILY_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-mqa": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-mha": ("LlamaConfig", "LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama-head-dim": ("LlamaConfig", "LlamaForCausalLM", {"head_dim": 32}),
    "llama3-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-dynamic-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        "SmolLM3ForCausalLM",
        {"num_hidden_layers": 5, "no_rope_layer_interval": 2, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen2-tied": ("Qwen2Config", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GEMMA, "sliding_window": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma2-no-caps": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "sliding_window": 9,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "head_dim": 32,
        },
    ),
    "gemma2-biases": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **GEMMA,
            "attention_bias": True,
            "sliding_window": 17,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "attn_logit_softcapping": 2.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**GEMMA, "num_hidden_layers": 5, "sliding_window": 16, "layer_types": ALTERNATING},
    ),
    "gemma3-far": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GEMMA,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 7,
        },
    ),
    "gemma3-mqa": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**GEMMA, "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 33, "attention_bias": True},
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}),
    "phi3-partial": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {"sliding_window": 24, "partial_rotary_factor": 0.75, "num_key_value_heads": 4},
    ),
    "gemma4": ("Gemma4TextConfig", "Gemma4ForCausalLM", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4-small": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2
            + ["full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4-experts": (
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "use_bidirectional_attention": "vision",
        },
    ),
    "phi3-short": ("Phi3Config", "Phi3ForCausalLM", {"rope_parameters": LONGROPE}),
    "phi3-long": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {**LONGROPE, "attention_factor": 1.3},
        },
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "olmo2-biases": ("Olmo2Config", "Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo2-tied": (
        "Olmo2Config",
        "Olmo2ForCausalLM",
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {"num_hidden_layers": 5, "sliding_window": 16}),
    "olmo3-yarn": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmo3-mha": ("Olmo3Config", "Olmo3ForCausalLM", {"num_key_value_heads": 4, "sliding_window": 24}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {"head_dim": 16}),
    "glm4-whole-heads": (
        "Glm4Config",
        "Glm4ForCausalLM",
        {"head_dim": 32, "partial_rotary_factor": 1.0, "attention_bias": False, "num_key_value_heads": 1},
    ),
    "glm4-quarter": (
        "Glm4Config",
        "Glm4ForCausalLM",
        {"head_dim": 16, "partial_rotary_factor": 0.25, "num_key_value_heads": 4, "rms_norm_eps": 1e-2},
    ),
    "granite": ("GraniteConfig", "GraniteForCausalLM", GRANITE),
    "granite-biases": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "granite-mqa": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**GRANITE, "num_key_value_heads": 1, "residual_multiplier": 2.0, "rms_norm_eps": 1e-2},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3-moe-plain": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {
            "head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-moe-window": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 32,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.7,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "glm4-moe-groups": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "head_dim": 32,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "partial_rotary_factor": 0.25,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**MLA, "q_lora_rank": None, "num_hidden_layers": 4},
    ),
    "deepseek-v2-groups": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **MLA,
            **MLA_YARN,
            "q_lora_rank": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
        },
    ),
    "deepseek-v2-biases": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **MLA,
            "q_lora_rank": None,
            "attention_bias": True,
            "mlp_bias": True,
            "n_shared_experts": 1,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**MLA, **MLA_YARN, "q_lora_rank": 24, "n_group": 4, "topk_group": 2},
    ),
    "deepseek-v3-halves": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **MLA,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "attention_bias": True,
            "n_shared_experts": 2,
        },
    ),
    "deepseek-v3-wide-values": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **MLA,
            "q_lora_rank": 32,
            "n_group": 2,
            "topk_group": 1,
            "v_head_dim": 32,
            "first_k_dense_replace": 0,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 16,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 8.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-biases": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "num_hidden_layers": 4,
            "conv_L_cache": 4,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2-two-taps": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"full_attn_idxs": [1], "conv_L_cache": 2, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8},
    ),
}

# The same of families some of whose layers keep a state.
STATE_FAMILY_SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**GATED_DELTA, **GATED_EXPERTS, "mlp_only_layers": [1]},
    ),
    "qwen3-next-biases": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **GATED_DELTA,
            **GATED_EXPERTS,
            "attention_bias": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 2,
            "partial_rotary_factor": 0.5,
            "norm_topk_prob": False,
        },
    ),
    "qwen3-next-dense": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {**GATED_DELTA, "num_experts": 0, "num_hidden_layers": 3, "full_attention_interval": 2},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", GATED_DELTA),
    "qwen3.5-tied": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **GATED_DELTA,
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 1,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**GATED_DELTA, **GATED_EXPERTS}),
    "granite-hybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", MAMBA),
    "granite-hybrid-moe": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 32,
            "mamba_n_groups": 1,
            "position_embedding_type": "rope",
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "granite-hybrid-biases": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **MAMBA,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_n_groups": 4,
            "mamba_d_conv": 3,
            "num_key_value_heads": 1,
            "layer_types": ["attention", "mamba", "mamba", "attention"],
        },
    ),
}

FAMILIES: list[str] = list(FAMILY_SETTINGS)
STATE_FAMILIES: list[str] = list(STATE_FAMILY_SETTINGS)
CONVOLVED_FAMILIES: list[str] = [family for family in FAMILIES if family.startswith("lfm2")]
ATTENDING_FAMILIES: list[str] = [family for family in FAMILIES if family not in CONVOLVED_FAMILIES]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog was not amused, and the fox went on its way.",
    "Paged attention keeps the keys and values of every request in small blocks, as an operating system "
    "keeps pages.",
    "Grüße aus Köln, ça va? 你好，世界。 Привет, мир! 12345 + 67890 = 80235 🙂🚀",
    "one two three four five six seven eight nine ten; the scheduler hands out tokens until each request "
    "catches up.",
]


def save_word_tokenizer(directory: Path) -> Path:
    """Train a byte-level BPE of TOKENIZER_SIZE tokens and save it, with a chat template,
    into ``directory``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=SPECIAL_TOKENS[2:],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def save_tiny_model(directory: Path, family: str, overrides: dict[str, Any], dtype: str = "float32") -> Path:
    """Write a seeded model of ``family`` in ``dtype`` and its tokenizer into ``directory`` as save_pretrained
    does.

    Weights are several times larger than a fresh initialisation, norms and biases are random too: a forgotten
    bias or a swapped norm changes the output, and the largest logit stands well clear of the second.
    """
    import torch
    import transformers

    config_class, model_class, differences = {**FAMILY_SETTINGS, **STATE_FAMILY_SETTINGS}[family]
    settings = {**SHAPE, **differences, **overrides}
    config = getattr(transformers, config_class)(**json.loads(json.dumps(settings)))
    model = getattr(transformers, model_class)(config).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(2.0 * noise - 3.0)  # some heads forget soon, most do not
            elif name.endswith(("norm.weight", "layernorm_1.weight", "layernorm_2.weight", "scale")):
                is_less_one = model_class.startswith(("Qwen3Next", "Qwen3_5")) and "linear_attn" not in name
                parameter.copy_((0.0 if is_less_one else 1.0) + 0.2 * noise)
                if model_class.startswith("Gemma4") and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.mul_(0.5)  # its scores have no other scale
            elif name.endswith((".bias", "_bias", "sinks")):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("layer_scalar"):
                buffer.copy_(1.0 + 0.3 * torch.randn(buffer.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(directory, safe_serialization=True)
    return save_word_tokenizer(directory)
