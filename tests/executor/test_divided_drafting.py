"""Drafters over a model that several workers divide, by parts or in stages: the tokens are those of one
worker, and so are the guesses of parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from minivllm import LLM
from minivllm.errors import ConfigError
from minivllm.simulation.ranks import virtual_llm
from minivllm.worker.worker import Worker
from tests.executor.test_tensor_parallel import UNEVEN
from tests.parity_reference import reference_tokens, run, tiny_llm, tokens_of
from tests.spec_decode.drafting_cases import GREEDY, PARAMS, PROMPTS
from tests.spec_decode.eagle_heads import crafted_model, knowing_head, random_head
from tests.spec_decode.mtp_heads import PREVIOUS_TOO, crafted_glm, with_knowing_head, with_random_head

TinyModel = Callable[..., Path]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
    "early_exit": {"method": "early_exit", "num_layers": 1},
    "draft_model": {"method": "draft_model"},
}


def divided_llm(model: Path, size: int, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "enforce_eager": True,
        "compile_in_background": False,
        "block_size": 8,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 1 + 14,  # some are preempted
    }
    return virtual_llm(model=str(model), tensor_parallel_size=size, **{**defaults, **settings})


def workers_of(llm: LLM) -> list[Worker]:
    executor = llm.llm_engine.client.core.executor  # type: ignore[attr-defined]
    return getattr(executor, "workers", None) or [executor.worker]


def always_drafts(llm: LLM) -> LLM:
    """On every rank of the last stage, however costly it is."""
    for worker in workers_of(llm):
        assert (worker.runner.speculation is not None) == worker._stage.is_last
        if worker.runner.speculation is not None:
            worker.runner.speculation.lengths.choose = lambda *arguments: 3  # type: ignore[method-assign]
    return llm


def counts(llm: LLM) -> tuple[int, int]:
    metrics = llm.get_metrics()
    return metrics.num_draft_tokens, metrics.num_accepted_tokens


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama-biases", **{**UNEVEN, "num_hidden_layers": 3})


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    """Greedy and seeded, without drafts."""
    with tiny_llm(model, max_model_len=64) as llm:
        return tokens_of(run(llm, PROMPTS, PARAMS))


@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("size", [2, 3])
def test_tokens_are_those_without_drafts_and_guesses_those_of_one_worker(
    model: Path, plain: list[list[int]], method: str, size: int
) -> None:
    config = {**DRAFTERS[method], "num_speculative_tokens": 3, "verification_cost": 0.0}
    if method == "draft_model":
        config["model"] = str(model)
    roomy = {"max_model_len": 64, "num_gpu_blocks_override": 1 + 14}
    with always_drafts(tiny_llm(model, speculative_config=config, **roomy)) as llm:
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        expected = counts(llm)
    with always_drafts(
        divided_llm(model, size, speculative_config=config, max_num_batched_tokens=None)
    ) as llm:
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        assert llm.get_metrics().num_preemptions > 0
        drafted, accepted = counts(llm)
    assert (drafted, accepted) == expected and drafted > 0
    assert method != "draft_model" or accepted == drafted


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
@pytest.mark.parametrize(("stages", "size"), [(2, 1), (3, 1), (2, 2)])
def test_the_last_stage_guesses_and_all_take_back_what_is_rejected(
    model: Path, plain: list[list[int]], method: str, stages: int, size: int
) -> None:
    config = {**DRAFTERS[method], "num_speculative_tokens": 3, "verification_cost": 0.0}
    if method == "draft_model":
        config["model"] = str(model)
    settings = {"pipeline_parallel_size": stages, "speculative_config": config, "max_num_batched_tokens": 24}
    with always_drafts(divided_llm(model, size, **settings)) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        assert llm.get_metrics().num_preemptions > 0
        drafted, accepted = counts(llm)
        assert drafted >= accepted > 0
        assert (accepted == drafted) == (method == "draft_model")
        own = [worker._draft_model is not None for worker in workers_of(llm)]
        assert own == [worker._stage.is_last and method == "draft_model" for worker in workers_of(llm)]


def test_a_head_knows_in_the_last_stage_what_it_knows_beside_all_layers(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """It looks up tokens in the model's embedding, which that stage keeps for it."""
    model = crafted_model(tmp_path / "model", tiny_model("mistral", sliding_window=2))
    head = knowing_head(tmp_path / "eagle", "eagle", model)
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3, "verification_cost": 0.0}
    for size in (1, 2):
        settings = {"pipeline_parallel_size": 2, "speculative_config": config, "num_gpu_blocks_override": 64}
        with always_drafts(divided_llm(model, size, **settings)) as llm:
            for _ in range(2):
                assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(model, PROMPTS)
            drafted, accepted = counts(llm)
            assert accepted > 0.97 * drafted > 0


