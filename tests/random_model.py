"""Write a random model of a family in bfloat16, in any size, to measure engines with.

    python -m tests.random_model qwen3-moe DIR hidden_size=1024 num_hidden_layers=8 num_attention_heads=16 \\
        num_key_value_heads=4 head_dim=64 num_experts=32 num_experts_per_tok=8 moe_intermediate_size=512 \\
        mlp_only_layers=[] max_position_embeddings=4096
    minivllm bench model --model DIR --dtype bfloat16 --vs transformers,vllm --peer-python vllm=PYTHON \\
        --case decode:1 --case decode:8 --case prefill:512

What is not named is that of the tests' small models (``model_families``). Every value is JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.model_families import FAMILIES, save_tiny_model


def main(arguments: list[str]) -> None:
    """FAMILY DIR ENTRY=VALUE …"""
    family, directory, *entries = arguments
    if family not in FAMILIES:
        sys.exit(f"The family is {family!r}, but must be one of {', '.join(FAMILIES)}.")
    named = (entry.partition("=") for entry in entries)
    overrides = {name: json.loads(value) for name, _, value in named}
    save_tiny_model(Path(directory), family, overrides, dtype="bfloat16")


if __name__ == "__main__":
    main(sys.argv[1:])
