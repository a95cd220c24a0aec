"""Whatever cannot work is refused in a sentence that names what was given and what is allowed;
others are unharmed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, MinivllmError, ModelError, RequestError
from tests.parity_reference import (
    MAX_MODEL_LEN,
    assert_pool_unused,
    random_prompts,
    reference_tokens,
    run,
    tiny_llm,
    tokens_of,
)

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with tiny_llm(model) as engine:
        yield engine


def assert_is_a_sentence(error: MinivllmError, *named: str) -> None:
    text = str(error)
    assert all(part in text for part in named), text
    assert text.endswith(".") and "\n" not in text and "Traceback" not in text, text


BAD_PROMPTS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "an empty text": ("", {}, ("prompt is empty", "at least one")),
    "no ids": ({"prompt_token_ids": []}, {}, ("no tokens", "at least one")),
    "an id past the vocabulary": ({"prompt_token_ids": [5, 416]}, {}, (".1 is", "416", "0 to 415")),
    "a negative id": ({"prompt_token_ids": [-1]}, {}, ("-1", "0 to 415")),
    "a prompt that fills the context": ({"prompt_token_ids": [5] * MAX_MODEL_LEN}, {}, ("128",)),
    "a prompt longer than the context": ({"prompt_token_ids": [5] * 500}, {}, ("500", "128")),
    "a prompt and answer longer than the context": (
        {"prompt_token_ids": [5] * 100},
        {"max_tokens": 29},
        ("100", "29", "128"),
    ),
    "an unknown field of the prompt": ({"promt": "Hello"}, {}, ("promt", "prompt_token_ids")),
    "an allowed id past the vocabulary": (
        {"prompt_token_ids": [5]},
        {"allowed_token_ids": [416]},
        ("416", "415"),
    ),
    "a bias past the vocabulary": ({"prompt_token_ids": [5]}, {"logit_bias": {999: 1.0}}, ("999", "415")),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_and_a_running_request_goes_on(llm: LLM, model: Path, case: str) -> None:
    prompt, params, named = BAD_PROMPTS[case]
    good = random_prompts((9,))[0]
    engine = llm.llm_engine
    request_id = engine.add_request(
        None, {"prompt_token_ids": good}, SamplingParams(temperature=0.0, max_tokens=6)
    )
    engine.step()
    with pytest.raises(RequestError) as caught:
        engine.add_request(None, prompt, SamplingParams(**params))
    assert_is_a_sentence(caught.value, *named)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert {output.request_id for output in outputs} == {request_id}
    assert tokens_of(outputs[-1:]) == reference_tokens(model, [good], max_tokens=6)
    run(llm, [good], SamplingParams(max_tokens=1))
    assert_pool_unused(llm)


def test_one_bad_prompt_of_many_is_named_and_nothing_runs(llm: LLM) -> None:
    before = llm.get_metrics().num_steps
    with pytest.raises(RequestError, match=r"^Prompt 1: "):
        run(llm, [[5], [9999], [6]], SamplingParams(max_tokens=4))
    assert llm.get_metrics().num_steps == before
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_tokens": 0}, ("max_tokens", "0", "at least 1")),
        ({"max_tokens": -3}, ("max_tokens", "-3", "at least 1")),
        ({"temperature": float("nan")}, ("temperature", "nan", "finite")),
        ({"temperature": -0.5}, ("temperature", "-0.5", "at least 0")),
        ({"top_p": 0.0}, ("top_p", "0.0", "above 0 and at most 1")),
        ({"top_p": 1.5}, ("top_p", "1.5", "above 0 and at most 1")),
        ({"min_tokens": 9, "max_tokens": 4}, ("min_tokens", "9", "4")),
        ({"n": 0}, ("n is 0", "at least 1")),
        ({"temprature": 1.0}, ("temprature", "temperature", "max_tokens")),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_sampling_parameters_are_refused(values: dict[str, Any], named: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert_is_a_sentence(caught.value, *named)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_model_length": 5}, ("max_model_length", "max_model_len")),
        ({"dtype": "float23"}, ("float23", "float32", "bfloat16")),
        ({"block_size": 7}, ("block_size", "7", "16")),
        ({"cudagraph_mode": "full"}, ("cudagraph_mode", "'full'", "full_decode")),
        ({"cudagraph_mode": "piecewise", "enforce_eager": True}, ("cudagraph_mode", "enforce_eager")),
        (
            {"cudagraph_mode": "piecewise", "enforce_eager": False, "device": "cpu"},
            ("'piecewise'", "CUDA", "cpu"),
        ),
        ({"performance_mode": "fast"}, ("performance_mode", "'fast'", "interactivity")),
        ({"max_num_seqs": 0}, ("max_num_seqs", "0", "at least 1")),
        ({"num_gpu_blocks_override": 16}, ("16 blocks", "128", "17", "max_model_len")),
        ({"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1000}, ("kv_cache_memory_bytes", "128")),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 10**18},
            ("GiB", "lower kv_cache_memory_bytes"),
        ),
        ({"max_model_len": 100_000}, ("100000", "512")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_engine_arguments_are_refused(
    model: Path, settings: dict[str, Any], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_llm(model, **settings)
    assert_is_a_sentence(caught.value, *named)


def damaged(model: Path, directory: Path, damage: str) -> tuple[Path, tuple[str, ...]]:
    """A damaged copy of the model, and what the error must name."""
    shutil.copytree(model, directory / "model")
    weights, config = directory / "model" / "model.safetensors", directory / "model" / "config.json"
    if damage == "missing weights":
        weights.unlink()
        return weights.parent, ("safetensors",)
    if damage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-1000])
        return weights.parent, (weights.name,)
    if damage == "unknown architecture":
        config.write_text(
            json.dumps({**json.loads(config.read_text()), "architectures": ["MambaForCausalLM"]})
        )
        return weights.parent, ("MambaForCausalLM", "LlamaForCausalLM")
    if damage == "missing config":
        config.unlink()
        return weights.parent, ("config.json",)
    return directory / "nowhere", ("nowhere",)


DAMAGES = ("missing weights", "truncated weights", "unknown architecture", "missing config", "unknown model")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_unknown_model_is_refused(model: Path, tmp_path: Path, damage: str) -> None:
    path, named = damaged(model, tmp_path, damage)
    with pytest.raises(ModelError) as caught:
        tiny_llm(path)
    assert_is_a_sentence(caught.value, *named)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (("{model}", "--max-tokens", "0"), 2, ("max_tokens", "at least 1")),
        (("{model}", "--dtype", "float23"), 2, ("float23", "float32")),
        (("{model}", "--max-model-len", "8"), 2, ("max_model_len is 8",)),
        (("{model}/nowhere",), 1, ("nowhere",)),
    ],
    ids=["max tokens", "dtype", "long prompt", "model"],
)
def test_generate_prints_one_sentence_and_exits_with_1_or_2(
    model: Path, arguments: tuple[str, ...], code: int, named: tuple[str, ...]
) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "minivllm.cli.main", "generate"),
            *(argument.replace("{model}", str(model)) for argument in arguments),
            *("-p", "one two three four five six seven eight nine", "--enforce-eager"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "400"},
        timeout=120,
    )
    assert result.returncode == code, result.stderr
    assert all(part in result.stderr for part in named), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
