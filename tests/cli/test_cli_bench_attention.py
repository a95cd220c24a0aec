"""``bench attention``: both orders are measured on tables that share what they should, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from minivllm.attention.costs.calibration import tables_of
from minivllm.attention.lists.shared_prefixes import find_shared
from minivllm.bench.parts.attention import BLOCK_SIZE, SIDES, WAYS
from minivllm.cli.main import main
from minivllm.compilation.compiler import cannot_compile_reason


@pytest.mark.parametrize("prefix", [0, 63, 64, 200])
def test_users_share_the_whole_blocks_of_the_prefix_and_no_others(prefix: int) -> None:
    tables, num_blocks = tables_of(3, prefix, 300, BLOCK_SIZE, torch.device("cpu"))
    table = tables.block_table.host
    found = find_shared(table, np.full(3, table.shape[1]))
    assert found.num_shared.tolist() == [prefix // BLOCK_SIZE] * 3
    assert set(table.ravel().tolist()) == set(range(1, num_blocks)), "each block but the null block is used"


def test_heads_that_are_no_whole_strips_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--head-dim=40"])
    assert ended.value.code == 2
    assert "Heads of 40 dimensions are no whole strips: give a multiple of 32" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="there is no C++ compiler here"
)
def test_both_ways_are_measured_in_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    report = tmp_path / "report.json"
    small = ["--users=3", "--prefix=128", "--suffix=20", "--question=5", "--layers=2", "--repeats=3"]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", *small, f"--json={report}"])
    assert ended.value.code == 0
    measured = json.loads(report.read_text())["measurements"]
    figures = ("processor time of a layer", "time of a layer", "lists of a step")
    assert {(one["case"], one["side"], one["metric"]) for one in measured} == {
        (f"{asks}, {shares}", side, metric)
        for asks, sides in (
            ("decode", SIDES),
            ("questions of 5 tokens", SIDES),
            *((f"chunks of {count} tokens", WAYS) for count in (2, 4, 8, 16)),
        )
        for shares in ("shared prefix", "nothing shared")
        for side in sides
        for metric in ("expected time of a layer", *figures)
    }
    assert all(len(one["samples"]) == (3 if one["metric"] in figures else 1) for one in measured)
    assert all(min(one["samples"]) > 0 for one in measured)
    assert "Together and each for itself give the same result, bit for bit." in capsys.readouterr().out
