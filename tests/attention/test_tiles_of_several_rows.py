"""Short prompt chunks behind one prefix share query tiles, and attend as each would alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels_triton_free.attention
from minivllm.attention import AttentionContext, AttentionRule, FlexAttention, SdpaAttention, StepRows
from minivllm.attention.gathered import GatheredTiles
from minivllm.attention.lists.key_groups import bundles_of, groups_of_step
from minivllm.attention.pairs import RowPairs
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
from minivllm.device.buffers import MirroredTable
from minivllm.specs.attention import Reach
from minivllm.specs.caches import LayerCache
from tests.attention.backends import (
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    SmallTiles,
    attend_to_listed_blocks,
    new_context,
    specs_of,
)
from tests.attention.random_batches import CPU, BatchShape

BLOCK_SIZE, TILE = 4, 8


class Tables(NamedTuple):
    """Block tables of made-up requests."""

    block_size: int
    block_table: MirroredTable
    kv_position: MirroredTable
    num_entered: int = 0


class Chunk(NamedTuple):
    """A chunk of a prompt that begins like those with the same ``family`` and ``shared``."""

    family: int
    shared: int
    """Blocks."""
    start: int
    """Tokens after the shared blocks that are computed already."""
    count: int


CHUNKS = st.lists(
    st.builds(Chunk, st.integers(0, 1), st.integers(0, 6), st.integers(0, 6), st.integers(1, 20)),
    min_size=1,
    max_size=7,
)


def made(chunks: list[Chunk]) -> tuple[Tables, int, StepRows]:
    """Tables in which the rows of a family share their first blocks, as long as both have them; the number of
    blocks; and the step."""
    starts = np.array([chunk.shared * BLOCK_SIZE + chunk.start for chunk in chunks])
    counts = np.array([chunk.count for chunk in chunks])
    width = int((starts + counts).max() - 1) // BLOCK_SIZE + 1
    numbers = iter(1 + np.random.default_rng(len(chunks)).permutation((2 + len(chunks)) * (width + 6)))
    prefixes = [[next(numbers) for _ in range(6)] for _ in range(2)]
    table = MirroredTable(len(chunks), width, CPU)
    for row, chunk in enumerate(chunks):
        blocks = [*prefixes[chunk.family][: chunk.shared], *(next(numbers) for _ in range(width))]
        table.host[row] = blocks[:width]
    num_blocks = int(table.host.max()) + 1
    rows = StepRows(np.arange(len(chunks)), starts, counts, 0, 0, int(counts.sum()))
    return Tables(BLOCK_SIZE, table, MirroredTable(num_blocks, BLOCK_SIZE, CPU)), num_blocks, rows


def context_of(
    tables: Tables, num_blocks: int, rows: StepRows, reach: Reach, **changes: object
) -> AttentionContext:
    shape = BatchShape(len(rows.slots), rows.num_padded, 64, BLOCK_SIZE, num_blocks)
    policy = SmallTiles(type="cpu", tile_size=TILE, together=2 * BLOCK_SIZE)
    return new_context(tables, shape, specs_of([reach]), policy=policy, **changes)


def inputs_of(num_blocks: int, rows: StepRows) -> tuple[LayerCache, Tensor]:
    generator = torch.Generator().manual_seed(num_blocks)
    shape = num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM
    k, v = (torch.randn(shape, generator=generator) for _ in range(2))
    return LayerCache(k, v), torch.randn(rows.num_padded, KV_HEADS, GROUP, HEAD_DIM, generator=generator)


@settings(max_examples=200)
@given(CHUNKS, st.sampled_from([Reach(), Reach(window=9)]))
def test_chunks_attend_as_each_would_alone(chunks: list[Chunk], reach: Reach) -> None:
    """Whatever they share; the judge gathers each request's blocks and attends without tiles."""
    tables, num_blocks, rows = made(chunks)
    context = context_of(tables, num_blocks, rows, reach)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(kernels_triton_free.attention, "attend_to_blocks", attend_to_listed_blocks)
        tiles = GatheredTiles(context, AttentionRule(), "prompt attention", TILE, rows.num_padded)
        cache, q = inputs_of(num_blocks, rows)
        for _ in range(2):  # what the first call left in buffers does no harm
            out = tiles.attend(tiles.prepare(rows, 0, 2), cache, context.specs[0], q)
    judge = SdpaAttention(context)
    torch.testing.assert_close(
        out, judge.attend(judge.prepare(rows), cache, context.specs[0], q), rtol=1e-5, atol=1e-5
    )


