"""Pairs of shared blocks are computed side by side: with the same result, bit for bit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import minivllm.attention.pairs
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.strips.attention import FAR, Pairs, attend_to_strips
from kernels_triton_free.strips.layout import strip_shapes
from kernels_triton_free.strips.visibility import Bounds
from minivllm.attention import AttentionRule, StepRows
from minivllm.attention.lists.bounds import bounds_of
from minivllm.attention.lists.pair_lists import HostPairs, list_pairs
from minivllm.attention.lists.shared_prefixes import Readers, block_by_block, find_shared
from minivllm.attention.pairs import RowPairs
from minivllm.batch.persistent_batch import PersistentBatch
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.messages import SchedulerOutput
from minivllm.specs.attention import Reach
from tests.attention.backends import new_context, specs_of
from tests.attention.random_batches import CPU, BatchShape, new_batch, new_request

BLOCK_SIZE = 32
SHAPE = BatchShape(max_num_seqs=8, max_model_len=64, block_size=8, num_blocks=60)


def tables_of(rows: int, prefix: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Block tables of rows, and the position of each: all but every fifth begin with the same ``prefix``
    blocks, half of which go on with two blocks more in common. Blocks lie anywhere."""
    rng = np.random.default_rng(seed)
    width = prefix + 5
    table = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    for row in range(rows):
        if row % 5:
            table[row, : prefix + 2 * (row % 2)] = table[row % 2 + 1, : prefix + 2 * (row % 2)]
            table[row, :prefix] = table[1, :prefix]
    return table, rng.integers((prefix + 2) * BLOCK_SIZE, width * BLOCK_SIZE, rows)


def listed(table: np.ndarray, positions: np.ndarray, shared: Readers | None) -> HostPairs:
    rows = np.arange(len(table))
    return list_pairs(table, rows, bounds_of(positions, Reach()), BLOCK_SIZE, len(table) + 1, shared)


def new_inputs(rows: int, blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = strip_shapes(BLOCK_SIZE, 3, 64, dtype)
    k, v = (torch.randn(blocks, *shape, generator=generator).to(dtype) for shape in shapes)
    return torch.randn(rows + 1, 3, 3, 64, generator=generator).to(dtype), k, v


def check_bitwise_equal(rows: int, prefix: int, dtype: torch.dtype, *, is_compiled: bool) -> None:
    table, positions = tables_of(rows, prefix, seed=rows)
    readers = block_by_block(find_shared(table, positions // BLOCK_SIZE))
    plain, ordered = listed(table, positions, None), listed(table, positions, readers)
    assert len(readers.row) >= prefix * 3 and not np.array_equal(plain.blocks, ordered.blocks)
    attend = partial(attend_to_strips, scale=0.125)
    if is_compiled:
        patch_inductor()
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True)
    q, k, v = new_inputs(rows, int(table.max()) + 1, dtype)
    bounds = Bounds(torch.from_numpy(np.append(positions, -1).astype(np.int32)))
    with torch.inference_mode():
        first, second = (
            attend(q, k, v, None, Pairs(*map(torch.from_numpy, pairs)), bounds) for pairs in (plain, ordered)
        )
    assert torch.equal(first, second)
    assert first[:-1].unique(dim=0).shape[0] == rows, "rows differ, so a mixed-up order would be seen"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "prefix"), [(8, 1), (8, 40), (13, 17), (32, 6)])
def test_the_order_of_pairs_changes_no_bit(rows: int, prefix: int, dtype: torch.dtype) -> None:
    check_bitwise_equal(rows, prefix, dtype, is_compiled=False)


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "prefix"), [(8, 320), (32, 32)])
def test_the_order_of_pairs_changes_no_bit_of_compiled_loops(
    rows: int, prefix: int, dtype: torch.dtype
) -> None:
    check_bitwise_equal(rows, prefix, dtype, is_compiled=True)


