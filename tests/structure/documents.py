"""The Markdown documents of this repository, and the blocks of code in them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FOLDERS = ("minivllm", "kernels_triton_free", "tests", "tutorials")
DOCUMENTS = [
    README,
    *sorted(
        path for folder in FOLDERS for path in ROOT.glob(f"{folder}/**/*.md") if "packages" not in path.parts
    ),
]
"""All of them; ``tests/gpu/packages`` holds packages of other projects (see tests/gpu/run.sh)."""


def name_of(document: Path) -> str:
    """The path of a document below the root, to name a test by."""
    return document.relative_to(ROOT).as_posix()


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """A document's text without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """The contents of all blocks of code in a language, in the order of the documents."""
    pattern = rf"^```{language}\n(.*?)^```$"
    return [
        block
        for document in DOCUMENTS
        for block in re.findall(pattern, text_of(document), re.MULTILINE | re.DOTALL)
    ]
