"""Small random models of many families on a CUDA device, compiled and with graphs,
against transformers in float32."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.lora.lora_adapters import merged_tokens, random_adapter
from tests.model_families import save_tiny_model
from tests.parity_reference import random_prompts, reference_logits, reference_tokens

DEVICE = os.environ.get("MINIVLLM_TEST_DEVICE", "cuda")
"""What is checked; another one tries the checks themselves."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here"
    ),
]
pytest.importorskip("msgspec", reason="the engine needs msgspec, which is not installed")

DENSE = ["llama-biases", "llama-mqa", "mistral-window", "qwen3", "gemma2", "gemma3", "olmo3", "phi3-partial"]
STATES = ["lfm2", "qwen3-next-dense", "granite-hybrid"]
LATENT = ["deepseek-v2-dense"]
EXPERTS = ["qwen3-moe", "gpt-oss", "deepseek-v3", "mixtral"]
"""Computed in bfloat16, which is all that a GPU's grouped products take."""
SETTINGS = {
    "deepseek-v2-dense": ("deepseek-v2", {"first_k_dense_replace": 9}),
    # Older transformers norm several groups together.
    "granite-hybrid": ("granite-hybrid", {"mamba_n_groups": 1}),
}
PROMPTS = random_prompts((1, 5, 64, 65, 100))
LIMITS = {
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 64,
}


def generated(directory: Path, **arguments: object) -> list[list[int]]:
    """Greedy answers, of all prompts together, and again of each by itself."""
    from minivllm import LLM, SamplingParams

    torch._dynamo.reset()
    torch.set_float32_matmul_precision("highest")
    settings = SamplingParams(temperature=0.0, max_tokens=16)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    arguments = {"enforce_eager": DEVICE == "cpu", **arguments}
    with LLM(str(directory), device=DEVICE, **(LIMITS | arguments)) as llm:
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("family", DENSE + STATES + LATENT)
def test_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    directory = save_tiny_model(tmp_path, *SETTINGS.get(family, (family, {})))
    assert generated(directory, dtype="float32") == reference_tokens(directory, PROMPTS)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_stay_close_to_transformers(tmp_path: Path, family: str) -> None:
    """Log-probabilities of a text. Rounding sends some tokens to other experts,
    so that only most can be compared."""
    from minivllm import LLM, SamplingParams

    torch._dynamo.reset()
    sides: dict[str, float] = {"hidden_size": 64, "moe_intermediate_size": 32}
    if family == "gpt-oss":
        sides |= {"intermediate_size": 64, "swiglu_limit": 7.0}  # the only limit that older transformers know
    directory = save_tiny_model(tmp_path, family, sides)
    prompt, settings = PROMPTS[-1], SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=0)
    with LLM(str(directory), device=DEVICE, dtype="bfloat16", enforce_eager=DEVICE == "cpu", **LIMITS) as llm:
        [output] = llm.generate({"prompt_token_ids": prompt}, settings, use_tqdm=False)
    entries = zip(prompt[1:], output.prompt_logprobs[1:])
    got = torch.tensor([entry[token].logprob for token, entry in entries])
    logits = reference_logits(directory, prompt)
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert (got - expected).abs().median() < 0.05 * logits.std()


def test_requests_with_adapters_are_served_beside_others(tmp_path: Path) -> None:
    from minivllm import LLM, SamplingParams

    torch._dynamo.reset()
    torch.set_float32_matmul_precision("highest")
    directory = save_tiny_model(tmp_path / "model", "llama", {})
    adapters = [None, *(random_adapter(tmp_path / str(seed), directory, seed=seed) for seed in (1, 2))]
    chosen = [adapters[index % len(adapters)] for index in range(len(PROMPTS))]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    settings = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(
        str(directory), device=DEVICE, dtype="float32", enforce_eager=DEVICE == "cpu", **(LIMITS | lora)
    ) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, settings, lora_request=chosen, use_tqdm=False)
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0
    got = [output.outputs[0].token_ids for output in outputs]
    assert got == [merged_tokens(directory, one, prompt, 16) for one, prompt in zip(chosen, PROMPTS)]
