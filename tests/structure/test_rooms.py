"""The rooms of the package: who may import whom, what may never be imported, how large a file may grow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("minivllm/**/*.py"), *ROOT.glob("kernels_triton_free/**/*.py")])
EVERYTHING = [*SOURCES, *sorted(ROOT.glob("tests/**/*.py")), *sorted(ROOT.glob("tutorials/**/*.py"))]

MAX_LINES = 1000
TOP_LEVEL = {
    "pyproject.toml",
    "minivllm",
    "kernels_triton_free",
    "tests",
    "tutorials",
    "README.md",
    "LICENSE",
    ".ci",
    ".git",
    ".gitignore",
}

# What every room may import besides itself and the vocabulary. A room without an entry may import nothing else.
ROOMS: dict[str, set[str]] = {
    "kernels": set(),
    "vocabulary": set(),
    "kv_cache": set(),
    "scheduler": {"kv_cache"},
    "models": {"kernels"},
    "quantization": {"models", "kernels"},
    "lora": {"models", "kernels"},
    "spec_decode": {"models", "kernels"},
    "structured_output": {"kernels"},
    "profiling": set(),
    "logits_processors": set(),
    "worker": {"profiling", "logits_processors", "models", "kernels", "quantization", "lora", "spec_decode"},
    "executor": {"worker", "models"},
    "engine": {
        "profiling",
        "logits_processors",
        "scheduler",
        "kv_cache",
        "executor",
        "models",
        "structured_output",
        "lora",
    },
    "metrics": set(),
    "frontend": {"engine", "metrics", "structured_output", "logits_processors"},
    "server": {"frontend", "metrics"},
    "cli": {"frontend", "server"},
    "package": {"frontend", "logits_processors"},
}
VOCABULARY = {
    "minivllm.errors",
    "minivllm.config",
    "minivllm.sampling_params",
    "minivllm.messages",
    "minivllm.request",
}

# Imports that the rooms would not allow, each with its reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("minivllm.frontend.tokenizer", "minivllm.models.fetch"): "a tokenizer comes from the model's files",
    ("minivllm.frontend.tokenizer", "minivllm.models.gguf_file"): "a GGUF file carries its tokenizer",
    ("minivllm.frontend.gguf_tokenizer", "minivllm.models.gguf_file"): "a GGUF file carries its tokenizer",
    ("minivllm.frontend.text_frontend", "minivllm.models.fetch"): "generation_config.json lies beside the weights",
    ("minivllm.frontend.text_frontend", "minivllm.models.gguf_file"): "a GGUF file has no generation_config.json",
    (
        "minivllm.structured_output.compiler",
        "minivllm.frontend.tokenizer",
    ): "a grammar is about text, a model about tokens",
    ("minivllm.cli.pull", "minivllm.models.fetch"): "pull fetches and starts no engine",
    ("minivllm.cli.engine_start", "minivllm.models.fetch"): "the download draws its own progress bar",
    ("minivllm.cli.env", "minivllm.models.fetch"): "env names the cache directory",
    ("minivllm.cli.env", "minivllm.engine.resolve"): "env tells what an engine would choose",
    ("minivllm.cli.env", "minivllm.worker.compiler"): "env tells why nothing would compile",
    ("minivllm.cli.env", "minivllm.worker.decode_options"): "env tells whether decode attention is tuned here",
    ("minivllm.cli.env", "minivllm.worker.memory"): "env tells how much memory the cache would take",
    ("minivllm.cli.trace", "minivllm.kv_cache.manager"): "trace runs the real scheduler without a model",
    ("minivllm.cli.trace", "minivllm.scheduler.scheduler"): "trace runs the real scheduler without a model",
}

# Benchmarks measure the parts one by one, so they reach below the frontend.
BENCHMARKS = "minivllm.cli.bench"

# Everything that can run code while it reads data, and everything that would be a handwritten kernel.
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "triton"}
FORBIDDEN_CALLS = {"torch.load", "torch.jit.load", "numpy.load", "np.load", "torch.utils.cpp_extension"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    if module.startswith("kernels_triton_free"):
        return "kernels"
    if module == "minivllm":
        return "package"
    return "vocabulary" if module in VOCABULARY else module.split(".")[1]


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, inside functions and type-checking blocks too; members count as modules."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: write imports from the top."
            assert node.module is not None
            yield node.module, node.lineno


def own_imports() -> Iterator[tuple[str, str, str]]:
    """(importing module, imported module, place) within the two packages."""
    for path in SOURCES:
        for imported, line in imported_modules(path):
            if imported.split(".")[0] in ("minivllm", "kernels_triton_free"):
                yield module_name(path), imported, f"{path.relative_to(ROOT)}:{line}"


def test_every_room_is_known() -> None:
    assert {room_of(module_name(path)) for path in SOURCES} <= set(ROOMS)


def test_imports_point_downwards_in_the_table_of_rooms() -> None:
    wrong = []
    for importer, imported, place in own_imports():
        room, target = room_of(importer), room_of(imported)
        allowed = {room, "vocabulary", "package", *ROOMS[room]} if room != "kernels" else {"kernels"}
        if importer.startswith(BENCHMARKS):
            allowed |= set(ROOMS)
        if target not in allowed and (importer, imported) not in EXCEPTIONS:
            wrong.append(f"{place}: {room} may not import {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_table_of_rooms_has_no_cycle() -> None:
    placed: set[str] = set()
    while len(placed) < len(ROOMS):
        ready = {room for room, below in ROOMS.items() if room not in placed and below <= placed}
        assert ready, f"These rooms import one another: {sorted(set(ROOMS) - placed)}"
        placed |= ready


def test_every_exception_is_still_needed() -> None:
    assert set(EXCEPTIONS) <= {(importer, imported) for importer, imported, _ in own_imports()}


def test_the_frontend_reaches_the_engine_through_its_client_only() -> None:
    reached = {imported for importer, imported, _ in own_imports() if room_of(importer) == "frontend"}
    assert {module for module in reached if room_of(module) == "engine"} == {"minivllm.engine.client"}


def test_kernels_need_only_torch_and_the_standard_library() -> None:
    import sys

    known = {*sys.stdlib_module_names, "torch", "kernels_triton_free"}
    for path in ROOT.glob("kernels_triton_free/*.py"):
        assert {module.split(".")[0] for module, _ in imported_modules(path)} <= known, path.name


@pytest.mark.parametrize("room", ["vocabulary", "kv_cache", "scheduler"])
def test_decisions_are_made_without_torch(room: str) -> None:
    for path in SOURCES:
        if room_of(module_name(path)) == room:
            assert "torch" not in {module.split(".")[0] for module, _ in imported_modules(path)}, path.name


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_imported_that_runs_code_while_reading_data(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for module, line in imported_modules(path):
        assert module.split(".")[0] not in FORBIDDEN_MODULES, f"{path}:{line} imports {module}"
        assert module not in FORBIDDEN_CALLS, f"{path}:{line} imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in FORBIDDEN_CALLS, f"{path}:{node.lineno} uses {ast.unparse(node)}"
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert path not in SOURCES or name not in ("eval", "exec", "__import__"), f"{path}:{node.lineno}: {name}"
            assert "trust_remote_code" not in {keyword.arg for keyword in node.keywords}, f"{path}:{node.lineno}"


def test_remote_code_has_no_name_here() -> None:
    for path in SOURCES:
        assert "trust_remote_code" not in path.read_text(encoding="utf-8"), path


def test_nothing_is_checked_by_assert_that_a_caller_could_get_wrong() -> None:
    """Under ``python -O`` an assert is gone, so none may stand between a request and the engine."""
    for path in SOURCES:
        module = module_name(path)
        if room_of(module) not in ("vocabulary", "frontend", "cli") or module.startswith(BENCHMARKS):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not isinstance(node, ast.Assert), f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("path", EVERYTHING, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_one_thousand_lines(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_no_file_is_a_grab_bag_and_no_work_is_put_off() -> None:
    grab_bags = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "base.py", "misc.py"}
    assert not grab_bags & {path.name for path in EVERYTHING}
    put_off = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|\bfor now\b", re.IGNORECASE)
    for path in SOURCES:
        found = put_off.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(ROOT)} says {found and found.group()!r}"


def test_the_top_level_holds_only_what_it_should() -> None:
    ignored = {".venv", "build", "dist"}
    for line in (ROOT / ".gitignore").read_text().splitlines():
        ignored.add(line.strip().rstrip("/"))
    names = {path.name for path in ROOT.iterdir()}
    assert {name for name in names - TOP_LEVEL - ignored if not name.endswith(".egg-info")} == set()


def test_every_module_says_what_it_is_for() -> None:
    for path in SOURCES:
        if path.name == "__init__.py" and not path.read_text(encoding="utf-8").strip():
            continue
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), (
            f"{path.relative_to(ROOT)} has no docstring"
        )
