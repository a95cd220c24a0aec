"""Compiled attention over pages against a query-by-query float64 computation, on a poisoned cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton_free.attention import (
    TileLists,
    gathered_flex_attention,
    gathered_sdpa_attention,
    pack_tiles,
    paged_flex_attention,
    unpack_tiles,
)
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.strips.visibility import Bounds
from minivllm.compilation.compiler import cannot_compile_reason
from tests.kernels.attention_cases import AttentionCase, TileShape, assert_attends, random_case

CPU_OPTIONS = {"PARTITION_SIZE": 1}
needs_compiler = pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None,
    reason="there is no C++ compiler for torch.compile here",
)
EVERY_GROUP = pytest.mark.parametrize("group", [1, 3, 4, 7])
EVERY_WINDOW = pytest.mark.parametrize("window", [None, 1, 5, 20])


def compile_attention(function: Callable, shape: TileShape) -> Callable:
    patch_inductor()
    torch._dynamo.reset()
    bound = partial(function, scale=shape.head_dim**-0.5, soft_cap=shape.soft_cap, kernel_options=CPU_OPTIONS)
    return torch.compile(bound, fullgraph=True, dynamic=False)


def check_paged(shape: TileShape, seeds: range, full_lists: bool = True) -> None:
    attend = compile_attention(paged_flex_attention, shape)
    for seed in seeds:
        case = random_case(seed, shape, full_lists=full_lists)
        out = attend(
            case.q, case.k_cache, case.v_cache, case.lists, case.bounds, case.kv_position, *case.sinks
        )
        assert_attends(out, case, 1e-5)


def gather_arguments(case: AttentionCase, shape: TileShape, num_step_pages: int) -> tuple:
    """Renumber the listed pages as places of step_pages;
    a few pages that are not read fill it up to a fixed number."""
    listed = [case.lists.partial_blocks, case.lists.full_blocks]
    counts = [case.lists.partial_count, case.lists.full_count]
    used: set[int] = {0} if case.sinks else set()
    for pages, count in zip(listed, counts):
        assert pages is not None and count is not None
        for tile in range(shape.tiles):
            used.update(pages[tile, 0, 0, : int(count[tile])].tolist())
    unused = [page for page in range(shape.num_pages) if page not in used]
    step_pages = sorted(used) + unused[: num_step_pages - len(used)]
    place = torch.zeros(shape.num_pages, dtype=torch.int32)
    place[step_pages] = torch.arange(len(step_pages), dtype=torch.int32)
    kv_position = torch.zeros_like(case.kv_position)
    by_page = case.kv_position.view(shape.num_pages, shape.page_size)
    kv_position[: len(step_pages) * shape.page_size] = by_page[step_pages].flatten()
    cut = [place[pages.long()][..., :num_step_pages] for pages in listed if pages is not None]
    lists = TileLists(case.lists.partial_count, cut[0], case.lists.full_count, cut[1])
    pages = torch.tensor(step_pages, dtype=torch.int32)
    return case.q, case.k_cache, case.v_cache, pages[:, None], lists, case.bounds, kv_position, *case.sinks


def check_gathered(shape: TileShape, seeds: range, dtype: torch.dtype, tolerance: float) -> None:
    attend = compile_attention(gathered_flex_attention, shape)
    for seed in seeds:
        case = random_case(seed, shape, dtype)
        # The cache is float32 whatever the tiles are computed in; its values fit them exactly here.
        case = replace(case, k_cache=case.k_cache.float(), v_cache=case.v_cache.float())
        out = attend(*gather_arguments(case, shape, shape.num_pages - 4))
        assert_attends(out, case, tolerance)


@needs_compiler
def test_decode_tiles_with_seven_heads_per_kv_head_equal_float64() -> None:
    check_paged(TileShape(group=7, tile_size=1), range(8))


FEATURES = {"chunk": {"chunk": 11}, "soft cap": {"soft_cap": 0.7}, "sinks": {"has_sinks": True}}
ALL_FEATURES = {"window": 20, "chunk": 27, "soft_cap": 0.7, "has_sinks": True}


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("feature", FEATURES.values(), ids=FEATURES)
def test_what_a_spec_adds_equals_float64(feature: dict[str, Any]) -> None:
    """In heads of a size that is no power of two."""
    shape = TileShape(group=3, tile_size=4, max_length=40, num_pages=50, head_dim=24)
    check_paged(replace(shape, **feature), range(8))


@needs_compiler
def test_heads_that_fill_no_vector_registers_equal_float64() -> None:
    """Their keys are not transposed ahead."""
    check_paged(TileShape(group=3, tile_size=4, max_length=40, num_pages=50, head_dim=20), range(8))


@needs_compiler
@pytest.mark.parametrize(
    ("group", "full_lists", "tile_size"),
    [
        one if one == (3, True, 4) else pytest.param(*one, marks=pytest.mark.matrix)
        for one in itertools.product((1, 3, 4), (True, False), (1, 4))
    ],
)
def test_all_that_a_spec_adds_together_equals_float64(group: int, full_lists: bool, tile_size: int) -> None:
    shape = TileShape(
        group=group, tile_size=tile_size, max_length=40, num_pages=50, head_dim=24, **ALL_FEATURES
    )
    check_paged(shape, range(10), full_lists)


@pytest.mark.matrix
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_tiles_with_all_that_a_spec_adds_equal_float64(dtype: torch.dtype) -> None:
    shape = TileShape(group=4, tile_size=16, max_length=30, num_pages=50, **ALL_FEATURES)
    check_gathered(shape, range(10), dtype, 1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("feature", FEATURES)
def test_leaving_out_what_a_spec_adds_would_be_noticed(feature: str) -> None:
    """The float64 results of the same random cases, with and without it,
    differ by far more than any tolerance."""
    shape = TileShape(group=3, tile_size=4, max_length=40, num_pages=50)
    differences = []
    for seed in range(8):
        plain, changed = random_case(seed, shape), random_case(seed, replace(shape, **FEATURES[feature]))
        assert torch.equal(plain.q, changed.q)
        differences.append(float((plain.expected - changed.expected).abs().max()))
    assert max(differences) > 0.1


@needs_compiler
def test_gathered_bfloat16_tiles_equal_float64_to_bfloat16() -> None:
    shape = TileShape(group=4, tile_size=16, max_length=30, num_pages=50)
    check_gathered(shape, range(6), torch.bfloat16, 1e-2)


@pytest.mark.matrix
@needs_compiler
@EVERY_WINDOW
@EVERY_GROUP
@pytest.mark.parametrize("tile_size", [1, 4])
def test_paged_tiles_equal_float64(group: int, window: int | None, tile_size: int) -> None:
    check_paged(
        TileShape(group=group, tile_size=tile_size, window=window, max_length=40, num_pages=50), range(20)
    )


@pytest.mark.matrix
@needs_compiler
@EVERY_WINDOW
@pytest.mark.parametrize("group", [1, 3])
def test_pages_may_all_be_listed_as_masked(group: int, window: int | None) -> None:
    shape = TileShape(group=group, tile_size=4, window=window, max_length=40, num_pages=50)
    check_paged(shape, range(10), full_lists=False)


@pytest.mark.matrix
@needs_compiler
@EVERY_WINDOW
@EVERY_GROUP
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_tiles_equal_float64(group: int, window: int | None, dtype: torch.dtype) -> None:
    shape = TileShape(group=group, tile_size=16, window=window, max_length=30, num_pages=50)
    check_gathered(shape, range(10), dtype, 1e-5 if dtype == torch.float32 else 1e-2)


@EVERY_WINDOW
@EVERY_GROUP
def test_the_sdpa_reference_equals_float64(group: int, window: int | None) -> None:
    shape = TileShape(group=group, tile_size=9, window=window, max_length=30, num_pages=60)
    for seed in range(4):
        case = random_case(seed, shape)
        for tile in range(shape.tiles - 1):
            positions = [p for p in case.bounds.high[tile].tolist() if p >= 0]
            length = positions[-1] + 1
            q = (
                case.q[tile]
                .view(shape.kv_heads, shape.tile_size, group, -1)
                .transpose(0, 1)[: len(positions)]
            )
            expected = case.expected[tile].view(shape.kv_heads, shape.tile_size, group, -1).transpose(0, 1)
            table = table_of(case, shape, tile, length)
            own = Bounds(*(None if x is None else x[tile, : len(positions)] for x in case.bounds))
            out = gathered_sdpa_attention(
                q, case.k_cache, case.v_cache, table, positions[0], bounds=own, scale=shape.head_dim**-0.5
            )
            assert out.shape == q.shape
            torch.testing.assert_close(out.double(), expected[: len(positions)], rtol=1e-5, atol=1e-5)


def table_of(case: AttentionCase, shape: TileShape, tile: int, length: int) -> Tensor:
    """The block table of a tile's request; pages outside the window stand for any finite page."""
    pages = [tile_pages[tile, 0, 0] for tile_pages in (case.lists.partial_blocks, case.lists.full_blocks)]  # type: ignore[index]
    counts = [int(count[tile]) for count in (case.lists.partial_count, case.lists.full_count)]  # type: ignore[index]
    listed = pages[0][: counts[0]].tolist() + pages[1][: counts[1]].tolist()
    first_positions = case.kv_position.view(shape.num_pages, shape.page_size)[:, 0]
    table = torch.full((-(-length // shape.page_size),), listed[0], dtype=torch.int32)
    for page in listed:
        table[int(first_positions[page]) // shape.page_size] = page
    return table


@pytest.mark.parametrize(("kv_heads", "group", "tile_size"), [(1, 1, 1), (2, 3, 4), (3, 7, 2)])
def test_unpacking_undoes_packing_in_any_order_of_tokens(kv_heads: int, group: int, tile_size: int) -> None:
    tokens = 11
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(tokens, kv_heads, group, 8, generator=generator)
    tiles = -(-tokens // tile_size) + 1
    order = torch.randperm(tiles * tile_size, generator=generator)[:tokens]
    tile_tokens = torch.zeros(tiles * tile_size, dtype=torch.int64)
    tile_tokens[order] = torch.arange(tokens)
    packed = pack_tiles(q, tile_tokens, tile_size)
    assert packed.shape == (tiles, kv_heads, tile_size * group, 8) and packed.is_contiguous()
    token, head, member = 5, kv_heads - 1, group - 1
    tile, row = divmod(int(order[token]), tile_size)
    assert torch.equal(packed[tile, head, row * group + member], q[token, head, member])
    assert torch.equal(unpack_tiles(packed, order, tile_size), q)
