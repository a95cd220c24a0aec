"""Every row of a mixed batch answers as transformers does with that row's adapter merged into the weights
(float32)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels_triton_free.lora
import minivllm.lora.manager
from minivllm import LLM, LoRARequest, SamplingParams
from minivllm.processing.outputs import RequestOutput
from tests.lora.lora_adapters import TinyModel, merged_logprobs, merged_model, merged_tokens, random_adapter
from tests.parity_reference import assert_pool_unused, random_prompts, runner_of, tiny_llm, tokens_of

MAX_TOKENS = 8
Adapters = list[LoRARequest | None]


def mixed_adapters(directory: Path, model: Path) -> Adapters:
    """None, and adapters of ranks 8 to 64 that change all layers, some, or one,
    with both kinds of scaling."""
    return [
        None,
        random_adapter(directory / "all-8", model, rank=8, seed=1),
        random_adapter(
            directory / "attention-16", model, rank=16, layers=("q_proj", "v_proj"), seed=2, lora_alpha=32
        ),
        random_adapter(directory / "mlp-33", model, rank=33, layers=("gate_proj", "down_proj"), seed=3),
        random_adapter(directory / "all-64", model, rank=64, seed=4, use_rslora=True, lora_alpha=8),
        random_adapter(directory / "keys-9", model, rank=9, layers=("k_proj", "o_proj", "up_proj"), seed=5),
    ]


def lora_llm(model: Path, **settings: Any) -> LLM:
    return tiny_llm(model, **{"enable_lora": True, "max_loras": 6, "max_lora_rank": 64, **settings})


def run_mixed(llm: LLM, prompts: list[list[int]], adapters: Adapters, **params: Any) -> list[RequestOutput]:
    """Greedy completions, one adapter per prompt, all in one batch."""
    greedy = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **params})
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, greedy, use_tqdm=False, lora_request=adapters)


def assert_logprobs_equal_merged(
    model: Path, outputs: list[RequestOutput], prompts: list[list[int]], adapters: Adapters
) -> None:
    """Tokens, and the log-probability of every one of them and of every prompt token."""
    for output, prompt, adapter in zip(outputs, prompts, adapters):
        tokens = output.outputs[0].token_ids
        assert tokens == merged_tokens(model, adapter, prompt, MAX_TOKENS), adapter
        expected = merged_logprobs(model, adapter, prompt + tokens)
        assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
        maps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for position, (token, entries) in enumerate(zip([*prompt, *tokens][1:], maps)):
            assert entries is not None
            assert entries[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-3), (
                adapter
            )


@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "llama-biases"])
def test_each_row_of_a_mixed_batch_equals_the_merged_model(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    model = tiny_model(family)
    adapters = mixed_adapters(tmp_path, model)
    prompts = random_prompts((5, 17, 1, 33, 9, 12))
    with lora_llm(model, max_num_batched_tokens=24) as llm:
        outputs = run_mixed(llm, prompts, adapters, logprobs=0, prompt_logprobs=0)
        assert_logprobs_equal_merged(model, outputs, prompts, adapters)
        assert_pool_unused(llm)
    answers = {tuple(output.outputs[0].token_ids) for output in outputs}
    assert len(answers) == len(adapters)


@pytest.mark.parametrize("family", ["llama", "llama-biases"])
def test_adapters_stored_in_one_piece_as_on_a_gpu_equal_the_merged_model(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(minivllm.lora.manager, "lane_width", lambda sizes, device: sum(sizes))
    monkeypatch.setattr(kernels_triton_free.lora, "_add_by_products", kernels_triton_free.lora._add_stacked)
    model = tiny_model(family)
    adapters, prompts = mixed_adapters(tmp_path, model), random_prompts((5, 17, 1, 33, 9, 12))
    with lora_llm(model, max_num_batched_tokens=24) as llm:
        outputs = run_mixed(llm, prompts, adapters, logprobs=0, prompt_logprobs=0)
        assert_logprobs_equal_merged(model, outputs, prompts, adapters)


def test_an_engine_with_adapters_answers_without_one_as_an_engine_without(tiny_model: TinyModel) -> None:
    model = tiny_model("llama")
    prompts = random_prompts()
    with lora_llm(model) as llm:
        assert tokens_of(run_mixed(llm, prompts, [None] * len(prompts))) == [
            merged_tokens(model, None, prompt, MAX_TOKENS) for prompt in prompts
        ]


def test_preempted_requests_keep_their_adapters(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Requests that grow to 5 blocks, in a pool that holds 8, with prompts that repeat between adapters."""
    model = tiny_model("llama")
    adapters = mixed_adapters(tmp_path, model)
    prompts = random_prompts((15, 16, 14)) * 2
    with lora_llm(model, max_model_len=40, num_gpu_blocks_override=9, max_loras=3) as llm:
        outputs = run_mixed(llm, prompts, adapters, max_tokens=24)
        assert llm.get_metrics().num_preemptions > 0
        for output, prompt, adapter in zip(outputs, prompts, adapters):
            assert output.outputs[0].token_ids == merged_tokens(model, adapter, prompt, 24), adapter


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_adapters_over_layers_that_forget(tiny_model: TinyModel, tmp_path: Path, num_blocks: int) -> None:
    """Twice: cached prefixes belong to one adapter in the pool of windows too.
    In 8 blocks, requests are preempted."""
    model = tiny_model("qwen2-window", sliding_window=16)
    adapters = mixed_adapters(tmp_path, model)[:3]
    prompts = [random_prompts((21,))[0]] * 3
    with lora_llm(model, max_model_len=48, num_gpu_blocks_override=num_blocks, max_loras=3) as llm:
        assert [group.reach for group in runner_of(llm).limits.groups] == [None, 16]
        for _ in range(2):
            outputs = run_mixed(llm, prompts, adapters, max_tokens=20)
            for output, prompt, adapter in zip(outputs, prompts, adapters):
                assert output.outputs[0].token_ids == merged_tokens(model, adapter, prompt, 20), adapter
        if num_blocks == 64:
            assert [output.num_cached_tokens for output in outputs] == [16] * 3
        assert (llm.get_metrics().num_preemptions > 0) == (num_blocks == 9)
        assert_pool_unused(llm)


