"""Programs that are not ours: requests as ``llm``, litellm and lm-evaluation-harness form them, and, where
they are installed, the programs themselves.

The judge of a score is transformers in float32.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from minivllm.tokenizer.tokenizer import load_tokenizer
from tests.parity_reference import reference_logits
from tests.server.serving import RealServer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "llm_version",
            "description": "Return the installed version of llm",
            "parameters": {"properties": {}, "type": "object"},
        },
    }
]
CALL = {"id": "call-1", "type": "function", "function": {"name": "llm_version", "arguments": "{}"}}
QUESTION = {"role": "user", "content": "Who are you?"}
LOOP = [
    QUESTION,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "0.36", "tool_call_id": "call-1"},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Rex", "Bello"]}, "age": {"enum": [1, 2, 3]}},
    "required": ["name", "age"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}
STREAMED = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}

# What llm 0.36 sends for: a prompt, a system prompt without a stream, a tool, its result, the next question.
LLM_CHATS: dict[str, dict[str, Any]] = {
    "prompt": {**STREAMED, "messages": [QUESTION], "max_tokens": 12},
    "system": {
        "model": "tiny",
        "stream": False,
        "messages": [{"role": "system", "content": "You are terse"}, QUESTION],
        "max_tokens": 12,
        "temperature": 0.0,
    },
    "tool": {**STREAMED, "messages": [QUESTION], "max_tokens": 12, "tools": TOOLS},
    "tool result": {**STREAMED, "messages": LOOP, "max_tokens": 12, "tools": TOOLS},
    "next question": {
        **STREAMED,
        "messages": [
            *LOOP,
            {"role": "assistant", "content": "All done."},
            {"role": "user", "content": "And now?"},
        ],
        "max_tokens": 12,
        "tools": TOOLS,
    },
}


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("case", LLM_CHATS)
def test_what_llm_sends_to_chat_is_answered(real_server: RealServer, case: str) -> None:
    body = LLM_CHATS[case]
    response = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    if body["stream"]:
        *chunks, last = events(response)
        assert last["choices"] == [] and 0 < last["usage"]["completion_tokens"] <= 12
        assert chunks[-1]["choices"][0]["finish_reason"] is not None
    else:
        assert response.json()["choices"][0]["message"]["role"] == "assistant"


def test_what_litellm_sends_back_of_an_answer_is_answered(real_server: RealServer) -> None:
    again = {"provider_specific_fields": {"refusal": None}, "function_call": None}
    messages = [QUESTION, {"role": "assistant", "content": "A model.", "tool_calls": None, **again}, QUESTION]
    body = {"model": "tiny", "messages": messages, "max_tokens": 12}
    response = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text


def test_what_llm_sends_for_a_schema_gets_an_answer_that_follows_it(real_server: RealServer) -> None:
    body = {**STREAMED, "messages": [QUESTION], "max_tokens": 200, "seed": 1, "response_format": FORMAT}
    # Random weights would write whitespace between the tokens of JSON without end.
    body["bad_words"] = ["\n", " ", "\t", "\r"]
    response = httpx.post(f"{real_server.url}/v1/chat/completions", json=body, timeout=60)
    chunks = [event["choices"][0]["delta"] for event in events(response) if event["choices"]]
    found = json.loads("".join(delta.get("content") or "" for delta in chunks))
    assert found["name"] in ("Rex", "Bello") and found["age"] in (1, 2, 3)


def test_what_llm_sends_to_a_completion_model_is_answered(real_server: RealServer) -> None:
    body = {**STREAMED, "prompt": "Once upon", "max_tokens": 12}
    *chunks, last = events(httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=60))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert last["usage"]["completion_tokens"] <= 12


CHOICES = [
    ("Two and two are", " four"),
    ("Two and two are", " a cat"),
    ("The sky is", " blue"),
    ("Water is", " wet"),
]


def score(server: RealServer, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """As the harness does: echo the tokens with their logprobs, leave out the one that was generated."""
    body = {"model": "tiny", "prompt": [[*context, *continuation]], "temperature": 0, "max_tokens": 1}
    body |= {"logprobs": 1, "seed": 1234, "echo": True}
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    [choice] = response.json()["choices"]
    found = choice["logprobs"]["token_logprobs"][len(context) : -1]
    best = choice["logprobs"]["top_logprobs"][len(context) : -1]
    assert len(found) == len(best) == len(continuation)
    return sum(found), all(logprob == max(top.values()) for logprob, top in zip(found, best))


def reference_score(server: RealServer, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids = [*context, *continuation]
    logprobs = reference_logits(server.model, ids).log_softmax(-1)
    places = range(len(context) - 1, len(ids) - 1)
    total = sum(float(logprobs[place, ids[place + 1]]) for place in places)
    return total, all(int(torch.argmax(logprobs[place])) == ids[place + 1] for place in places)


def test_the_harness_scores_choices_and_whole_texts_as_transformers_would(real_server: RealServer) -> None:
    encode = load_tokenizer(real_server.model).encode
    cases = [(encode(context), encode(context + more)[len(encode(context)) :]) for context, more in CHOICES]
    # A whole text is scored behind the token that begins one; and what the model itself would say is greedy.
    cases += [([0], encode("The sky is blue"))]
    cases += [([0, 5, 9], [int(reference_logits(real_server.model, [0, 5, 9])[-1].argmax())])]
    found = [score(real_server, context, continuation) for context, continuation in cases]
    for (total, is_greedy), (context, continuation) in zip(found, cases):
        wanted, wanted_greedy = reference_score(real_server, context, continuation)
        assert (total, is_greedy) == (pytest.approx(wanted, abs=1e-3), wanted_greedy)
    assert [is_greedy for _, is_greedy in found][-1] is True
    assert all(abs(one[0] - other[0]) > 1e-3 for one, other in pairwise(found))


def test_what_the_harness_sends_to_generate_is_answered(real_server: RealServer) -> None:
    options = {"model": "tiny", "max_tokens": 8, "temperature": 0.0, "stop": ["\n"], "seed": 1234}
    bodies: dict[str, dict[str, Any]] = {
        "completions": {"prompt": [[53, 82, 80, 72], [55, 359]], **options},
        "chat/completions": {"messages": [{"role": "user", "content": "The sky is"}], **options},
    }
    for path, body in bodies.items():
        answer = httpx.post(f"{real_server.url}/v1/{path}", json=body, timeout=60)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == len(body.get("prompt", "1"))


def run(command: list[str], **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "OPENAI_API_KEY": "unused", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


@pytest.mark.skipif(importlib.util.find_spec("llm") is None, reason="llm is not installed")
def test_the_program_llm_itself_talks_to_the_server(real_server: RealServer, tmp_path: Path) -> None:
    entries = [
        f"- model_id: {name}\n  model_name: tiny\n  api_base: {real_server.url}/v1\n"
        for name in ("chat", "text")
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"{entries[0]}  supports_schema: true\n{entries[1]}  completion: true\n"
    )
    home = {"LLM_USER_PATH": str(tmp_path)}
    for model in ("chat", "text"):
        assert run(
            ["llm", "-m", model, "Once upon", "-o", "max_tokens", "12", "-o", "seed", "1"], **home
        ).strip()
    assert run(["llm", "-c", "And then?", "-o", "max_tokens", "12", "-o", "seed", "2"], **home).strip()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed"
)
def test_the_harness_itself_evaluates_the_server(real_server: RealServer, tmp_path: Path) -> None:
    rows = [{"question": context, "choices": [more, " nothing at all"]} for context, more in CHOICES]
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "local_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.json")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "0",
        "doc_to_choice": "{{choices}}",
    }
    (tmp_path / "local_choice.yaml").write_text(json.dumps(task))
    where = (
        f"base_url={real_server.url}/v1/completions,model=tiny,tokenizer={real_server.model},num_concurrent=2"
    )
    command = ["lm_eval", "--model", "local-completions", "--model_args", where, "--tasks", "local_choice"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    run(command, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "cache"))
    encode = load_tokenizer(real_server.model).encode
    [samples] = (tmp_path / "out").rglob("samples_local_choice*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(lines) == len(CHOICES)
    for line in lines:
        for asked, response in zip(line["arguments"].values(), line["resps"]):
            context = encode(asked["arg_0"])
            continuation = encode(asked["arg_0"] + asked["arg_1"])[len(context) :]
            wanted, _ = reference_score(real_server, context, continuation)
            assert float(response[0][0]) == pytest.approx(wanted, abs=1e-3)
