"""RegionCompiler with Dynamo's own eager backend: what is traced, and how often, without generating code."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from minivllm.compilation import compiler as compiler_module
from minivllm.compilation.compiler import (
    RegionCompiler,
    cache_directory,
    cannot_compile_reason,
    find_cpp_compiler,
    packages_directory,
    prepare_inductor,
)
from minivllm.compilation.regions import Region, Size, TensorSpec

CPU = torch.device("cpu")


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compilation stops after tracing: graphs are counted, nothing is sent to a C++ compiler."""
    monkeypatch.setattr(compiler_module, "compile_fx", lambda graph, example_inputs: graph.forward)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def own_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == compiler_module.__name__]


def scaled(factor: float, x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight * factor


def region_of(function: Callable, *shapes: tuple[int | Size, ...], name: str = "scaled") -> Region:
    """A region of float32 tensors."""
    specs = {f"x{index}": TensorSpec(shape, torch.float32, CPU) for index, shape in enumerate(shapes)}
    return Region(name, function, specs)


ROWS = Size("rows", 5)


def test_disabled_it_hands_back_the_function_itself() -> None:
    function: Callable = partial(scaled, 2.0)
    assert RegionCompiler(enabled=False)(region_of(function)) is function


def test_one_graph_serves_every_number_of_rows_from_two_on(traced_only: None) -> None:
    compiler = RegionCompiler(enabled=True)
    region = compiler(region_of(partial(scaled, 2.0), (ROWS, 4), (4, 3)))
    before = graphs()
    for rows in (5, 2, 3, 64, 1000):
        x, weight = torch.randn(rows, 4), torch.randn(4, 3)
        torch.testing.assert_close(region(x, weight), x @ weight * 2.0)
    assert graphs() == before + 1


def test_regions_with_equal_code_do_not_compile_each_other_again(traced_only: None) -> None:
    compiler = RegionCompiler(enabled=True)
    count = torch._dynamo.config.recompile_limit + 3
    regions = [
        compiler(region_of(partial(scaled, float(index)), (ROWS, 4), (4, 3 + index)))
        for index in range(count)
    ]
    x = torch.randn(5, 4)
    before = graphs()
    for _ in range(3):
        for index, region in enumerate(regions):
            # Other widths in each region would make shared code believe that the width is dynamic.
            own = torch.randn(4, 3 + index)
            torch.testing.assert_close(region(x, own), x @ own * index)
    assert graphs() == before + count


def test_dimensions_of_nested_tensors_that_are_declared_dynamic_are(traced_only: None) -> None:
    def total(pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].sum(-1) + pair[1]

    pair = TensorSpec((ROWS, Size("width", 7)), torch.float32, CPU), TensorSpec((ROWS,), torch.float32, CPU)
    region = RegionCompiler(enabled=True)(Region("total", total, {"pair": pair}))
    before = graphs()
    for rows, width in ((5, 7), (3, 4), (9, 30)):
        wide, narrow = torch.randn(rows, width), torch.randn(rows)
        torch.testing.assert_close(region((wide, narrow)), wide.sum(-1) + narrow)
    assert graphs() == before + 1


def test_sizes_that_are_equal_at_the_first_call_may_differ_later(traced_only: None) -> None:
    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y * 3

    region = RegionCompiler(enabled=True)(region_of(both, (ROWS, 5), (ROWS, 5)))
    before = graphs()
    for first, second in ((4, 4), (2, 7), (9, 3)):
        region(torch.ones(first, 5), torch.ones(second, 5))
    assert graphs() == before + 1


def test_a_single_row_has_code_of_its_own_where_it_is_asked_for(traced_only: None) -> None:
    def rows(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight * (1.0 if x.shape[0] == 1 else 2.0)

    x, weight = Size("rows", 5, single=1), TensorSpec((4, 3), torch.float32, CPU)
    declared = Region("rows", rows, {"x": TensorSpec((x, 4), torch.float32, CPU), "weight": weight})
    compiler = RegionCompiler(enabled=True, single_rows=True)
    region, own = compiler(declared), torch.randn(4, 3)
    assert compiler.rows.fewest == 1 and RegionCompiler(enabled=True).rows.fewest == 2
    before = graphs()
    for count in (1, 5, 1, 2, 30, 1):
        x = torch.randn(count, 4)
        torch.testing.assert_close(region(x, own), x @ own * (1.0 if count == 1 else 2.0))
    assert graphs() == before + 2


def test_code_of_other_bounds_is_not_taken_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's cache would find it, and its bounds would break those of the new sizes."""
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    for most in (16, 64, 16):
        torch._dynamo.reset()
        region = RegionCompiler(enabled=True, most={"rows": most})(
            region_of(partial(scaled, 2.0), (ROWS, 4), (4, 3))
        )
        for rows in (5, most):
            x, weight = torch.randn(rows, 4), torch.randn(4, 3)
            torch.testing.assert_close(region(x, weight), x @ weight * 2.0)


def test_arguments_that_were_not_declared_are_refused(traced_only: None) -> None:
    region = RegionCompiler(enabled=True)(region_of(partial(scaled, 2.0), (ROWS, 4), (4, 3)))
    with pytest.raises(TypeError, match=r"'scaled' takes torch.float32 cpu \[4,3\] in x1, but .* \[4,5\]"):
        region(torch.ones(5, 4), torch.ones(4, 5))


def test_compilations_after_freeze_are_counted_once_and_reported(
    traced_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = RegionCompiler(enabled=True)
    region = compiler(region_of(partial(scaled, 2.0), (ROWS, 4), (4, 3)))
    region(torch.randn(5, 4), torch.randn(4, 3))
    assert compiler.num_recompilations == 0, "before freeze nothing counts"
    compiler.freeze()
    with caplog.at_level(logging.WARNING):
        region(torch.randn(7, 4), torch.randn(4, 3))
    assert compiler.num_recompilations == 0 and not own_warnings(caplog)
    with caplog.at_level(logging.WARNING):
        region(torch.randn(7, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64))
    assert compiler.num_recompilations == 1
    (warning,) = own_warnings(caplog)
    assert "compiled again after warm-up (1 so far)" in warning


def test_without_a_compiler_there_is_a_reason_and_with_a_gpu_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    reason = cannot_compile_reason(CPU)
    assert reason is not None and "C++ compiler" in reason and "g++" in reason
    assert cannot_compile_reason(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("there", "cxx", "expected"),
    [
        (["g++", "clang++"], None, "g++"),
        (["clang++"], None, "clang++"),
        (["c++"], None, "c++"),
        (["g++", "my-c++"], "my-c++", "my-c++"),
        (["g++"], "not-installed", "g++"),
        ([], None, None),
    ],
)
def test_the_compiler_is_cxx_or_else_the_first_one_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: list[str], cxx: str | None, expected: str | None
) -> None:
    for name in there:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if cxx is None:
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", cxx)
    assert find_cpp_compiler() == expected
    assert (cannot_compile_reason(CPU) is None) == (expected is not None)


def test_inductor_is_told_of_a_compiler_it_would_not_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    with config.patch({"cpp.cxx": (None, "g++")}):
        monkeypatch.setattr(compiler_module, "find_cpp_compiler", lambda: "g++")
        prepare_inductor()
        assert config.cpp.cxx == (None, "g++")
        monkeypatch.setattr(compiler_module, "find_cpp_compiler", lambda: "clang++")
        prepare_inductor()
        assert config.cpp.cxx == ("clang++",)


def test_compiled_code_is_kept_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "given"))
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "given" and packages_directory() == tmp_path / "given" / "regions"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cache_directory() == tmp_path / "home" / "inductor"
    assert packages_directory() == tmp_path / "home" / "regions"
    torchs_own = cache_dir()  # what Inductor writes into the environment is not the user's choice
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == torchs_own
    assert cache_directory() == tmp_path / "home" / "inductor"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("MINIVLLM_HOME")
    assert cache_directory() == Path.home() / ".cache" / "minivllm" / "inductor"


