"""The first minute, where a test without timing can tell: what is loaded, who spins beside whom."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from minivllm.bench.engines import spinning_processes
from minivllm.bench.parts.startup import cold_and_warm


def children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(stat.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_load_is_so_many_processes_and_ends_with_the_block() -> None:
    before = children()
    with pytest.raises(ZeroDivisionError), spinning_processes(2):
        assert len(children() - before) == 2
        raise ZeroDivisionError
    assert children() == before


CHOICE = """
import os, sys
if sys.argv[1] == "torch first":
    sys.modules["torch"] = os
from minivllm.startup.openmp import choose_wait_policy
choose_wait_policy()
print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "order", "expected"),
    [
        ({}, "minivllm first", "None 6000"),
        ({}, "torch first", "None None"),
        ({"OMP_WAIT_POLICY": "active"}, "minivllm first", "active None"),
        ({"GOMP_SPINCOUNT": "7"}, "minivllm first", "None 7"),
    ],
)
def test_threads_spin_for_a_short_time_unless_the_user_chose_or_it_is_too_late(
    given: dict[str, str], order: str, expected: str
) -> None:
    rest = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    command = [sys.executable, "-c", CHOICE, order]
    done = subprocess.run(command, capture_output=True, text=True, env=rest | given, timeout=60)
    assert done.stdout.strip() == expected, done.stderr


def test_nothing_imports_torch_before_the_wait_policy_is_chosen() -> None:
    """Neither a frontend nor the engine's process: libgomp reads the setting when torch is loaded."""
    program = (
        "import sys, minivllm.cli.chat.command, minivllm.engine_process.process, minivllm.frontend.async_llm;"
        "import minivllm.frontend.llm;"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False False", done.stderr


def test_a_warm_start_finds_what_the_cold_one_left_to_be_compiled_behind_it() -> None:
    found: list[bool] = []

    def start(environment: Mapping[str, str]) -> dict[str, float]:
        found.append(Path(environment["TORCHINDUCTOR_CACHE_DIR"]).exists())
        return {}

    def finish(environment: Mapping[str, str]) -> None:
        Path(environment["TORCHINDUCTOR_CACHE_DIR"]).mkdir()

    assert cold_and_warm(start, finish) == [("cold", {}), ("warm", {})]
    assert cold_and_warm(start) == [("cold", {}), ("warm", {})]
    assert found == [False, True, False, False]
