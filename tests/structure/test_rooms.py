"""The packages: who may import whom, what may never be imported, how large files and packages may grow.

Every package declares in its ``__init__.py`` what it is for, what it may import, and its door. These
declarations are compared with the real graph of modules, imports inside functions and for type checking
included.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("minivllm/**/*.py"), *ROOT.glob("kernels_triton_free/**/*.py")])
BROUGHT_ALONG = ROOT / "tests" / "gpu" / "packages"
"""What others wrote: see tests/gpu/run.sh."""
OWN_TESTS = [path for path in sorted(ROOT.glob("tests/**/*.py")) if BROUGHT_ALONG not in path.parents]
PRETENDS_A_GPU = ROOT / "tests" / "gpu_code"
"""Stands in for Triton's driver, and calls Triton by its name."""
EVERYTHING = [*SOURCES, *OWN_TESTS, *sorted(ROOT.glob("tutorials/**/*.py"))]

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

VOCABULARY = "minivllm"
"""Modules beside the packages: configuration, messages, errors. All packages of minivllm may import them."""

MAX_PACKAGE_LINES = 1120
"""Of a package's files together: what a reader opens and keeps in mind."""

CATALOGUES = {"minivllm.families.makers": "registry"}
"""Package -> its index. No other file of it imports another, so each is read alone,
and the limit does not apply."""

# Everything that can run code while it reads data, and everything that would be a handwritten kernel.
FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "triton",
}
FORBIDDEN_BUILTINS = {"eval", "exec", "__import__"}
FORBIDDEN_CALLS = {"torch.load", "torch.jit.load", "numpy.load", "np.load", "torch.utils.cpp_extension"}


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def num_lines(path: Path) -> int:
    """Lines that are not blank."""
    return sum(1 for line in path.read_text(encoding="utf-8").splitlines() if line.strip())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def package_of(module: str) -> str:
    """The package that a module, or a name in it, belongs to."""
    while module not in MODULES:
        assert module, "no module of this tree"
        module = module.rpartition(".")[0]
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


PACKAGES = sorted({package_of(module) for module in MODULES} - {VOCABULARY})


def declaration(package: str) -> str:
    docstring = ast.get_docstring(syntax(MODULES[package]))
    assert docstring, f"{package} has no docstring"
    return docstring