def test_what_needs_layers_of_several_stages_to_guess_is_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, head = tiny_model("llama"), random_head(tmp_path / "eagle3", "eagle3")
    for config, message in (
        (
            {"method": "early_exit", "num_layers": 1},
            "early_exit guesses from the first layers and the head, which no",
        ),
        (
            {"method": "eagle3", "model": str(head)},
            "eagle3 guesses from hidden states of layers all over the model",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            divided_llm(model, 1, pipeline_parallel_size=2, speculative_config=config)


@pytest.mark.parametrize("version", ["eagle", "eagle3"])
def test_a_head_that_can_know_what_the_model_says_is_right(
    tiny_model: TinyModel, tmp_path: Path, version: str
) -> None:
    """EAGLE's head shares embedding and head with a model of which each worker has a part of both."""
    model = crafted_model(tmp_path / "model", tiny_model("mistral", sliding_window=2))
    head = knowing_head(tmp_path / version, version, model)
    config = {"method": version, "model": str(head), "num_speculative_tokens": 3, "verification_cost": 0.0}
    with always_drafts(divided_llm(model, 2, speculative_config=config, num_gpu_blocks_override=64)) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(model, PROMPTS)
        drafted, accepted = counts(llm)
        assert accepted > 0.97 * drafted > 0
        call = llm.llm_engine.client.call
        call("sleep", 2)
        call("wake_up")
        assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(model, PROMPTS)
        assert counts(llm)[1] > 0.97 * counts(llm)[0] > drafted


MTP = {"method": "mtp", "num_speculative_tokens": 3, "verification_cost": 0.0}
DIVISIONS: dict[str, dict[str, Any]] = {
    "TP 2": {},
    "whole experts": {"enable_expert_parallel": True},
    "PP 2 and TP 2": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 24},
}


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("family", ["glm4-moe", "deepseek-v3", "qwen3-next"])
def test_an_mtp_head_that_is_divided_guesses_what_a_whole_one_guesses(
    tiny_model: TinyModel, tmp_path: Path, family: str, division: str
) -> None:
    sizes = {"moe_intermediate_size": 64}
    if family == "qwen3-next":
        sizes["shared_expert_intermediate_size"] = 64
    source = tiny_model(family, **sizes)
    model = with_random_head(tmp_path / "model", source)
    with tiny_llm(source, max_model_len=64) as llm:
        plain = tokens_of(run(llm, PROMPTS, PARAMS))
    roomy = {"max_model_len": 64, "num_gpu_blocks_override": 1 + 14}
    with always_drafts(tiny_llm(model, speculative_config=MTP, **roomy)) as llm:
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        expected = counts(llm)
        whole = sum(one.numel() for one in _head_weights(llm)[0])
    settings = {"max_num_batched_tokens": None, **DIVISIONS[division]}
    with always_drafts(divided_llm(model, 2, speculative_config=MTP, **settings)) as llm:
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
        assert llm.get_metrics().num_preemptions > 0
        if division != "PP 2 and TP 2":  # whose steps are others
            assert counts(llm) == expected and expected[0] > 0
        assert all(sum(one.numel() for one in own) < 0.7 * whole for own in _head_weights(llm))


def _head_weights(llm: LLM) -> list[list[Tensor]]:
    """Of each worker that has a head."""
    found: list[list[Tensor]] = []
    for worker in workers_of(llm):
        if worker._draft_model is not None:
            own: list[Tensor] = []
            worker._draft_model.map_weights(lambda tensor, own=own: own.append(tensor) or tensor)  # type: ignore[misc, func-returns-value]
            found.append(own)
    return found


def test_a_divided_mtp_head_that_can_know_what_the_model_says_is_right(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    glm = tiny_model("glm4-moe", moe_intermediate_size=64, **PREVIOUS_TOO)
    model = with_knowing_head(tmp_path / "head", crafted_glm(tmp_path / "model", glm))
    for stages in (1, 2):
        settings = {"pipeline_parallel_size": stages, "num_gpu_blocks_override": 64}
        with always_drafts(divided_llm(model, 2, speculative_config=MTP, **settings)) as llm:
            for _ in range(2):  # the second time from the prefix cache
                assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(model, PROMPTS)
            drafted, accepted = counts(llm)
            assert accepted > 0.97 * drafted > 0
            call = llm.llm_engine.client.call
            call("sleep", 2)
            call("wake_up")
            assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(model, PROMPTS)
            assert counts(llm)[1] > 0.97 * counts(llm)[0] > drafted


def test_all_ranks_take_drafts_for_equally_costly(model: Path, plain: list[list[int]]) -> None:
    """Shares of a layer are uneven, and so are the steps that drafts are compared with:
    the dearest counts."""
    config = {"method": "early_exit", "num_layers": 1, "num_speculative_tokens": 3}
    with divided_llm(model, 2, speculative_config=config) as llm:
        speculations = [worker.runner.speculation for worker in workers_of(llm)]
        own = [one.drafter.cost_per_token for one in speculations if one is not None]
        agreed = [one.lengths.cost.draft_token for one in speculations if one is not None]
        assert own[0] != own[1] and agreed == [max(own)] * 2
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
