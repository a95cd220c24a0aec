"""Random LoRA adapters for whatever model is loaded: how fast they are served does not depend on what they learnt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from minivllm.messages import LoRARequest

RANKS = (8, 16, 32, 64)


def ranks_of(count: int, max_rank: int) -> list[int]:
    """Ranks of ``count`` adapters: 8, 16, 32, 64 in turn, none above max_rank, or max_rank if it is below 8."""
    allowed = [rank for rank in RANKS if rank <= max_rank] or [max_rank]
    return [allowed[index % len(allowed)] for index in range(count)]


def write_random_adapters(
    directory: Path, shapes: Mapping[str, Sequence[int]], ranks: Sequence[int]
) -> list[LoRARequest]:
    """Write one adapter of each rank in PEFT's format that changes all layers a little; seeded.

    shapes: [out, in] of every linear layer by its name in the model, such as ``model.layers.0.self_attn.q_proj``.
    """
    import torch
    from safetensors.torch import save_file

    requests = []
    for index, rank in enumerate(ranks):
        generator = torch.Generator().manual_seed(index)
        matrices = {}
        for name, (outputs, inputs) in shapes.items():
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                matrix = torch.randn(*shape, generator=generator) * 0.01
                matrices[f"base_model.model.{name}.lora_{part}.weight"] = matrix.bfloat16()
        path = directory / f"random-{index}"
        path.mkdir()
        save_file(matrices, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        requests.append(LoRARequest(path.name, str(path)))
    return requests
