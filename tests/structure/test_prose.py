"""Words and links: what people read in the documents, the tutorials and the docstrings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.structure.documents import DOCUMENTS, ROOT, name_of, without_code

PROSE = [*DOCUMENTS, *sorted([*ROOT.glob("minivllm/**/*.py"), *ROOT.glob("kernels_triton_free/**/*.py")])]
PROSE += sorted(
    [*ROOT.glob("tutorials/**/*.py"), *ROOT.glob("minivllm/**/*.html"), *ROOT.glob("minivllm/**/*.js")]
)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")

# Words that are right here, although they look like others misspelt.
CORRECT_HERE = {
    "te": "the pattern [te][0-9] finds tutorials and examples",
    "notin": "LaTeX's ∉",
    "oint": "LaTeX's ∮",
    "nd": "the Unicode category of decimal digits",
}


def anchors(document: Path) -> set[str]:
    """What #… can name: headings as the renderers turn them into ids."""
    headings = re.findall(r"^#+ (.+)$", without_code(document.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_words_are_spelt_as_dictionaries_do() -> None:
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", ",".join(CORRECT_HERE)]
    result = subprocess.run([*command, *map(str, PROSE)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_and_anchors_of_a_document_lead_somewhere(document: Path) -> None:
    links = LINK.findall(without_code(document.read_text(encoding="utf-8")))
    assert links
    for _, target in links:
        if target.startswith(("https://", "http://")):
            continue
        file, _, anchor = target.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), f"{document.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{target}: {path.name} has no such heading"


def test_the_blocks_of_a_document_say_their_language() -> None:
    for document in DOCUMENTS:
        fences = re.findall(r"^```(\w*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
        assert all(fences[::2]) and not any(fences[1::2]), f"{document.name} has a block without a language"


def test_files_that_the_prose_names_exist() -> None:
    """`minivllm/x/y.py`, `tutorials.t05_…` and `tests/…` between backquotes."""
    for path in PROSE:
        for name in re.findall(
            r"`((?:minivllm|tutorials|tests|kernels_triton_free)/[\w/.]+\.\w+)`", path.read_text("utf-8")
        ):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"
        for module in re.findall(r"python -m (tutorials\.\w+)", path.read_text("utf-8")):
            named = ROOT / module.replace(".", "/")
            assert named.with_suffix(".py").exists() or (named / "__main__.py").exists(), (
                f"{path.relative_to(ROOT)} names {module}"
            )


def test_a_piece_of_the_kv_cache_is_called_a_block() -> None:
    """In documents and chapters; a page is one of the web or of paper."""
    allowed = (
        r"gets a page to chat|the page at `/`|page for a browser|server's page keeps|narrow cells fits a page"
    )
    for path in [*DOCUMENTS, *sorted(ROOT.glob("tutorials/*.py"))]:
        text = re.sub(allowed, "", path.read_text(encoding="utf-8"))
        assert re.findall(r"(?i)^.*\bpages?\b.*$", text, re.MULTILINE) == [], path.relative_to(ROOT)
