"""Profiles of random examples: the same in every run of CI, ten times as many in a thorough one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.conftest import THOROUGH_FACTOR, pytest_collection_modifyitems


@hypothesis.given(st.integers())
@hypothesis.settings(max_examples=7)
def property_of_numbers(number: int) -> None:
    assert number == number


def examples_drawn(monkeypatch: pytest.MonkeyPatch, option: str | None, variable: str | None) -> int:
    """How many the property draws in a run with this option and HYPOTHESIS_PROFILE."""
    attribute = "_hypothesis_internal_use_settings"
    monkeypatch.setattr(property_of_numbers, attribute, getattr(property_of_numbers, attribute))
    monkeypatch.delenv("HYPOTHESIS_PROFILE", raising=False)
    if variable is not None:
        monkeypatch.setenv("HYPOTHESIS_PROFILE", variable)
    config: Any = SimpleNamespace(getoption={"--shard": None, "--hypothesis-profile": option}.get)
    item: Any = SimpleNamespace(obj=property_of_numbers, path=Path(__file__))
    pytest_collection_modifyitems(config, [item])
    drawn: int = getattr(property_of_numbers, attribute).max_examples
    monkeypatch.undo()
    return drawn


def test_a_thorough_run_draws_more_than_a_test_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert examples_drawn(monkeypatch, None, None) == examples_drawn(monkeypatch, "ci", None) == 7
    assert examples_drawn(monkeypatch, "thorough", None) == examples_drawn(monkeypatch, None, "thorough")
    assert examples_drawn(monkeypatch, "thorough", None) == 7 * THOROUGH_FACTOR
    assert examples_drawn(monkeypatch, "default", "thorough") == 7, "the option comes first"


def test_ci_draws_the_same_examples_in_every_run() -> None:
    for name in ("default", "ci", "thorough"):
        assert hypothesis.settings.get_profile(name).deadline is None, "no test is of time"
    assert hypothesis.settings.get_profile("ci").derandomize
    assert not hypothesis.settings.get_profile("thorough").derandomize
