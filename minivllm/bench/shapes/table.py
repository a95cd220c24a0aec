"""Models by their sizes: what ``config.json`` says of them, and the cases that are measured with each.

The weights are random (``load_format="dummy"``), so nothing has to be fetched, and no case depends on what a
model has learnt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_600M: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: Mapping[str, Any] = {
    **QWEN3_600M,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
_TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Shape:
    """A model's sizes and its cases, as ``bench model --case`` reads them. at_a_time: requests that run
    together in a workload."""

    name: str
    config: Mapping[str, Any]
    cases: tuple[str, ...]
    at_a_time: int = 64

    def tiny(self) -> Shape:
        """The same model with small sizes and short cases, to try the command anywhere."""
        sizes = _TINY | (_TINY_EXPERTS if "num_experts" in self.config else {})
        cases = ("decode:2:8", "prefill:16")
        name = f"{self.name} (tiny)"
        return replace(self, name=name, config={**self.config, **sizes}, cases=cases, at_a_time=2)


_SHORT = ("decode:1:512", "decode:8:512", "decode:64:512", "prefill:2048")

SHAPES = (
    Shape("nano-256", QWEN3_600M, ("nano-256,temperature=0.6",), at_a_time=256),
    Shape("llama-8b", LLAMA_8B, (*_SHORT, "fixed:16:2048:1")),
    Shape(
        "llama-8b-long",
        {**LLAMA_8B, "num_hidden_layers": 8, "max_position_embeddings": 32768},
        ("decode:1:16384", "decode:16:16384", "prefill:16384"),
    ),
    Shape("qwen3-30b-a3b", {**QWEN3_30B_A3B, "num_hidden_layers": 12}, (*_SHORT, "fixed:8:2048:1")),
)
"""Whole models, and the first layers of two: 8 of a Llama, for long contexts, and 12 of the experts."""
