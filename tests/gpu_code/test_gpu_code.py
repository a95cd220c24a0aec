"""GPU code compiles without spilled registers, and the program that says so would say otherwise."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_code.report import (
    Configuration,
    RegionReport,
    differences,
    faults,
    join,
    read_wrapper,
    split,
    tables,
)
from tests.gpu_code.shapes import parts
from tests.gpu_code.sources import ROOT, digest, essence, source_files

PYTHON = os.environ.get("GPU_CODE_PYTHON") or (sys.executable if importlib.util.find_spec("triton") else None)
needs_triton = pytest.mark.skipif(
    PYTHON is None,
    reason="no Triton here: make an environment as tests/gpu_code/README.md says, named by GPU_CODE_PYTHON",
)

WRAPPER = """
def call(args):
        triton_red_fused_sum_0.run(arg0, buf0, 13, stream=stream0)
        extern_kernels.mm(buf0, arg1, out=buf1)
        buf2 = torch.ops.aten.sort.stable(buf1)
        triton_red_fused_sum_0.run(buf1, buf3, 13, stream=stream0)
        triton_poi_fused_add_1.run(buf3, 13, stream=stream0)
"""


def small(kernel: str = "triton_poi_fused_add_1", stack: int = 0, registers: int = 24) -> Configuration:
    return Configuration(kernel, warps=4, registers=registers, stack=stack, shared=0)


def report(**changes: object) -> RegionReport:
    values: dict = {"launches": {"triton_poi_fused_add_1": 1}, "configurations": [small()]}
    return RegionReport("Llama 3 8B", "between", **(values | changes))


def test_launches_and_library_calls_are_those_of_the_wrapper() -> None:
    launches, library = read_wrapper(WRAPPER)
    assert launches == {"triton_red_fused_sum_0": 2, "triton_poi_fused_add_1": 1}
    assert library == {"extern_kernels.mm": 1, "torch.ops.aten.sort.stable": 1}


def test_a_region_in_order_has_no_fault() -> None:
    assert faults(report(library={"extern_kernels.mm": 4})) == []


def test_a_configuration_may_spill_that_the_gpu_does_not_have_to_take() -> None:
    assert faults(report(configurations=[small(), small(stack=16)])) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"error": "ValueError: out of range"}, "does not compile: ValueError: out of range"),
        (
            {"configurations": [small(stack=40), small(stack=16)]},
            "triton_poi_fused_add_1 spills 16 bytes a thread",
        ),
        ({"library": {"torch.ops.aten.sort.stable": 1}}, "torch.ops.aten.sort.stable is left to PyTorch"),
        ({"configurations": []}, "triton_poi_fused_add_1 is launched, but no compilation was seen"),
        ({"warnings": ["PyTorch cannot be changed"]}, "warns: PyTorch cannot be changed"),
    ],
)
def test_what_must_not_be_is_a_fault_that_names_region_and_kernel(changes: dict, told: str) -> None:
    [fault] = faults(report(**changes))
    assert fault.startswith("Llama 3 8B: between") and told in fault


def test_the_table_has_a_line_for_each_region_and_each_kernel() -> None:
    long = "triton_red_fused_" + "add_" * 30 + "17"
    first = report(launches={"triton_poi_fused_add_1": 1, long: 2}, library={"extern_kernels.mm": 1})
    first.configurations += [small(registers=30), small(long, stack=8)]
    second = RegionReport("Llama 3 8B", "last", error="ValueError")
    table = join(tables([first, second]), "torch 2.11.0, triton 3.6.0")
    assert "torch 2.11.0, triton 3.6.0" in table and table.count("## Llama 3 8B\n") == 1
    assert "\nbetween: 3 launches, 1 extern_kernels.mm\n" in table and "\nlast: does not compile\n" in table
    assert (
        "    triton_poi_fused_add: 1 launch, 2 configurations, warps 4, registers 24-30, shared 0\n" in table
    )
    [cut] = [line for line in table.splitlines() if "add_add" in line]
    assert "_add_add..: 2 launches, 1 configuration, warps 4, registers 24, shared 0, stack 8" in cut


def test_a_table_is_compared_line_by_line() -> None:
    old, new = (
        join(tables([report(configurations=[small(registers=count)])]), "torch") for count in (24, 40)
    )
    assert differences(old, old) == []
    changed = [
        line for line in differences(old, new) if line[0] in "+-" and not line.startswith(("---", "+++"))
    ]
    assert [line[0] for line in changed] == ["-", "+"] and "registers 40" in changed[1]


def test_a_table_can_be_taken_apart_and_put_together_again() -> None:
    parts_of_table = tables(
        [report(), RegionReport("Qwen3 8B", "draw", launches={"triton_poi_fused_add_1": 1})]
    )
    assert split(join(parts_of_table, "torch 2.11.0")) == (parts_of_table, "torch 2.11.0")
    assert split("") == ({}, "")


def test_reports_survive_the_way_between_processes() -> None:
    assert RegionReport.from_json(report().to_json()) == report()


def test_comments_and_docstrings_change_no_digest(tmp_path: Path) -> None:
    plain = "def f(x):\n    return x + 1\n"
    assert essence('"""Doc."""\n\ndef f(x):  # why\n    """Doc."""\n    return (x + 1)\n') == essence(plain)
    assert essence(plain) != essence(plain.replace("1", "2"))
    assert essence('def f():\n    """Doc."""\n') == essence("def f():\n    pass\n")


def test_the_digest_covers_kernels_models_and_versions() -> None:
    names = {path.relative_to(ROOT).as_posix() for path in source_files()}
    assert {
        "kernels_triton_free/sampling/noise.py",
        "tests/gpu_code/versions.txt",
        "tests/gpu_code/shapes.py",
    } <= names
    assert not any("/test_" in name for name in names)
    assert digest(source_files()) == digest(source_files())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_triton
def test_the_gpu_code_of_all_shapes_compiles_and_is_that_of_the_table() -> None:
    done = subprocess.run([str(PYTHON), "-m", "tests.gpu_code"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_triton
def test_a_product_of_token_ids_that_triton_refuses_is_reported(tmp_path: Path) -> None:
    """Without the mask in the noise, PyTorch 2.11 writes a constant beyond int32 for 128,256 tokens."""
    version = subprocess.run(
        [str(PYTHON), "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    )
    if not version.stdout.startswith("2.11"):
        pytest.skip("this PyTorch writes no such constant")
    for folder in ("kernels_triton_free", "minivllm", "tests/gpu_code"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "__init__.py").touch()
    noise = tmp_path / "kernels_triton_free" / "sampling" / "noise.py"
    text, masked = noise.read_text(), "(token_ids.to(torch.int32) & 0x7FFFFFFF)"
    assert text.count(masked) == 1
    noise.write_text(text.replace(masked, "token_ids.to(torch.int32)"))
    command = [str(PYTHON), "-m", "tests.gpu_code", "--only", "vocabulary of 128256"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "vocabulary of 128256: truncated draw does not compile" in done.stdout


def test_every_part_has_a_name_of_its_own() -> None:
    assert len(set(parts())) == len(parts())
