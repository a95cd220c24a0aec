"""The server takes images in chat completions, counts them, and refuses what it must."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from PIL import Image

from minivllm.frontend.async_llm import AsyncLLM
from minivllm.multimodal.files.decoding import MAX_FILE_BYTES
from tests.multimodal.models import engine_args, expected, picture
from tests.server.serving import Served, serve_in_thread


@pytest.fixture(scope="module")
def server(directories: dict[str, Path]) -> Iterator[Served]:
    engine = AsyncLLM.from_args(engine_args(directories["smolvlm"]))
    with serve_in_thread(lambda: engine) as running:
        yield running


def url_of(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def message(*urls: str, text: str = "What is it?", **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url, **more}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


GREEDY = {"temperature": 0.0, "max_tokens": 4}


def test_an_answer_counts_its_images(server: Served, directories: dict[str, Path]) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    images = [picture(0, 60, 60), picture(1, 30, 60)]
    asked: Any = [message(*map(url_of, images))]
    (model,) = client.models.list().data
    assert model.model_dump()["input_modalities"] == ["text", "image"]
    limits = model.model_dump()["image_limits"]
    assert limits["max_images"] == 8 and limits["max_file_bytes"] == MAX_FILE_BYTES
    assert limits["max_body_bytes"] == 32 * 2**20
    assert limits["media_types"] == ["image/png", "image/jpeg", "image/webp"]
    answer = client.chat.completions.create(
        model=model.id, messages=asked, temperature=0.0, max_tokens=4, extra_body={"ignore_eos": True}
    )
    text = "user:<image><image>What is it?</s>assistant:"
    tokens, _ = expected(directories["smolvlm"], text, images, 4)
    from minivllm.tokenizer.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(directories["smolvlm"])
    assert answer.choices[0].message.content == tokenizer.decode(tokens)

    counted = httpx.post(f"{server.url}/tokenize", json={"model": model.id, "messages": asked}).json()
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == counted["count"] == len(counted["tokens"])
    assert counted["tokens"].count(2) == 4 * (17 + 9)


def test_a_response_sees_what_a_chat_completion_sees(server: Served) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    urls = [url_of(picture(0, 60, 60)), url_of(picture(1, 30, 60))]
    asked: Any = [message(*urls, detail="low")]
    (model,) = client.models.list().data
    completion = client.chat.completions.create(
        model=model.id, messages=asked, temperature=0.0, max_tokens=16
    )
    parts = [{"type": "input_image", "image_url": url, "detail": "low"} for url in urls]
    content: Any = [*parts, {"type": "input_text", "text": "What is it?"}]
    response = client.responses.create(
        model=model.id, input=[{"role": "user", "content": content}], temperature=0.0, max_output_tokens=16
    )
    assert response.output_text == completion.choices[0].message.content
    assert completion.usage is not None and response.usage is not None
    assert response.usage.input_tokens == completion.usage.prompt_tokens


@pytest.mark.parametrize(
    ("part", "where", "reason"),
    [
        ({"file_id": "file-1"}, ".file_id", "stores none"),
        ({}, ".image_url", "is missing"),
        ({"image_url": "data:,", "detail": "original"}, ".detail", "'auto', 'low' or 'high'"),
        ({"image_url": "https://example.org/a.png"}, "", "remote images are off"),
    ],
)
def test_what_a_response_refuses(server: Served, part: dict[str, Any], where: str, reason: str) -> None:
    content = [{"type": "input_text", "text": "Look:"}, {"type": "input_image", **part}]
    answer = httpx.post(f"{server.url}/v1/responses", json={"input": [{"role": "user", "content": content}]})
    error = answer.json()["error"]
    assert answer.status_code == 400 and reason in error["message"], error
    assert error["param"] == f"input.0.content.1{where}" and error["param"] in error["message"]


def test_tokens_are_counted_without_decoding(server: Served) -> None:
    """Sizes are in the header, whatever comes after it."""
    url = url_of(picture(7, 60, 60))
    head, _, body = url.partition(",")
    cut = f"{head},{body[: len(body) // 8 * 4]}"
    counted = [
        httpx.post(f"{server.url}/tokenize", json={"messages": [message(one)]}).json() for one in (url, cut)
    ]
    assert counted[0] == counted[1] and counted[0]["count"] > 100
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [message(cut)]})
    assert answer.status_code == 400 and "cannot be decoded" in answer.json()["error"]["message"]


def test_input_tokens_are_counted_without_decoding(server: Served) -> None:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    (model,) = client.models.list().data
    head, _, body = url_of(picture(7, 60, 60)).partition(",")
    text = {"type": "input_text", "text": "What is it?"}
    for url, more in ((f"{head},{body}", {}), (f"{head},{body[: len(body) // 8 * 4]}", {"detail": "low"})):
        content = [{"type": "input_image", "image_url": url, **more}, text]
        asked: Any = [{"role": "user", "content": content}]
        counted = client.responses.input_tokens.count(model=model.id, input=asked, instructions="Look.")
        told = {"messages": [{"role": "system", "content": "Look."}, message(url, **more)]}
        assert counted.input_tokens == httpx.post(f"{server.url}/tokenize", json=told).json()["count"]
    response = client.responses.create(model=model.id, input="Hello", max_output_tokens=16)
    counted = client.responses.input_tokens.count(model=model.id, input="Hello")
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
    part = {"type": "input_image", "image_url": "https://example.org/a.png"}
    refused = httpx.post(
        f"{server.url}/v1/responses/input_tokens", json={"input": [{"role": "user", "content": [part]}]}
    )
    assert refused.json()["error"]["param"] == "input.0.content.0"


def test_detail_is_ignored_where_images_have_no_choice(directories: dict[str, Path]) -> None:
    """Clients send one with every image."""
    engine = AsyncLLM.from_args(engine_args(directories["clip"]))
    with serve_in_thread(lambda: engine) as running:
        bodies = [
            {"messages": [message(url_of(picture(0)), **more)], **GREEDY}
            for more in ({}, {"detail": "auto"}, {"detail": "low"}, {"detail": "high"})
        ]
        url = f"{running.url}/v1/chat/completions"
        answers = [httpx.post(url, json=body).json() for body in bodies]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        bad = {"messages": [message(url_of(picture(0)), detail="huge")], **GREEDY}
        assert httpx.post(url, json=bad).json()["error"]["param"] == "messages.0.content.0.image_url.detail"


def test_detail_is_the_number_of_tiles(server: Served) -> None:
    def count(**more: Any) -> int:
        body = {"messages": [message(url_of(picture(0, 60, 60)), **more)]}
        return int(httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"].count(2))

    assert count(detail="low") == 4
    assert count() == count(detail="auto") == count(detail="high") == 17 * 4


@pytest.mark.parametrize(
    ("urls", "reason"),
    [
        (["https://example.org/a.png"], "remote images are off"),
        (["file:///etc/passwd"], "must begin with 'data:image/png;base64,'"),
        (["data:image/png;base64,!!!"], "no valid base64"),
        (["data:image/png;base64,aGVsbG8="], "is no file of the formats PNG, JPEG, WEBP"),
        ([url_of(picture(0))] * 9, "at most 8 images per request"),
        ([url_of(picture(0, 300, 1))], "200 times as long"),
    ],
)
def test_what_is_refused(server: Served, urls: list[str], reason: str) -> None:
    body = {"messages": [{"role": "system", "content": "Look."}, message(*urls)]}
    for path, more in (("/v1/chat/completions", GREEDY), ("/tokenize", {})):
        answer = httpx.post(server.url + path, json={**body, **more})
        error = answer.json()["error"]
        assert answer.status_code == 400 and reason in error["message"], answer.text
        assert error["param"] == f"messages.1.content.{len(urls) - 1}"
        assert error["message"].startswith(error["param"])


def test_placeholders_in_the_text_of_a_user_are_text(server: Served) -> None:
    body = {
        "messages": [message(url_of(picture(0)), text="<image><image><fake_token_around_image>")],
        **GREEDY,
    }
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200
    body = {"messages": [{"role": "user", "content": "Say <image>."}], **GREEDY}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=body).status_code == 200


def test_bodies_may_be_as_large_as_images_are(server: Served) -> None:
    noise = Image.effect_noise((1900, 1900), 100).convert("RGB")
    url = url_of(noise)
    assert 4 * 2**20 < len(url) < 20 * 2**20
    started = time.monotonic()
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": [message(url)], **GREEDY}, timeout=60
    )
    assert answer.status_code == 200, (answer.text, started)
    cut = {"messages": [message(url_of(picture(0)))], "truncate_prompt_tokens": 5, **GREEDY}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=cut)
    assert answer.status_code == 400 and "would cut images" in answer.json()["error"]["message"]
