"""Random adapters in PEFT's format for the small models, and the models they amount to, merged by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm import LoRARequest

TinyModel = Callable[..., Path]
ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_shapes(model: Path) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear layer that an adapter may change, by name,
    from the model's own checkpoint."""
    weights = load_file(model / "model.safetensors")
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in weights.items()
        if name.endswith(".weight") and name.split(".")[-2] in ALL_LAYERS
    }


def random_matrices(model: Path, rank: int, layers: Sequence[str], seed: int) -> dict[str, Tensor]:
    """A and B of every layer under PEFT's names, large enough to change every answer."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, (outputs, inputs) in linear_shapes(model).items():
        if name.split(".")[-1] in layers:
            a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            b = torch.randn(outputs, rank, generator=generator) / rank**0.5
            matrices[f"base_model.model.{name}.lora_A.weight"] = a
            matrices[f"base_model.model.{name}.lora_B.weight"] = b
    return matrices


def write_adapter(directory: Path, matrices: dict[str, Tensor], **options: Any) -> Path:
    """An adapter directory as PEFT's save_pretrained leaves it. options: entries of adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(matrices, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "bias": "none",
        "lora_alpha": 16,
        "target_modules": list(ALL_LAYERS),
        **options,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def random_adapter(
    directory: Path,
    model: Path,
    *,
    rank: int = 8,
    layers: Sequence[str] = ALL_LAYERS,
    seed: int = 0,
    **options: Any,
) -> LoRARequest:
    """A random adapter for the model, named after its directory."""
    alpha = options.pop("lora_alpha", rank)
    matrices = random_matrices(model, rank, layers, seed)
    path = write_adapter(
        directory, matrices, r=rank, lora_alpha=alpha, target_modules=list(layers), **options
    )
    return LoRARequest(directory.name, lora_path=str(path))


@lru_cache(maxsize=8)
def merged_model(model: Path, adapter: LoRARequest | None) -> Any:
    """The model as transformers loads it in float32, with W + scale * B @ A in place of W."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter is None:
        return loaded
    config = json.loads((Path(adapter.path) / "adapter_config.json").read_text())
    matrices = load_file(Path(adapter.path) / "adapter_model.safetensors")
    parameters = dict(loaded.named_parameters())
    with torch.no_grad():
        for name in [name for name in matrices if "lora_A" in name]:
            a, b = matrices[name].double(), matrices[name.replace("lora_A", "lora_B")].double()
            rank = a.shape[0]
            scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            parameters[target] += (scale * (b @ a)).float()
    return loaded


def merged_tokens(
    model: Path, adapter: LoRARequest | None, prompt: Sequence[int], max_tokens: int
) -> list[int]:
    """What transformers' greedy generate appends to the prompt with the merged weights."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = merged_model(model, adapter).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def merged_logprobs(model: Path, adapter: LoRARequest | None, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [len(token_ids), vocab] float32 of the merged model at every position."""
    with torch.inference_mode():
        return merged_model(model, adapter)(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
