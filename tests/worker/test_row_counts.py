"""Numbers of rows: what steps and picks are padded to, and which code a call gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.compilation.row_counts import CodeByRows, RowCounts, bound

COUNTS = st.builds(RowCounts, fewest=st.sampled_from([1, 2]), few=st.sampled_from([0, 4, 8]))


@given(COUNTS, st.integers(1, 40))
def test_a_padded_step_has_code_and_no_more_rows_than_that_takes(rows: RowCounts, count: int) -> None:
    padded = rows.of_step(count)
    assert padded >= count and padded >= rows.fewest
    assert padded == count or padded in (rows.fewest, rows.few)
    assert (padded == 1) <= (count == 1)


@given(COUNTS, st.integers(1, 40), st.data())
def test_one_picked_row_has_code_only_in_a_step_of_one(
    rows: RowCounts, tokens: int, data: st.DataObject
) -> None:
    padded = rows.of_step(tokens)
    picked = rows.of_pick(data.draw(st.integers(1, tokens)), padded)
    assert picked <= padded and (picked == 1) == (padded == 1)
    assert padded != rows.few or picked == rows.few


def said(name: str) -> Callable[..., str]:
    return lambda *args: f"{name} {len(args)}"


@given(st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_code_is_chosen_by_first_dimensions(first: int, second: int, has_few: bool, binds: bool) -> None:
    code = CodeByRows(said("several"), said("single"), said("few") if has_few else None, (4, 4, None))
    args: list[Any] = [torch.empty(first, 2), torch.empty(second), torch.empty(9)]
    expected = "single" if first == 1 else "few" if has_few and first == second == 4 else "several"
    assert (bound(code, *args[1:])(args[0]) if binds else code(*args)) == f"{expected} 3"


def test_bound_is_for_any_function() -> None:
    assert bound(said("plain"), 1, 2)(0) == "plain 3"
