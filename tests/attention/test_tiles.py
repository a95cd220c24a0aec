"""Step inputs against a reference that walks token by token, and lists of blocks evaluated by brute force."""

from __future__ import annotations

import doctest
import random
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_triton_free.attention import TileLists, pack_tiles, unpack_tiles
from minivllm.attention import FlexAttention
from minivllm.attention.flex import FlexMetadata
from minivllm.attention.lists import bounds as interval_bounds
from minivllm.attention.lists import key_groups, pair_lists, shared_prefixes, tile_lists
from minivllm.attention.tiles import Tiles
from minivllm.batch.persistent_batch import PersistentBatch
from minivllm.batch.step_inputs import Row, StepInputBuilder, StepInputs
from minivllm.messages import SchedulerOutput
from minivllm.specs.attention import Reach
from tests.attention.backends import SmallTiles, new_context, specs_of
from tests.attention.random_batches import (
    CPU,
    BatchShape,
    block_ids,
    finish_all,
    new_batch,
    new_request,
    random_rows,
)

pytestmark = pytest.mark.smoke

SHAPE = BatchShape()
REACHES = [
    *(Reach(window) for window in (None, 1, 5, 8, 20, 100)),
    *(Reach(chunk=chunk) for chunk in (1, 8, 11, 63)),
    *(Reach(window, 16) for window in (7, 16, 17)),
    *(Reach(window, chunk, has_sinks=True) for window, chunk in ((None, None), (9, None), (None, 12))),
    *(Reach(window, looks_ahead=True) for window in (None, 1, 6, 20)),
]
VERIFY_SIZE = 4


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiles are dealt to the threads of a CPU; with one of them they lie in the order of the rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Steps:
    """A step builder and the backend that lists blocks for it, with the choices for a CPU or for a GPU."""

    def __init__(
        self,
        batch: PersistentBatch,
        shape: BatchShape,
        tile_size: int,
        device_type: str,
        keys_together: int = 1,
    ) -> None:
        tokens = shape.max_num_batched_tokens
        self._builder = StepInputBuilder(
            batch, max_num_batched_tokens=tokens, few_tokens=VERIFY_SIZE, device=CPU
        )
        policy = SmallTiles(type=device_type, tile_size=tile_size, together=keys_together)
        context = new_context(
            batch.groups[0], shape, specs_of(REACHES), policy=policy, few_tokens=VERIFY_SIZE
        )
        self.backend = FlexAttention(context)

    def build(self, rows: list[Row]) -> StepInputs:
        return self._builder.build(rows, 2, self.backend.prepare)