def test_suffixes_of_one_prefix_fill_tiles_together() -> None:
    """A row is never cut for it, and rows that share less have tiles of their own."""
    tables, num_blocks, rows = made(
        [Chunk(0, 6, 0, 4)] * 5 + [Chunk(1, 6, 0, 4)] * 2 + [Chunk(0, 0, 0, 4)] * 2
    )
    tiles = GatheredTiles(
        context_of(tables, num_blocks, rows, Reach()), AttentionRule(), "prompt attention", TILE, 40
    )
    prepared = tiles.prepare(rows, 0, 2)
    assert prepared.num_tiles == 3 + 1 + 2
    lists = prepared.lists[Reach()]
    read = sorted((lists.full_count + lists.partial_count).flatten().tolist())
    assert read == [1, 1, 3 + 1, 3 + 2, 3 + 2, 3 + 2], "what is shared is read once for each tile"


@given(CHUNKS)
def test_bundles_fit_into_tiles_and_share_all_but_their_last_groups(chunks: list[Chunk]) -> None:
    tables, _, rows = made(chunks)
    ends = rows.starts + rows.counts
    groups = groups_of_step(
        tables.block_table.host, rows.starts, ends, [Reach()], 2, BLOCK_SIZE, by_position=False
    )
    bundles = bundles_of(groups, rows.counts, TILE)
    for bundle in set() if bundles is None else set(bundles.tolist()):
        members = np.flatnonzero(bundles == bundle)
        assert len(members) == 1 or rows.counts[members].sum() <= TILE
        shared = {tuple(groups.group_of[row, : groups.own[row]].tolist()) for row in members}
        assert len(shared) == 1 and (len(members) == 1 or next(iter(shared)))


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler here")
@torch.inference_mode()
def test_compiled_code_attends_as_each_chunk_would_alone() -> None:
    chunks = [Chunk(0, 6, number % 3, 3 + number % 2) for number in range(6)] + [Chunk(1, 3, 5, 19)]
    tables, num_blocks, rows = made(chunks)
    compiler = PackagedRegionCompiler()
    context = context_of(tables, num_blocks, rows, Reach(), compile_region=compiler)
    tiles = GatheredTiles(context, AttentionRule(), "prompt attention", TILE, rows.num_padded)
    compiler.build()
    cache, q = inputs_of(num_blocks, rows)
    prepared, judge = tiles.prepare(rows, 0, 2), SdpaAttention(context)
    assert prepared.num_tiles < 6 + 3
    torch.testing.assert_close(
        tiles.attend(prepared, cache, context.specs[0], q),
        judge.attend(judge.prepare(rows), cache, context.specs[0], q),
        rtol=1e-5,
        atol=1e-5,
    )


def parts_of(chunks: list[Chunk], **changes: object) -> list[type]:
    """What attends to chunks that are all of few tokens."""
    tables, num_blocks, rows = made(chunks)
    rows = rows._replace(num_few=len(chunks))
    context = context_of(tables, num_blocks, rows, Reach(), few_tokens=5, in_strips=True, **changes)
    return [type(part.kind) for part in FlexAttention(context).prepare(rows).parts]


def test_few_tokens_take_tiles_where_these_read_a_prefix_for_many_rows() -> None:
    """Rows of 4 tokens after 24: by tiles of 8 that is 8 x (24 + 8 + 8) products for two rows of one prefix, and
    2 x 8 x (24 + 8) for rows that share nothing; token by token 2 x 4 x 28, each of which counts 1.5 times."""
    assert parts_of([Chunk(0, 6, 0, 4)] * 2) == [GatheredTiles]
    assert parts_of([Chunk(0, 6, 0, 4), Chunk(1, 6, 0, 4)]) == [RowPairs]
    assert parts_of([Chunk(0, 6, 0, 2)] * 2) == [RowPairs], "2 x 2 x 26 of such products are fewer"