@pytest.mark.slow
def test_adding_adapters_compiles_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("llama")
    adapters = mixed_adapters(tmp_path, model)
    prompts = random_prompts((5, 17, 1, 33, 9, 12))
    with lora_llm(model, enforce_eager=False) as llm, torch.compiler.set_stance("fail_on_recompile"):
        for count in (1, 3, len(adapters)):
            outputs = run_mixed(llm, prompts[:count], adapters[:count])
            for output, prompt, adapter in zip(outputs, prompts, adapters):
                assert output.outputs[0].token_ids == merged_tokens(model, adapter, prompt, MAX_TOKENS), (
                    adapter
                )
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


def test_completions_of_one_prompt_share_its_adapter(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tiny_model("qwen3-tied")
    adapter = random_adapter(tmp_path / "shared", model, rank=8)
    with lora_llm(model) as llm:
        [output] = run_mixed(llm, random_prompts((20,)), [adapter], n=3, logprobs=0)
    expected = merged_tokens(model, adapter, output.prompt_token_ids, MAX_TOKENS)
    assert [completion.token_ids for completion in output.outputs] == [expected] * 3


def test_adapters_work_over_quantised_weights(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The judge is transformers with the weights that the quantised layers amount to, and the update on top.
    The tolerance is that of int8 products, whose activations are rounded to bfloat16; the update moves far
    more.
    """
    model = tiny_model("llama")
    adapters: Adapters = [None, random_adapter(tmp_path / "all-8", model, rank=8, seed=1)]
    prompts = random_prompts((17, 9))
    with lora_llm(model, quantization="int8") as llm:
        outputs = run_mixed(llm, prompts, adapters, logprobs=0)
        restored = {}
        for block, linear in runner_of(llm).model.linears:
            weight = linear.method.apply(torch.eye(linear.in_features), linear.tensors).T
            for part, own in zip(linear.sizes, weight.split(list(linear.sizes.values()))):
                restored[f"{block}.{part}.weight"] = own
    for output, prompt, adapter in zip(outputs, prompts, adapters):
        reference = copy.deepcopy(merged_model(model, adapter))
        plain = dict(merged_model(model, None).named_parameters())
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if name in restored:
                    parameter += restored[name] - plain[name]
            tokens = output.outputs[0].token_ids
            expected = reference(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        assert output.outputs[0].logprobs is not None
        for place, (token, entries) in enumerate(zip(tokens, output.outputs[0].logprobs), len(prompt) - 1):
            assert entries[token].logprob == pytest.approx(float(expected[place, token]), abs=0.1)
