"""The package as it is installed: cheap to import, complete, and the same under ``python -O``."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest

import minivllm

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "numpy", "tokenizers", "safetensors", "gguf"}


def run_python(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, "-c", program], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "statement",
    [
        "import minivllm",
        "from minivllm import SamplingParams, EngineArgs, OutputKind",
        "import minivllm.scheduler.scheduler, minivllm.kv_cache.manager",
        "import minivllm.cli.main, minivllm.cli.commands",
    ],
)
def test_importing_what_decides_does_not_import_what_computes(statement: str) -> None:
    result = run_python(f"import sys; {statement}; print(*({HEAVY!r} & set(sys.modules)))")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ""


def test_every_public_name_can_be_imported() -> None:
    for name in minivllm.__all__:
        assert getattr(minivllm, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = minivllm.no_such_name


def test_the_console_script_and_the_version_are_those_of_the_package() -> None:
    [script] = entry_points(group="console_scripts", name="minivllm")
    assert script.value == "minivllm.cli.main:command"
    assert callable(script.load())
    assert metadata("minivllm")["Version"] == minivllm.__version__


@pytest.mark.parametrize("package", ["minivllm", "kernels_triton_free"])
def test_every_file_beside_the_code_is_installed_with_it(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"][package]
    matched = {pattern: set((ROOT / package).glob(pattern)) for pattern in patterns}
    there = {
        path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    others = {path for path in there if path.suffix != ".py"}
    assert others - set().union(*matched.values()) == set(), "an installed package would lack them"
    assert [pattern for pattern, files in matched.items() if not files & others] == [], "patterns of nothing"


def test_torch_is_pinned_to_the_versions_the_engine_is_made_for() -> None:
    [torch] = [
        line for line in requires("minivllm") or () if line.split(">")[0].split("<")[0].strip() == "torch"
    ]
    assert ">=2.11" in torch
    assert "<2.14" in torch


@pytest.mark.slow
def test_generation_works_where_asserts_are_stripped(tiny_model: Callable[..., Path]) -> None:
    program = f"""
import sys
assert False, "this interpreter runs asserts"
from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError
with LLM({str(tiny_model("llama"))!r}, enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9) as llm:
    [output] = llm.generate({{"prompt_token_ids": [5, 6, 7]}}, SamplingParams(temperature=0.0, max_tokens=5))
    print(len(output.outputs[0].token_ids), output.outputs[0].finish_reason)
    for ids in ([], [10**6], [-1], [5] * 65):
        try:
            llm.generate({{"prompt_token_ids": ids}}, SamplingParams(max_tokens=1))
        except RequestError:
            print("refused")
"""
    result = run_python(program, "-O")
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["5", "length", "refused", "refused", "refused", "refused"]
