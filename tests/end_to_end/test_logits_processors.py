"""Custom logits processors do for each request what they say, whatever else the engine does with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import EngineArgs, SamplingParams
from minivllm.errors import ConfigError, RequestError
from minivllm.sampling.logits_processors import load_logits_processors
from tests.end_to_end.custom_processors import Forbid, NoRepeats, OwnMinP, Unfinished, WrongShape
from tests.parity_reference import assert_pool_unused, random_prompts, run, tiny_llm, tokens_of

TinyModel = Callable[..., Path]
VOCABULARY = 416
_WORDS = random_prompts((6, 9, 7), seed=21)
PROMPTS = [_WORDS[0] * 3, _WORDS[1], _WORDS[2] * 2, _WORDS[0], _WORDS[1] * 3]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 7},
    "two at a time": {"max_num_seqs": 2},
    "preemption": {"max_model_len": 64, "num_gpu_blocks_override": 1 + 12},
    "ngram": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "verification_cost": 0.0}},
    "early exit": {"speculative_config": {"method": "early_exit", "num_layers": 2, "verification_cost": 0.0}},
}
LENGTHS = (20, 9, 14, 20, 5)


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


def sampled(index: int, **fields: Any) -> SamplingParams:
    """Greedy and random requests of different lengths, so that slots are emptied and filled again."""
    temperature = 0.0 if index % 2 == 0 else 0.8
    return SamplingParams(
        temperature=temperature, seed=index, max_tokens=LENGTHS[index], ignore_eos=True, **fields
    )


@pytest.fixture(scope="module")
def forbidden(model: Path) -> list[int]:
    """For each prompt a token that it would say."""
    with tiny_llm(model) as llm:
        return [
            tokens[2] for tokens in tokens_of(run(llm, PROMPTS, [sampled(i) for i in range(len(PROMPTS))]))
        ]


@pytest.fixture(scope="module")
def expected(model: Path, forbidden: list[int]) -> list[list[int]]:
    """What an engine says that may choose from all tokens but the forbidden one;
    every third may say anything."""
    params = [
        sampled(i, allowed_token_ids=None if i % 3 == 0 else [t for t in range(VOCABULARY) if t != token])
        for i, token in enumerate(forbidden)
    ]
    with tiny_llm(model) as llm:
        return tokens_of(run(llm, PROMPTS, params))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_token_forbidden_by_a_request_is_forbidden_for_this_request_alone(
    model: Path, forbidden: list[int], expected: list[list[int]], settings: dict[str, Any]
) -> None:
    params = [
        sampled(i, extra_args=None if i % 3 == 0 else {"forbid": token}) for i, token in enumerate(forbidden)
    ]
    with tiny_llm(model, logits_processors=[Forbid, NoRepeats], **settings) as llm:
        for _ in range(2):
            assert tokens_of(run(llm, PROMPTS, params)) == expected
        assert "num_gpu_blocks_override" not in settings or llm.get_metrics().num_preemptions > 0
        assert_pool_unused(llm)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_processor_sees_the_output_so_far_and_no_rejected_guess(
    model: Path, settings: dict[str, Any]
) -> None:
    params = [
        sampled(i, extra_args={"no_repeats": i != 1}, logit_bias={40: 20.0}) for i in range(len(PROMPTS))
    ]
    with tiny_llm(model, logits_processors=["tests.end_to_end.custom_processors:NoRepeats"]) as llm:
        plain = tokens_of(run(llm, PROMPTS, params))
    for index, tokens in enumerate(plain):  # token 40 is what they would say all the time
        assert tokens.count(40) == (1 if index != 1 else LENGTHS[1])
        assert index == 1 or len(set(tokens)) == len(tokens)
    with tiny_llm(
        model, logits_processors=["tests.end_to_end.custom_processors:NoRepeats"], **settings
    ) as llm:
        assert tokens_of(run(llm, PROMPTS, params)) == plain


@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_an_argmax_invariant_processor_comes_where_min_p_does(model: Path, top_p: float) -> None:
    fields: dict[str, Any] = {
        "temperature": 2.0,
        "top_p": top_p,
        "seed": 4,
        "max_tokens": 20,
        "ignore_eos": True,
    }
    with tiny_llm(model, logits_processors=[OwnMinP]) as llm:
        free = tokens_of(run(llm, PROMPTS, SamplingParams(**fields)))
        theirs = tokens_of(run(llm, PROMPTS, SamplingParams(**fields, extra_args={"own_min_p": 0.3})))
        assert theirs == tokens_of(run(llm, PROMPTS, SamplingParams(**fields, min_p=0.3))) != free


def test_a_request_that_a_processor_objects_to_is_refused_with_its_sentence(model: Path) -> None:
    with tiny_llm(model, logits_processors=[Forbid]) as llm:
        with pytest.raises(RequestError, match="Forbid: forbid is 'x', but must be a token id"):
            run(llm, PROMPTS[:1], SamplingParams(extra_args={"forbid": "x"}))
        assert_pool_unused(llm)
    with (
        tiny_llm(model) as llm,
        pytest.raises(RequestError, match="engine was started without logits_processors"),
    ):
        run(llm, PROMPTS[:1], SamplingParams(extra_args={"forbid": 3}))


@pytest.mark.parametrize("value", [[1], {1: 2}, {"a": object()}, {"a": "x" * 2**20}])
def test_extra_args_are_plain_values_by_name_and_not_too_many(value: Any) -> None:
    with pytest.raises(RequestError, match="extra_args"):
        SamplingParams(extra_args=value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (int, "must be a subclass of minivllm.LogitsProcessor"),
        (Forbid(3, None), "the class, not an object"),  # type: ignore[arg-type]
        (Unfinished, "lacks __init__, apply, update_state"),
        ("Forbid", "must name a class or an object as 'package.module:Class'"),
        ("no_such_module:Forbid", "cannot be imported: No module named 'no_such_module'"),
        ("tests.end_to_end.custom_processors:Forbids", "cannot be imported"),
        ("json:dumps", "must be a subclass"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_has_not_the_protocol_is_refused_before_the_model_is_loaded(
    model: Path, entry: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llm(model, logits_processors=[entry])


def test_a_class_goes_to_another_process_by_its_import_path_and_a_list_is_a_list(model: Path) -> None:
    local = type("Local", (Forbid,), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="put it into a module"):
        tiny_llm(model, logits_processors=[local], multiprocess=True)
    args = EngineArgs(logits_processors=[NoRepeats]).for_another_process()
    assert load_logits_processors(args.logits_processors) == (NoRepeats,)
    with pytest.raises(ConfigError, match="must be a list"):
        tiny_llm(model, logits_processors="tests.end_to_end.custom_processors:Forbid")


def test_logits_of_another_shape_are_an_error_that_names_the_processor(model: Path) -> None:
    with (
        tiny_llm(model, logits_processors=[WrongShape]) as llm,
        pytest.raises(RuntimeError, match=r"WrongShape\.apply"),
    ):
        run(llm, PROMPTS[:1], SamplingParams(extra_args={"forbid": 3}))
