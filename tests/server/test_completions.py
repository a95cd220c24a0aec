"""/v1/completions as the official client, and an evaluation harness, see it."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.server.answers.logprobs import TextOffsets
from minivllm.tokenizer.detokenizer import TokenDecoder
from tests.frontend.small_tokenizers import FAMILIES
from tests.server.serving import Scripts, ServedCore

pytestmark = pytest.mark.smoke


@pytest.fixture
def encode(scripts: Scripts) -> Any:
    return scripts.tokenizer.encode


def test_prompts_may_be_texts_or_ids_one_or_many(client: openai.OpenAI, encode: Any) -> None:
    prompts: list[Any] = [
        "say:a b",
        ["say:a b", "say:c"],
        encode("say:a b"),
        [encode("say:a b"), encode("say:c")],
    ]
    for prompt, expected in zip(prompts, [["a b"], ["a b", "c"]] * 2):
        answer = client.completions.create(model="scripted", prompt=prompt)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))


def test_n_completions_of_each_prompt_are_numbered_prompt_by_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt=["say:a", "say:b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a"),
        (1, "a"),
        (2, "b"),
        (3, "b"),
    ]
    texts = [""] * 4
    for chunk in client.completions.create(model="scripted", prompt=["say:a", "say:b"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a", "a", "b", "b"]


def test_sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt="say:" + "x y " * 40)
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_echo_puts_the_prompt_before_the_completion(client: openai.OpenAI) -> None:
    for stream in (False, True):
        answer: Any = client.completions.create(model="scripted", prompt="say:a b", echo=True, stream=stream)
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "say:a ba b"


def test_logprobs_line_up_with_the_tokens_and_their_places(client: openai.OpenAI, encode: Any) -> None:
    answer = client.completions.create(model="scripted", prompt="say:one two", logprobs=2, max_tokens=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.token_logprobs == [-2.0] * 3
    assert "".join(logprobs.tokens[:2]) == "one two"[: len("".join(logprobs.tokens[:2]))]
    assert logprobs.text_offset[:2] == [0, len(logprobs.tokens[0])]
    assert logprobs.top_logprobs is not None and all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_harness_can_score_a_prompt_by_echo_and_logprobs(
    client: openai.OpenAI, encode: Any, max_tokens: int
) -> None:
    """What lm-evaluation-harness asks for:
    the logprobs of given tokens, and whether each was the likeliest."""
    ids = encode("say:one two three")
    answer = client.completions.create(
        model="scripted", prompt=ids, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0, seed=1
    )
    [choice] = answer.choices
    assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.token_logprobs) == len(ids) + max_tokens
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1 : len(ids)] == [-2.0] * (len(ids) - 1)
    assert choice.logprobs.top_logprobs is not None
    top = choice.logprobs.top_logprobs[1]
    assert max(top.values()) == -0.5
    if max_tokens == 0:
        assert choice.text == "say:one two three"
        assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_chat_logprobs_give_bytes_and_the_likeliest_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "say:é!"}], logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    *text_tokens, _ = logprobs.content
    assert b"".join(bytes(token.bytes or ()) for token in text_tokens).decode() == "é!"
    assert [len(token.top_logprobs) for token in logprobs.content] == [2] * len(logprobs.content)
    assert [top.logprob for top in text_tokens[0].top_logprobs] == [-0.5, -2.0]
    streamed = []
    for chunk in client.chat.completions.create(
        model="scripted",
        messages=[{"role": "user", "content": "say:é!"}],
        logprobs=True,
        top_logprobs=2,
        stream=True,
    ):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == logprobs.content


def test_sampling_parameters_reach_the_engine_unchanged(client: openai.OpenAI, server: ServedCore) -> None:
    client.completions.create(
        model="scripted",
        prompt="say:a",
        temperature=0.7,
        top_p=0.9,
        seed=11,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -3},
        stop=["zz"],
        extra_body={
            "top_k": 7,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "stop_regex": "x{9}",
            "stop_token_ids": [9],
            "allowed_token_ids": [5, 6],
            "ignore_eos": False,
            "priority": 3,
            "cache_salt": "tenant",
        },
    )
    request = server.core.admitted[-1]
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.seed, params.top_k, params.min_p) == (
        0.7,
        0.9,
        11,
        7,
        0.1,
    )
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.logit_bias, params.stop, params.stop_token_ids) == ({5: -3.0}, ["zz"], [9])
    assert params.stop_regex == ["x{9}"]
    assert (params.min_tokens, params.allowed_token_ids) == (1, [5, 6])
    assert (request.priority, request.cache_salt) == (3, "tenant")


def test_tokenize_and_detokenize_are_the_models_tokenizer(server: ServedCore, encode: Any) -> None:
    import httpx

    with httpx.Client(base_url=server.url) as http:
        tokens = http.post("/tokenize", json={"prompt": "say é", "return_token_strs": True}).json()
        assert tokens["tokens"] == encode("say é")
        assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json() == {"prompt": "say é"}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert chat["tokens"] == encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["scripted", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError, match="known are: scripted, other"):
        client.models.retrieve("nobody")


def test_no_two_tokens_share_a_name_in_top_logprobs(client: openai.OpenAI, scripts: Scripts) -> None:
    """Parts of characters are named by their bytes, as OpenAI names them;
    the judge is the scripted numbers."""
    text = "漢字かな é 😀 ünï"
    for named_by_id in (False, True):
        answer = client.completions.create(
            model="scripted",
            prompt=f"say:{text}",
            max_tokens=0,
            echo=True,
            logprobs=5,
            extra_body={"return_tokens_as_token_ids": named_by_id},
        )
        logprobs: Any = answer.choices[0].logprobs
        spelt = b""
        for place, (name, number, top) in enumerate(
            zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs)
        ):
            assert name.startswith("token_id:") == named_by_id
            if place:
                assert (top[name], len(top)) == (number, 5), name
            if name.startswith("bytes:"):
                spelt += bytes(int(digits, 16) for digits in name.removeprefix("bytes:").split("\\x")[1:])
            elif not named_by_id:
                spelt += name.encode()
        if named_by_id:
            assert [
                int(name.removeprefix("token_id:")) for name in logprobs.tokens
            ] == scripts.tokenizer.encode(f"say:{text}")
        else:
            assert spelt.decode() == f"say:{text}"


def test_a_token_begins_where_its_character_does(client: openai.OpenAI) -> None:
    """In one piece, in a stream, and where a stop string holds text back."""
    text = "a漢 é 😀b"
    for fields in ({}, {"stop": [" 😀x"]}, {"echo": True, "n": 1}):
        body: dict[str, Any] = {
            "model": "scripted",
            "prompt": f"say:{text}",
            "max_tokens": 40,
            "logprobs": 0,
            **fields,
        }
        choice = client.completions.create(**body).choices[0]
        offsets: Any = choice.logprobs.text_offset  # type: ignore[union-attr]
        streamed = [
            offset
            for chunk in client.completions.create(**body, stream=True)
            if chunk.choices[0].logprobs is not None
            for offset in chunk.choices[0].logprobs.text_offset or ()
        ]
        assert streamed == offsets
        for name, offset in zip(choice.logprobs.tokens, offsets):  # type: ignore[union-attr,arg-type]
            if name.startswith("bytes:"):
                assert ord(choice.text[offset]) > 127
            elif name != "<|eos|>":
                assert choice.text.startswith(name, offset), (name, offset)


@settings(max_examples=100, deadline=None)
@given(
    family=st.sampled_from(["byte-level", "byte-fallback", "metaspace"]),
    text=st.text("the ingé日😀", min_size=1),
)
def test_offsets_of_every_kind_of_tokenizer_are_where_decoding_puts_the_tokens(
    family: str, text: str
) -> None:
    """The judge is decoding all ids before a token at once, wherever they end with a whole character."""
    backend = FAMILIES[family]()
    decoder, ids = TokenDecoder(backend), backend.encode(text).ids
    offsets = TextOffsets(decoder, skip_special_tokens=True)
    for place, token_id in enumerate(ids):
        before = backend.decode(ids[:place])
        offset = offsets.add(token_id)
        assert "\ufffd" in before or offset == len(before)
