"""Linear layers of transformers models are the engine's: quantised, with adapters, asleep and awake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minivllm import LLM, SamplingParams
from minivllm.messages import LoRARequest
from tests.parity_reference import run, tiny_llm
from tests.transformers_models.families import save_model
from tests.transformers_models.test_features import use_regions
from tests.transformers_models.test_parity import GREEDY, prompts, reference

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}

ADAPTED = {
    "olmo2": ("self_attn.q_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_attn", "mlp.c_proj"),
    "gpt_neox": ("attention.query_key_value", "mlp.dense_4h_to_h"),
    "opt": ("self_attn.v_proj", "fc2"),
}
"""Family -> two linear layers of each of its layers."""

IN_REGIONS = ("gpt2", "olmo2")


def tokens(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in run(llm, prompts(), params)]


def test_weights_of_eight_bits_are_those_that_rounding_gives(tmp_path: Path) -> None:
    directory = save_model(tmp_path, "granite", WIDE)
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=64, quantization="int8")
    weights = llm.llm_engine.client.core.executor.worker.runner.model._linears  # type: ignore[attr-defined]
    model = reference(directory)
    with torch.no_grad():
        for name in weights:  # q, k and v are rounded row by row, as they would be alone
            weight = model.get_submodule(name).weight
            scale = weight.abs().amax(1, keepdim=True) / 127
            weight.copy_((weight / scale).round() * scale)
    for prompt, given in zip(prompts(), tokens(llm)):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + given]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        # Rounding twice may swap two nearly equal tokens.
        chosen = logits.gather(1, torch.tensor(given)[:, None])[:, 0]
        assert bool((logits.max(-1).values - chosen < 0.05).all())


@pytest.mark.parametrize("family", ADAPTED)
def test_an_adapter_changes_what_it_names_and_nobody_else(family: str, tmp_path: Path) -> None:
    """Also where layers have other names,
    and where PEFT notes that the base model stores its weights transposed."""
    differences: dict[str, Any] = {"ffn_dim": 96} if family == "opt" else {}
    directory = save_model(tmp_path / "model", family, {**WIDE, **differences})
    model, generator = reference(directory), torch.Generator().manual_seed(0)
    state, updates = {}, {}
    for module, part in model.named_modules():
        if not module.endswith(ADAPTED[family]):
            continue
        is_transposed = type(part).__name__ == "Conv1D"
        rows, columns = reversed(part.weight.shape) if is_transposed else part.weight.shape
        a, b = (torch.randn(shape, generator=generator) / 8 for shape in ((4, columns), (rows, 4)))
        state |= {
            f"base_model.model.{module}.lora_A.weight": a,
            f"base_model.model.{module}.lora_B.weight": b,
        }
        updates[module] = (2 * b @ a).T if is_transposed else 2 * b @ a
    assert len(updates) == 6
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(state, adapter / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "fan_in_fan_out": family == "gpt2"}
    (adapter / "adapter_config.json").write_text(json.dumps(options))
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=64, enable_lora=True)
    if family in IN_REGIONS:
        use_regions(llm)
    lora = [LoRARequest("own", lora_path=str(adapter)), None] * 3
    texts = [{"prompt_token_ids": prompt} for prompt in prompts()]
    answers = llm.generate(texts, GREEDY, use_tqdm=False, lora_request=lora[: len(texts)])

    def expect(places: slice) -> None:
        for prompt, answer in zip(prompts()[places], answers[places]):
            given = list(answer.outputs[0].token_ids)
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + given]), use_cache=False).logits[
                    0, len(prompt) - 1 : -1
                ]
            assert given == logits.argmax(-1).tolist()

    expect(slice(1, None, 2))
    with torch.no_grad():
        for module, update in updates.items():
            model.get_submodule(module).weight += update
    expect(slice(0, None, 2))


def test_a_model_that_slept_answers_as_before(tmp_path: Path) -> None:
    directory = save_model(tmp_path, "gpt2", {"tie_word_embeddings": True})
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=64)
    before = tokens(llm)
    for level in (1, 2):
        llm.sleep(level=level)
        llm.wake_up()
        assert tokens(llm) == before


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    directory = save_model(tmp_path, "mixtral", {"num_local_experts": 4})
    (directory / "model.safetensors").unlink()
    settings = {"model_impl": "transformers", "load_format": "dummy", "max_model_len": 64}
    assert tokens(tiny_llm(directory, **settings)) == tokens(tiny_llm(directory, **settings))
