"""tests/README.md says what to run after a change: for every package, and only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.conftest import LONGEST, pytest_collection_modifyitems

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "tests" / "README.md").read_text(encoding="utf-8").split("## What to run after a change")[1]
ROWS = [row.strip("| ").split(" | ") for row in TABLE.splitlines() if row.startswith(("| `", "| a "))]


def test_every_package_is_in_the_map_once() -> None:
    named = [name for changed, _ in ROWS for name in re.findall(r"`(.+?)`", changed)]
    packages = [f"minivllm/{path.parent.name}" for path in (ROOT / "minivllm").glob("*/__init__.py")]
    assert sorted(named) == sorted([*packages, "kernels_triton_free", "tutorials"])


def test_the_map_leads_to_tests_and_every_folder_of_tests_is_reached() -> None:
    paths = {path for _, run in ROWS for path in re.findall(r"tests/[\w/.]+", run)}
    assert not [path for path in paths if not (ROOT / path).exists()]
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders - {path.split("/")[1] for path in paths} == {"gpu"}, "which need a GPU, and have a marker"


def test_the_longest_files_exist_and_run_first() -> None:
    paths = [ROOT / name for name in LONGEST]
    assert [path for path in paths if not path.exists()] == []
    items: Any = [SimpleNamespace(path=path, obj=None) for path in (Path(__file__), *reversed(paths))]
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: None), items)  # type: ignore[arg-type]
    assert [item.path for item in items] == [*paths, Path(__file__)]
