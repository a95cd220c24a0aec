"""Step inputs against a reference that walks token by token, and page lists evaluated by brute force."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_batches import CPU, BatchShape, finish_all, new_batch, random_rows

from kernels_triton_free.attention import TileLists, pack_tiles, unpack_tiles
from minivllm.worker.persistent_batch import PersistentBatch
from minivllm.worker.step_inputs import Row, StepInputBuilder, StepInputs

SHAPE = BatchShape()
WINDOWS: list[int | None] = [None, 1, 5, 8, 20, 100]


def new_builder(batch: PersistentBatch, shape: BatchShape, tile_size: int, gathers_pages: bool) -> StepInputBuilder:
    return StepInputBuilder(
        batch,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        num_pages=shape.num_pages,
        tile_size=tile_size,
        windows=WINDOWS,
        gathers_pages=gathers_pages,
        device=CPU,
    )


def check_tokens(inputs: StepInputs, rows: list[Row], batch: PersistentBatch) -> None:
    """Token ids, positions and cache slots, one token after the other."""
    token_ids, positions, slots = [], [], []
    for row in rows:
        data = row.request.data
        for position in range(row.start, row.start + row.count):
            token_ids.append(data.prompt_token_ids[position])
            positions.append(position)
            page = data.block_ids[0][position // batch.page_size]
            slots.append(page * batch.page_size + position % batch.page_size)
    padding = max(2, len(positions)) - len(positions)
    assert inputs.num_tokens == len(positions)
    assert inputs.token_ids.tolist()[: len(positions)] == token_ids
    assert len(inputs.token_ids) == len(positions) + padding
    assert inputs.tokens.positions.tolist() == positions + [0] * padding
    assert inputs.tokens.slot_mapping.tolist() == slots + [0] * padding, "padding is written to the null page"


def check_tile(
    row: Row,
    queries: list[int],
    window: int | None,
    partial: list[int],
    full: list[int],
    physical_pages: list[int],
    kv_position: np.ndarray,
    page_size: int,
) -> None:
    """The mask over the listed pages must leave each query exactly the positions it may see, each of them once.

    partial, full: listed places; physical_pages: the page behind each place.
    """
    table = row.request.data.block_ids[0]

    def visible(query: int) -> range:
        return range(0 if window is None else max(0, query - window + 1), query + 1)

    listed = [physical_pages[place] for place in partial + full]
    needed = {table[position // page_size] for query in queries for position in visible(query)}
    assert len(listed) == len(set(listed)) and set(listed) == needed, "exactly the pages that some query sees"
    for query in queries:
        seen = []
        for place in full:
            seen += [physical_pages[place] * page_size + offset for offset in range(page_size)]
        for place in partial:
            for offset in range(page_size):
                key = kv_position[place * page_size + offset]
                if key <= query and (window is None or key > query - window):
                    seen.append(physical_pages[place] * page_size + offset)
        expected = [table[p // page_size] * page_size + p % page_size for p in visible(query)]
        assert sorted(seen) == sorted(expected)


def listed(lists: TileLists, tile: int) -> tuple[list[int], list[int]]:
    partial = lists.partial_pages[tile, 0, 0, : int(lists.partial_count[tile, 0, 0])].tolist()
    if lists.full_count is None or lists.full_pages is None:
        return partial, []
    return partial, lists.full_pages[tile, 0, 0, : int(lists.full_count[tile, 0, 0])].tolist()


def check_tiles(inputs: StepInputs, rows: list[Row], batch: PersistentBatch, shape: BatchShape) -> None:
    singles, several = [row for row in rows if row.count == 1], [row for row in rows if row.count > 1]
    assert (inputs.decode is not None) == bool(singles) and (inputs.prefill is not None) == bool(several)
    every_page = list(range(shape.num_pages))
    for window in WINDOWS:
        if inputs.decode is not None:
            decode = inputs.decode
            assert decode.rows == len(singles) and decode.padded == max(2, len(singles))
            for tile, row in enumerate(singles):
                assert decode.q_position[tile].tolist() == [row.start]
                lists = listed(decode.lists[window], tile)
                check_tile(row, [row.start], window, *lists, every_page, decode.kv_position.numpy(), shape.page_size)
            for tile in range(len(singles), decode.padded):
                assert listed(decode.lists[window], tile) == ([], []) and decode.q_position[tile].tolist() == [-1]
        if inputs.prefill is not None:
            prefill = inputs.prefill
            physical = every_page if prefill.step_pages is None else prefill.step_pages.tolist()
            tile = 0
            for row in several:
                for start in range(row.start, row.start + row.count, prefill.tile_size):
                    queries = list(range(start, min(start + prefill.tile_size, row.start + row.count)))
                    padding = [-1] * (prefill.tile_size - len(queries))
                    assert prefill.q_position[tile].tolist() == queries + padding
                    lists = listed(prefill.lists[window], tile)
                    check_tile(row, queries, window, *lists, physical, prefill.kv_position.numpy(), shape.page_size)
                    tile += 1
            assert len(prefill.lists[window].partial_count) == max(2, tile)
            for empty in range(tile, max(2, tile)):
                assert listed(prefill.lists[window], empty) == ([], [])


def check_packing(inputs: StepInputs) -> None:
    """Tokens packed into tiles come back in order; a tile's queries are consecutive tokens."""
    if inputs.prefill is None:
        return
    prefill = inputs.prefill
    tokens = torch.arange(inputs.num_tokens, dtype=torch.float32)[:, None, None, None]
    q = tokens + torch.tensor([0.0, 0.25, 0.5])[:, None] + torch.tensor([0.0, 0.125])[:, None, None]
    q = q.expand(inputs.num_tokens, 2, 3, 4).contiguous()
    packed = pack_tiles(q, prefill.tile_tokens, prefill.tile_size)
    assert packed.is_contiguous() and packed.shape[1:] == (2, prefill.tile_size * 3, 4)
    first = inputs.decode.rows if inputs.decode is not None else 0
    assert torch.equal(unpack_tiles(packed, prefill.token_places, prefill.tile_size), q[first:])


