"""Keys of compiled code: whatever changes the code changes its key, and nothing else does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import minivllm
from minivllm.compilation import inductor_options, package_keys
from minivllm.compilation.compiler import RegionCompiler, prepare_inductor
from minivllm.compilation.package_keys import package_key, region_key
from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.program.fuse import Joined
from tests.models.region_ledger import recorded, settings_of

CPU = torch.device("cpu")
ROWS = TensorSpec((Size("rows", 5), 4), torch.float32, CPU)


def shifted(*x: Tensor) -> Tensor:
    return x[0] + 1


CODE = """
from dataclasses import dataclass

from {other} import amount


@dataclass(frozen=True)
class Shift:
    by: int

    def __call__(self, x):
        return x + self.by * amount()
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Writes modules as a user would have them, and returns the last one, imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
                del sys.modules[name]

    def write_and_import(**sources: str) -> Any:
        for name, source in sources.items():
            path = tmp_path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(source)
        forget()
        importlib.invalidate_caches()
        return importlib.import_module(list(sources)[-1].replace("__", "."))

    yield write_and_import
    forget()


def joined(code: Any) -> Region:
    """A region as a program makes it, of this code alone."""
    function = Joined((code,), (((0,), (1,)),), ("·",), ((),), (1,))
    return Region("between", function, {"x": ROWS}, function)


def test_classes_of_one_name_in_two_modules_have_two_keys(write: Callable[..., Any]) -> None:
    first = write(amounts="def amount(): return 1", one=CODE.format(other="amounts")).Shift(2)
    second = write(amounts="def amount(): return 1", two=CODE.format(other="amounts")).Shift(2)
    assert repr(first) == repr(second)
    compiler = RegionCompiler(enabled=True)
    assert compiler(joined(first)) is not compiler(joined(second)), "they may compute different things"
    assert package_key(joined(first)) != package_key(joined(second))
    assert region_key(joined(first)) == region_key(joined(type(first)(2)))


def test_functions_of_one_name_in_two_modules_have_two_keys(write: Callable[..., Any]) -> None:
    def region(function: Callable) -> Region:
        return Region("shift", partial(function, by=1), {"x": ROWS}, 1)

    one, two = (write(**{name: f"def shift(x, by): return x + {at} * by"}) for at, name in enumerate("pq"))
    assert region_key(region(one.shift)) != region_key(region(two.shift))


@pytest.mark.parametrize("in_package", [False, True])
def test_another_source_of_code_outside_is_another_key(write: Callable[..., Any], in_package: bool) -> None:
    """Of the module of a class, and of a module beside it that this one uses; nothing else counts."""
    top, at = ("own__", "own.") if in_package else ("", "")

    def key(amount: str = "1", unrelated: str = "1", more: str = "") -> str:
        sources = {
            f"{top}unrelated": f"def amount(): return {unrelated}",
            f"{top}amounts": f"def amount(): return {amount}",
            f"{top}model": CODE.format(other=f"{at}amounts") + more,
        }
        return package_key(joined(write(**sources).Shift(2)))

    assert key() == key() == key(unrelated="2")
    assert len({key(), key(amount="2"), key(more="# changed\n")}) == 3


def test_code_without_a_file_is_told_apart_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(body: str) -> str:
        module: Any = ModuleType("typed_in")
        monkeypatch.setitem(sys.modules, "typed_in", module)
        module.dataclass = dataclass
        code = f"@dataclass(frozen=True)\nclass Shift:\n  by: int\n  def __call__(self, x): {body}\n"
        exec(code, vars(module))
        return package_key(joined(module.Shift(2)))

    bodies = ["return x + self.by", "return x - self.by", "return x + self.by * 2", "return [y for y in x]"]
    assert key(bodies[0]) == key(bodies[0]) and len(set(map(key, bodies))) == 4


def test_all_code_of_an_engine_lies_where_the_digest_looks(tiny_model: Callable[..., Path]) -> None:
    """Else an edit of any module that such code uses, a scheduler's say, would compile it again."""
    with recorded(settings_of(tiny_model("llama"))) as recorders:
        regions = recorders[0].regions
    assert len(regions) > 4
    for region in regions:
        assert {package_keys._source_outside(one) for one in package_keys._definitions(region)} == {""}


def test_other_constants_shapes_sources_and_settings_are_other_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def key(name: str = "a", constants: int = 1, *specs: TensorSpec) -> str:
        return package_keys.package_key(Region(name, shifted, {"x": specs}, constants))

    def spec(
        *shape: int | Size, dtype: torch.dtype = torch.float32, strides: tuple[int, ...] | None = None
    ) -> TensorSpec:
        return TensorSpec(shape, dtype, CPU, strides)

    rows = Size("rows", 5)
    keys = {
        key(),
        key("b"),
        key("a", 2),
        key("a", 1, spec(4)),
        key("a", 1, spec(4), spec(4)),
        key("a", 1, spec(5)),
    }
    keys |= {key("a", 1, spec(rows)), key("a", 1, TensorSpec((4,), torch.float64, CPU))}
    keys.add(key("a", 1, spec(4, strides=(2,))))
    assert key("a", 1, spec(Size("other rows", 7))) in keys, "a dynamic size serves all sizes"
    monkeypatch.setattr(package_keys, "environment", lambda: ("another source",))
    keys.add(key())
    assert len(keys) == 10


@pytest.mark.parametrize("name", package_keys.PACKAGES_WITH_REGION_CODE)
def test_packages_whose_sources_regions_are_made_of_are_there(name: str) -> None:
    assert list((Path(minivllm.__file__).parent / name).glob("*.py"))


@pytest.mark.parametrize("table", ["OPTIONS", "PACKAGE_OPTIONS", "FIXED_ROWS_OPTIONS"])
def test_another_option_of_inductor_is_another_key(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    region = Region("a", shifted, {"x": ROWS})
    keys = {package_key(region)}
    for value in (1, 2):
        options = MappingProxyType({**getattr(inductor_options, table), "cpp.simdlen": value})
        monkeypatch.setattr(inductor_options, table, options)
        keys.add(package_key(region))
    assert len(keys) == 3


def test_another_cpp_compiler_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    region = Region("a", shifted, {"x": ROWS})
    before = package_key(region)
    monkeypatch.setattr(inductor_options, "find_cpp_compiler", lambda: "another-c++")
    assert package_key(region) != before


def test_inductor_gets_the_options_that_keys_are_made_of() -> None:
    from torch._inductor import config

    with config.patch({"shape_padding": True}):
        prepare_inductor()
        for name, value in inductor_options.OPTIONS.items():
            assert getattr(config, name) == value
    known = config.get_config_copy()
    for table in (inductor_options.PACKAGE_OPTIONS, inductor_options.FIXED_ROWS_OPTIONS):
        assert table.keys() <= known.keys()
