"""What packages have in common is compiled once, and what a killed build leaves is deleted by the next one."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.compilation.compiler import cannot_compile_reason, prepare_inductor
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler, build_package, export_region
from minivllm.compilation.packaged.shared_parts import SharedParts
from tests.worker.test_region_packages import arguments, declared, transform

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(cannot_compile_reason(CPU) is not None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("rows", [None, "single"])
def test_a_package_made_of_shared_parts_computes_what_the_function_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any
) -> None:
    from torch._inductor import codecache, cpp_builder

    callers, commands = list[str](), list[str]()
    compile_all, run = codecache.AotCodeCompiler.compile, cpp_builder.run_compile_cmd

    def note_caller(graph: Any, caller: str, *args: Any, **kwargs: Any) -> Any:
        callers.append(caller)
        return compile_all(graph, caller, *args, **kwargs)

    def note_command(command: str, *args: Any, **kwargs: Any) -> None:
        commands.append(command)
        run(command, *args, **kwargs)

    monkeypatch.setattr(codecache.AotCodeCompiler, "compile", note_caller)
    compiler = PackagedRegionCompiler(tmp_path)
    region = declared(single=1)
    call = compiler(region)
    packaged = compiler._packaged(region if rows is None else region.fixed(rows))
    prepare_inductor()
    with SharedParts(tmp_path) as shared:
        shared.make()
        monkeypatch.setattr(cpp_builder, "run_compile_cmd", note_command)
        build_package(export_region(packaged.region, {}), tmp_path, packaged, shared)
        assert {"interface", "caller", "kernel"} <= {path.name for path in shared.folder.iterdir()}
    (caller,) = callers
    assert "extern template" in caller and "AOTInductorModelContainerRun(" not in caller
    compiling = [command for command in commands if " -c " in command and ".cpp" in command]
    assert sum(f"-include {shared.folder}" in command for command in compiling) == 2, "caller and kernels"
    assert [path.suffix for path in tmp_path.iterdir()] == [".pt2"], "the parts are gone"
    with torch.inference_mode():
        x, pair, cache = arguments(7 if rows is None else 1)
        packaged.load(tmp_path)
        torch.testing.assert_close(packaged(x, pair, cache), transform(2.0, x, pair, torch.zeros_like(cache)))
    assert call is compiler(region)


def test_what_a_killed_build_leaves_is_deleted_by_the_next_one_and_what_a_living_one_makes_is_not(
    tmp_path: Path,
) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from minivllm.compilation.packaged.shared_parts import SharedParts
with SharedParts(Path({str(tmp_path)!r})) as shared:
    (shared.folder / "half").write_text("written")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with SharedParts(tmp_path) as living:
        subprocess.run([sys.executable, "-c", program], timeout=120)
        assert len(list(tmp_path.glob("building-*"))) == 2
        with SharedParts(tmp_path) as next_one:
            assert {*tmp_path.iterdir()} == {living.folder, next_one.folder}
        assert living.folder.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_being_made_is_not_taken_for_one_that_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank begins to build between the making of the folder and its lock."""
    make, others = tempfile.mkdtemp, list[threading.Thread]()
    folders = list[Path]()

    def enter() -> None:
        with SharedParts(tmp_path) as parts:
            folders.append(parts.folder)

    def interrupted(**where: Any) -> str:
        folder = make(**where)
        if not others:
            others.append(threading.Thread(target=enter))
            others[0].start()
            others[0].join(1.0)  # it waits
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", interrupted)
    with SharedParts(tmp_path) as parts:
        others[0].join()
        assert parts.folder.is_dir() and len(folders) == 1
    assert not list(tmp_path.iterdir())
