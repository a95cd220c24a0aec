"""Codes are values: all that a compiled region depends on besides its tensors is in the repr of its
function."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
from collections.abc import Iterator

import pytest

from minivllm.compilation.package_keys import PACKAGES_WITH_REGION_CODE


def codes() -> Iterator[type]:
    """Every dataclass that is called, in the packages whose code is compiled."""
    for name in PACKAGES_WITH_REGION_CODE:
        package = importlib.import_module(f"minivllm.{name.replace('/', '.')}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for found in vars(importlib.import_module(module.name)).values():
                is_here = isinstance(found, type) and found.__module__ == module.name
                if is_here and dataclasses.is_dataclass(found) and "__call__" in vars(found):
                    yield found


CODES = sorted(set(codes()), key=lambda code: code.__qualname__)


def test_there_are_codes_of_every_kind() -> None:
    names = {code.__name__ for code in CODES}
    assert {
        "Embed",
        "RotateAndStore",
        "LatentQueries",
        "ChosenExperts",
        "DraftHead",
        "Joined",
        "PickRows",
    } <= names


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_a_code_is_frozen_and_its_repr_and_comparison_leave_nothing_out(code: type) -> None:
    assert code.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert "__repr__" not in vars(code) or code.__repr__.__qualname__.startswith(code.__name__)
    for field in dataclasses.fields(code):
        if field.type == "fx.GraphModule":
            assert "text" in vars(code)["__annotations__"], "its text takes part"
            continue
        assert field.repr and field.compare, field.name


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_a_code_reads_no_global_that_changes(code: type) -> None:
    """Functions, classes, modules and constants of a module."""
    for method in vars(code).values():
        if not isinstance(method, types.FunctionType) or method.__name__ in (
            "__init__",
            "__repr__",
            "__eq__",
        ):
            continue
        for name in method.__code__.co_names:
            value = method.__globals__.get(name)
            is_fixed = isinstance(value, types.FunctionType | types.ModuleType | type) or name.isupper()
            assert value is None or is_fixed or name.startswith("__"), f"{method.__qualname__} reads {name}"
