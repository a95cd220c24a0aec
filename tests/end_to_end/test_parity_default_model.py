"""The default model's greedy tokens equal transformers', which loads the same GGUF file, in float32."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.bench.requests.texts import PROMPTS
from minivllm.gguf.gguf_file import find_gguf
from minivllm.kv_cache.blocks.continuations import MIN_COPIED_TOKENS
from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.parity_reference import reference_logits, run, tokens_of

MAX_TOKENS = 64
BLOCK_SIZE = 32
QUESTIONS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish, German and French.",
    "List three fruits that are red.",
    "What is 17 plus 25?",
    "Why is the sky blue?",
    "Write a Python function that reverses a string.",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes.",
)
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village near the mountains,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "The three laws of thermodynamics state that",
    "Grüße aus Köln! Heute",
    '{"name": "Ada", "year":',
    "A",
    "Paged attention keeps the keys and values of every request in blocks of equal size, so that memory is "
    "not wasted "
    "on lengths that never come. " * 6 + "In other words,",
)


@pytest.fixture(scope="module")
def prompts(smollm2_path: Path) -> list[list[int]]:
    """Twenty prompts: ten questions through the chat template, ten plain texts, one of them long."""
    tokenizer = load_tokenizer(smollm2_path)
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    return chats + [tokenizer.encode(text) for text in TEXTS]


def gguf_of(path: Path) -> Path:
    gguf = find_gguf(path, "auto")
    assert gguf is not None
    return gguf


@lru_cache(maxsize=64)
def likeliest_after_each(path: Path, prompt: tuple[int, ...], completion: tuple[int, ...]) -> list[int]:
    """The likeliest token where each token of the completion stands,
    from one pass of transformers over all of them.

    Equal to ``completion`` exactly if greedy decoding gives it (by induction over its tokens),
    and much faster.
    """
    gguf = find_gguf(path, "auto")
    assert gguf is not None
    logits = reference_logits(gguf.parent, [*prompt, *completion], gguf.name)
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def assert_greedy(
    path: Path, eos: Collection[int], prompts: list[list[int]], completions: list[list[int]]
) -> None:
    """Every completion is what transformers finds likeliest, up to where it must end."""
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion) == MAX_TOKENS or completion[-1] in eos
        assert completion == likeliest_after_each(path, tuple(prompt), tuple(completion))


def engine(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 320,
        "max_num_seqs": 20,
        "num_gpu_blocks_override": 200,
        "block_size": BLOCK_SIZE,
        "compile_in_background": False,
    }
    return LLM(str(path), **{**defaults, **settings})


GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


def reusable(num_tokens: int) -> int:
    """All tokens but the last, if a copy of a block is worth it; else those in whole blocks."""
    whole = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    return num_tokens - 1 if num_tokens - 1 - whole >= MIN_COPIED_TOKENS else whole


@pytest.mark.parametrize(
    ("eager", "chosen"),
    [
        pytest.param(False, range(20), id="compiled"),
        pytest.param(True, (0, 18), id="eager, two"),
        pytest.param(True, range(20), id="eager", marks=pytest.mark.matrix),
    ],
)
def test_the_default_model_equals_transformers(
    smollm2_path: Path, prompts: list[list[int]], eager: bool, chosen: Sequence[int]
) -> None:
    """All in one batch, then a few again from the prefix cache in reverse order."""
    prompts = [prompts[index] for index in chosen]
    with engine(smollm2_path, enforce_eager=eager) as llm:
        completions = tokens_of(run(llm, prompts, GREEDY))
        again = run(llm, prompts[:-4:-1], GREEDY)
        assert tokens_of(again) == completions[:-4:-1]
        assert [output.num_cached_tokens for output in again] == [
            reusable(len(prompt)) for prompt in prompts[:-4:-1]
        ]
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]
    assert_greedy(smollm2_path, llm.llm_engine.client.eos_token_ids, prompts, completions)


@pytest.mark.slow
def test_tokens_guessed_from_a_prompt_to_repair_leave_the_default_models_answer(smollm2_path: Path) -> None:
    tokenizer = load_tokenizer(smollm2_path)
    question = PROMPTS["repair"](random.Random(0))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    guessing = {"method": "ngram", "verification_cost": 0.0}
    with engine(smollm2_path, enforce_eager=True, speculative_config=guessing) as llm:
        [completion] = tokens_of(run(llm, [prompt], GREEDY))
        assert llm.get_metrics().num_accepted_tokens > 10
    assert_greedy(smollm2_path, llm.llm_engine.client.eos_token_ids, [prompt], [completion])


@pytest.mark.matrix
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        pytest.param({"max_num_batched_tokens": 1}, range(3, 20, 4), id="budget 1, five"),
        pytest.param({"max_num_batched_tokens": 7}, range(3, 20, 4), id="budget 7, five"),
        pytest.param({"max_num_batched_tokens": 64}, range(20), id="budget 64"),
        pytest.param({"num_gpu_blocks_override": 24, "block_size": 16}, range(20), id="preempted"),
    ],
)
def test_the_default_model_equals_transformers_in_every_setting(
    smollm2_path: Path, prompts: list[list[int]], eager: bool, settings: dict[str, Any], chosen: Sequence[int]
) -> None:
    prompts = [prompts[index] for index in chosen]
    with engine(smollm2_path, enforce_eager=eager, **settings) as llm:
        completions = tokens_of(run(llm, prompts, GREEDY))
        assert (llm.get_metrics().num_preemptions > 1) == ("num_gpu_blocks_override" in settings)
    assert_greedy(smollm2_path, llm.llm_engine.client.eos_token_ids, prompts, completions)
