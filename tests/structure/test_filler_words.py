"""Words that make prose hard to translate: none in documents, and in the code fewer with every change."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest

from tests.structure.documents import DOCUMENTS, ROOT, name_of, text_of

FILLERS = re.compile(
    r"\b(?i:(?:no|some|every)body|(?:who|which)ever)\b|\b(?:What of|Of what)\b"  # capitals begin a sentence
)
FOLDERS = ("minivllm", "kernels_triton_free", "tests", "tutorials")

MOST: dict[str, int] = {
    "minivllm/linear": 1,
}
"""Folder -> how many of these words its docstrings and comments have. These numbers may only fall."""


def prose(path: Path) -> str:
    """Docstrings, also those of attributes, and comments of a file, one after the other."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    bare = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    docstrings = [
        node.value for node in bare if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    # Joined by lines, since a sentence may go on in the next comment.
    comments = "\n".join(token.string for token in tokens if token.type == tokenize.COMMENT)
    return "\n".join([*docstrings, comments])


def folder_of(path: Path) -> str:
    """The top-level folder, in ``minivllm`` the package."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "minivllm" and len(parts) > 2 else parts[0]


def counted() -> dict[str, int]:
    """Folder -> fillers in its Python files; this file, which names them, left out."""
    counts: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in ROOT.glob(f"{folder}/**/*.py"):
            if path == Path(__file__) or "packages" in path.parts:
                continue
            if FILLERS.search(path.read_text(encoding="utf-8")):  # to parse all files takes seconds
                counts[folder_of(path)] += len(FILLERS.findall(prose(path)))
    return {folder: count for folder, count in sorted(counts.items()) if count}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_document_has_no_filler_words(document: Path) -> None:
    assert FILLERS.findall(text_of(document)) == []


def test_docstrings_and_comments_have_fewer_filler_words_with_every_change() -> None:
    counts = counted()
    more = {folder: count for folder, count in counts.items() if count > MOST.get(folder, 0)}
    assert not more, f"more filler words than {MOST}: {more}; say who or what is meant"
    fewer = {folder: counts.get(folder, 0) for folder in MOST if counts.get(folder, 0) < MOST[folder]}
    assert not fewer, f"fewer filler words than before: lower the numbers in {Path(__file__).name} to {fewer}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is Nobody's.", 1),
        ("Whoever asks, somebody answers.", 2),
        ("Ends. Of what comes next", 1),
        ("# What of a row is known", 1),
        ("on_screen = 3  # what of it is shown", 0),
        ("It knows of what comes, and what of it counts.", 0),
    ],
)
def test_fillers_are_found(text: str, found: int) -> None:
    assert len(FILLERS.findall(text)) == found


def test_prose_is_docstrings_and_comments_alone(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""One."""\nA = 1  # two\n"""Three."""\nB = "four"\n', encoding="utf-8")
    assert prose(path) == "One.\nThree.\n# two"
