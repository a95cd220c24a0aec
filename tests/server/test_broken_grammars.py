"""A grammar that cannot be compiled, or not be followed to its end, is the client's mistake:
400 with a sentence."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from typing import Any

import httpx
import openai
import pytest

from minivllm.server.answers.constraints import _moved
from tests.server.serving import RealServer

TOO_HARD = "(([a-z]*[0-9]*){1,50}){1,50}z"
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a schema of a wrong type": ({"json": {"type": "strnig"}}, "has the type"),
    "a schema that is none": ({"json": {"items": 7}}, "a schema is an object, true or false"),
    "a schema that refers to itself": ({"json": {"$ref": "#"}}, "to itself without end"),
    "a schema without finite values": (
        {"json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        "No finite value",
    ),
    "a reference to nothing": ({"json": {"$ref": "#/$defs/a"}}, "there is nothing in the schema"),
    "alternatives that overlap": ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
    "an expression in a schema": ({"json": {"type": "string", "pattern": "(a"}}, "unclosed group"),
    "an expression": ({"regex": "(a"}, "unclosed group"),
    "an empty expression": ({"regex": "[a&&b]"}, "Nothing that can be written|cannot be compiled"),
    "choices of one letter too many": ({"choice": ["a" * 200_000]}, "may have at most"),
    "a grammar of Lark": ({"grammar": "start: missing"}, "missing"),
    "a grammar that never ends": ({"grammar": "start: a\na: a"}, "Nothing that can be written"),
    "a grammar in GBNF": ({"grammar": "root ::= missing"}, "missing"),
    "half a grammar in GBNF": ({"grammar": 'root ::= "a'}, "cannot be compiled"),
    "text that is no grammar": ({"grammar": "::::"}, "cannot be compiled"),
    "whitespace that is none": ({"json": {}, "whitespace_pattern": "x"}, "whitespace_pattern is"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_a_grammar_that_cannot_be_compiled_is_refused(
    real_server: RealServer, name: str, stream: bool
) -> None:
    structure, complaint = BROKEN[name]
    body = {
        "model": "tiny",
        "prompt": "Hello",
        "max_tokens": 9,
        "stream": stream,
        "structured_outputs": structure,
    }
    answer = httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(complaint, error["message"])
    assert error["message"].endswith((".", "smaller."))


def test_a_response_format_that_cannot_be_compiled_is_refused(real_client: openai.OpenAI) -> None:
    for schema in ({"$ref": "#"}, {"type": "array", "uniqueItems": True}):
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="JSON schema"):
            real_client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], response_format=wanted
            )


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_failing_grammar_did_not_allow_is_not_delivered(real_server: RealServer, stream: bool) -> None:
    structure = {
        "structured_outputs": {"regex": TOO_HARD},
        "max_tokens": 200,
        "min_tokens": 190,
        "stream": stream,
    }
    body = {"model": "tiny", "prompt": "Hello", "seed": 1, **structure}
    written, error = "", None
    with httpx.stream("POST", f"{real_server.url}/v1/completions", json=body, timeout=60) as answer:
        if answer.status_code != 200:
            answer.read()
            error = answer.json()["error"]
        else:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    error = event.get("error") or error
                    written += "".join(choice["text"] for choice in event.get("choices", ()))
    assert re.fullmatch("[a-z0-9]*", written), written
    assert error is not None
    assert error["type"] == "invalid_request_error"
    assert "could not be continued" in error["message"]


def test_references_in_the_data_of_a_tool_stay_as_they_are() -> None:
    parameters: dict[str, Any] = {
        "properties": {
            "const": {"$ref": "#/$defs/a"},
            "b": {"const": {"$ref": "#"}, "default": {"$ref": "#/x"}},
        },
        "$defs": {"a": {"enum": [{"$ref": "#"}]}},
    }
    moved = _moved(parameters)
    assert moved["properties"]["const"] == {"$ref": "#/$defs/arguments/$defs/a"}
    assert moved["properties"]["b"] == parameters["properties"]["b"]
    assert moved["$defs"] == parameters["$defs"]


def bomb(number: int) -> dict[str, Any]:
    """One of the grammars that take a compiler long, each another one."""
    low, high = 400 + number, 900 + number
    wide = {
        f"key{number}_{index}": {"type": "string", "pattern": f"^(a|b|ab){{{low}}}$"} for index in range(40)
    }
    bombs: list[dict[str, Any]] = [
        {"regex": f"(a?){{{low}}}(a|b|ab){{{high}}}"},
        {"regex": f"(([a-z]*[0-9]*){{1,{low}}}){{1,{high}}}z"},
        {"json": {"type": "object", "properties": wide}},
        {
            "json": {
                "allOf": [
                    {"anyOf": [{"minLength": k * j + number} for k in range(1, 9)]} for j in range(1, 9)
                ]
            }
        },
        {"grammar": "root ::= " + " ".join(["(" * 40 + f'"{number}"' + ")?" * 40] * 20)},
    ]
    return bombs[number % 5]


@pytest.mark.slow
def test_grammar_bombs_cost_others_little(real_server: RealServer) -> None:
    """25 hostile grammars at once: what a stream's longest gap is without and with them."""

    def longest_gap() -> float:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 300, "stream": True, "ignore_eos": True}
        times = []
        with httpx.stream("POST", f"{real_server.url}/v1/completions", json=body, timeout=120) as answer:
            times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data")]
        return max(after - before for before, after in itertools.pairwise(times))

    def attack(number: int) -> None:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 20, "structured_outputs": bomb(number)}
        began = time.monotonic()
        answer = httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=120)
        seen.append((answer.status_code, time.monotonic() - began))

    longest_gap()
    alone = longest_gap()
    seen: list[tuple[int, float]] = []
    attackers = [threading.Thread(target=attack, args=(number,)) for number in range(25)]
    for attacker in attackers:
        attacker.start()
    beside = longest_gap()
    for attacker in attackers:
        attacker.join()
    slowest = max(seconds for _, seconds in seen)
    statuses = sorted({status for status, _ in seen})
    print(
        f"\nlongest gap {alone * 1e3:.0f} ms alone, {beside * 1e3:.0f} ms beside 25 bombs, of which the "
        "slowest"
    )
    print(f"took {slowest:.1f} s; statuses {statuses}")
    assert set(statuses) <= {200, 400, 429}, statuses
    assert slowest < 60
