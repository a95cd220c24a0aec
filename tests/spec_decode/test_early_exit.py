"""Early exit guesses what the cut model says, and everything where the layers it leaves out do nothing."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm import SamplingParams
from minivllm.errors import ConfigError
from tests.parity_reference import (
    assert_pool_unused,
    random_prompts,
    reference_model,
    reference_tokens,
    run,
    tiny_llm,
    tokens_of,
)
from tests.spec_decode.drafting_cases import recorded_guesses

TinyModel = Callable[..., Path]

NUM_LAYERS = 2
CONFIG = {
    "method": "early_exit",
    "num_layers": NUM_LAYERS,
    "num_speculative_tokens": 3,
    "verification_cost": 0.0,
}
PROMPTS = random_prompts((5, 17, 9, 20), seed=13)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def with_layer_scaled(model: Path, layer: int, factor: float, directory: Path) -> Path:
    """The same model, but for so many times what a layer adds."""
    shutil.copytree(model, directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        weights[f"model.layers.{layer}.{name}"] *= factor
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def shallow_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose last layer adds nothing to what the first two have found."""
    return with_layer_scaled(model, NUM_LAYERS, 0.0, tmp_path_factory.mktemp("shallow"))


def test_guesses_are_the_greedy_tokens_of_the_cut_model(model: Path) -> None:
    cut: Any = copy.deepcopy(reference_model(model))
    cut.model.layers = cut.model.layers[:NUM_LAYERS]
    with tiny_llm(model, speculative_config=CONFIG, max_num_batched_tokens=16) as llm:
        recorded = recorded_guesses(llm)
        params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
        assert tokens_of(run(llm, PROMPTS, params)) == reference_tokens(model, PROMPTS, max_tokens=10)
    assert len(recorded) > len(PROMPTS) and any(len(guess) == 3 for _, guess in recorded)
    for known, guess in recorded:
        with torch.inference_mode():
            logits = cut(torch.tensor([known + guess[:-1]]), use_cache=False).logits[0]
        assert logits[len(known) - 1 :].argmax(-1).tolist() == guess


def test_new_weights_are_those_of_the_guesses_too(shallow_model: Path, tmp_path: Path) -> None:
    """Every guess is right again, of a model whose first layer computes something else."""
    other = with_layer_scaled(shallow_model, 0, -1.0, tmp_path)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with tiny_llm(other) as llm:
        plain = tokens_of(run(llm, PROMPTS, params))
    with tiny_llm(shallow_model, speculative_config=CONFIG) as llm:
        run(llm, PROMPTS, params)
        llm.update_weights(str(other))
        before = llm.get_metrics()
        assert tokens_of(run(llm, PROMPTS, params)) == plain
        after = llm.get_metrics()
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert 0 < after.num_draft_tokens - before.num_draft_tokens == accepted


def test_where_the_last_layer_does_nothing_every_guess_is_right_also_at_random(shallow_model: Path) -> None:
    """Drafts are drawn with the noise of the target, so equal distributions give equal tokens."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True, seed=3),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=50, max_tokens=16, ignore_eos=True, seed=4),
        SamplingParams(temperature=1.3, min_p=0.01, max_tokens=16, ignore_eos=True, seed=5),
    ]
    with tiny_llm(shallow_model) as llm:
        plain = run(llm, PROMPTS, params)
        steps = llm.get_metrics().num_steps
    with tiny_llm(shallow_model, speculative_config=CONFIG) as llm:
        assert tokens_of(run(llm, PROMPTS, params)) == tokens_of(plain)
        metrics = llm.get_metrics()
        assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 0
        assert metrics.num_steps <= steps // 2
        assert_pool_unused(llm)


@pytest.mark.parametrize("blocks", [8, 10])
def test_places_for_guesses_never_cost_a_request_its_own(shallow_model: Path, blocks: int) -> None:
    """A pool that just holds the longest request:
    room ahead is asked for, but never more than the request may need."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with tiny_llm(shallow_model) as llm:
        plain = tokens_of(run(llm, PROMPTS, params))
    with tiny_llm(
        shallow_model, speculative_config=CONFIG, max_model_len=64, num_gpu_blocks_override=1 + blocks
    ) as llm:
        assert tokens_of(run(llm, PROMPTS, params)) == plain
        metrics = llm.get_metrics()
        assert metrics.num_preemptions > 0 and metrics.num_accepted_tokens > 0
        assert_pool_unused(llm)


def test_more_layers_than_the_model_has_are_refused(model: Path) -> None:
    with pytest.raises(
        ConfigError, match="first 3 layers as a drafter, but the model has 3: num_layers must be fewer"
    ):
        tiny_llm(model, speculative_config={"method": "early_exit", "num_layers": 3})