def test_pairs_of_a_shared_block_stand_side_by_side_and_before_all_others() -> None:
    table, positions = tables_of(13, 17, seed=0)
    readers = block_by_block(find_shared(table, positions // BLOCK_SIZE))
    pairs = listed(table, positions, readers)
    first, rest = pairs.blocks[: len(readers.row)], pairs.blocks[len(readers.row) : -1]
    assert (np.diff(first) != 0).sum() + 1 == len(np.unique(first)) < len(first)
    assert not np.isin(first, rest).any() and len(np.unique(rest)) == len(rest)
    assert pairs.first[-1] == FAR, "the pair in which nothing is seen stays the last one"


def test_pairs_that_a_row_does_not_read_yet_are_left_out() -> None:
    """Whatever was found, only blocks up to the query are read."""
    table, positions = tables_of(8, 4, seed=0)
    readers = block_by_block(find_shared(table, positions // BLOCK_SIZE))
    pairs = listed(table, np.full(8, 2 * BLOCK_SIZE), readers)
    assert sorted(zip(pairs.row[:-1].tolist(), pairs.first[:-1].tolist())) == [
        (row, place * BLOCK_SIZE) for row in range(8) for place in range(3)
    ]


# -- over the steps of a batch -----------------------------------------------------------------------


class Steps:
    """A batch of requests with two blocks of 8 tokens in common, and a backend that counts how often it looks for
    shared blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, window: int | None = None) -> None:
        self.batch: PersistentBatch = new_batch(SHAPE)
        self.num_searches = 0
        self.pairs = RowPairs(
            new_context(self.batch.groups[0], SHAPE, specs_of([Reach(window)])), AttentionRule()
        )
        self.listed: list[HostPairs] = []

        def search(table: np.ndarray, counts: np.ndarray) -> object:
            self.num_searches += 1
            return find_shared(table, counts)

        def record(*args: object) -> HostPairs:
            self.listed.append(list_pairs(*args))  # type: ignore[arg-type]
            return self.listed[-1]

        monkeypatch.setattr(minivllm.attention.pairs, "find_shared", search)
        monkeypatch.setattr(minivllm.attention.pairs, "list_pairs", record)

    def enter(self, name: str, blocks: list[int], computed: int = 16) -> None:
        new = new_request(name, [0] * (computed + 1), blocks, computed)
        self.batch.apply(SchedulerOutput(new_requests=[new]))

    def step(self, count: int = 1) -> list[int]:
        """A step of so many tokens a request; the blocks of its pairs."""
        requests = list(self.batch.requests.values())
        slots = np.array([request.slot for request in requests])
        starts = np.array([request.num_computed_tokens for request in requests])
        single, tokens = (len(slots), 0) if count == 1 else (0, count * len(slots))
        self.pairs.prepare(
            StepRows(slots, starts, np.full_like(starts, count), single, len(slots) - single, tokens), 0, 2
        )
        for request in requests:
            request.num_computed_tokens += count
        return self.listed[-1].blocks.tolist()


def test_shared_blocks_are_looked_for_once_a_change_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    for row in range(3):
        steps.enter(f"r{row}", [1, 2, 10 + row, 20 + row])
    for _ in range(10):
        assert steps.step()[:6] == [1, 1, 1, 2, 2, 2]
    assert steps.num_searches == 1
    steps.batch.apply(SchedulerOutput(preempted_request_ids=["r1"]))
    del steps.batch.requests["r1"]
    for _ in range(2):
        assert steps.step()[:4] == [1, 1, 2, 2]
    assert steps.num_searches == 2
    steps.enter("r3", [30, 31, 32])  # in the slot that became free
    steps.step()
    assert steps.num_searches == 3
    steps.batch.apply(SchedulerOutput(finished_request_ids=["r3"]))
    steps.enter("r4", [1, 2, 33])
    assert steps.step()[:6] == [1, 1, 1, 2, 2, 2], "the same slots, with another request in one of them"
    assert steps.num_searches == 4


def test_queries_of_drafts_read_the_blocks_of_their_request_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    for row in range(2):
        steps.enter(f"r{row}", [1, 2, 10 + row, 20 + row])
    assert steps.step(count=3)[:12] == [1] * 6 + [2] * 6
    assert steps.step()[:4] == [1, 1, 2, 2] and steps.num_searches == 1


def test_blocks_before_a_window_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, window=12)
    for row in range(3):
        steps.enter(f"r{row}", [1, 2, 10 + row])
    assert steps.step() == [1, 2, 10, 1, 2, 11, 1, 2, 12] and steps.num_searches == 0
