"""Adapters as models: named in requests, listed with their parent, loaded and unloaded while others stream.

The judge of an answer is transformers in float32 with the adapter merged into the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from minivllm.errors import ConfigError
from minivllm.messages import LoRARequest
from minivllm.server.service.models import ServedModels
from minivllm.server.service.settings import ServerSettings
from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.lora.lora_adapters import merged_tokens
from tests.parity_reference import random_prompts
from tests.server.serving import RealServer, ServedCore

PROMPT = random_prompts((11,), seed=3)[0]
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def http(real_server: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=real_server.url, timeout=60) as client:
        yield client


@pytest.fixture
def second(real_server: RealServer, http: httpx.Client) -> Iterator[LoRARequest]:
    """An adapter loaded while the server runs, gone after the test."""
    adapter = real_server.adapters[1]
    assert http.post(LOAD, json={"lora_name": "second", "lora_path": "second"}).status_code == 200
    yield adapter
    http.post(UNLOAD, json={"lora_name": "second"})


def expected(server: RealServer, adapter: LoRARequest | None, max_tokens: int = 12) -> str:
    tokens = merged_tokens(server.model, adapter, PROMPT, max_tokens)
    return load_tokenizer(server.model).decode(tokens, True)


def answer(client: openai.OpenAI, model: str, max_tokens: int = 12) -> str:
    made = client.completions.create(model=model, prompt=PROMPT, max_tokens=max_tokens, temperature=0)
    assert made.model == model
    return made.choices[0].text


def test_a_models_name_chooses_the_adapter(
    real_server: RealServer, real_client: openai.OpenAI, second: LoRARequest
) -> None:
    wanted = {
        "tiny": expected(real_server, None),
        "first": expected(real_server, real_server.adapters[0]),
        "second": expected(real_server, second),
    }
    assert len(set(wanted.values())) == 3
    assert {name: answer(real_client, name) for name in wanted} == wanted
    chats = {
        name: real_client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": "Who are you?"}], max_tokens=12, temperature=0
        )
        for name in wanted
    }
    assert {chat.model for chat in chats.values()} == set(wanted)
    assert len({chat.choices[0].message.content for chat in chats.values()}) == 3


def test_models_are_listed_with_their_parent(
    real_server: RealServer, real_client: openai.OpenAI, second: LoRARequest
) -> None:
    cards = [card.model_dump() for card in real_client.models.list()]
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None),
        ("first", "tiny"),
        ("second", "tiny"),
    ]
    assert cards[2]["root"] == second.path and real_client.models.retrieve("second").model_dump() == cards[2]


def test_adapters_come_and_go_while_others_stream(
    real_server: RealServer, real_client: openai.OpenAI, http: httpx.Client
) -> None:
    stream = real_client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=200, temperature=0, stream=True
    )
    text = next(iter(stream)).choices[0].text
    loaded = http.post(LOAD, json={"lora_name": "visitor", "lora_path": str(real_server.directory / "third")})
    assert loaded.json()["id"] == "visitor" and loaded.json()["parent"] == "tiny"
    assert answer(real_client, "visitor") == expected(real_server, real_server.adapters[2])
    assert http.post(UNLOAD, json={"lora_name": "visitor"}).json()["deleted"] is True
    with pytest.raises(openai.NotFoundError, match="known are: tiny, first"):
        answer(real_client, "visitor")
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == expected(real_server, None, 200)


def test_a_name_can_be_given_to_another_adapter_once_the_first_is_gone(
    real_server: RealServer, real_client: openai.OpenAI, http: httpx.Client
) -> None:
    for number in (1, 2):
        path = real_server.adapters[number].path
        assert http.post(LOAD, json={"lora_name": "seat", "lora_path": path}).status_code == 200
        assert answer(real_client, "seat") == expected(real_server, real_server.adapters[number])
        assert http.post(UNLOAD, json={"lora_name": "seat"}).status_code == 200


def test_an_adapter_in_use_stays(
    real_server: RealServer, real_client: openai.OpenAI, http: httpx.Client
) -> None:
    stream = real_client.completions.create(
        model="first", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    refused = http.post(UNLOAD, json={"lora_name": "first"})
    assert refused.status_code == 409 and "in use" in refused.json()["error"]["message"]
    stream.close()
    assert answer(real_client, "first") == expected(real_server, real_server.adapters[0])


def test_what_is_loaded_already_is_fine_and_a_taken_name_is_not(
    real_server: RealServer, http: httpx.Client, second: LoRARequest
) -> None:
    assert http.post(LOAD, json={"lora_name": "second", "lora_path": second.path}).status_code == 200
    for name in ("second", "tiny"):
        refused = http.post(LOAD, json={"lora_name": name, "lora_path": "third"})
        assert refused.status_code == 409 and "is taken" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["..", ".", "/etc", "../adapters0", "third/../../x", "a\x00b", "loop", "outside"]
)
def test_paths_out_of_the_directory_are_refused_whether_they_exist_or_not(
    real_server: RealServer, http: httpx.Client, path: str
) -> None:
    for name, goal in (("loop", "loop"), ("outside", "/")):
        if not (real_server.directory / name).is_symlink():
            (real_server.directory / name).symlink_to(goal)
    refused = http.post(LOAD, json={"lora_name": "x", "lora_path": path})
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "lora_path"
    assert "inside the server's directory" in error["message"] or path == "loop"


def test_a_directory_without_an_adapter_is_refused_and_nothing_changes(
    real_server: RealServer, http: httpx.Client
) -> None:
    (real_server.directory / "empty").mkdir(exist_ok=True)
    before = http.get("/v1/models").json()
    refused = http.post(LOAD, json={"lora_name": "x", "lora_path": "empty"})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_adapter"
    unknown = http.post(UNLOAD, json={"lora_name": "x"})
    assert unknown.status_code == 404 and "known are: first" in unknown.json()["error"]["message"]
    assert http.post(UNLOAD, json={"lora_name": "tiny"}).status_code == 404
    assert http.get("/v1/models").json() == before


@pytest.mark.parametrize("name", ["", "a b", "é", "x" * 129, "-x", "a\n"])
def test_a_name_has_plain_characters(http: httpx.Client, name: str) -> None:
    refused = http.post(LOAD, json={"lora_name": name, "lora_path": "second"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "lora_name"


def test_without_the_operators_consent_nobody_loads_anything(server: ServedCore) -> None:
    bodies: dict[str, Any] = {LOAD: {"lora_name": "x", "lora_path": "/etc"}, UNLOAD: {"lora_name": "x"}}
    for path, body in bodies.items():
        refused = httpx.post(server.url + path, json=body)
        assert refused.status_code == 403 and "--lora-directory" in refused.json()["error"]["message"]


def test_names_that_clash_and_directories_that_are_none_are_refused_at_the_start(
    real_server: RealServer, tmp_path: Path
) -> None:
    engine = real_server.served.run.service.engine
    with pytest.raises(ConfigError, match="'tiny' stands for two models"):
        ServedModels(engine, ["tiny"], [LoRARequest("tiny", lora_path="/x")])
    with pytest.raises(ConfigError, match="must be a directory"):
        ServerSettings(lora_directory=tmp_path / "missing")
