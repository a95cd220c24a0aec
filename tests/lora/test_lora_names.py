"""Adapters name modules as PEFT does, that is as transformers has them,
whatever the decoder's layers are called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minivllm import LoRARequest
from minivllm.errors import RequestError
from tests.lora.lora_adapters import TinyModel, write_adapter
from tests.lora.test_lora_parity import assert_logprobs_equal_merged, lora_llm, run_mixed
from tests.parity_reference import assert_pool_unused, random_prompts, runner_of

GATED = ("mlp.gate_up_proj", "mlp.down_proj")
NAMED: dict[str, tuple[dict[str, Any], Sequence[str]]] = {
    "lfm2": (
        {},
        (
            *("conv.in_proj", "conv.out_proj", "self_attn.q_proj", "self_attn.v_proj", "self_attn.out_proj"),
            *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
        ),
    ),
    "phi3": ({}, ("self_attn.qkv_proj", "self_attn.o_proj", *GATED)),
    "glm4": ({}, ("self_attn.q_proj", *GATED)),
    "gemma4-small": ({}, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")),
    "qwen3.5": (
        {},
        (
            "self_attn.q_proj",
            "linear_attn.in_proj_qkv",
            "linear_attn.in_proj_z",
            "linear_attn.out_proj",
            "mlp.up_proj",
        ),
    ),
    "qwen3-next": ({}, ("self_attn.q_proj", "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")),
    "granite-hybrid": (
        {},
        (
            "mamba.in_proj",
            "mamba.out_proj",
            "self_attn.k_proj",
            "shared_mlp.input_linear",
            "shared_mlp.output_linear",
        ),
    ),
}
"""Family -> what differs in its model, and modules of it as transformers has them."""


def adapter_of(directory: Path, model: Path, modules: Sequence[str], rank: int = 6) -> LoRARequest:
    """A random adapter of these modules in every layer that has them."""
    generator, matrices = torch.Generator().manual_seed(0), {}
    changed = set()
    for name, tensor in load_file(model / "model.safetensors").items():
        module = name.removesuffix(".weight")
        kind = next((kind for kind in modules if module.endswith("." + kind)), None)
        if kind is None or module == name:
            continue
        changed.add(kind)
        outputs, inputs = tensor.shape
        prefix = f"base_model.model.{module}"
        matrices[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        matrices[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / rank**0.5
    assert changed == set(modules)
    return LoRARequest(
        directory.name, lora_path=str(write_adapter(directory, matrices, r=rank, lora_alpha=rank))
    )


@pytest.mark.parametrize("family", NAMED)
def test_an_adapter_by_the_names_of_transformers_equals_the_merged_model(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    differences, modules = NAMED[family]
    model = tiny_model(family, **differences)
    adapters = [adapter_of(tmp_path / "own", model, modules), None]
    prompts = random_prompts((17, 9))
    with lora_llm(model, max_num_batched_tokens=12) as llm:
        outputs = run_mixed(llm, prompts, adapters, logprobs=0, prompt_logprobs=0)
        assert_logprobs_equal_merged(model, outputs, prompts, adapters)
        assert_pool_unused(llm)


def test_two_names_of_one_layer_and_modules_that_are_no_linear_layers_are_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("lfm2")
    with lora_llm(model) as llm:
        prefix = "base_model.model.model.layers.0"

        def matrices(module: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
            outputs, inputs = shape
            return {
                f"{prefix}.{module}.lora_A.weight": torch.ones(2, inputs),
                f"{prefix}.{module}.lora_B.weight": torch.ones(outputs, 2),
            }

        gate = runner_of(llm).paged_model.model.linear_shapes["model.layers.0.mlp.gate_proj"]
        twice = {**matrices("feed_forward.w1", gate), **matrices("mlp.gate_proj", gate)}
        with pytest.raises(RequestError, match=r"changes model\.layers\.0\.mlp\.gate_proj twice"):
            run_mixed(
                llm, [[5]], [LoRARequest("a", lora_path=str(write_adapter(tmp_path / "a", twice, r=2)))]
            )
        with pytest.raises(
            RequestError, match=r"changes model\.layers\.0\.conv\.conv, which this model does not have"
        ):
            other = matrices("conv.conv", (64, 3))
            run_mixed(
                llm, [[5]], [LoRARequest("b", lora_path=str(write_adapter(tmp_path / "b", other, r=2)))]
            )