def declared_imports(package: str) -> set[str]:
    """The packages that ``May import: …`` names, in full."""
    found = re.search(r"^May import: (.*?)\.$", declaration(package), re.MULTILINE | re.DOTALL)
    assert found, f"{package} does not say what it may import"
    names = " ".join(found[1].split()).split(", ")
    if names[0] in ("the vocabulary only", "torch only"):
        return set()
    return {name if name.startswith("kernels_triton_free") else f"minivllm.{name}" for name in names}


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import, inside functions and type-checking blocks too;
    members count as modules."""
    for node in ast.walk(syntax(path)):
        yield from imports_of(node, path)


def imports_of(node: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, node.lineno) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: write imports from the top."
        assert node.module is not None
        yield node.module, node.lineno


@cache
def own_imports() -> list[tuple[str, str, str]]:
    """(importing module, imported module, place) within the two packages."""
    found = []
    for path in SOURCES:
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                if name.split(".")[0] in ("minivllm", "kernels_triton_free"):
                    found.append((module_name(path), name, f"{path.relative_to(ROOT)}:{node.lineno}"))
    return found


@cache
def real_imports() -> dict[str, set[str]]:
    """package -> packages that its modules import, the vocabulary left out."""
    graph: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for importer, imported, _ in own_imports():
        source, target = package_of(importer), package_of(imported)
        if VOCABULARY not in (source, target) and source != target:
            graph[source].add(target)
    return graph


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_what_it_declares_and_nothing_else(package: str) -> None:
    assert real_imports()[package] == declared_imports(package)


def test_packages_do_not_import_one_another_in_circles() -> None:
    graph, placed = real_imports(), set[str]()
    while len(placed) < len(graph):
        ready = {package for package, below in graph.items() if package not in placed and below <= placed}
        assert ready, f"These packages import one another: {sorted(set(graph) - placed)}"
        placed |= ready


def test_folders_of_the_top_do_not_import_one_another_in_circles() -> None:
    def top(package: str) -> str:
        return package.split(".")[1] if package.startswith(f"{VOCABULARY}.") else package

    imports = {(top(package), top(one)) for package, imported in real_imports().items() for one in imported}
    edges = {(source, target) for source, target in imports if source != target}
    while loose := {
        (source, target) for source, target in edges if target not in {source for source, _ in edges}
    }:
        edges -= loose
    while loose := {
        (source, target) for source, target in edges if source not in {target for _, target in edges}
    }:
        edges -= loose
    assert edges == set()


def test_the_vocabulary_imports_no_package() -> None:
    for importer, imported, place in own_imports():
        if package_of(importer) == VOCABULARY and importer not in (VOCABULARY, f"{VOCABULARY}.__main__"):
            assert package_of(imported) == VOCABULARY, place


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is_for_and_where_its_door_is(package: str) -> None:
    text = declaration(package)
    assert text.split("\n\n")[0].endswith("."), "one sentence of purpose comes first"
    folder = MODULES[package].parent
    door = re.search(r"^Door: (.*?)(?:\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    for name, file in re.findall(r"`([A-Za-z_]+)` (?:and its parts )?in (\w+\.py)", door[1] if door else ""):
        assert re.search(
            rf"^(?:class|def|async def) {name}\b", (folder / file).read_text(encoding="utf-8"), re.M
        ), name


@pytest.mark.parametrize("package", [*PACKAGES, VOCABULARY])
def test_a_package_is_a_component_of_about_a_thousand_lines(package: str) -> None:
    folder = MODULES[package].parent
    lines = sum(map(num_lines, folder.glob("*.py")))
    if package in CATALOGUES:
        index = f"{package}.{CATALOGUES[package]}"
        inside = [(a, b) for a, b, _ in own_imports() if package_of(a) == package_of(b) == package]
        assert [pair for pair in inside if pair[0] != index] == []
        return
    assert lines <= MAX_PACKAGE_LINES, f"{package} has {lines} lines of its own"
    assert package.count(".") <= 2, f"{package} lies too deep"


def test_the_frontend_reaches_the_engine_through_its_client_only() -> None:
    reached = {
        imported for importer, imported, _ in own_imports() if package_of(importer) == "minivllm.frontend"
    }
    engine = {module for module in reached if package_of(module).startswith("minivllm.engine")}
    client, protocol = "minivllm.engine_process.client", "minivllm.engine_process.protocol."
    assert all(module.startswith((client + ".", protocol)) for module in engine), engine


def test_only_benchmarks_import_the_language() -> None:
    importers = {
        package_of(importer)
        for importer, imported, _ in own_imports()
        if package_of(imported) == "minivllm.lang"
    }
    assert importers == {"minivllm.lang", "minivllm.lang.examples", "minivllm.bench.programs"}


def test_kernels_need_only_torch_and_the_standard_library() -> None:
    import sys

    known = {*sys.stdlib_module_names, "torch", "kernels_triton_free"}
    for path in ROOT.glob("kernels_triton_free/**/*.py"):
        assert {module.split(".")[0] for module, _ in imported_modules(path)} <= known, path.name


@pytest.mark.parametrize(
    "package",
    [VOCABULARY, "minivllm.kv_cache", "minivllm.kv_transfer", "minivllm.scheduler", "minivllm.executor"],
)
def test_decisions_are_made_without_torch(package: str) -> None:
    for path in SOURCES:
        if package_of(module_name(path)) == package:
            assert "torch" not in {module.split(".")[0] for module, _ in imported_modules(path)}, path.name


def forbidden_uses(path: Path) -> Iterator[str]:
    """The names in a file that no file may use, each with its line."""
    forbidden = FORBIDDEN_MODULES - ({"triton"} if PRETENDS_A_GPU in path.parents else set())
    builtins = FORBIDDEN_BUILTINS if path in SOURCES else set()
    last_names = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}
    for node in ast.walk(syntax(path)):
        for module, line in imports_of(node, path):
            if module.split(".")[0] in forbidden or module in FORBIDDEN_CALLS:
                yield f"{path}:{line}: {module}"
        # An expression is written out only if it may be forbidden: to write out all takes seconds.
        if isinstance(node, ast.Attribute) and node.attr in last_names:
            name = ast.unparse(node)
            if name in FORBIDDEN_CALLS:
                yield f"{path}:{node.lineno}: {name}"
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in builtins:
                yield f"{path}:{node.lineno}: {node.func.id}"
            if "trust_remote_code" in {keyword.arg for keyword in node.keywords}:
                yield f"{path}:{node.lineno}: trust_remote_code"


def test_nothing_is_imported_that_runs_code_while_reading_data() -> None:
    assert [use for path in EVERYTHING for use in forbidden_uses(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from triton.language import load",
        "from torch.utils.cpp_extension import load_inline",
        "import torch.jit.load",
        "weights = torch.load(path)",
        "read = np.load",
        "eval(text)",
        "__import__(name)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
    ],
)
def test_what_runs_code_while_reading_data_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"def read(path, text, name):\n    {line}\n", encoding="utf-8")
    monkeypatch.setitem(globals(), "SOURCES", [path])
    [found] = forbidden_uses(path)
    assert found.startswith(f"{path}:2: ")


def test_remote_code_has_no_name_here() -> None:
    for path in SOURCES:
        assert "trust_remote_code" not in path.read_text(encoding="utf-8"), path


def test_nothing_is_checked_by_assert_that_a_caller_could_get_wrong() -> None:
    """Under ``python -O`` an assert is gone, so none may stand between a request and the engine."""
    for path in SOURCES:
        module = module_name(path)
        checked = (
            VOCABULARY,
            "minivllm.frontend",
            "minivllm.processing",
            "minivllm.tokenizer",
            "minivllm.cli",
        )
        if not package_of(module).startswith(checked[1:]) and package_of(module) != VOCABULARY:
            continue
        for node in ast.walk(syntax(path)):
            assert not isinstance(node, ast.Assert), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_no_file_is_longer_than_one_thousand_lines() -> None:
    assert [path for path in EVERYTHING if num_lines(path) > MAX_LINES] == []


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
        assert ast.get_docstring(syntax(path)), f"{path.relative_to(ROOT)} has no docstring"


@pytest.mark.parametrize("name", ["e01", "e02", "e03", "t14", "t15"])
def test_a_worked_example_plugs_in_by_public_names(name: str) -> None:
    [path] = ROOT.glob(f"tutorials/{name}_*.py")
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            is_private = node.attr.startswith("_") and not node.attr.startswith("__") and not is_own
            assert not is_private and node.attr not in ("llm_engine", "core"), (
                f"{path.name}:{node.lineno}: {node.attr}"
            )
        if isinstance(node, ast.ImportFrom):
            assert not any(alias.name.startswith("_") for alias in node.names), f"{path.name}:{node.lineno}"


def test_attributes_are_set_one_a_line() -> None:
    """``self.a, self.b = x, y`` hides fields. Results of a call, and new values that need the old ones, may
    be assigned together."""
    packed = []
    for path in SOURCES:
        for node in ast.walk(syntax(path)):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
                continue
            (target,) = node.targets if len(node.targets) == 1 else (None,)
            names = {ast.unparse(one) for one in target.elts} if isinstance(target, ast.Tuple) else set()
            read = {ast.unparse(one) for one in ast.walk(node.value)}
            if names and all(re.fullmatch(r"self\.\w+", name) for name in names) and not names & read:
                packed.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert packed == []
