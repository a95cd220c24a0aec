"""Whether sources have changed that GPU code depends on. Needs no PyTorch.

The digest is of what Python runs: comments, docstrings and layout do not count. So a change that cannot
change a kernel seldom costs the minutes that compiling takes.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIGEST = Path(__file__).parent / "sources.txt"

PARTS = (
    "kernels_triton_free",
    "minivllm/attention",
    "minivllm/batch",
    "minivllm/checkpoints",
    "minivllm/compilation",
    "minivllm/device",
    "minivllm/families",
    "minivllm/kv_cache/specs.py",
    "minivllm/linear",
    "minivllm/models",
    "minivllm/program",
    "minivllm/sampling",
    "minivllm/spec_decode/eagle",
    "minivllm/specs",
    "minivllm/weights",
    "tests/gpu_code",
)
"""Folders and files that regions are made of, and this program."""


def source_files() -> list[Path]:
    found = [
        path
        for part in PARTS
        for path in ([ROOT / part] if part.endswith(".py") else (ROOT / part).rglob("*.py"))
    ]
    return sorted(
        [path for path in found if not path.name.startswith("test_")] + [ROOT / "tests/gpu_code/versions.txt"]
    )


def digest(files: Iterable[Path]) -> str:
    """Of the files' places and of what Python runs of them."""
    total = hashlib.sha256()
    for path in files:
        text = path.read_text(encoding="utf-8")
        total.update(path.relative_to(ROOT).as_posix().encode())
        total.update((essence(text) if path.suffix == ".py" else text).encode())
    return total.hexdigest()


def essence(source: str) -> str:
    """The source without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not _is_text(statement)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(statement: ast.AST) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def are_current() -> bool:
    """Whether the table was written for these sources."""
    return DIGEST.is_file() and DIGEST.read_text().strip() == digest(source_files())
