"""Models that transformers computes give transformers' own tokens and probabilities,
with the whole engine around them.

The judge is the same model run by transformers alone: eager attention, float32, the whole text in one pass.
Three configurations of every family, and one way for requests to be cut, preempted and guessed ahead for
each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import SamplingParams
from tests.parity_reference import run, tiny_llm
from tests.transformers_models.families import FAMILIES, VOCAB, save_model

CORE = ("gemma3_text", "gpt2", "gpt_oss", "granite", "llama4_text", "mixtral")
"""Between them: windows, transposed weights, sinks, multipliers, chunks,
experts that are merged on the way."""

WAYS: tuple[dict[str, Any], ...] = (
    {"max_num_batched_tokens": 11, "num_gpu_blocks_override": 1 + 12},
    {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "max_num_batched_tokens": 24},
    {"max_num_batched_tokens": 5, "max_num_seqs": 3, "block_size": 16},
)
"""Prompt chunks in a pool so small that requests are preempted; guesses that are verified;
steps of a few tokens."""

COMPILED = [pytest.param("llama", 1), pytest.param("gemma3_text", 2)]
"""One kind of layer, and two; their regions are compiled, which takes minutes."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
MODELS = [
    pytest.param(family, index, marks=() if family in CORE else pytest.mark.slow)
    for family, configurations in FAMILIES.items()
    for index in range(len(configurations))
]


def reference(directory: Path) -> Any:
    """The model as transformers runs it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def prompts() -> list[list[int]]:
    """Of different lengths; one repeats itself, and two begin with the same three blocks."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in (1, 6, 25)]
    return [*texts, texts[1] * 4, texts[2][:24] + texts[1]]


@pytest.mark.parametrize(("family", "index"), MODELS)
def test_a_model_of_transformers_gives_its_own_tokens_and_probabilities(
    family: str, index: int, tmp_path: Path
) -> None:
    directory = save_model(tmp_path, family, FAMILIES[family][index], seed=index)
    model, way = reference(directory), WAYS[index]
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=64, **way)
    first = run(llm, prompts(), GREEDY)
    again = run(llm, prompts(), GREEDY)  # on cached blocks
    scored = run(llm, prompts(), SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
    for prompt, output, other, scores in zip(prompts(), first, again, scored):
        tokens = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0].log_softmax(-1)
        assert tokens == logprobs[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert list(other.outputs[0].token_ids) == tokens
        given = scores.prompt_logprobs or []
        own = torch.tensor([entry[token].logprob for token, entry in list(zip(prompt, given))[1:] if entry])
        expected = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
        torch.testing.assert_close(own, expected, atol=3e-5, rtol=1e-5)
    metrics = llm.get_metrics()
    if [pool.name for pool in metrics.kv_cache_pools] == [
        "full attention"
    ]:  # what windows hold is less, or forgotten
        assert any(output.num_cached_tokens for output in again)
        assert "num_gpu_blocks_override" not in way or metrics.num_preemptions > 0
    assert "speculative_config" not in way or metrics.num_drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "index"), COMPILED)
def test_compiled_code_gives_the_same_tokens(family: str, index: int, tmp_path: Path) -> None:
    directory = save_model(tmp_path, family, FAMILIES[family][index])
    model = reference(directory)
    llm = tiny_llm(directory, model_impl="transformers", max_model_len=64, enforce_eager=False)
    for prompt, output in zip(prompts(), run(llm, prompts(), GREEDY)):
        tokens = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert tokens == logits.argmax(-1).tolist()
