"""Annexes: folders that plug in at an extension point by an import path, and that the core works without.

A folder is an annex if its ``__init__.py`` says ``Annex: plugs in at POINT.``; what lies in it belongs to it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.config import EngineArgs, engine_args
from minivllm.engine_process.client import load_core, make_client, run_node
from minivllm.errors import ConfigError
from minivllm.plugins import points
from minivllm.plugins.plugin import import_object
from minivllm.plugins.points import CONNECTORS
from tests.structure.test_rooms import PACKAGES, declaration, own_imports, package_of

POINT_OF = {
    package: found[1]
    for package in PACKAGES
    if (found := re.search(r"^Annex: plugs in at (\w+)\.$", declaration(package), re.MULTILINE))
}
"""Annex -> its extension point."""

REFUSE = f"""
import sys
from importlib.abc import MetaPathFinder

class NoAnnexes(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == annex or name.startswith(annex + ".") for annex in {sorted(POINT_OF)!r}):
            raise ImportError(f"{{name}} is in an annex")

sys.meta_path.insert(0, NoAnnexes())
"""


def annex_of(package: str) -> str | None:
    return next((annex for annex in POINT_OF if f"{package}.".startswith(f"{annex}.")), None)


def paths_at(point: str) -> dict[str, str]:
    """What an extension point names, by import path."""
    found = getattr(points, point)
    if isinstance(found, str):
        return {"": found}
    if isinstance(found, tuple):
        return {path: path for path in found}
    named = dict(getattr(found, "known", found))
    return {
        f"{name}.{part}" if part else name: path
        for name, value in named.items()
        for part, path in (
            value._asdict() if isinstance(value, points.ModelImplementation) else {"": value}
        ).items()
        if path  # of a part that not every implementation has
    }


PATHS = [
    (point, path) for point in sorted({*POINT_OF.values(), "NODE_AGENT"}) for path in paths_at(point).values()
]
ANNEX_PATHS = [(point, path) for point, path in PATHS if annex_of(package_of(path.partition(":")[0]))]


def test_no_import_leads_from_outside_into_an_annex() -> None:
    assert len(POINT_OF) > 5
    inward = [
        place
        for importer, imported, place in own_imports()
        if annex_of(package_of(imported)) and not annex_of(package_of(importer))
    ]
    assert inward == []


@pytest.mark.parametrize("annex", sorted(POINT_OF))
def test_an_annex_is_named_at_the_point_that_it_says(annex: str) -> None:
    assert any(path.startswith(f"{annex}.") for path in paths_at(POINT_OF[annex]).values())


@pytest.mark.parametrize(("point", "path"), ANNEX_PATHS)
def test_naming_an_annex_loads_it(point: str, path: str) -> None:
    assert callable(import_object(point, path))


def without_annexes(program: str, folder: Path) -> list[str]:
    """What a program prints, in whose process and in all that it starts no annex can be imported. folder:
    gets a file for each of these processes, with its command."""
    (folder / "sitecustomize.py").write_text(
        f"{REFUSE}\nimport os\nwith open(os.path.join({str(folder)!r}, f'process-{{os.getpid()}}'), 'w') as "
        "file:\n"
        "    file.write(' '.join(sys.orig_argv))\n"
    )
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "flags", ["", pytest.param("tensor_parallel_size=2, multiprocess=True", marks=pytest.mark.slow)]
)
def test_an_engine_serves_without_annexes(
    tiny_model: Callable[..., Path], tmp_path: Path, flags: str
) -> None:
    printed = without_annexes(
        f"""
from minivllm import LLM, SamplingParams
with LLM({str(tiny_model("llama"))!r}, enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9, {flags}) as llm:
    [output] = llm.generate({{"prompt_token_ids": [5, 6, 7]}}, SamplingParams(max_tokens=5, ignore_eos=True))
    print(len(output.outputs[0].token_ids))
""",
        tmp_path,
    )
    assert printed[-1:] == ["5"]
    commands = [path.read_text() for path in tmp_path.glob("process-*")]
    for module in ("minivllm.executor.worker_process", "minivllm.engine_process.process"):
        assert sum(module in command for command in commands) == (
            0 if not flags else 2 if "worker" in module else 1
        )


def test_regions_compile_without_the_code_generators(tmp_path: Path) -> None:
    """As PyTorch alone compiles them, operators that the annex would generate included."""
    device = torch.device("cpu")
    if cannot_compile_reason(device) is not None:
        pytest.skip("no C++ compiler")
    printed = without_annexes(
        """
from minivllm.plugins import points
points.CODE_GENERATORS = ()
import torch
from kernels_triton_free.activation import gated_activation
from kernels_triton_free.packed.whole_numbers import WholeNumbers, whole_numbers_linear
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import Region, Size, TensorSpec
def function(x, values, scale):
    return gated_activation(whole_numbers_linear(x, WholeNumbers(values, scale)), "silu")
cpu = torch.device("cpu")
specs = {"x": TensorSpec((Size("rows", 5), 8), torch.float32, cpu), "values": TensorSpec((6, 8), torch.int8, cpu)}
specs["scale"] = TensorSpec((1, 6), torch.float32, cpu)
compiled = RegionCompiler(enabled=True)(Region("product", function, specs))
given = torch.randn(7, 8), torch.randint(-128, 127, (6, 8), dtype=torch.int8), torch.rand(1, 6) / 100
print(compiled is not function and torch.allclose(compiled(*given), function(*given), atol=1e-5))
""",
        tmp_path,
    )
    assert printed[-1:] == ["True"]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No annex can be imported, also if it was already."""
    for name in [name for name in sys.modules if annex_of(name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    exec(REFUSE, {})


@pytest.mark.usefixtures("refused")
def test_settings_lead_to_annexes_and_no_others_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_args, "find_spec", lambda name: object())
    workers = {"model": "none", "tensor_parallel_size": 2}
    several = {**workers, "nnodes": 2, "master_addr": "127.0.0.1", "node_key_file": str(tmp_path / "key")}
    ray = {**workers, "distributed_executor_backend": "ray"}
    torchrun = {**workers, "distributed_executor_backend": "external_launcher"}
    starts = {
        "executor.nodes.entry:start_executor": lambda: load_core(EngineArgs(**several)),
        "executor.nodes.entry:run_node": lambda: run_node(EngineArgs(**several, node_rank=1)),
        "engine_process.ray.executor:RayExecutor": lambda: load_core(EngineArgs(**ray)),
        "engine_process.torchrun.client:TorchrunClient": lambda: make_client(EngineArgs(**torchrun)),
        **{
            path: lambda name=name: CONNECTORS.load(name)
            for name, path in CONNECTORS.known.items()
            if "foreign" in path
        },
    }
    for path, start in starts.items():
        with pytest.raises(ConfigError, match=f"{path}.*cannot be imported: .* is in an annex"):
            start()


@pytest.mark.parametrize("command", ["bench", "simulate"])
def test_a_command_of_an_annex_is_imported_when_it_is_asked_for(tmp_path: Path, command: str) -> None:
    program = f"""
import contextlib, sys
from minivllm.cli.main import main
for arguments in (["--help"], [{command!r}, "--help"]):
    try:
        main(arguments)
    except SystemExit as end:
        print(end.code)
"""
    printed = without_annexes(program, tmp_path)
    assert any(line.split()[:1] == [command] for line in printed), "its line of help is there"
    assert [line for line in printed if line.isdigit()] == ["0", "2"]
