"""vLLM's fields beyond OpenAI's:
structured_outputs in every form, arguments for logits processors, best_of, …

The judges are jsonschema and Python's re, on what random weights wrote:
only the structure can have made it valid.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import jsonschema
import openai
import pytest
import torch

from minivllm import LogitsProcessor
from minivllm.sampling.logits_processors import BatchUpdate
from tests.server.serving import RealServer, ScriptedCore, Scripts, ServedCore, served

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "visited": {"type": "boolean"}},
    "required": ["city", "visited"],
    "additionalProperties": False,
}
COMPACT = {"disable_any_whitespace": True}
WANTED: dict[str, tuple[dict[str, Any], Any]] = {
    "json": ({"json": SCHEMA, **COMPACT}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
    "json as text": (
        {"json": json.dumps(SCHEMA), **COMPACT},
        lambda text: json.loads(text)["city"] in ("Rome", "Oslo"),
    ),
    "regex": ({"regex": r"[a-c]{3}-\d{2}"}, lambda text: re.fullmatch(r"[a-c]{3}-\d{2}", text)),
    "choice": ({"choice": ["yes", "no", "perhaps"]}, lambda text: text in ("yes", "no", "perhaps")),
    "grammar": ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
    "whitespace": ({"json": SCHEMA, "whitespace_pattern": " ?"}, lambda text: json.loads(text)["city"]),
}


def ask(client: openai.OpenAI, path: str, text: str = "Hello", model: str = "tiny", **fields: Any) -> str:
    options: dict[str, Any] = {"model": model, "max_tokens": 200, "extra_body": fields}
    if path == "completions":
        return client.completions.create(prompt=text, **options).choices[0].text
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(messages=messages, **options).choices[0].message.content or ""


@pytest.mark.parametrize("path", ["completions", "chat"])
@pytest.mark.parametrize("kind", WANTED)
def test_answers_have_the_structure_that_was_asked_for(
    real_client: openai.OpenAI, path: str, kind: str
) -> None:
    structure, is_valid = WANTED[kind]
    for seed in range(3):
        text = ask(real_client, path, structured_outputs=structure, seed=seed)
        assert is_valid(text), text


def test_any_json_object_can_be_asked_for(client: openai.OpenAI, server: ServedCore) -> None:
    assert ask(client, "chat", "say:{}", "scripted", structured_outputs={"json_object": True}) == "{}"
    structured = server.core.admitted[-1].sampling_params.structured_outputs
    assert structured is not None and structured.json_object is True


def test_a_response_takes_the_same_field(client: openai.OpenAI, server: ServedCore) -> None:
    body: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"]}}
    assert client.responses.create(model="scripted", input="say:yes", extra_body=body).output_text == "yes"
    structured = server.core.admitted[-1].sampling_params.structured_outputs
    assert structured is not None and structured.choice == ["yes", "no"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"structured_outputs": {}}, "none of them"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice"),
        ({"structured_outputs": {"regex": "a", **COMPACT}}, "Whitespace options are for json"),
        ({"structured_outputs": {"json": "{"}}, "not a JSON schema"),
        ({"structured_outputs": {"choice": []}}, "choice"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "give one of them",
        ),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "give one of them"),
        ({"structured_outputs": {"regex": "a"}, "tools": [TOOL]}, "give tool_choice none"),
        (
            {"structured_outputs": {"regex": "a"}, "tools": [TOOL], "tool_choice": "required"},
            "give tool_choice none",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "a structure has an end"),
        ({"structured_outputs": {"regex": "a"}, "thinking_budget": 3}, "contradict each other"),
        ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ],
)
def test_contradictions_are_told_in_a_sentence(
    client: openai.OpenAI, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(told)) as raised:
        ask(client, "chat", "say:a", "scripted", **fields)
    assert raised.value.param is not None


def test_tools_that_are_switched_off_leave_room_for_a_structure(client: openai.OpenAI) -> None:
    fields = {"structured_outputs": {"regex": "a+"}, "tools": [TOOL], "tool_choice": "none"}
    assert ask(client, "chat", "say:aa", "scripted", **fields) == "aa"


class Accepting(LogitsProcessor):
    """Takes every request's arguments and changes nothing."""

    def __init__(self, vocab_size: int, device: torch.device) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, update: BatchUpdate) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def test_arguments_reach_logits_processors(scripts: Scripts) -> None:
    arguments = {"target": 7, "words": ["a", "b"], "share": 0.5, "on": True, "name": "x"}
    core = ScriptedCore(scripts)
    core.config = dataclasses.replace(core.config, logits_processors=(Accepting,))
    with (
        served(core, scripts.tokenizer) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        for path in ("chat", "completions"):
            assert ask(client, path, "say:fine", "scripted", vllm_xargs=arguments) == "fine"
            assert core.admitted[-1].sampling_params.extra_args == arguments


def test_arguments_that_nobody_takes_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="started without logits_processors"):
        ask(client, "completions", "say:x", "scripted", vllm_xargs={"a": 1})


def test_the_best_of_several_come_back_best_first(
    real_server: RealServer, real_client: openai.OpenAI
) -> None:
    """The judge is the same request asked for all of them."""
    body: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 6, "seed": 3, "logprobs": 0}
    body["extra_body"] = {"ignore_eos": True}

    def ranked(answer: Any) -> list[tuple[float, str]]:
        return [(sum(choice.logprobs.token_logprobs), choice.text) for choice in answer.choices]

    every = sorted(ranked(real_client.completions.create(n=4, **body)), reverse=True)
    best = ranked(real_client.completions.create(n=2, best_of=4, **body))
    assert [text for _, text in best] == [text for _, text in every[:2]]
    assert real_server.served.run.service.admission.num_completions == 0
    with pytest.raises(openai.BadRequestError, match="known at the end only"):
        real_client.completions.create(n=2, best_of=4, stream=True, **body)
    with pytest.raises(openai.BadRequestError, match="best_of"):
        real_client.completions.create(n=4, best_of=2, **body)


def test_repetition_and_thinking_have_limits_to_choose(client: openai.OpenAI, server: ServedCore) -> None:
    fields = {"repetition_detection": {"max_pattern_size": 4, "min_count": 2}, "thinking_budget": 5}
    assert ask(client, "chat", "say:fine", "scripted", **fields) == "fine"
    params = server.core.admitted[-1].sampling_params
    assert params.thinking_budget == 5 and params.repetition_detection is not None
    assert (params.repetition_detection.max_pattern_size, params.repetition_detection.min_count) == (4, 2)
    with pytest.raises(openai.BadRequestError, match="max_pattern_size"):
        ask(client, "chat", "say:fine", "scripted", repetition_detection={"max_pattern_size": 0})


def test_a_grammar_that_the_engine_refuses_is_counted_as_an_error(
    real_server: RealServer, real_client: openai.OpenAI
) -> None:
    registry = real_server.served.run.service.metrics.registry

    def errors() -> float:
        return (
            registry.get_sample_value("minivllm_request_success_total", {"finished_reason": "error"}) or 0.0
        )

    before = errors()
    with pytest.raises(openai.BadRequestError, match="look-around"):
        ask(real_client, "completions", "a", "tiny", structured_outputs={"regex": "(?=a)b"})
    assert errors() == before + 1
