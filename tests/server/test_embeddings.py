"""/v1/embeddings and /v1/score as the official client sees them;
the judge is transformers' hidden states, float32."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.parity_reference import random_prompts, reference_model
from tests.server.serving import RealServer

PROMPTS = random_prompts((5, 12, 3), seed=9)


def reference(server: RealServer, token_ids: list[int], pooling: str = "last", normalize: bool = True) -> Any:
    with torch.inference_mode():
        hidden = reference_model(server.model).model(torch.tensor([token_ids])).last_hidden_state[0]
    vector = hidden[-1] if pooling == "last" else hidden.mean(0)
    return (vector / vector.norm() if normalize else vector).numpy()


def assert_close(vectors: list[Any], wanted: list[Any]) -> None:
    np.testing.assert_allclose(np.asarray(vectors), np.asarray(wanted), rtol=1e-4, atol=1e-4)


def test_the_official_client_gets_the_models_states(
    real_server: RealServer, real_client: openai.OpenAI
) -> None:
    """It asks for base64 unless told otherwise, and decodes it."""
    wanted = [reference(real_server, prompt) for prompt in PROMPTS]
    for options in ({}, {"encoding_format": "float"}):
        answer = real_client.embeddings.create(model="tiny", input=PROMPTS, **options)  # type: ignore[arg-type]
        assert [item.index for item in answer.data] == [0, 1, 2] and answer.model == "tiny"
        assert_close([item.embedding for item in answer.data], wanted)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, PROMPTS))


def test_base64_is_little_endian_float32(real_server: RealServer, real_client: openai.OpenAI) -> None:
    answer = httpx.post(
        f"{real_server.url}/v1/embeddings", json={"input": PROMPTS[0], "encoding_format": "base64"}
    )
    vector = np.frombuffer(base64.b64decode(answer.json()["data"][0]["embedding"]), "<f4")
    assert_close([vector], [reference(real_server, PROMPTS[0])])


def test_a_prompt_that_fills_the_context_becomes_a_vector(
    real_server: RealServer, real_client: openai.OpenAI
) -> None:
    """Nothing is generated, so nothing needs room; the server of these tests has a context of 512 tokens."""
    [full] = random_prompts((512,), seed=2)
    answer = real_client.embeddings.create(model="tiny", input=full, encoding_format="float")
    assert_close([answer.data[0].embedding], [reference(real_server, full)])
    for body, param in (({"input": [*full, 3]}, "input"), ({"input": [[3], [*full, 3]]}, "input.1")):
        error = httpx.post(f"{real_server.url}/v1/embeddings", json=body).json()["error"]
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")
        assert "at most 512 tokens" in error["message"] and "max_tokens" not in error["message"]
    error = httpx.post(f"{real_server.url}/v1/score", json={"text_1": "a", "text_2": [*full, 3]}).json()[
        "error"
    ]
    assert error["param"] == "text_2"


def test_a_prompt_that_fills_the_context_can_be_scored_by_echo(
    real_server: RealServer, real_client: openai.OpenAI
) -> None:
    """The judge is transformers' log-probabilities."""
    [full] = random_prompts((512,), seed=2)
    with torch.inference_mode():
        logprobs = reference_model(real_server.model)(torch.tensor([full])).logits[0].float().log_softmax(-1)
    wanted = logprobs[torch.arange(511), torch.tensor(full[1:])].numpy()
    for stream in (False, True):
        answer: Any = real_client.completions.create(
            model="tiny", prompt=full, echo=True, max_tokens=0, logprobs=0, stream=stream
        )
        chunks = list(answer) if stream else [answer]
        found = [number for chunk in chunks for number in chunk.choices[0].logprobs.token_logprobs]
        assert found[0] is None and chunks[-1].choices[0].finish_reason == "length"
        np.testing.assert_allclose(found[1:], wanted, rtol=1e-3, atol=1e-3)
        assert stream or answer.usage.completion_tokens == 0


