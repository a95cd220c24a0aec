"""Low-rank updates of mixed batches equal the row-by-row reference, whatever other rows and adapters hold."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import kernels_triton_free.lora as lora
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.lora import (
    CHUNK,
    AdapterTiles,
    RowAdapters,
    add_low_rank,
    chunks_of_rank,
    lane_width,
    plan_groups,
)
from minivllm.compilation.compiler import cannot_compile_reason, only_marked_sizes_are_dynamic
from minivllm.lora.manager import adapter_tiles, plan_tiles

needs_compiler = pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None,
    reason="there is no C++ compiler for torch.compile here",
)

IN_FEATURES = 9
CHUNKS = 6
MAX_RANK = 40
Ranges = list[tuple[int, int]]


def add_low_rank_reference(
    out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, slots: Tensor, sizes: Sequence[int]
) -> Tensor:
    """add_low_rank, row by row and part by part."""
    result = out.clone()
    a, b = a.flatten(0, 1), b.transpose(1, 2).reshape(b.shape[0] * b.shape[2], -1)
    for row, slot in enumerate(slots.tolist()):
        first, end = columns[slot].tolist()
        for part, (update, weight) in enumerate(
            zip(result[row].split(list(sizes)), b.split(list(sizes), dim=1))
        ):
            update += (a[first:end, part] @ x[row]) @ weight[first:end]
    return result


@st.composite
def ranges_of_adapters(draw: st.DrawFn) -> Ranges:
    """Columns of adapters 0 to 4 in any order, each from a chunk on, the first chunk unused;
    some may have none."""
    ranks = draw(st.lists(st.integers(0, MAX_RANK), min_size=4, max_size=4).filter(fits))
    ranges, first = [(0, 0)] * 5, 1
    for adapter in draw(st.permutations(range(4))):
        ranges[adapter + 1] = (first * CHUNK, first * CHUNK + ranks[adapter])
        first += chunks_of_rank(ranks[adapter])
    return ranges


def fits(ranks: list[int]) -> bool:
    return sum(map(chunks_of_rank, ranks)) < CHUNKS


def random_case(ranges: Ranges, slots: list[int], sizes: tuple[int, ...], seed: int) -> tuple[Tensor, ...]:
    """out, x, a, b, columns and slots in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    out, x, width = (
        random(len(slots), sum(sizes)),
        random(len(slots), IN_FEATURES),
        lane_width(sizes, torch.device("cpu")),
    )
    a, b = random(CHUNKS, CHUNK, len(sizes), IN_FEATURES), random(CHUNKS, sum(sizes) // width, CHUNK, width)
    is_used = torch.zeros(CHUNKS * CHUNK, dtype=torch.bool)
    for first, end in ranges:
        is_used[first:end] = True
    a.flatten(0, 1)[~is_used] = 0
    b.transpose(1, 2)[~is_used.view(CHUNKS, CHUNK)] = 0
    return out, x, a, b, torch.tensor(ranges, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32)


def tiles_of(ranges: Ranges, slots: list[int], lanes: int) -> AdapterTiles:
    ranks = np.array([ranges[slot][1] - ranges[slot][0] for slot in slots])
    places = np.empty((len(slots), chunks_of_rank(MAX_RANK)), dtype=np.int32)
    planned = plan_tiles(np.array(slots, dtype=np.int32), ranks, lanes, places)
    assert planned is not None
    return AdapterTiles(*map(torch.from_numpy, (*planned, places)))


CASES = (
    ranges_of_adapters(),
    st.lists(st.integers(0, 4), min_size=1, max_size=12),
    st.sampled_from([(8,), (5, 7), (8, 2, 2), (32, 16, 16)]),
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
        torch.testing.assert_close(add_low_rank(*case[:-1], RowAdapters(case[-1]), sizes), expected)
    lora._plan_of.cache_clear()


@settings(max_examples=60, deadline=None)
@given(*CASES, st.integers(1, 5), st.integers(1, 2))
def test_tiles_give_the_same_however_many_rows_share_one(
    ranges: Ranges, slots: list[int], sizes: tuple[int, ...], seed: int, lanes: int, idle: int
) -> None:
    case = random_case(ranges, slots, sizes, seed)
    tiles = with_idle_tiles(tiles_of(ranges, slots, lanes), idle)
    tiled = lora._add_tiled(*case[:-1], tiles, sizes)
    # Its loops sum in float32, whatever the dtype.
    torch.testing.assert_close(tiled, add_low_rank_reference(*case, sizes), rtol=1e-4, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(*CASES, st.data())
def test_tiles_of_a_batch_serve_any_choice_of_its_rows(
    ranges: Ranges, slots: list[int], sizes: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    out, x, a, b, columns, own = random_case(ranges, slots, sizes, seed)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(slots) - 1), min_size=1, max_size=15)))
    adapters = RowAdapters(own, with_idle_tiles(tiles_of(ranges, slots, 4), 1)).of(rows)
    assert adapters.tiles is not None
    tiled = lora._add_tiled(out[rows], x[rows], a, b, columns, adapters.tiles, sizes)
    expected = add_low_rank_reference(out[rows], x[rows], a, b, columns, own[rows], sizes)
    torch.testing.assert_close(tiled, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(adapters.slots, own[rows])


@settings(max_examples=60, deadline=None)
@given(ranges_of_adapters(), st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 5))
def test_every_row_has_a_place_in_one_tile_for_each_chunk_of_its_adapter(
    ranges: Ranges, slots: list[int], lanes: int
) -> None:
    tiles = tiles_of(ranges, slots, lanes)
    for row, slot in enumerate(slots):
        depth = chunks_of_rank(ranges[slot][1] - ranges[slot][0])
        places = tiles.places[row].tolist()
        assert places[depth:] == [-1] * (len(places) - depth)
        met = [
            (int(tiles.rows[p // lanes, p % lanes]), int(tiles.adapters[p // lanes])) for p in places[:depth]
        ]
        assert met == [(row, slot)] * depth
        assert [int(tiles.chunks[p // lanes]) for p in places[:depth]] == list(range(depth))
    taken = [p for p in tiles.places.flatten().tolist() if p >= 0]
    assert len(taken) == len(set(taken))
    full = [
        chunks_of_rank(end - first) * -(-slots.count(slot) // lanes)
        for slot, (first, end) in enumerate(ranges)
    ]
    assert len(tiles.rows) == sum(full)


def test_a_batch_that_wants_more_tiles_than_pay_has_no_plan() -> None:
    slots, ranks = np.ones(4 * lora.MAX_TILES + 1, dtype=np.int32), np.full(4 * lora.MAX_TILES + 1, CHUNK)
    places = np.empty((len(slots), 1), dtype=np.int32)
    assert plan_tiles(slots, ranks, 4, places) is None
    assert len(adapter_tiles(slots, ranks, 1).rows) == lora.MAX_TILES + 1
    assert len(adapter_tiles(slots[1:], ranks[1:], 1).rows) == lora.MAX_TILES


@pytest.mark.parametrize(("rows", "shape"), [(1, (3, 1)), (2, (2, 4)), (9, (2, 4))])
def test_a_batch_without_adapters_has_tiles_of_the_sizes_that_compiled_code_takes(
    rows: int, shape: tuple[int, int]
) -> None:
    tiles = adapter_tiles(np.zeros(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32), 3)
    assert tiles.rows.shape == shape
    assert not tiles.adapters.any() and (tiles.places == -1).all()


@needs_compiler
@pytest.mark.parametrize(
    ("ranks", "slots", "sizes"),
    [((8, 16, 32, 40), [1, 2, 3, 4] * 4, (32, 16, 16)), ((16, 0, 40, 3), [0, 3, 3, 3, 3, 3, 4], (48,))],
    ids=["mixed", "one mostly"],
)
def test_exported_code_vectorises_over_outputs_and_gives_the_same(
    ranks: tuple[int, ...], slots: list[int], sizes: tuple[int, ...]
) -> None:
    """Gathering a vector's elements one by one, as Inductor does where it takes another index,
    costs ten times."""
    ranges, first = [(0, 0)], CHUNK
    for rank in ranks:
        ranges.append((first, first + rank))
        first += chunks_of_rank(rank) * CHUNK
    out, x, a, b, columns, own = (
        tensor.bfloat16() if tensor.is_floating_point() else tensor
        for tensor in wide_case(ranges, slots, sizes)
    )
    expected = add_low_rank_reference(*(t.double() for t in (out, x, a, b)), columns, own, sizes)
    tiles = with_idle_tiles(tiles_of(ranges, slots, 4), 2)

    def region(out: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: Tensor, *tiles: Tensor) -> Tensor:
        return lora._add_tiled(out, x, a, b, columns, AdapterTiles(*tiles), sizes)

    patch_inductor()
    torch._dynamo.reset()
    arguments = (out, x, a, b, columns, *tiles)
    for tensor in (out, x, *tiles):
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad(), only_marked_sizes_are_dynamic():
        result, [code] = run_and_get_code(torch.compile(region, fullgraph=True), *arguments)
    torch.testing.assert_close(result.double(), expected, rtol=2e-2, atol=2e-2)
    assert "at::vec::Vectorized<at::BFloat16>::loadu" in code
    for element in ("float", "at::BFloat16"):
        assert f"std::array<{element}," not in code


def wide_case(ranges: Ranges, slots: list[int], sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """random_case with 32 input features and more chunks."""
    with patch.multiple(f"{__name__}", IN_FEATURES=32, CHUNKS=16):
        return random_case(ranges, slots, sizes, 0)


def with_idle_tiles(tiles: AdapterTiles, count: int) -> AdapterTiles:
    """The same and some that are not read, as a batch has them that needs fewer than compiled code wants."""
    rows, adapters, chunks = (
        F.pad(tiles.rows, (0, 0, 0, count)),
        F.pad(tiles.adapters, (0, count)),
        F.pad(tiles.chunks, (0, count)),
    )
    return AdapterTiles(rows, adapters, chunks, tiles.places)


@settings(max_examples=60, deadline=None)
@given(
    ranges_of_adapters(), st.lists(st.integers(0, 4), min_size=1, max_size=40), st.sampled_from([0, 4, 100])
)
def test_every_row_meets_its_own_columns_once_and_no_others(
    ranges: Ranges, slots: list[int], cost: int
) -> None:
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
    a, b = torch.zeros(3, CHUNK, 1, 8, dtype=dtype), torch.zeros(3, 1, CHUNK, 4, dtype=dtype)
    a[1:, :2] = torch.randn(2, 2, 1, 8, generator=generator).to(dtype)
    b[1:, :, :2] = torch.randn(2, 1, 2, 4, generator=generator).to(dtype)
    ranges = [(0, 0), (CHUNK, CHUNK + 2), (2 * CHUNK, 2 * CHUNK + 2)]
    columns, slots = torch.tensor(ranges, dtype=torch.int32), torch.tensor([0, 1, 2], dtype=torch.int32)

    def results() -> list[Tensor]:
        tiled = lora._add_tiled(
            out, x, a, b, columns, with_idle_tiles(tiles_of(ranges, slots.tolist(), 4), 1), (4,)
        )
        return [add_low_rank(out, x, a, b, columns, RowAdapters(slots), (4,)), tiled]

    before = results()
    a[2, :2] = torch.finfo(dtype).max
    for expected, updated in zip(before, results()):
        assert not updated[2].isfinite().all()
        torch.testing.assert_close(updated[:2], expected[:2], rtol=0, atol=0)
        torch.testing.assert_close(updated[0], out[0], rtol=0, atol=0)