def check_tokens(inputs: StepInputs, rows: list[Row], batch: PersistentBatch) -> None:
    """Token ids, positions and cache slots, one token after the other."""
    token_ids, positions, slots = [], [], []
    for row in rows:
        data = row.request.data
        for position in range(row.start, row.start + row.count):
            token_ids.append(data.prompt_token_ids[position])
            positions.append(position)
            block = int(
                batch.groups[0].block_table.host[row.request.slot, position // batch.groups[0].block_size]
            )
            slots.append(block * batch.groups[0].block_size + position % batch.groups[0].block_size)
    padding = max(2, len(positions)) - len(positions)
    assert inputs.num_tokens == len(positions)
    assert inputs.token_ids.tolist()[: len(positions)] == token_ids
    assert len(inputs.token_ids) == len(positions) + padding
    assert inputs.tokens.positions.tolist() == positions + [0] * padding
    assert inputs.slots[0].tolist() == slots + [0] * padding, "padding is written to the null block"


def check_tile(
    table: list[int],
    row: Row,
    queries: list[int],
    reach: Reach,
    partial: list[int],
    full: list[int],
    physical_blocks: list[int],
    keys: np.ndarray,
    bounds: list[tuple[int, int]],
    block_size: int,
    together: int,
) -> None:
    """The mask over the listed blocks must leave each query exactly the positions it may see,
    each of them once.

    table: blocks of the request. partial, full: listed places, of ``together`` blocks each, physical_blocks
    the blocks there. keys: what the bounds of each query are compared with, by slot.
    """

    def visible(query: int) -> range:
        begin = 0 if reach.window is None else max(0, query - reach.window + 1)
        ends = [end for first, end in row.runs if reach.looks_ahead and first <= query < end]
        first = begin if reach.chunk is None else max(begin, query // reach.chunk * reach.chunk)
        return range(first, *(ends or [query + 1]))

    assert (0 in partial) == reach.has_sinks and 0 not in full, "the null block stands for sinks"

    def blocks_of(places: list[int]) -> list[int]:
        every = [place * together + number for place in places for number in range(together)]
        return [place for place in every if physical_blocks[place] != 0]

    partial, full = blocks_of(partial), blocks_of(full)
    listed = [physical_blocks[place] for place in partial + full]
    groups = {position // (block_size * together) for query in queries for position in visible(query)}
    needed = {block for group in groups for block in table[group * together : (group + 1) * together]}
    assert len(listed) == len(set(listed)), "each block once"
    assert needed >= set(listed) if together > 1 else needed == set(listed), "the blocks that some query sees"
    for query, (low, high) in zip(queries, bounds, strict=True):
        seen = []
        for place in full:
            seen += [physical_blocks[place] * block_size + offset for offset in range(block_size)]
        for place in partial:
            for offset in range(block_size):
                if low <= keys[place * block_size + offset] <= high:
                    seen.append(physical_blocks[place] * block_size + offset)
        expected = [table[p // block_size] * block_size + p % block_size for p in visible(query)]
        assert sorted(seen) == sorted(expected)


def listed(lists: TileLists, tile: int) -> tuple[list[int], list[int]]:
    partial = lists.partial_blocks[tile, 0, 0, : int(lists.partial_count[tile, 0, 0])].tolist()
    if lists.full_count is None or lists.full_blocks is None:
        return partial, []
    return partial, lists.full_blocks[tile, 0, 0, : int(lists.full_count[tile, 0, 0])].tolist()


def check_tiles(
    steps: Steps, inputs: StepInputs, rows: list[Row], shape: BatchShape, batch: PersistentBatch
) -> None:
    """Rows with one token, with few, and with several have their tiles in this order,
    with exactly their blocks."""
    several = max(1, VERIFY_SIZE)
    kinds = [
        [row for row in rows if row.count == 1],
        [row for row in rows if 1 < row.count <= VERIFY_SIZE and not row.runs],
        [row for row in rows if row.count > several or (row.count > 1 and row.runs)],
    ]
    assert inputs.rows == [row for kind in kinds for row in kind]
    metadata: FlexMetadata = inputs.attention
    assert metadata.num_tokens == inputs.num_tokens
    parts, token = iter(metadata.parts), 0
    for kind, kind_rows in zip((steps.backend._single, steps.backend._few, steps.backend._several), kinds):
        if not kind_rows:
            continue
        part = next(parts)
        end = token + sum(row.count for row in kind_rows)
        assert (part.kind, part.begin, part.end) == (kind, token, end)
        token = end
        check_part(part.tiles, part.kind.size, kind_rows, shape, batch)
        if part.kind.size == 1:
            least = max(2, len(kind_rows))
            assert part.tiles.num_tiles == next(
                (n for n in steps.backend.decode_batches if n >= least), least
            )
    assert next(parts, None) is None


def check_part(tiles: Tiles, size: int, rows: list[Row], shape: BatchShape, batch: PersistentBatch) -> None:
    spans = [
        (row, list(range(start, min(start + size, row.start + row.count))))
        for row in rows
        for start in range(row.start, row.start + row.count, size)
    ]
    together = 1 if tiles.step_blocks is None else tiles.step_blocks.shape[1]
    physical = (
        list(range(shape.num_blocks)) if tiles.step_blocks is None else tiles.step_blocks.flatten().tolist()
    )
    slots = np.arange(len(physical) * shape.block_size)
    assert tiles.num_tiles >= max(2, len(spans))
    assert (tiles.kv_position is None) == (tiles.step_blocks is not None)
    keys = slots if tiles.kv_position is None else tiles.kv_position.numpy()
    for reach in REACHES:
        lows, highs = tiles.bounds[reach].low, tiles.bounds[reach].high
        assert lows is not None, "one kernel serves layers that are limited and layers that are not"
        for tile, (row, queries) in enumerate(spans):
            bounds = list(zip(lows[tile].tolist(), highs[tile].tolist()))
            assert bounds[len(queries) :] == [(0, -1)] * (size - len(queries))
            lists = listed(tiles.lists[reach], tile)
            check_tile(
                block_ids(batch, row.request),
                row,
                queries,
                reach,
                *lists,
                physical,
                keys,
                bounds[: len(queries)],
                shape.block_size,
                together,
            )
        for tile in range(len(spans), tiles.num_tiles):
            assert listed(tiles.lists[reach], tile) == ([], [])
            assert set(highs[tile].tolist()) == {-1} and set(lows[tile].tolist()) == {0}


def check_packing(inputs: StepInputs) -> None:
    """Tokens packed into tiles come back in order; a tile's queries are consecutive tokens."""
    tokens = torch.arange(inputs.num_tokens, dtype=torch.float32)[:, None, None, None]
    q = tokens + torch.tensor([0.0, 0.25, 0.5])[:, None] + torch.tensor([0.0, 0.125])[:, None, None]
    q = q.expand(inputs.num_tokens, 2, 3, 4).contiguous()
    for kind, begin, end, tiles in inputs.attention.parts:
        if tiles.tile_tokens is None or tiles.token_places is None:
            continue
        packed = pack_tiles(q, tiles.tile_tokens, kind.size)
        assert packed.is_contiguous() and packed.shape[1:] == (2, kind.size * 3, 4)
        assert torch.equal(packed, pack_tiles(q, tiles.tile_tokens, kind.size, tiles.to_tiles))
        for places in (None, tiles.to_tokens):
            assert torch.equal(unpack_tiles(packed, tiles.token_places, kind.size, places), q[begin:end])


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), tile_size=st.sampled_from([2, 4, 7, 32]), together=st.integers(1, 3))
def test_step_inputs_equal_a_walk_over_every_token_and_block(
    seed: int, tile_size: int, together: int, device_type: str
) -> None:
    rng = random.Random(seed)
    shape = BatchShape(block_size=rng.choice([2, 8, 16]), num_blocks=rng.choice([33, 60]))
    batch = new_batch(shape)
    rows = random_rows(rng, shape, batch)
    if not rows:
        return
    steps = Steps(batch, shape, tile_size, device_type, together * shape.block_size)
    inputs = steps.build(rows)
    check_tokens(inputs, inputs.rows, batch)
    check_tiles(steps, inputs, rows, shape, batch)
    check_packing(inputs)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_an_earlier_step_left_in_the_buffers_does_not_show(device_type: str) -> None:
    rng = random.Random(0)
    batch = new_batch(SHAPE)
    steps = Steps(batch, SHAPE, 4, device_type)
    for _ in range(30):
        rows = random_rows(rng, SHAPE, batch)
        inputs = steps.build(rows)
        check_tokens(inputs, inputs.rows, batch)
        check_tiles(steps, inputs, rows, SHAPE, batch)
        check_packing(inputs)
        finish_all(batch)


def test_the_largest_step_fits_the_buffers() -> None:
    shape = BatchShape(max_num_seqs=6, max_num_batched_tokens=48, block_size=8)
    batch = new_batch(shape)
    steps = Steps(batch, shape, 4, "cpu")
    rng = random.Random(1)
    while len(rows := random_rows(rng, shape, batch)) < 6:
        finish_all(batch)
    # Six chunks whose tiles are all cut short: the most tiles that 48 tokens can make.
    chunks = [Row(row.request, 0, 9 if index < 4 else 6) for index, row in enumerate(rows)]
    assert sum(row.count for row in chunks) == 48
    inputs = steps.build(chunks)
    assert inputs.num_tokens == 48
    [part] = inputs.attention.parts
    assert part.kind is steps.backend._several and part.tiles.num_tiles == 4 * 3 + 2 * 2


def test_a_single_token_is_padded_to_two_rows_that_touch_only_the_null_block() -> None:
    shape = BatchShape(max_num_seqs=1, max_num_batched_tokens=1)
    batch = new_batch(shape)
    rows = random_rows(random.Random(3), shape, batch)
    steps = Steps(batch, shape, 4, "cpu")
    inputs = steps.build(rows)
    assert inputs.num_tokens == 1 and len(inputs.token_ids) == 2
    check_tokens(inputs, rows, batch)
    check_tiles(steps, inputs, rows, shape, batch)


def test_made_up_requests_in_the_null_block_write_its_first_slot_only() -> None:
    """Its last one stands for attention sinks, and V must stay zero there."""
    batch = new_batch(SHAPE)
    batch.apply(SchedulerOutput(new_requests=[new_request("made up", [0] * 20, [0, 0, 0], 0)]))
    builder = StepInputBuilder(batch, max_num_batched_tokens=SHAPE.max_num_batched_tokens, device=CPU)
    inputs = builder.build([Row(batch.requests["made up"], 0, 20)], 24, lambda rows: None)
    assert inputs.slots[0].tolist() == [0] * 24 and inputs.tokens.positions.tolist()[:20] == list(range(20))


@pytest.mark.parametrize(
    "module",
    [interval_bounds, tile_lists, key_groups, shared_prefixes, pair_lists],
    ids=lambda module: module.__name__,
)
def test_the_examples_of_the_lists_are_what_they_are(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted >= 4 and found.failed == 0


def test_a_row_that_ends_inside_a_run_that_sees_itself_is_refused() -> None:
    batch = new_batch(SHAPE)
    [row, *_] = random_rows(random.Random(1), SHAPE, batch)
    builder = StepInputBuilder(batch, max_num_batched_tokens=SHAPE.max_num_batched_tokens, device=CPU)
    sentence = (
        "Positions 2 to 8 see themselves, but a row of this step ends with position 7. Compute all of them "
        "in one step."
    )
    with pytest.raises(ValueError, match=sentence):
        builder.build([Row(row.request, 0, 8, runs=[(2, 9)])], 2, lambda rows: None)
    builder.build([Row(row.request, 0, 9, runs=[(2, 9)])], 2, lambda rows: None)


@given(work=st.lists(st.integers(0, 99), max_size=60), hands=st.integers(1, 9))
def test_dealt_work_is_spread_evenly(work: list[int], hands: int) -> None:
    """Runs of equal length differ by no more than the greatest piece of work; each piece is there once."""
    work = work[: len(work) // hands * hands]
    order = tile_lists.dealt(np.array(work, dtype=np.int64), hands)
    assert sorted(order) == list(range(len(work)))
    if hands > 1 and work:
        runs = np.array(work)[order].reshape(hands, -1).sum(1)
        assert runs.max() - runs.min() <= max(work)
