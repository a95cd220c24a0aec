"""The measuring script itself, on a CPU and tiny sizes: figures that mean nothing, in the right places."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minivllm.worker.compiler import cannot_compile_reason

REASON = cannot_compile_reason(torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_the_measuring_script_writes_all_its_figures(tmp_path: Path) -> None:
    script = Path(__file__).parent / "measure.py"
    command = [sys.executable, str(script), "--tiny", "--device", "cpu", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "measure.json").read_text())
    assert report["versions"]["torch"] == torch.__version__
    assert report["copy_bandwidth"]["gb_per_second"] > 0
    assert all(case["largest_error"] < 1e-5 for case in report["decode_attention"])
    assert report["engine"]["recompilations"] == 0
    assert report["engine"]["batch_4"]["prefill_tokens_per_second"] > 0
