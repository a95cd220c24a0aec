"""What is refused, in which words, and what an accepted prompt becomes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import RequestError
from minivllm.processing.input_processor import InputProcessor
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer.tokenizer import Tokenizer
from tests.frontend.scripted_client import engine_config
from tests.frontend.small_tokenizers import byte_level_bpe, wrapped

pytestmark = pytest.mark.smoke

VOCAB = 500
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ mood }}"
)
TOKENIZER = wrapped(byte_level_bpe(), TEMPLATE)
BOS_ADDING = wrapped(byte_level_bpe())
IDS = {"prompt_token_ids": [1, 2, 3]}


def processor(
    tokenizer: Tokenizer | None = TOKENIZER, max_model_len: int = 64, policy: str = "fcfs", seed: int = 0
) -> InputProcessor:
    config = engine_config(max_model_len, policy, seed)
    return InputProcessor(config, tokenizer, model_vocab_size=VOCAB, eos_token_ids=(7, 9))


def test_text_becomes_the_tokenizers_ids() -> None:
    for prompt in ("The quick fox", {"prompt": "The quick fox"}):
        prepared = processor().prepare(None, prompt, SamplingParams())
        assert prepared.prompt == "The quick fox"
        assert prepared.prompt_token_ids == TOKENIZER.encode("The quick fox")
        (request,) = prepared.sequences
        assert request.prompt_token_ids == prepared.prompt_token_ids
        assert request.eos_token_ids == [7, 9]


def test_token_ids_need_no_tokenizer_and_count_before_the_text_beside_them() -> None:
    assert processor(None).prepare(None, IDS, SamplingParams()).prompt_token_ids == [1, 2, 3]
    prepared = processor().prepare(
        None, {**IDS, "prompt": "only echoed", "cache_salt": "me"}, SamplingParams()
    )
    assert (prepared.prompt, prepared.prompt_token_ids) == ("only echoed", [1, 2, 3])
    assert prepared.sequences[0].cache_salt == "me"


@pytest.mark.parametrize(
    "prompt, words",
    [
        ("", ["prompt is empty"]),
        ({"prompt_token_ids": []}, ["no tokens"]),
        ({}, ["neither", "prompt_token_ids"]),
        ({"prompt": None}, ["neither"]),
        (3, ["prompt is 3", "text or a dictionary"]),
        ([1, 2], ["text or a dictionary"]),
        (None, ["text or a dictionary"]),
        ({"text": "a"}, ["'text'", "prompt, prompt_token_ids, cache_salt"]),
        ({"prompt": 5}, ["prompt is 5"]),
        ({"prompt": "a\ud83d"}, ["prompt", "U+D83D", "character 1"]),
        ({**IDS, "prompt": "a\ud83d"}, ["prompt", "U+D83D"]),
        ({"prompt_token_ids": [1, VOCAB]}, [f"prompt_token_ids.1 is {VOCAB}", f"0 to {VOCAB - 1}"]),
        ({"prompt_token_ids": [-1]}, ["prompt_token_ids.0 is -1"]),
        ({"prompt_token_ids": [10**30]}, ["prompt_token_ids.0"]),
        ({"prompt_token_ids": [1, True]}, ["prompt_token_ids.1 is True", "whole number"]),
        ({"prompt_token_ids": [1.0]}, ["prompt_token_ids.0 is 1.0"]),
        ({"prompt_token_ids": ["1"]}, ["prompt_token_ids.0 is '1'"]),
        ({"prompt_token_ids": [None]}, ["prompt_token_ids.0 is None"]),
        ({"prompt_token_ids": [[1]]}, ["prompt_token_ids.0 is [1]"]),
        ({"prompt_token_ids": 7}, ["prompt_token_ids is 7", "list"]),
        ({"prompt_token_ids": "abc"}, ["prompt_token_ids is 'abc'", "list"]),
        ({**IDS, "cache_salt": 4}, ["cache_salt is 4"]),
        ({**IDS, "cache_salt": ""}, ["cache_salt is empty"]),
        ({**IDS, "cache_salt": "\udc00"}, ["cache_salt", "U+DC00"]),
    ],
)
def test_bad_prompt_is_refused_naming_what_was_given(prompt: Any, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        processor().prepare(None, prompt, SamplingParams())
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "params, words",
    [
        ({"stop_token_ids": [VOCAB]}, ["stop_token_ids.0", str(VOCAB)]),
        ({"allowed_token_ids": [1, VOCAB + 3]}, ["allowed_token_ids.1", str(VOCAB + 3)]),
        ({"logit_bias": {VOCAB: 1.0}}, ["logit_bias", str(VOCAB)]),
        ({"stop": ["a\ud800"]}, ["stop.0", "U+D800"]),
        ({"stop": ["ok", "x" * 5000]}, ["stop.1", "5000", "1024"]),
        ({"stop_regex": ["a\ud800"]}, ["stop_regex.0", "U+D800"]),
        ({"stop_regex": ["ok", "x" * 5000]}, ["stop_regex.1", "5000", "1024"]),
        ({"stop_regex": ["ok", "(x"]}, ["stop_regex.1 is '(x'", "missing )"]),
        ({"bad_words": ["\ud800"]}, ["bad_words.0", "U+D800"]),
        ({"min_tokens": 62, "max_tokens": None}, ["min_tokens is 62", "at most 61", "64"]),
    ],
)
def test_parameters_the_model_cannot_serve_are_refused(params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        processor().prepare(None, IDS, SamplingParams(**params))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_parameters_of_another_type_are_refused() -> None:
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        processor().prepare(None, IDS, {"max_tokens": 3})  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["a text", {"stop": ["x"]}, {"stop_regex": ["x"]}, {"bad_words": ["x"]}])
def test_text_without_a_tokenizer_is_refused(what: Any) -> None:
    prompt, params = (what, {}) if isinstance(what, str) else (IDS, what)
    with pytest.raises(RequestError, match="needs a tokenizer"):
        processor(None).prepare(None, prompt, SamplingParams(**params))


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 40), st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 40))
def test_nothing_is_ever_cut_to_fit(num_prompt: int, max_tokens: int | None, limit: int) -> None:
    prompt = {"prompt_token_ids": [1] * num_prompt}
    params = SamplingParams(max_tokens=max_tokens)
    fits = num_prompt < limit and num_prompt + (max_tokens or 1) <= limit
    if fits:
        (request,) = processor(max_model_len=limit).prepare(None, prompt, params).sequences
        assert len(request.prompt_token_ids) == num_prompt
        assert request.max_tokens == (limit - num_prompt if max_tokens is None else max_tokens)
    else:
        with pytest.raises(RequestError) as caught:
            processor(max_model_len=limit).prepare(None, prompt, params)
        asked = "" if max_tokens is None else f"max_tokens is {max_tokens}"
        for part in (f"{num_prompt} tokens", asked, f"max_model_len is {limit}"):
            assert part in str(caught.value)


def test_n_becomes_n_sequences_with_their_own_ids_and_seeds() -> None:
    params = SamplingParams(n=3, seed=2**63 - 1, prompt_logprobs=2, prompt_logprobs_start=1)
    prepared = processor().prepare("mine", IDS, params)
    assert prepared.request_id == "mine"
    assert len({request.request_id for request in prepared.sequences}) == 3
    assert [request.seed for request in prepared.sequences] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert all(request.sampling_params.n == 1 for request in prepared.sequences)
    assert [request.sampling_params.prompt_logprobs for request in prepared.sequences] == [2, None, None]


def test_prompt_logprobs_begin_inside_the_prompt() -> None:
    params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=len(IDS["prompt_token_ids"]) + 1)
    with pytest.raises(RequestError, match=r"prompt_logprobs_start is .*: it must be at most that"):
        processor().prepare("mine", IDS, params)


def test_seeds_follow_from_the_engines_seed_and_the_order_of_requests() -> None:
    def seeds(engine_seed: int) -> list[int]:
        inputs = processor(seed=engine_seed)
        return [inputs.prepare(None, IDS, SamplingParams()).sequences[0].seed for _ in range(20)]

    assert seeds(0) == seeds(0)
    assert len(set(seeds(0) + seeds(1))) == 40
    assert all(-(2**63) <= seed < 2**63 for seed in seeds(0))
    assert processor().prepare(None, IDS, SamplingParams(seed=5)).sequences[0].seed == 5


def test_callers_request_id_is_echoed_and_never_a_key() -> None:
    inputs = processor()
    first, second = (inputs.prepare("same", IDS, SamplingParams()) for _ in range(2))
    assert first.request_id == second.request_id == "same"
    assert first.sequences[0].request_id != second.sequences[0].request_id
    with pytest.raises(RequestError, match="request_id"):
        inputs.prepare("\ud800", IDS, SamplingParams())


def test_bad_words_are_given_as_ids_at_the_start_and_behind_a_space() -> None:
    (request,) = processor().prepare(None, IDS, SamplingParams(bad_words=["quick", " fox", "fox"])).sequences
    expected = {
        tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("quick", " quick", "fox", " fox")
    }
    assert {tuple(ids) for ids in request.bad_words_token_ids} == expected
    assert len(request.bad_words_token_ids) == len(expected)


def test_priority_is_refused_where_it_would_be_ignored() -> None:
    assert (
        processor(policy="priority").prepare(None, IDS, SamplingParams(), priority=-3).sequences[0].priority
        == -3
    )
    with pytest.raises(RequestError, match="has no priorities"):
        processor().prepare(None, IDS, SamplingParams(), priority=1)
    for value in (True, 1.5, "1", 2**63):
        with pytest.raises(RequestError, match="priority is"):
            processor(policy="priority").prepare(None, IDS, SamplingParams(), priority=value)  # type: ignore[arg-type]


def test_conversation_is_rendered_by_the_chat_template() -> None:
    messages = [{"role": "user", "content": "Grüße"}]
    prompt = processor().render_chat(messages, chat_template_kwargs={"mood": "!"})
    assert prompt["prompt"] == "<user>Grüße<assistant>!"
    assert TOKENIZER.decode(prompt["prompt_token_ids"]) == "<user>Grüße<assistant>!"
    assert processor().render_chat(messages, add_generation_prompt=False)["prompt"] == "<user>Grüße"


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], "at least one message"),
        ("hello", "list"),
        ({"role": "user", "content": "a"}, "list"),
        ([{"content": "a"}], "messages.0 is"),
        ([{"role": "user", "content": "a"}, 4], "messages.1 is"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\.0\.content .*U\+D800"),
        ([{"role": "user", "content": [{"type": "text", "text": "\udfff"}]}], r"content\.0\.text .*U\+DFFF"),
        ([{"role": "user"}], "messages.0 has no content: give a text"),
        ([{"role": "user", "content": None}], "messages.0 has no content"),
        ([{"role": "user", "content": 4}], "messages.0.content is 4"),
        ([{"role": "user", "content": []}], r"messages.0.content is \[\], but must be a text, or a list"),
        ([{"role": "user", "content": ["a", 7]}], "messages.0.content.1 is 7"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0 is {'type': 'text'}"),
        ([{"role": "user", "content": [{"type": "sound", "text": "a"}]}], "messages.0.content.0 is"),
    ],
)
def test_bad_conversation_is_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        processor().render_chat(messages)


def test_texts_in_parts_are_one_text() -> None:
    parts = ["Grüße", {"type": "text", "text": "alle"}]
    prompt = processor().render_chat([{"role": "user", "content": parts}])
    assert prompt["prompt"] == "<user>Grüße\nalle<assistant>"


def test_conversation_without_a_template_is_refused() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        processor(BOS_ADDING).render_chat([{"role": "user", "content": "a"}])


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "x"]), inner, max_size=3
            )
        ),
        max_leaves=8,
    )
)
def test_whatever_is_given_as_a_prompt_is_served_or_refused_in_words(prompt: Any) -> None:
    try:
        prepared = processor().prepare(None, prompt, SamplingParams(max_tokens=1))
    except RequestError as error:
        assert str(error).isprintable()
    else:
        assert all(0 <= token < VOCAB for token in prepared.prompt_token_ids)