@pytest.mark.skipif(find_cpp_compiler() is None, reason="no C++ compiler")
def test_without_a_place_for_compiled_code_there_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    assert cannot_compile_reason(CPU) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * 2**20))
    reason = cannot_compile_reason(CPU)
    assert reason is not None and "only 3 MiB are free" in reason and "set MINIVLLM_HOME" in reason
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "file"))
    reason = cannot_compile_reason(CPU)
    assert reason is not None and "Not a directory" in reason and "set MINIVLLM_HOME" in reason


def test_less_exact_products_are_not_advised_and_other_warnings_are_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._inductor.compile_fx as inductor

    def warn(graph: object, example_inputs: object) -> None:
        warnings.warn("TensorFloat32 tensor cores for float32 matrix multiplication available", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    monkeypatch.setattr(inductor, "compile_fx", warn)
    with pytest.warns(UserWarning) as told:
        compiler_module.compile_fx(torch.fx.GraphModule({}, torch.fx.Graph()), [])
    assert [str(one.message) for one in told] == ["something else"]


def test_sizes_of_another_engine_do_not_become_dynamic(
    traced_only: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of one process share the source lines of their regions,
    by which Dynamo remembers sizes it has seen."""
    widths: list[list[object]] = []

    def record(graph: torch.fx.GraphModule, example_inputs: list) -> Callable:
        inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        widths.append([value.shape[-1] for value in inputs if isinstance(value, Tensor)])
        return graph.forward

    monkeypatch.setattr(compiler_module, "compile_fx", record)
    for width in (64, 16, 8):
        region = RegionCompiler(enabled=True)(region_of(partial(scaled, 2.0), (ROWS, 4), (4, width)))
        region(torch.ones(5, 4), torch.ones(4, width))
    assert widths == [[4, 64], [4, 16], [4, 8]]
    assert all(type(width) is int for pair in widths for width in pair)
