"""The tutorials run, their claims hold, their exercises have solutions that work,
and they read as promised."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm.plugins.points import ATTENTION, DRAFTERS, POLICIES
from tutorials.__main__ import FOLDER, Chapter, chapters

CHAPTERS = chapters()
ISOLATED = {"10", "11", "14", "A"}
"""Run in processes of their own:
they start processes, add to the table of families, or Dynamo looks into __main__. Each takes many seconds."""
SLOW = {*ISOLATED, "25"}
WITH_SMOLLM2 = {"25"}
"""They talk to the default model, which is fetched once."""

each_chapter = pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.path.stem)


def run(*arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1", "COLUMNS": "200"},
        cwd=FOLDER.parent,
        timeout=timeout,
    )


@pytest.mark.parametrize(
    "chapter",
    [pytest.param(one, marks=[pytest.mark.slow] * (one.number in SLOW)) for one in CHAPTERS],
    ids=lambda chapter: chapter.path.stem,
)
def test_a_chapter_keeps_its_promises_and_so_do_its_solutions(
    chapter: Chapter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if chapter.number in WITH_SMOLLM2:
        request.getfixturevalue("smollm2_path")
    options = ["--solution", "all", "--save", str(tmp_path)]
    if chapter.number in ISOLATED:
        result = run(chapter.module, *options)
        assert result.returncode == 0, result.stderr
        printed = result.stdout
    else:
        monkeypatch.setattr(sys, "argv", [str(chapter.path), *options])
        runpy.run_module(chapter.module, run_name="__main__", alter_sys=False)
        printed = capsys.readouterr().out
    assert re.match(r"PASS: \S", printed.strip().splitlines()[-1])
    exercises = re.findall(r"^Exercise (\d): \S", printed, re.MULTILINE)
    solutions = re.findall(r"^Solution (\d): \S", printed, re.MULTILINE)
    assert exercises == solutions == [str(number) for number in range(1, len(exercises) + 1)]
    assert 2 <= len(exercises) <= 3
    pictures = list(tmp_path.glob("*.png"))
    assert pictures
    assert all(picture.stat().st_size > 1000 for picture in pictures)


def test_a_chapter_runs_as_a_script_and_shows_predictions_pictures_and_exercises() -> None:
    result = run("tutorials.t05_unified_scheduler")
    assert result.returncode == 0, result.stderr
    for shown in (
        "predict   step 0 = {'R1': 3, 'R2': 5, 'R3': 2}",
        "measure   step 0",
        "R3    2 8 2 1 1 1",
        "1. Cap a long",
    ):
        assert shown in result.stdout
    assert result.stdout.strip().splitlines()[-1].startswith("PASS: ")
    assert "Solution" not in result.stdout


def test_a_chapter_runs_as_a_file_from_any_directory(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "t05_unified_scheduler.py")]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().splitlines()[-1].startswith("PASS: ")


def test_the_list_names_every_chapter_with_its_summary() -> None:
    result = run("tutorials")
    assert result.returncode == 0, result.stderr
    for chapter in CHAPTERS:
        assert chapter.summary in result.stdout
        assert f"python -m {chapter.module}" in result.stdout


def test_running_a_chapter_prints_its_prose_before_the_output_that_it_is_about() -> None:
    result = run("tutorials", "--run", "5")
    assert result.returncode == 0, result.stderr
    doc = "Older engines had a phase for prompts"
    parts = (
        doc,
        "The figure of the articles",
        "predict   step 0",
        "R3    2 8 2 1 1 1",
        "The whole idea in one function",
    )
    parts += (
        "steps of 200 random workloads",
        "When memory runs out: preemption",
        "Exercises",
        "1. Cap a long",
        "PASS: ",
    )
    places = [result.stdout.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)


def test_checking_chapters_reports_each_and_an_unknown_one_is_named() -> None:
    program = (
        "from rich.console import Console; from tutorials.__main__ import chapters, check_chapters;"
        "raise SystemExit(check_chapters(Console(), chapters()[4:5], None))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=FOLDER.parent
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"05\s+passed", result.stdout)
    refused = run("tutorials", "--run", "99")
    assert refused.returncode == 2
    assert "There is no chapter 99; choose from 1, 2" in refused.stderr


def test_a_wrong_prediction_fails_the_chapter(tmp_path: Path) -> None:
    program = (
        "from tutorials.lesson import Lesson, PredictionFailed\n"
        "lesson = Lesson('00 · Nothing: is shown.', [])\n"
        "lesson.predict('tokens', 3, 'a guess')\n"
        "lesson.measure('tokens', 4)\n"
    )
    result = subprocess.run(
        [sys.executable, "-O", "-c", program], capture_output=True, text=True, cwd=FOLDER.parent
    )
    assert result.returncode != 0
    assert "PredictionFailed: tokens: predicted 3, measured 4." in result.stderr


def test_ctrl_c_and_a_directory_that_cannot_be_written_show_no_traceback(tmp_path: Path) -> None:
    program = "import tutorials, torch; raise KeyboardInterrupt"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=FOLDER.parent
    )
    assert result.returncode != 0 and result.stderr == ""
    (tmp_path / "file").touch()
    refused = run("tutorials.t05_unified_scheduler", "--save", str(tmp_path / "file"))
    assert refused.returncode == 2
    assert "name another directory" in refused.stderr and "Traceback" not in refused.stderr


def test_an_unmeasured_prediction_fails_the_chapter() -> None:
    from tutorials.lesson import Lesson, PredictionFailed

    lesson = Lesson("00 · Nothing: is shown.", [])
    lesson.predict("tokens", 3, "a guess")
    with pytest.raises(PredictionFailed, match="never measured: tokens"):
        lesson.passed("nothing")


def test_a_chapter_carries_its_number_in_its_file_name() -> None:
    for chapter in CHAPTERS:
        if chapter.number.isdigit():
            assert chapter.path.name.startswith(f"t{chapter.number}_")
        else:
            assert chapter.path.name.startswith(f"e{ord(chapter.number) - ord('A') + 1:02d}_")


@each_chapter
def test_a_chapter_reads_as_prose_in_cells(chapter: Chapter) -> None:
    text = chapter.path.read_text(encoding="utf-8")
    doc = ast.get_docstring(ast.parse(text))
    assert doc is not None
    title, _, text_below = doc.partition("\n\n")
    title = title.replace("\n", " ")
    assert re.fullmatch(r"(\d\d|[A-Z]) · [^:]+: .+\.", title), "first paragraph: number · name: idea."
    assert text_below, "the docstring says what the chapter is about"
    cells = re.split(r"^# %%", text, flags=re.MULTILINE)[1:]
    prose = [cell for cell in cells if cell.startswith(" [markdown]")]
    assert len(prose) >= 3 and len(cells) >= 2 * len(prose) - 2
    assert all(line.startswith("#") or not line for cell in prose for line in cell.splitlines()[1:])
    for needed in ("lesson.predict(", "lesson.measure(", "@lesson.exercise(", "lesson.passed("):
        assert needed in text
    assert re.search(r"lesson\.(cells|bars|curves)\(", text), "a chapter has a picture"


@each_chapter
def test_a_chapter_calls_a_request_it_and_spells_out_no_count_of_lines(chapter: Chapter) -> None:
    text = chapter.path.read_text(encoding="utf-8")
    assert re.findall(r"(?i)\b(?:he|his|him|she|her|somebody|everybody|anybody)\b", text) == []
    assert re.findall(r"(?i)\b(?:[0-9]+|\w*(?:teen|ty|ten|eleven|twelve)) lines\b", text) == []


def test_the_names_that_chapters_register_are_names_that_can_be_registered() -> None:
    """Also those of the chapters that only the slow tests run."""
    points = {"register_attention": ATTENTION, "register_drafter": DRAFTERS, "register_policy": POLICIES}
    registered = []
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in points:
                name, point = node.args[0], points[node.func.id]
                assert isinstance(name, ast.Constant), f"{path.name}, line {node.lineno}"
                point.register(str(name.value), object())
                registered.append(node.func.id)
    assert set(registered) == set(points)


@each_chapter
def test_a_chapter_uses_the_engine_itself(chapter: Chapter) -> None:
    tree = ast.parse(chapter.path.read_text(encoding="utf-8"))
    imported = {
        node.module.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
    }
    assert imported & {"minivllm", "kernels_triton_free"}