@pytest.mark.parametrize("gathers_pages", [True, False], ids=["copy of the step's pages", "pages in place"])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), tile_size=st.sampled_from([2, 4, 7, 32]))
def test_step_inputs_equal_a_walk_over_every_token_and_page(seed: int, tile_size: int, gathers_pages: bool) -> None:
    rng = random.Random(seed)
    shape = BatchShape(page_size=rng.choice([2, 8, 16]), num_pages=rng.choice([33, 60]))
    batch = new_batch(shape)
    rows = random_rows(rng, shape, batch)
    if not rows:
        return
    inputs = new_builder(batch, shape, tile_size, gathers_pages).build(rows)
    check_tokens(inputs, rows, batch)
    check_tiles(inputs, rows, batch, shape)
    check_packing(inputs)


@pytest.mark.parametrize("gathers_pages", [True, False])
def test_what_an_earlier_step_left_in_the_buffers_does_not_show(gathers_pages: bool) -> None:
    rng = random.Random(0)
    batch = new_batch(SHAPE)
    builder = new_builder(batch, SHAPE, 4, gathers_pages)
    for _ in range(30):
        rows = random_rows(rng, SHAPE, batch)
        inputs = builder.build(rows)
        check_tokens(inputs, rows, batch)
        check_tiles(inputs, rows, batch, SHAPE)
        check_packing(inputs)
        finish_all(batch)


def test_the_largest_step_fits_the_buffers() -> None:
    shape = BatchShape(max_num_seqs=6, max_num_batched_tokens=48, page_size=8)
    batch = new_batch(shape)
    builder = new_builder(batch, shape, 4, True)
    rng = random.Random(1)
    while len(rows := random_rows(rng, shape, batch)) < 6:
        finish_all(batch)
    # Six chunks whose tiles are all cut short: the most tiles that 48 tokens can make.
    chunks = [Row(row.request, 0, 9 if index < 4 else 6) for index, row in enumerate(rows)]
    assert sum(row.count for row in chunks) == 48
    inputs = builder.build(chunks)
    assert inputs.num_tokens == 48 and inputs.prefill is not None
    assert len(inputs.prefill.lists[None].partial_count) == 4 * 3 + 2 * 2


def test_a_single_token_is_padded_to_two_rows_that_touch_only_the_null_page() -> None:
    shape = BatchShape(max_num_seqs=1, max_num_batched_tokens=1)
    batch = new_batch(shape)
    rows = random_rows(random.Random(3), shape, batch)
    inputs = new_builder(batch, shape, 4, True).build(rows)
    assert inputs.num_tokens == 1 and len(inputs.token_ids) == 2
    check_tokens(inputs, rows, batch)
    check_tiles(inputs, rows, batch, shape)
