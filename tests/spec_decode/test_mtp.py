"""MTP heads, which checkpoints hold: hidden states and guesses are those of the formulas, tokens are those
without a head, and a head that can know everything is always right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minivllm import LLM
from minivllm.errors import ConfigError, ModelError
from minivllm.models.decoder import Decoder
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
    draft_of,
    recorded_guesses,
    recorded_heads,
)
from tests.spec_decode.mtp_heads import (
    PREVIOUS_TOO,
    WEIGHTS,
    ReferenceMtp,
    copied,
    crafted_glm,
    random_head_tensors,
    with_knowing_head,
    with_random_head,
)

TinyModel = Callable[..., Path]
ATTENDING = ("glm4-moe", "deepseek-v3")
FAMILIES = (*ATTENDING, "qwen3-next", "qwen3.5")
SETTINGS_AS_PARAMETERS = [
    pytest.param(settings, id=name, marks=[pytest.mark.slow] if name == "no prefix cache" else [])
    for name, settings in SETTINGS.items()
]


def drafting(count: int = 3) -> dict[str, Any]:
    return {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": count, "verification_cost": 0.0}
    }


@pytest.fixture(scope="module")
def models(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with heads that know nothing."""
    directory = tmp_path_factory.mktemp("mtp")
    return {family: with_random_head(directory / family, tiny_model(family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def knowing_model(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose next token follows from the last two, with a head that knows that."""
    directory = tmp_path_factory.mktemp("knowing")
    glm = tiny_model("glm4-moe", **PREVIOUS_TOO)
    return with_knowing_head(directory / "head", crafted_glm(directory / "model", glm))


# -- the formulas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ATTENDING)
def test_the_formulas_are_those_of_transformers(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    from transformers.modeling_layers import MtpModel

    reference = ReferenceMtp(models[family], tmp_path)
    target = reference_model(models[family])
    target._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\..*"]
    head = MtpModel.from_pretrained(target)
    tokens = PROMPTS[0]
    features = reference.features(tokens[:-1])
    places = torch.arange(len(features))[None]
    with torch.inference_mode():
        expected = head.forward_layer(0, features[None], places, None, input_ids=torch.tensor([tokens[1:]]))
    torch.testing.assert_close(reference.step(tokens[1:], features), expected[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS_AS_PARAMETERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_guesses_are_those_of_the_formulas(
    models: dict[str, Path], tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    reference = ReferenceMtp(models[family], tmp_path)
    with always_drafts(tiny_llm(models[family], **drafting(), **settings)) as llm:
        for prompts in (PROMPTS, PROMPTS[:2]):  # the second time from the prefix cache
            guesses = recorded_guesses(llm)
            with recorded_heads(llm) as recorded:
                assert tokens_of(run(llm, prompts, GREEDY)) == reference_tokens(models[family], prompts)
            assert len(recorded) > 60 // len(prompts)
            for guess in recorded[::5]:
                logits, feature = reference.guess(guess.text, guess.num_known)
                torch.testing.assert_close(guess.feature, feature, atol=1e-4, rtol=0)
                torch.testing.assert_close(guess.logits, logits, atol=2e-3, rtol=1e-3)
            assert {len(guess) for _, guess in guesses} >= {3}
            for known, guess in guesses[::5]:
                for count, token in enumerate(guess):
                    text = [*known, *guess[:count]]
                    assert int(reference.guess(text, len(known))[0].argmax()) == token
        if settings == SETTINGS["preemption"]:
            assert llm.get_metrics().num_preemptions > 0
        assert_pool_unused(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_guess_is_that_of_the_formulas(models: dict[str, Path], tmp_path: Path, family: str) -> None:
    reference = ReferenceMtp(models[family], tmp_path)
    with always_drafts(tiny_llm(models[family], **drafting(1)), 1) as llm:
        guesses = recorded_guesses(llm)
        assert tokens_of(run(llm, PROMPTS, GREEDY)) == reference_tokens(models[family], PROMPTS)
    assert guesses and {len(guess) for _, guess in guesses} == {1}
    for known, [token] in guesses[::3]:
        assert int(reference.guess(known, len(known))[0].argmax()) == token


@pytest.mark.parametrize("family", FAMILIES)
def test_random_tokens_are_those_without_a_head(models: dict[str, Path], family: str) -> None:
    with tiny_llm(models[family]) as llm:
        plain = tokens_of(run(llm, PROMPTS, PARAMS))
    for name in ("chunks", "preemption"):
        with always_drafts(tiny_llm(models[family], **drafting(), **SETTINGS[name])) as llm:
            for _ in range(2):  # the second time from the prefix cache
                assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain
            drafted = llm.get_metrics().num_draft_tokens
            assert 0 <= llm.get_metrics().num_accepted_tokens < drafted / 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_model_has_a_quantised_head(models: dict[str, Path], family: str) -> None:
    with tiny_llm(models[family], quantization="int8") as llm:
        plain = tokens_of(run(llm, PROMPTS, GREEDY))
    with always_drafts(tiny_llm(models[family], quantization="int8", **drafting())) as llm:
        head, target = draft_of(llm).model, runner_of(llm).model
        assert isinstance(target, Decoder)
        assert head.layers[0].methods == target.layers[-1].methods
        assert tokens_of(run(llm, PROMPTS, GREEDY)) == plain


# -- a head that knows -----------------------------------------------------------------------------


def acceptance(llm: LLM, model: Path) -> float:
    """Share of guesses that were right, while greedy tokens are checked against transformers."""
    before = llm.get_metrics()
    for _ in range(2):
        tokens = tokens_of(run(llm, PROMPTS, GREEDY))
        assert tokens == reference_tokens(model, PROMPTS)
        assert len({token for text in tokens for token in text}) > 30
    after = llm.get_metrics()
    drafted = after.num_draft_tokens - before.num_draft_tokens
    assert drafted > 0
    return (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


@pytest.mark.parametrize("settings", SETTINGS_AS_PARAMETERS)
def test_a_head_that_can_know_what_the_model_says_is_right(
    knowing_model: Path, settings: dict[str, Any]
) -> None:
    with always_drafts(tiny_llm(knowing_model, **drafting(), **settings)) as llm:
        assert acceptance(llm, knowing_model) > 0.97


def test_it_is_wrong_if_tokens_or_features_are_shifted_by_one(knowing_model: Path) -> None:
    with always_drafts(tiny_llm(knowing_model, **drafting())) as llm:
        draft = draft_of(llm)
        features = draft.model.features
        draft._paged._builder._token_offset = 0
        assert acceptance(llm, knowing_model) < 0.1
        draft._paged._builder._token_offset = 1
        draft.model.features = lambda *args: features(*args).roll(1, 0)  # type: ignore[method-assign]
        assert llm.reset_prefix_cache()
        assert acceptance(llm, knowing_model) < 0.5


def test_right_guesses_save_their_share_of_steps(knowing_model: Path) -> None:
    with always_drafts(tiny_llm(knowing_model, **drafting())) as llm:
        run(llm, PROMPTS[:1], GREEDY)
        assert llm.get_metrics().num_steps == 1 + -(-(MAX_TOKENS - 1) // 4)


@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_it_sleeps_and_wakes_up_with_its_model(knowing_model: Path, level: int) -> None:
    with always_drafts(tiny_llm(knowing_model, **drafting())) as llm:
        client = llm.llm_engine.client
        client.call("sleep", level)
        client.call("wake_up")
        assert acceptance(llm, knowing_model) > 0.97


@pytest.mark.slow
def test_a_compiled_head_is_right_too_and_nothing_is_compiled_after_warm_up(knowing_model: Path) -> None:
    with always_drafts(tiny_llm(knowing_model, enforce_eager=False, **drafting())) as llm:
        assert acceptance(llm, knowing_model) > 0.97
        for prompt in PROMPTS[1:3]:
            run(llm, [prompt], GREEDY)
        assert llm.llm_engine.client.core.executor.num_recompilations() == 0  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_tokens_are_those_without_a_head(models: dict[str, Path], family: str) -> None:
    with tiny_llm(models[family], enforce_eager=False) as llm:
        plain = tokens_of(run(llm, PROMPTS, PARAMS))
    with always_drafts(tiny_llm(models[family], enforce_eager=False, **drafting())) as llm:
        assert tokens_of(run(llm, PROMPTS, PARAMS)) == plain


# -- what is read, and what cannot work ------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_without_the_method_has_the_weights_of_the_model_alone(
    models: dict[str, Path], tiny_model: TinyModel, family: str
) -> None:
    def checksums(model: Path, **settings: Any) -> list[float]:
        with tiny_llm(model, **settings) as llm:
            worker = llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]
            sums: list[float] = worker.weight_checksums()
            return sums

    alone = checksums(tiny_model(family))
    assert checksums(models[family]) == alone
    assert len(checksums(models[family], **drafting())) > len(alone)


def test_no_hidden_states_are_tapped_without_a_head(models: dict[str, Path]) -> None:
    with tiny_llm(models["glm4-moe"]) as llm:
        assert runner_of(llm).model.tap is None


def test_a_checkpoint_without_a_head_is_refused_with_a_sentence(tiny_model: TinyModel) -> None:
    with pytest.raises(
        ModelError, match=r"holds no MTP head, though models of Glm4Moe.* another method, such"
    ):
        tiny_llm(tiny_model("glm4-moe"), **drafting())
    with pytest.raises(ModelError, match="Checkpoints of LlamaForCausalLM hold no MTP head: choose another"):
        tiny_llm(tiny_model("llama"), **drafting())


def test_a_head_that_lacks_a_tensor_or_has_another_shape_is_refused_with_a_sentence(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("deepseek-v3")
    whole = {**load_file(source / WEIGHTS), **random_head_tensors(source)}
    missing = {name: tensor for name, tensor in whole.items() if not name.endswith("3.hnorm.weight")}
    with pytest.raises(ModelError, match=r"lacks tensor 'model.layers.0.hnorm.weight'"):
        tiny_llm(copied(tmp_path / "missing", source, missing), **drafting())
    whole["model.layers.3.eh_proj.weight"] = torch.zeros(64, 64)
    with pytest.raises(ModelError, match=r"'model.fc.weight' has shape \[64, 64\], but .* \[64, 128\]"):
        tiny_llm(copied(tmp_path / "shape", source, whole), **drafting())


def test_the_method_has_no_model_to_name(models: dict[str, Path]) -> None:
    config = {"method": "mtp", "model": str(models["glm4-moe"])}
    with pytest.raises(ConfigError, match="speculative_config has a key 'model', but with method 'mtp'"):
        tiny_llm(models["glm4-moe"], speculative_config=config)


def test_models_with_other_layers_than_minivllms_are_refused(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="No mtp head guesses for a model that transformers computes"):
        tiny_llm(models["glm4-moe"], model_impl="transformers", **drafting())


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_need_a_configuration_only(tiny_model: TinyModel, family: str) -> None:
    with always_drafts(tiny_llm(tiny_model(family), load_format="dummy", **drafting())) as llm:
        (text,) = tokens_of(run(llm, PROMPTS[:1], GREEDY))
        assert len(text) == MAX_TOKENS
        assert llm.get_metrics().num_draft_tokens > 0
