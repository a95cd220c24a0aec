"""Small random models of every supported family, built by transformers itself: the references other tests judge by."""

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
}

FAMILIES: list[str] = list(FAMILY_SETTINGS)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog was not amused, and the fox went on its way.",
    "Paged attention keeps the keys and values of every request in small blocks, as an operating system keeps pages.",
    "Grüße aus Köln, ça va? 你好，世界。 Привет, мир! 12345 + 67890 = 80235 🙂🚀",
    "one two three four five six seven eight nine ten; the scheduler hands out tokens until each request catches up.",
]


def save_word_tokenizer(directory: Path) -> Path:
    """Train a byte-level BPE of TOKENIZER_SIZE tokens and save it, with a chat template, into ``directory``."""
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
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>", additional_special_tokens=SPECIAL_TOKENS[2:]
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def save_tiny_model(directory: Path, family: str, overrides: dict[str, Any]) -> Path:
    """Write a seeded float32 model of ``family`` and its tokenizer into ``directory`` as save_pretrained does.

    Weights are several times larger than a fresh initialisation, norms and biases are random too: a forgotten bias or
    a swapped norm changes the output, and the largest logit stands well clear of the second.
    """
    import torch
    import transformers

    config_class, model_class, differences = FAMILY_SETTINGS[family]
    settings = {**SHAPE, **differences, **overrides}
    config = getattr(transformers, config_class)(**json.loads(json.dumps(settings)))
    model = getattr(transformers, model_class)(config).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(".bias"):
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory, safe_serialization=True)
    return save_word_tokenizer(directory)
