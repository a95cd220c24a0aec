"""Names between backquotes, in documents and in docstrings: what they name exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.structure.documents import DOCUMENTS, ROOT, name_of, text_of, without_code

SOURCES = [
    path
    for folder in ("minivllm", "kernels_triton_free", "tests", "tutorials")
    for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
    # tests/gpu/packages holds those of other projects; this file has names that do not exist.
    if "packages" not in path.parts and path != Path(__file__)
]
NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
OTHERS = {
    "DecodeStream",  # of tokenizers
    "h100",  # a GPU, and a file named after it
    "minivllm_engine_stats_age_seconds",  # put together from its parts
    "scheduler_reserve_full_isl",  # of vLLM
    "sm_90",  # a GPU
}
"""Names that stand for something else than code here."""


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def names_in(tree: ast.AST) -> Iterator[str]:
    """What a module defines, imports or uses as an attribute, and the words of its strings without spaces."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        for field in ("name", "arg", "attr", "id"):
            if isinstance(found := getattr(node, field, None), str):
                yield found
        if isinstance(node, ast.alias):
            yield from node.name.split(".")
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            for word in node.value.split():
                yield from re.findall(r"\w+", word)


@cache
def known_names() -> frozenset[str]:
    """All of the repository: those of its modules, and of its files and folders."""
    names = {part for path in SOURCES for part in path.relative_to(ROOT).with_suffix("").parts}
    return frozenset(names.union(*(names_in(tree_of(path)) for path in SOURCES)))


@cache
def members() -> dict[str, frozenset[str]]:
    """Class -> the names in the modules that define a class of this name."""
    found: dict[str, frozenset[str]] = {}
    for path in SOURCES:
        tree = tree_of(path)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = found.get(node.name, frozenset()) | frozenset(names_in(tree))
    return found


def unknown(name: str) -> bool:
    """Whether a part of a dotted name is nowhere in the code; of Class.member, in the module of the class."""
    *owners, last = name.split(".")
    if owners and owners[-1] in members() and last not in members()[owners[-1]] | OTHERS:
        return True
    return not {*owners, last} <= known_names() | OTHERS | {"py"}


def docstrings(path: Path) -> Iterator[str]:
    """Those of a module, its classes and functions, and of its fields and constants."""
    for node in ast.walk(tree_of(path)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_document_names_what_the_code_has(document: Path) -> None:
    found = re.findall(rf"(?<!`)`({NAME})(?:\(\))?`(?!`)", without_code(text_of(document)))
    assert [name for name in dict.fromkeys(found) if unknown(name)] == []


def test_docstrings_name_what_the_code_has() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for text in docstrings(path)
        for name in re.findall(rf"``({NAME})(?:\(\))?``", text)
        if unknown(name)
    }
    assert found == set()


def test_a_file_that_a_docstring_names_is_beside_it_or_at_that_path() -> None:
    missing = []
    for path in SOURCES:
        for text in docstrings(path):
            for name in re.findall(r"``([\w/]+\.py)``", text):
                if not any((folder / name).is_file() for folder in (path.parent, ROOT, ROOT / "minivllm")):
                    missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


@pytest.mark.parametrize(
    ("name", "is_unknown"),
    [
        ("EngineCore.step", False),
        ("EngineCore.no_such_method", True),
        ("NoSuchClass", True),
        ("ShardedDecoder", True),
        ("minivllm.engine.core", False),
        ("max_num_batched_tokens", False),
    ],
)
def test_a_name_that_no_longer_exists_is_found(name: str, is_unknown: bool) -> None:
    assert unknown(name) == is_unknown