def test_texts_and_ids_one_or_many_give_the_same(real_server: RealServer, real_client: openai.OpenAI) -> None:
    encode = load_tokenizer(real_server.model).encode
    texts = ["a b", "two words more"]
    ids = [encode(text) for text in texts]
    forms: list[Any] = [texts, ids]
    both = [
        [item.embedding for item in real_client.embeddings.create(model="tiny", input=form).data]
        for form in forms
    ]
    ones: list[Any] = [[texts[0], texts[1]], [ids[0], ids[1]]]
    alone = [
        [real_client.embeddings.create(model="tiny", input=one).data[0].embedding for one in form]
        for form in ones
    ]
    for vectors in (*both, *alone):
        assert_close(vectors, [reference(real_server, one) for one in ids])


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_and_length_can_be_chosen(
    real_client: openai.OpenAI, real_server: RealServer, pooling: str
) -> None:
    for normalize in (True, False):
        answer = real_client.embeddings.create(
            model="tiny", input=PROMPTS[1], extra_body={"pooling": pooling, "normalize": normalize}
        )
        assert_close([answer.data[0].embedding], [reference(real_server, PROMPTS[1], pooling, normalize)])


def test_a_list_longer_than_the_queue_is_served_a_few_at_a_time(
    real_server: RealServer, real_client: openai.OpenAI
) -> None:
    service = real_server.served.run.service
    inputs = random_prompts((4,) * 300, seed=1)
    assert len(inputs) > service.admission.capacity
    answer = real_client.embeddings.create(model="tiny", input=inputs)
    for index in (0, 150, 299):
        assert_close([answer.data[index].embedding], [reference(real_server, inputs[index])])
    assert service.admission.num_completions == service.admission.num_queued_prompt_tokens == 0


def test_prompt_tokens_are_counted_and_no_generated_ones(
    real_server: RealServer, real_client: openai.OpenAI
) -> None:
    metrics = real_server.served.run.service.metrics

    def counts() -> tuple[float, float]:
        value = metrics.registry.get_sample_value
        return value("minivllm_prompt_tokens_total") or 0.0, value("minivllm_generation_tokens_total") or 0.0

    before = counts()
    real_client.embeddings.create(model="tiny", input=PROMPTS)
    assert (counts()[0] - before[0], counts()[1] - before[1]) == (sum(map(len, PROMPTS)), 0)


def test_adapters_have_vectors_of_their_own(real_client: openai.OpenAI) -> None:
    base, adapted = (
        real_client.embeddings.create(model=name, input=PROMPTS[0]) for name in ("tiny", "first")
    )
    assert np.abs(np.subtract(base.data[0].embedding, adapted.data[0].embedding)).max() > 1e-2


def test_a_score_is_the_cosine_of_two_vectors(real_server: RealServer) -> None:
    vectors = [reference(real_server, prompt) for prompt in PROMPTS]

    def scores(left: Any, right: Any) -> list[float]:
        answer = httpx.post(
            f"{real_server.url}/v1/score", json={"model": "tiny", "text_1": left, "text_2": right}
        )
        assert answer.json()["usage"]["total_tokens"] > 0
        return [item["score"] for item in answer.json()["data"]]

    assert_close(scores(PROMPTS[0], PROMPTS), [vectors[0] @ vector for vector in vectors])
    assert_close(scores(PROMPTS[:2], PROMPTS[1:]), [vectors[0] @ vectors[1], vectors[1] @ vectors[2]])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
        ("embeddings", {"input": []}, "input"),
        ("embeddings", {"input": [""]}, "input.0"),
        ("embeddings", {"input": [[5], [9999]]}, None),
        ("embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("embeddings", {"input": "a", "temperature": 1}, "temperature"),
        ("embeddings", {"input": [5] * 513}, "input"),
        ("score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("score", {"text_1": "a"}, "text_2"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    real_server: RealServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = httpx.post(f"{real_server.url}/v1/{path}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_unknown_model_has_no_vectors(real_client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="known are: tiny"):
        real_client.embeddings.create(model="missing", input="a")
