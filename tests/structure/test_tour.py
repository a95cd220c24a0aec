"""The tour of one request in minivllm/README.md:
what it shows is what a real engine does, what it names is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import minivllm
from tests.structure import request_tour
from tests.structure.request_tour import TOUR, Record, follow, stations, written

ROOT = TOUR.parents[1]
TEXT = TOUR.read_text(encoding="utf-8")
MOST_FILES = 12
MOST_LINES = 4200
"""Of these files together: an afternoon of reading."""


@pytest.fixture(scope="module")
def record() -> Record:
    return follow()


def test_every_station_shows_what_the_engine_did(record: Record) -> None:
    assert written(TEXT) == stations(record), "run: python tests/structure/request_tour.py --write"


def test_the_sampled_tokens_do_not_hang_on_rounding(record: Record) -> None:
    assert record.margin > 1.0


def test_writing_replaces_what_stands_between_the_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied = re.sub(r"```text\n[^`]*```\n(?=<!-- end of tour)", "```text\nold\n```\n", TEXT)
    assert set(written(emptied).values()) == {"old"}
    (tmp_path / "README.md").write_text(emptied, encoding="utf-8")
    monkeypatch.setattr(request_tour, "TOUR", tmp_path / "README.md")
    request_tour.write(written(TEXT))
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == TEXT


def test_a_reader_opens_twelve_files_and_the_list_names_them_all() -> None:
    listed = re.findall(r"^\d+\. \[`([\w/.]+)`\]\(([\w/.]+)\)", TEXT, re.MULTILINE)
    assert all(name == target and (TOUR.parent / target).is_file() for name, target in listed)
    opened = [
        name
        for line in re.findall(r"^Open (.+)$", TEXT, re.MULTILINE)
        for name in re.findall(r"`(.+?)`", line)
    ]
    headings = re.findall(r"^## \d\. ", TEXT, re.MULTILINE)
    assert len(re.findall(r"^## \d\. .+\n\nOpen ", TEXT, re.MULTILINE)) == len(headings) == 8
    assert len(listed) <= MOST_FILES
    assert list(dict.fromkeys(opened)) == [name for name, _ in listed]
    lines = sum(len((TOUR.parent / name).read_text(encoding="utf-8").splitlines()) for name, _ in listed)
    assert lines <= MOST_LINES, f"the files of the tour have {lines} lines together"


def test_the_extension_points_of_the_tour_are_public_and_where_their_links_lead() -> None:
    table = TEXT.split("| | extension point | worked example |")[1].split("\n\n")[0]
    rows = [row for row in table.splitlines() if row.startswith("| a")]
    assert len(rows) == 5
    for row in rows:
        _, what, point, example, _ = row.split("|")
        names = re.findall(r"\[`(\w+)`\]\(([\w/.]+)\.py\)", point)
        assert names and len(names) == point.count("["), f"a link for each name: {point}"
        for name, file in names:
            module = importlib.import_module(f"minivllm.{file.replace('/', '.')}")
            assert hasattr(module, name), f"{what}: {file} has no {name}"
            assert getattr(minivllm, name, getattr(module, name)) is getattr(module, name)
        [target] = re.findall(r"\]\(\.\./(tutorials/\w+\.py)\)", example)
        used = (ROOT / target).read_text(encoding="utf-8")
        assert any(name in used for name, _ in names), f"{target} uses none of {names}"
