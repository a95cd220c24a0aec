"""A second model as a drafter: its cache follows the text through chunks, prefix hits,
preemption and rejections."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minivllm.batch.layer_caches import block_bytes
from minivllm.batch.step_inputs import Row
from minivllm.errors import ConfigError
from minivllm.spec_decode.paged_draft import PrefixFingerprints
from tests.parity_reference import (
    assert_pool_unused,
    reference_model,
    reference_tokens,
    run,
    runner_of,
    tiny_llm,
    tokens_of,
)
from tests.spec_decode.drafting_cases import (
    GREEDY,
    MAX_TOKENS,
    PARAMS,
    PROMPTS,
    SETTINGS,
    always_drafts,
    recorded_guesses,
)
from tests.spec_decode.scripted_drafter import speculation_of

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def other_model(tiny_model: TinyModel) -> Path:
    """Other weights, another attention, windows:
    a drafter that has little in common with the model but its tokens."""
    return tiny_model("qwen2-window", num_hidden_layers=2, hidden_size=32, num_key_value_heads=4)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    with tiny_llm(model) as llm:
        return tokens_of(run(llm, PROMPTS, PARAMS))


def drafting(draft: Path, **settings: Any) -> dict[str, Any]:
    config = {
        "method": "draft_model",
        "model": str(draft),
        "num_speculative_tokens": 3,
        "verification_cost": 0.0,
    }
    return {"speculative_config": {**config, **settings}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_guesses_are_the_greedy_tokens_of_the_draft_model_whatever_became_of_its_cache(
    model: Path, other_model: Path, settings: dict[str, Any]
) -> None:
    with always_drafts(tiny_llm(model, **drafting(other_model), **settings)) as llm:
        recorded = recorded_guesses(llm)
        for _ in range(2):  # the second time from the prefix cache
            assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(model, PROMPTS)
        assert "num_gpu_blocks_override" not in settings or llm.get_metrics().num_preemptions > 0
        assert_pool_unused(llm)
    assert any(len(guess) == 3 for _, guess in recorded)
    draft = reference_model(other_model)
    for known, guess in recorded:
        with torch.inference_mode():
            logits = draft(torch.tensor([known + guess[:-1]]), use_cache=False).logits[0]
        assert logits[len(known) - 1 :].argmax(-1).tolist() == guess


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_where_draft_and_model_are_the_same_every_guess_is_right_also_at_random(
    model: Path, plain: list[list[int]], settings: dict[str, Any]
) -> None:
    with always_drafts(tiny_llm(model, **drafting(model), **settings)) as llm:
        for _ in range(2):
            assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
        assert_pool_unused(llm)


def test_right_guesses_save_their_share_of_steps(model: Path, plain: list[list[int]]) -> None:
    with always_drafts(tiny_llm(model, **drafting(model))) as llm:
        assert tokens_of(run(llm, PROMPTS[:1], PARAMS[0])) == plain[:1]
        assert llm.get_metrics().num_steps == 1 + -(-(MAX_TOKENS - 1) // 4)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_draft_model_that_knows_nothing_changes_nothing(
    model: Path, other_model: Path, plain: list[list[int]], settings: dict[str, Any]
) -> None:
    with always_drafts(tiny_llm(model, **drafting(other_model), **settings)) as llm:
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens < metrics.num_draft_tokens // 4


def test_the_drafter_computes_every_token_once(model: Path, plain: list[list[int]]) -> None:
    """Shared blocks are shared for the drafter too:
    asked again, it computes what the model does, and no more."""
    with always_drafts(tiny_llm(model, **drafting(model))) as llm:
        drafter: Any = speculation_of(llm).drafter
        computed: list[int] = []
        original = drafter._compute

        def compute(rows: list[Row]) -> Any:
            computed.append(sum(row.count for row in rows))
            return original(rows)

        drafter._compute = compute
        sums = []
        for _ in range(2):
            computed.clear()
            assert tokens_of(run(llm, PROMPTS[:1], PARAMS[0])) == plain[:1]
            sums.append(sum(computed))
        # 18 prompt tokens and 15 of the answer (the last one is never computed); then without the prompt's
        # two blocks, and without those of the answer: its tokens are the same, but not its blocks, until it
        # has said them.
        assert sums[0] == 18 + 15 - 1
        assert sums[1] <= sums[0] - 16


def test_both_caches_count(model: Path, other_model: Path) -> None:
    megabyte = 2**20
    with tiny_llm(
        model, num_gpu_blocks_override=None, kv_cache_memory_bytes=megabyte, **drafting(other_model)
    ) as llm:
        worker = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
        page = sum(block_bytes(decoder, 8) for decoder in worker._text_models)
        assert (
            len(worker._text_models) == 2 and runner_of(llm).limits.groups[0].num_blocks == megabyte // page
        )
        assert worker.memory_bytes()["kv_cache"] == megabyte // page * page


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes_up_with_its_model(model: Path, plain: list[list[int]], level: int) -> None:
    with always_drafts(tiny_llm(model, **drafting(model))) as llm:
        client = llm.llm_engine.client
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        client.call("sleep", level)
        assert client.call("collective_rpc", "memory_bytes", [])[0]["kv_cache"] == 0
        client.call("wake_up")
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0


def test_another_vocabulary_is_refused_with_a_sentence(
    model: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match="has a vocabulary of 200 tokens, but the model it guesses for has 416"
    ):
        tiny_llm(model, **drafting(tiny_model("llama", vocab_size=200)))
    other = shutil.copytree(model, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another tokenizer than the model it guesses for"):
        tiny_llm(model, **drafting(other))


@pytest.mark.parametrize(("width", "draft_width"), [(432, 420), (420, 432)])
def test_a_vocabulary_may_be_padded_to_another_width(
    tiny_model: TinyModel, tmp_path: Path, width: int, draft_width: int
) -> None:
    """Qwen2.5 of 0.5B parameters has 151,936 logits, that of 7B has 152,064, for the same tokens."""
    wide = tiny_model("llama", vocab_size=max(width, draft_width))
    narrow = Path(shutil.copytree(wide, tmp_path / "narrow"))
    (narrow / "config.json").write_text(
        json.dumps({**json.loads((wide / "config.json").read_text()), "vocab_size": min(width, draft_width)})
    )
    weights = load_file(narrow / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][: min(width, draft_width)].contiguous()
    save_file(weights, narrow / "model.safetensors")
    target, draft = (wide, narrow) if width > draft_width else (narrow, wide)
    prompts = [*PROMPTS, [width - 1, 3, 4]]
    params = [*PARAMS, PARAMS[0]]
    with tiny_llm(target) as llm:
        expected = tokens_of(run(llm, prompts, params))
    with always_drafts(tiny_llm(target, **drafting(draft))) as llm:
        assert tokens_of(run(llm, prompts, params)) == expected
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens > metrics.num_draft_tokens // 4


def test_a_draft_model_must_be_named_and_long_enough(model: Path, tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="needs the name or the path of a model"):
        tiny_llm(model, speculative_config={"method": "draft_model"})
    with pytest.raises(ConfigError, match="made for at most 64 tokens, but max_model_len is 128"):
        tiny_llm(model, **drafting(tiny_model("llama", max_position_embeddings=64)))


@pytest.mark.slow
def test_a_compiled_draft_model_gives_the_same_tokens_and_compiles_nothing_after_warm_up(
    tiny_model: TinyModel,
) -> None:
    directory = tiny_model("qwen2-window")
    with tiny_llm(directory) as llm:
        expected = tokens_of(run(llm, PROMPTS, PARAMS))
    with always_drafts(tiny_llm(directory, enforce_eager=False, **drafting(directory))) as llm:
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == expected
        assert tokens_of(run(llm, PROMPTS[1:2], PARAMS[1])) == expected[1:2]
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens > 0.9 * metrics.num_draft_tokens > 0
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
def test_equal_fingerprints_are_equal_prefixes(first: list[int], second: list[int]) -> None:
    fingerprints = PrefixFingerprints(16)
    marks = [fingerprints(np.array(tokens, dtype=np.int32)) for tokens in (first, second)]
    for place, (mark, other) in enumerate(zip(*marks)):
        assert mark != 0
        assert (mark == other) == (first[: place + 1] == second[: place + 1])
