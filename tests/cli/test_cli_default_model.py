"""The command line on the default model and the real engine, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def minivllm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "minivllm.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
        timeout=500,
    )


@pytest.mark.slow
def test_chat_answers_a_question_and_tells_its_speed(smollm2_path: Path) -> None:
    result = minivllm(
        "chat",
        str(smollm2_path),
        "-p",
        "What is the capital of France?",
        "--temperature",
        "0",
        "--max-tokens",
        "32",
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
    assert "TTFT" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_generate_completes_a_batch_as_json(smollm2_path: Path) -> None:
    result = minivllm(
        *("generate", str(smollm2_path), "-p", "The capital of France is", "-p", "One, two, three, four,"),
        *("--temperature", "0", "--max-tokens", "8", "--json", "--enforce-eager"),
    )
    assert result.returncode == 0, result.stderr
    first, second = (json.loads(line) for line in result.stdout.splitlines())
    assert "Paris" in first["text"]
    assert "five" in second["text"]
    assert first["num_output_tokens"] == len(first["token_ids"]) <= 8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--max-model-len", "16", "-p", "word " * 100], 2, "16"),
        (["--num-gpu-blocks-override", "2", "--max-model-len", "2048", "-p", "x"], 2, "blocks"),
    ],
)
def test_what_cannot_fit_is_one_sentence(
    smollm2_path: Path, arguments: list[str], code: int, words: str
) -> None:
    result = minivllm("chat", str(smollm2_path), "--enforce-eager", *arguments)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr
