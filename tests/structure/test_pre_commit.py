"""tests/pre-commit.yaml: its hooks are programs that the [test] extra installs, and they pass."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CONFIGURATION = yaml.safe_load((ROOT / "tests" / "pre-commit.yaml").read_text(encoding="utf-8"))
HOOKS = [hook for repository in CONFIGURATION["repos"] for hook in repository["hooks"]]


def test_nothing_is_fetched() -> None:
    assert {repository["repo"] for repository in CONFIGURATION["repos"]} == {"local"}
    assert {hook["language"] for hook in HOOKS} == {"system"}
    assert [hook["id"] for hook in HOOKS] == ["ruff-check", "ruff-format", "structure"]


@pytest.mark.parametrize("hook", HOOKS[:2], ids=lambda hook: hook["id"])
def test_a_hook_passes_over_this_file(hook: dict[str, str]) -> None:
    command = [sys.executable, "-m", *shlex.split(hook["entry"]), __file__]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
