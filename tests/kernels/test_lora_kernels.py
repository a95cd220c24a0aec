"""Low-rank updates of mixed batches equal the row-by-row reference, whatever other rows and adapters hold."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels_triton_free.lora as lora
from kernels_triton_free.lora import RowAdapters, add_low_rank, add_low_rank_reference, plan_groups

IN_FEATURES = 9
COLUMNS = 16
Ranges = list[tuple[int, int]]


@st.composite
def ranges_of_adapters(draw: st.DrawFn) -> Ranges:
    """Columns of adapters 0 to 4 in any order with gaps between them; nobody has any of 0, and others may have none."""
    ends = sorted(draw(st.lists(st.integers(0, COLUMNS), min_size=8, max_size=8)))
    return [(0, 0), *draw(st.permutations(list(zip(ends[::2], ends[1::2]))))]


def random_case(ranges: Ranges, slots: list[int], sizes: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    """out, x, a, b, columns and slots in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out, x = random(len(slots), sum(sizes)), random(len(slots), IN_FEATURES)
    a, b = random(COLUMNS, len(sizes), IN_FEATURES), random(COLUMNS, sum(sizes))
    return out, x, a, b, torch.tensor(ranges, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)


def with_span(case: tuple[Tensor, ...], rank: int) -> tuple[Any, ...]:
    """The arguments of add_low_rank, sizes aside, whose adapters have at most this rank."""
    *tensors, slots = case
    return *tensors, RowAdapters(slots, torch.arange(rank, dtype=torch.int32))


CASES = (
    ranges_of_adapters(),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.sampled_from([(8,), (5, 7), (8, 2, 2)]),
    st.integers(0, 1000),
)
"""Columns of each adapter, adapter of each row, features of each part, seed."""


@pytest.mark.parametrize("cost", [0, lora.GROUP_COST], ids=["grouped", "stacked"])
@settings(max_examples=40, deadline=None)
@given(*CASES)
def test_every_row_gets_the_update_of_its_own_adapter(
    cost: int, ranges: Ranges, slots: list[int], sizes: tuple[int, ...], seed: int
) -> None:
    case = random_case(ranges, slots, sizes, seed)
    expected = add_low_rank_reference(*case, sizes)
    lora._plan_of.cache_clear()
    with patch.multiple(lora, GROUP_COST=cost, ROW_COST=0):
        torch.testing.assert_close(lora._add_stacked(*case, sizes), expected)
        torch.testing.assert_close(add_low_rank(*with_span(case, COLUMNS), sizes), expected)
    lora._plan_of.cache_clear()


@settings(max_examples=40, deadline=None)
@given(*CASES, st.integers(0, 3))
def test_gathering_gives_the_same_for_every_span_that_holds_the_ranks_of_the_batch(
    ranges: Ranges, slots: list[int], sizes: tuple[int, ...], seed: int, surplus: int
) -> None:
    case = random_case(ranges, slots, sizes, seed)
    rank = max(ranges[slot][1] - ranges[slot][0] for slot in slots)
    gathered = lora._add_gathered(*case, torch.arange(rank + surplus, dtype=torch.int32), sizes)
    # Its loops sum in float32, whatever the dtype.
    torch.testing.assert_close(gathered, add_low_rank_reference(*case, sizes), rtol=1e-4, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(ranges_of_adapters(), st.lists(st.integers(0, 4), min_size=1, max_size=40), st.sampled_from([0, 4, 100]))
def test_every_row_meets_its_own_columns_once_and_no_others(ranges: Ranges, slots: list[int], cost: int) -> None:
    with patch.multiple(lora, GROUP_COST=cost, ROW_COST=0):
        groups = plan_groups(torch.tensor(ranges), torch.tensor(slots))
    met: list[list[int]] = [[] for _ in slots]
    for group in groups:
        rows = range(len(slots)) if group.rows is None else group.rows.tolist()
        for index, row in enumerate(rows):
            foreign = [False] * (group.end - group.first)
            if group.foreign is not None:
                foreign = group.foreign[index, :, 0].tolist()
            met[row] += [group.first + place for place, is_foreign in enumerate(foreign) if not is_foreign]
    assert met == [list(range(*ranges[slot])) for slot in slots]


def test_a_batch_without_adapters_multiplies_nothing() -> None:
    assert plan_groups(torch.tensor([[0, 0], [0, 8], [8, 8]]), torch.tensor([0, 2, 0])) == ()


def test_a_prefill_with_one_of_many_adapters_multiplies_only_that_one() -> None:
    ranges = torch.tensor([[0, 0], *([64 * i, 64 * i + 64] for i in range(8))])
    [group] = plan_groups(ranges, torch.full((512,), 3))
    assert (group.rows, group.first, group.end, group.foreign) == (None, 128, 192, None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_adapter_whose_products_overflow_harms_no_other_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, generator=generator).to(dtype)
    out = torch.randn(3, 4, generator=generator).to(dtype)
    a = torch.randn(4, 1, 8, generator=generator).to(dtype)
    b = torch.randn(4, 4, generator=generator).to(dtype)
    columns = torch.tensor([[0, 0], [0, 2], [2, 4]], dtype=torch.int32)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    rows = RowAdapters(slots, torch.arange(2, dtype=torch.int32))
    expected = add_low_rank(out, x, a, b, columns, rows, (4,))
    a[2:] = torch.finfo(dtype).max
    updated = add_low_rank(out, x, a, b, columns, rows, (4,))
    assert not updated[2].isfinite().all()
    torch.testing.assert_close(updated[:2], expected[:2], rtol=0, atol=0)
    torch.testing.assert_close(updated[0], out[0], rtol=0, atol=0)
