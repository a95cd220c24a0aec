"""Beam search finds what transformers' finds: the same sequences, in the same order, with the same scores."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import BeamSearchParams, SamplingParams
from minivllm.errors import RequestError
from tests.parity_reference import (
    BLOCK_SIZE,
    assert_pool_unused,
    greedy,
    random_prompts,
    reference_model,
    tiny_llm,
)

TinyModel = Callable[..., Path]
MAX_TOKENS = 7

EOS_IDS = [17, 301]


def transformers_beams(
    directory: Path, prompt: list[int], params: BeamSearchParams, eos_ids: list[int] | None
) -> list[tuple[list[int], float]]:
    """(tokens, score) of every sequence that transformers returns, best first."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference_model(directory).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.n or params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=eos_ids,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    beams = []
    for sequence, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist()):
        end = next(
            (place + 1 for place, token in enumerate(sequence) if token in (eos_ids or ())), len(sequence)
        )
        beams.append((sequence[:end], score))
    return beams


@pytest.fixture(scope="module")
def ending_model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two end-of-sequence ids whose logits are large in either direction,
    so that many beams end early."""
    directory = tmp_path_factory.mktemp("ending") / "model"
    shutil.copytree(tiny_model("llama", eos_token_id=EOS_IDS), directory)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"][EOS_IDS] *= 2.5
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


CASES = [
    *itertools.product((2, 5), (0.0, 1.0, -1.0, 2.0), (False, True, "never"), (False,)),
    (3, 1.0, False, True),
    (4, -0.5, "never", True),
    (8, 0.6, "never", False),
]


def test_sequences_scores_and_order_equal_those_of_transformers(ending_model: Path) -> None:
    prompts = random_prompts((3, 9, 30))
    ended_early = 0
    with tiny_llm(ending_model, max_num_seqs=32) as llm:
        for width, penalty, early, ignore_eos in CASES:
            params = BeamSearchParams(
                beam_width=width,
                max_tokens=MAX_TOKENS,
                length_penalty=penalty,
                early_stopping=early,
                ignore_eos=ignore_eos,
            )
            outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in prompts], params)
            for prompt, output in zip(prompts, outputs):
                expected = transformers_beams(ending_model, prompt, params, None if ignore_eos else EOS_IDS)
                found = [(sequence.token_ids, sequence.score) for sequence in output.sequences]
                assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], params
                assert [score for _, score in found] == pytest.approx(
                    [score for _, score in expected], abs=1e-4
                )
                ended_early += sum(sequence.finish_reason == "stop" for sequence in output.sequences)
        assert_pool_unused(llm)
    assert ended_early > 100


def test_a_beam_of_one_is_greedy_decoding(tiny_model: TinyModel) -> None:
    model = tiny_model("qwen3")
    prompts = random_prompts()
    with tiny_llm(model) as llm:
        outputs = llm.beam_search(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            BeamSearchParams(beam_width=1, max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        assert [output.sequences[0].token_ids for output in outputs] == greedy(llm, prompts, MAX_TOKENS)


def test_rounds_compute_what_the_prefix_cache_does_not_hold(tiny_model: TinyModel) -> None:
    """A prompt of 64 tokens is computed once; after that every beam costs less than two blocks a round."""
    [prompt] = random_prompts((64,))
    params = BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS, ignore_eos=True)
    with tiny_llm(tiny_model("llama")) as llm:
        llm.beam_search({"prompt_token_ids": prompt}, params)
        num_rounds = MAX_TOKENS - 1
        assert llm.get_metrics().num_computed_tokens <= 64 + num_rounds * 4 * BLOCK_SIZE


def test_the_n_best_of_a_text_come_with_their_text(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("llama")) as llm:
        params = BeamSearchParams(beam_width=4, n=2, max_tokens=5)
        [two] = llm.beam_search("The quick brown fox", params)
        [four] = llm.beam_search("The quick brown fox", BeamSearchParams(beam_width=4, max_tokens=5))
        assert two.sequences == four.sequences[:2] and len(four.sequences) == 4
        assert two.prompt == "The quick brown fox"
        for sequence in two.sequences:
            assert sequence.text == llm.get_tokenizer().decode(sequence.token_ids, skip_special_tokens=True)
            assert sequence.score == pytest.approx(sequence.cumulative_logprob / len(sequence.token_ids))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0, but must be a whole number of at least 1 and at most 50"),
        ({"beam_width": 51}, "beam_width is 51"),
        ({"beam_width": 2, "n": 3}, "n is 3, but must be a whole number of at least 1 and at most 2"),
        ({"beam_width": 2, "max_tokens": 0}, "max_tokens is 0, but must be a whole number of at least 1"),
        (
            {"beam_width": 2, "length_penalty": float("nan")},
            "length_penalty is nan, but must be a number from -10",
        ),
        (
            {"beam_width": 2, "early_stopping": "always"},
            "early_stopping is 'always', but must be True, False or",
        ),
    ],
)
def test_parameters_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        BeamSearchParams(**values)


def test_searches_that_cannot_run_are_refused_before_anything_runs(ending_model: Path) -> None:
    prompts = [{"prompt_token_ids": [5]}, {"prompt_token_ids": [5] * 120}]
    with tiny_llm(ending_model) as llm:
        with pytest.raises(RequestError, match="Prompt 1: The prompt has 120 tokens and max_tokens is 20"):
            llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=20))
        with pytest.raises(
            RequestError, match=r"beam_width is 50, but must be at most 25 .* 3 end-of-sequence ids"
        ):
            llm.beam_search(prompts, BeamSearchParams(beam_width=50, max_tokens=2))
        with pytest.raises(
            RequestError, match="params is of type SamplingParams, but must be a BeamSearchParams"
        ):
            llm.beam_search(prompts, SamplingParams())  # type: ignore[arg-type]
        with pytest.raises(RequestError, match=r"A beam search cannot stream .* call LLM\.beam_search"):
            llm.llm_engine.add_request(None, prompts[0], BeamSearchParams(beam_width=2))  # type: ignore[arg-type]
        assert llm.get_metrics().num_steps == 0
