"""The figures and charts of the documents are those of the reports that are kept;
new reports take their place."""

from __future__ import annotations

from pathlib import Path

import msgspec

from minivllm.bench.reports.report import Comparison, Measurement, Report
from tutorials import speed_picture


def report(side: str, speed: float, calibration: float = 1.0) -> Report:
    first = Measurement(
        case="decode", side="minivllm", metric="speed", unit="tok/s", better="higher", samples=[10.0]
    )
    other = msgspec.structs.replace(first, side=side, samples=[speed, 3 * speed, speed])
    return Report(
        schema_version=2,
        kind="model",
        created="2026-01-01T00:00:00+00:00",
        command=["bench", "model", "--vs", side],
        commit=None,
        machine={"cpu": {"model": "abacus", "usable_cores": 3, "flags": ["beads"]}, "cuda_devices": []},
        versions={"torch": "1.2", "vllm": None},
        configuration={"sides": {"minivllm": {}, side: {"version": "7"}}},
        measurements=[first, other],
        comparisons=[
            Comparison("decode", "speed", "minivllm", side, 10 / speed, 1.0, 3.0, calibration=calibration)
        ],
    )


def test_documents_and_charts_show_the_reports_that_are_kept() -> None:
    for path, text in speed_picture.documents().items():
        assert path.read_text(encoding="utf-8") == text, "run python -m tutorials.speed_picture"
    first = speed_picture.read_report(speed_picture.MEASUREMENTS / speed_picture.SHOWN_FIRST)
    drawn = {speed_picture.PICTURE: [first], speed_picture.PICTURE_OF_ALL: speed_picture.reports()}
    for picture, kept in drawn.items():
        chart = picture.read_text(encoding="utf-8")
        for row in (row for one in kept for row in speed_picture.speeds(one).items()):
            case, values = row
            assert f">{case}<" in chart
            assert all(f">{speed_picture._figure(value)}<" in chart for value in values.values())


def test_the_table_of_accuracy_has_a_row_for_every_engine() -> None:
    [kept] = speed_picture.reports(kind="accuracy")
    rows = speed_picture.accuracy_section(kept).splitlines()[4:-2]
    assert [row.split(" | ")[1] for row in rows] == list(kept.configuration["sides"])
    assert "| 662 tokens | llama.cpp | 16.82 | 0.051 |" in rows


def test_a_new_report_brings_its_machine_its_command_and_its_medians(tmp_path: Path) -> None:
    (tmp_path / "new.json").write_bytes(msgspec.json.encode(report("slowpoke", 4.0)))
    [read] = speed_picture.reports(tmp_path)
    part = speed_picture.speed_part([read], tmp_path / "pictures" / "chart.svg", tmp_path / "a" / "b.md")
    assert "](../pictures/chart.svg)" in part
    text = speed_picture.with_new_part(f"before {speed_picture.BEGIN}old{speed_picture.END} after", part)
    assert text.startswith("before ") and text.endswith(" after") and "old" not in text
    assert "On 3 cores of abacus (beads, no bfloat16), with torch 1.2, slowpoke 7:\n" in text
    assert "Command: `minivllm bench model --vs slowpoke`\n" in text
    assert "| decode | 10 tok/s | 4 tok/s | 2.50 × |" in text
    slow = report("snail", 1.0, calibration=0.9)
    assert "| decode | 10 tok/s | 1 tok/s | not calibrated |" in speed_picture.section(slow)
    speed_picture.draw([read, report("hare", 40.0)], tmp_path / "chart.svg")
    chart = (tmp_path / "chart.svg").read_text(encoding="utf-8")
    assert all(
        f">{words}<" in chart
        for words in ("slowpoke", "hare", "40 tok/s", "3 cores of abacus (beads, no bfloat16)")
    )
