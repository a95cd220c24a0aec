"""Stored formats, rounding, speculation, cut prompts,
preemption and embeddings over the layers of transformers.

Every case pairs one format with one family and one way for requests to be cut. The second half runs on the
regions that a traced model is cut into, uncompiled. The judge is transformers with the values that are
stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM
from minivllm.compilation.regions import Size
from minivllm.errors import ModelError
from tests.end_to_end.test_packed_checkpoints import float8_copy, quantised_copy
from tests.parity_reference import run, tiny_llm
from tests.transformers_models.families import save_model
from tests.transformers_models.test_parity import GREEDY, WAYS, prompts, reference
from tests.transformers_models.test_regions import checked

WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
EXPERTS = {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHORT = {"max_num_batched_tokens": 5, "max_num_seqs": 3}
SUFFIX = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}

STORED = [
    pytest.param("seed_oss", WIDE, "awq", {}, WAYS[0], False, id="awq, chunks and preemption"),
    pytest.param("granite", WIDE, "gptq", {"bits": 8}, WAYS[1], False, id="gptq 8 bits, n-grams"),
    pytest.param("seed_oss", WIDE, "gptq", {}, SUFFIX, True, id="gptq in regions, suffixes"),
    pytest.param("qwen3_moe", EXPERTS, "awq", {}, SHORT, True, id="experts of awq in regions, short steps"),
    pytest.param(
        "olmo2", WIDE, "fp8", {"kind": "row"}, {"async_scheduling": True}, True, id="fp8 in regions, async"
    ),
    pytest.param(
        "granite", WIDE, "fp8", {"kind": "block"}, WAYS[0], True, id="fp8 blocks in regions, preemption"
    ),
]


def use_regions(llm: LLM) -> None:
    """Run on the regions of the traced model from now on, each of them checked and none compiled."""
    runner = llm.llm_engine.client.core.executor.worker.runner  # type: ignore[attr-defined]
    model, device = runner.model, runner.model.device
    caches = [spec.declare(Size("blocks", 8), 8, device) for spec in model.cache_specs]
    model.build_regions(checked, runner.paged_model._builder.token_specs, caches)
    assert model._traced is not None


def check_tokens(llm: LLM, judge: Any, slack: float) -> None:
    """Each token is the most likely one, or as likely as that but for ``slack`` of the largest logit."""
    for prompt, output in zip(prompts(), run(llm, prompts(), GREEDY)):
        given = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = judge(torch.tensor([prompt + given]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(given)[:, None])[:, 0]
        assert bool((logits.max(-1).values - chosen <= slack * logits.abs().max()).all())


@pytest.mark.parametrize(("family", "shape", "method", "settings", "way", "cuts"), STORED)
def test_stored_formats_are_multiplied_as_their_values_are(
    family: str,
    shape: dict[str, Any],
    method: str,
    settings: dict[str, Any],
    way: dict[str, Any],
    cuts: bool,
    tmp_path: Path,
) -> None:
    source = save_model(tmp_path / "source", family, shape)
    if method == "fp8":
        stored, plain, _ = float8_copy(source, tmp_path, **settings)
    else:
        stored, plain, _ = quantised_copy(source, tmp_path, method, settings)
    llm = tiny_llm(stored, model_impl="transformers", max_model_len=64, **way)
    if cuts:
        use_regions(llm)
    judge = reference(plain)
    check_tokens(llm, judge, 1e-3)
    check_tokens(llm, judge, 1e-3)  # on cached blocks


def test_a_bias_that_the_model_does_not_have_must_be_zero(tmp_path: Path) -> None:
    stored, _, _ = quantised_copy(save_model(tmp_path / "source", "granite", WIDE), tmp_path, "gptq", {})
    tensors = load_file(stored / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"][3] = 1
    save_file(tensors, stored / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj\.bias' is not zero"):
        tiny_llm(stored, model_impl="transformers", max_model_len=64)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_rounded_as_all_products_are(quantization: str, tmp_path: Path) -> None:
    directory = save_model(tmp_path, "qwen3_moe", EXPERTS)
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=64, quantization=quantization)
    model = llm.llm_engine.client.core.executor.worker.runner.model  # type: ignore[attr-defined]
    assert {str(part.experts.method.down) for part in model._experts.values()} != {"PlainLinear()"}
    rounded = [list(output.outputs[0].token_ids) for output in run(llm, prompts(), GREEDY)]
    use_regions(llm)
    assert [list(output.outputs[0].token_ids) for output in run(llm, prompts(), GREEDY)] == rounded
    judge = reference(directory)
    check_tokens(llm, judge, 0.1 if quantization == "int8" else 0.9)


@pytest.mark.parametrize("cuts", [False, True])
def test_embeddings_are_the_final_hidden_states(cuts: bool, tmp_path: Path) -> None:
    directory = save_model(tmp_path, "opt", {"ffn_dim": 48})
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=64, max_num_batched_tokens=11)
    if cuts:
        use_regions(llm)
    judge = reference(directory)
    outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts()], use_tqdm=False)
    for prompt, output in zip(prompts(), outputs):
        with torch.inference_mode():
            hidden = judge.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
        given = torch.tensor(output.embedding)
        torch.testing.assert_close(given, hidden / hidden.norm(), atol=1e-4, rtol=1e-4)
