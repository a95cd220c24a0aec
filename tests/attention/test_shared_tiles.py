"""Rows that read a prefix together, with the choices of a GPU: judged by brute force, and by whole engines."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels_triton_free.attention
import minivllm.attention.shared_tiles
import minivllm.attention.tiles
from kernels_triton_free.attention import Readers, TileLists, shared_flex_attention
from kernels_triton_free.strips.visibility import Bounds
from minivllm import LLM, SamplingParams
from minivllm.attention import AttentionContext, FlexAttention, SdpaAttention, StepRows
from minivllm.attention.costs import sharing
from minivllm.attention.costs.model import Cost
from minivllm.attention.shared_tiles import SharedFlexAttention, SharedMetadata, shared_attention
from minivllm.device.buffers import MirroredTable
from minivllm.device.policy import DevicePolicy
from minivllm.specs.attention import Reach
from minivllm.specs.caches import LayerCache
from tests.attention.backends import (
    CPU_POLICY,
    CUDA_POLICY,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    listed_attention,
    new_context,
    specs_of,
)
from tests.attention.random_batches import CPU, BatchShape
from tests.attention.test_tiles_of_several_rows import Tables
from tests.spec_decode.scripted_drafter import ScriptedDrafter, speculation_of
from tutorials.recorded_graphs import RecordedGraphs

BLOCK_SIZE, FEW = 4, 5
EVERYTHING = Reach()


class Always(SharedFlexAttention):
    """Shares whatever it can."""

    always = True


def always(context: AttentionContext) -> FlexAttention:
    """As ``shared_attention`` does, but also uncompiled, and whatever it costs."""
    return (FlexAttention if any(reach.is_limited for reach in context.reaches) else Always)(context)


class Row(NamedTuple):
    """A request: its blocks, and the tokens that it computes at the end of them."""

    blocks: list[int]
    start: int
    count: int


@st.composite
def steps(draw: st.DrawFn) -> list[Row]:
    """Requests that go on from any beginning of an earlier one, or begin anew; of one to six tokens."""
    numbers = count(1)
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 14))):
        whole = [row.blocks[: row.start // BLOCK_SIZE] for row in rows]
        prefix = draw(st.sampled_from(whole)) if whole else []
        prefix = prefix[: draw(st.integers(0, len(prefix)))]
        start = len(prefix) * BLOCK_SIZE + draw(st.integers(0, 11))
        tokens = draw(st.sampled_from([1, 1, 1, 2, 3, 6]))
        needed = -(-(start + tokens) // BLOCK_SIZE)
        rows.append(Row([*prefix, *(next(numbers) for _ in range(needed - len(prefix)))], start, tokens))
    return sorted(rows, key=lambda row: (row.count > 1, row.count > FEW))


def made(
    rows: list[Row], block_size: int = BLOCK_SIZE, device: torch.device = CPU
) -> tuple[Tables, int, StepRows]:
    """Block tables of the rows, the number of blocks, and the step."""
    width = max(len(row.blocks) for row in rows)
    num_blocks = 1 + max(max(row.blocks) for row in rows)
    table, position = MirroredTable(len(rows), width, device), MirroredTable(num_blocks, block_size, device)
    for slot, row in enumerate(rows):
        table.write(slot, 0, row.blocks)
        for index, block in enumerate(row.blocks):
            position.write(block, 0, index * block_size + np.arange(block_size))
    for mirrored in (table, position):
        mirrored.flush()
    starts, counts = (np.array([getattr(row, name) for row in rows]) for name in ("start", "count"))
    single, few = int((counts == 1).sum()), int(((counts > 1) & (counts <= FEW)).sum())
    step = StepRows(np.arange(len(rows)), starts, counts, single, few, int(counts.sum()))
    return Tables(block_size, table, position), num_blocks, step


def context_of(
    tables: Tables, num_blocks: int, step: StepRows, reach: Reach = EVERYTHING, **changes: Any
) -> AttentionContext:
    shape = BatchShape(len(step.slots), step.num_padded, 64, BLOCK_SIZE, num_blocks)
    return new_context(
        tables, shape, specs_of([reach]), **{"policy": CUDA_POLICY, "few_tokens": FEW} | changes
    )


def inputs_of(num_blocks: int, tokens: int) -> tuple[LayerCache, Tensor]:
    generator = torch.Generator().manual_seed(num_blocks)
    k, v = (torch.randn(num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    return LayerCache(k, v), torch.randn(tokens, KV_HEADS, GROUP, HEAD_DIM, generator=generator)


def brute_force(rows: list[Row], cache: LayerCache, q: Tensor) -> Tensor:
    """Token by token and head by head, in float64."""
    found = torch.zeros_like(q, dtype=torch.float64)
    token = 0
    for row in rows:
        k, v = (x[row.blocks].double().flatten(0, 1) for x in cache[:2])
        for position in range(row.start, row.start + row.count):
            for head in range(q.shape[1]):
                scores = q[token, head].double() @ k[: position + 1, head].T / math.sqrt(q.shape[-1])
                found[token, head] = scores.softmax(-1) @ v[: position + 1, head]
            token += 1
    return found


def listed_shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: TileLists,
    bounds: Bounds,
    kv_position: Tensor,
    readers: Readers,
    sinks: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Query by query, each of which lists the blocks of its tile that it reads."""
    assert sinks is None and lists.full_count is None and lists.full_blocks is None
    tiles, size = len(q), bounds.high.shape[1]
    out = torch.empty_like(q).unflatten(2, (size, -1))
    for tile in range(tiles):
        listed = lists.partial_blocks[tile, 0, 0, : int(lists.partial_count[tile])]
        assert len(listed.unique()) == len(listed), "a block that is listed twice counts twice"
        for query in range(size):
            place = tile * size + query
            own = listed[(readers.first[listed] <= place) & (place < readers.last[listed])]
            width = max(1, len(own))
            blocks = torch.zeros(1, 1, 1, width, dtype=torch.int32)
            blocks[0, 0, 0, : len(own)] = own
            number = torch.full((1, 1, 1), len(own), dtype=torch.int32)
            one = TileLists(number, blocks, None, None)
            high = Bounds(bounds.high[tile : tile + 1, query : query + 1])
            heads = q[tile : tile + 1].unflatten(2, (size, -1))[:, :, query]
            out[tile, :, query] = listed_attention(heads, k, v, one, high, kv_position, **options)[0]
    return out.flatten(2, 3)


def have_listed(patches: pytest.MonkeyPatch) -> None:
    """Tiles of one row attend by their lists: uncompiled FlexAttention asks the mask alone, which shows it
    the blocks of other rows too."""
    for module in (kernels_triton_free.attention, minivllm.attention.tiles):
        patches.setattr(module, "paged_flex_attention", listed_attention)


@pytest.fixture
def as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    have_listed(monkeypatch)


def check(rows: list[Row], kind: type[FlexAttention] = Always) -> SharedMetadata | None:
    """Compares a step with brute force; what was prepared, if rows are read together."""
    tables, num_blocks, step = made(rows)
    attention = kind(context_of(tables, num_blocks, step))
    cache, q = inputs_of(num_blocks, step.num_padded)
    for _ in range(2):  # what the first call left in buffers does no harm
        metadata = attention.prepare(step)
        out = attention.attend(metadata, cache, specs_of([Reach()])[0], q)
    torch.testing.assert_close(out.double(), brute_force(rows, cache, q), rtol=1e-5, atol=1e-5)
    return metadata if isinstance(metadata, SharedMetadata) else None


@settings(max_examples=40)
@given(steps(), st.booleans())
def test_rows_of_any_tree_attend_as_each_would_alone(rows: list[Row], by_lists: bool) -> None:
    """By the mask of real, uncompiled FlexAttention, which sees all blocks of the cache, and by the lists."""
    with pytest.MonkeyPatch.context() as patches:
        have_listed(patches)
        shared = listed_shared_attention if by_lists else shared_flex_attention
        patches.setattr(minivllm.attention.shared_tiles, "shared_flex_attention", shared)
        metadata = check(rows)
    heads = [row.blocks[0] for row in rows if row.count <= FEW and row.start >= BLOCK_SIZE]
    assert (metadata is not None) == (len(set(heads)) < len(heads))


def family(first: int, private: list[int], shared: int, start: int = 2, tokens: int = 1) -> list[Row]:
    """Rows that share so many blocks from number ``first`` on, and each a private one."""
    prefix = list(range(first, first + shared))
    return [Row([*prefix, own], shared * BLOCK_SIZE + start, tokens) for own in private]


def test_two_groups_and_a_row_that_shares_nothing(as_listed: None) -> None:
    rows = [*family(1, [20, 21, 22], 6), *family(8, [23, 24], 3), Row([30, 31], 5, 1)]
    metadata = check([rows[index] for index in (3, 0, 5, 1, 4, 2)])
    assert metadata is not None
    assert sorted(metadata.tokens.tolist()) == [0, 1, 3, 4, 5]
    counts = metadata.tiles.lists[Reach()].partial_count.flatten().tolist()
    assert sorted(counts, reverse=True) == [6 + 3, 3 + 2]
    plain = metadata.plain.parts[0].tiles.lists[Reach()].partial_count.flatten().tolist()
    assert plain == [0, 0, 2, 0, 0, 0], "rows that are read together are not read once more"


def test_a_tree_of_three_levels_reads_each_block_once(as_listed: None) -> None:
    tables = [[1, 2, 3, 10], [1, 2, 4, 11], [1, 5, 12], [1, 2, 3, 13], [1, 5, 14]]
    metadata = check([Row(blocks, len(blocks) * BLOCK_SIZE - 2, 1) for blocks in tables])
    assert metadata is not None
    counts = metadata.tiles.lists[Reach()].partial_count.flatten().tolist()
    assert counts[0] == len({block for blocks in tables for block in blocks}) and not any(counts[1:])


def test_drafts_are_read_with_the_other_rows(as_listed: None) -> None:
    rows = [*family(1, [20, 21], 4), *family(1, [22, 23], 4, start=0, tokens=4), Row([30], 0, 3)]
    metadata = check(rows)
    assert metadata is not None and sorted(metadata.tokens.tolist()) == list(range(10))


def test_more_rows_than_tiles_hold_leave_some_to_themselves(as_listed: None) -> None:
    most = sharing.MOST_TILES * (64 // GROUP)
    rows = family(1, list(range(10, 10 + most + 7)), 2)
    metadata = check(rows)
    assert metadata is not None and len(metadata.tokens) == most
    metadata = check(family(1, list(range(10, 10 + most // 2)), 2, start=0, tokens=4))
    assert metadata is not None and len(metadata.tokens) == most, "by tokens, not by rows"


@pytest.mark.parametrize(("most", "together"), [(8, 15), (5, 10), (4, 0), (2, 0)])
def test_drafts_that_tiles_have_no_room_for_are_read_row_by_row(
    as_listed: None, monkeypatch: pytest.MonkeyPatch, most: int, together: int
) -> None:
    """Tiles of two queries, and four rows of five tokens."""
    monkeypatch.setattr(minivllm.attention.shared_tiles, "TILE_ROWS", 2 * GROUP)
    monkeypatch.setattr(sharing, "MOST_TILES", most)
    prefix = [1, 2, 3]
    rows = [Row([*prefix, own, own + 1], 3 * BLOCK_SIZE + 2, 5) for own in (20, 22, 24, 26)]
    metadata = check(rows)
    assert (0 if metadata is None else len(metadata.tokens)) == together


def test_sinks_join_the_softmax_of_rows_that_are_read_together(as_listed: None) -> None:
    """The null block stands for them in every tile; the judge has it nowhere."""
    rows = [*family(1, [20, 21, 22], 6), Row([30, 31], 5, 1)]
    tables, num_blocks, step = made(rows)
    context = context_of(tables, num_blocks, step, Reach(has_sinks=True))
    attention, judge, spec = Always(context), SdpaAttention(context), context.specs[0]
    cache, q = inputs_of(num_blocks, step.num_padded)
    cache.v[0, -1] = 0
    sinks = torch.linspace(-1, 3, KV_HEADS * GROUP)
    metadata = attention.prepare(step)
    assert isinstance(metadata, SharedMetadata)
    torch.testing.assert_close(
        attention.attend(metadata, cache, spec, q, sinks),
        judge.attend(judge.prepare(step), cache, spec, q, sinks),
        rtol=1e-5,
        atol=1e-5,
    )


def test_equal_blocks_after_different_ones_are_read_row_by_row(as_listed: None) -> None:
    """The numbers of a block name one run of queries."""
    assert (
        check([Row([1, 3, 10], 9, 1), Row([2, 3, 11], 9, 1), Row([1, 4, 12], 9, 1), Row([2, 5, 13], 9, 1)])
        is None
    )


def test_a_member_that_leaves_from_the_middle_and_one_that_comes(as_listed: None) -> None:
    """Slots are those of the batch: the choice is made again when they change, and only then."""
    rows = family(1, [20, 21, 22, 23], 5)
    tables, num_blocks, step = made(rows)
    attention = Always(context_of(tables, num_blocks, step))
    cache, q = inputs_of(num_blocks, step.num_padded)

    def attend(kept: list[int]) -> int:
        part = step._replace(
            slots=step.slots[kept],
            starts=step.starts[kept],
            counts=step.counts[kept],
            num_single=len(kept),
            num_padded=len(kept),
        )
        metadata = attention.prepare(part)
        out = attention.attend(metadata, cache, specs_of([Reach()])[0], q[kept])
        expected = brute_force([rows[index] for index in kept], cache, q[kept])
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
        assert attention.shares_prefixes(part) == isinstance(metadata, SharedMetadata)
        return len(metadata.tokens) if isinstance(metadata, SharedMetadata) else 0

    assert attend([0, 1, 2, 3]) == 4
    assert attend([0, 2, 3]) == 3, "a member was preempted"
    assert attend([2]) == 0
    assert attend([3, 1]) == 2


def test_groups_are_read_together_where_that_should_take_less_time_and_not_given_up_for_little() -> None:
    tables, num_blocks, step = made(family(1, [20, 21, 22], 6))

    attention = SharedFlexAttention(context_of(tables, num_blocks, step))
    choice, taken = attention._sharing, []
    choice.shared = Cost(0, 1.0, 0)  # together they read 6 + 3 blocks, and 3 * 7 apart
    for share in (0.95, 0.85, 0.95, 1.05, 0.95):
        choice.plain = Cost(0, 9 / 21 / share, 0)
        tables = tables._replace(num_entered=tables.num_entered + 1)  # a request has come
        choice._context = context_of(tables, num_blocks, step)
        taken.append(attention.shares_prefixes(step))
    assert taken == [False, True, True, False, False]
    choice.plain, choice.shared = Cost(0, 1.0, 0), Cost(1e9, 1.0, 0)
    choice._context = context_of(tables._replace(num_entered=99), num_blocks, step)
    assert not attention.shares_prefixes(step), "what a lost graph costs counts too"


def test_windows_a_cpu_and_wide_groups_of_heads_stay_plain() -> None:
    tables, num_blocks, step = made(family(1, [20, 21, 22], 6))
    assert type(shared_attention(context_of(tables, num_blocks, step))) is SharedFlexAttention
    for changes in ({"reach": Reach(window=9)}, {"reach": Reach(chunk=8)}, {"policy": CPU_POLICY}):
        assert type(shared_attention(context_of(tables, num_blocks, step, **changes))) is FlexAttention
    wide = context_of(tables, num_blocks, step, query_group=40)
    assert type(shared_attention(wide)) is FlexAttention


LIMITS: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 6, "max_num_batched_tokens": 40}
Answers = Callable[..., tuple[list[list[int]], tuple[dict[Any, int], Any]]]


@pytest.fixture
def answers(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Greedy answers of an uncompiled engine that takes the choices of a GPU, graphs included; the steps that
    were replayed, and the engine's counters."""
    have_listed(monkeypatch)
    monkeypatch.setattr(DevicePolicy, "of", lambda device: CUDA_POLICY)

    def run(
        backend: Callable[..., FlexAttention],
        lengths: list[int],
        *,
        family: str = "llama",
        prepared: Callable[[LLM], None] = lambda llm: None,
        **changes: Any,
    ) -> tuple[list[list[int]], tuple[dict[Any, int], Any]]:
        limits = {"max_model_len": 96, "max_num_seqs": 6, "max_num_batched_tokens": 40}
        arguments: dict[str, Any] = {"num_gpu_blocks_override": 40, "block_size": 8} | limits | changes
        # By the engine's name for it, so that layers with windows have blocks of their own.
        monkeypatch.setattr(minivllm.attention.shared_tiles, "shared_attention", backend)
        arguments |= {"dtype": "float32", "enforce_eager": True, "attention_backend": "flex-shared"}
        with LLM(str(tiny_model(family)), **arguments) as llm:
            runner = llm.llm_engine.client.core.executor.worker.runner  # type: ignore[attr-defined]
            with torch.inference_mode():
                runner.capture_graphs("full_and_piecewise", RecordedGraphs())
            prepared(llm)
            params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
            prompts: Any = [{"prompt_token_ids": prompt} for prompt in tree_of_prompts()]
            llm.generate([prompts[0], prompts[3]], params[:2], use_tqdm=False)  # fill the prefix cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = [list(output.outputs[0].token_ids) for output in outputs]
            return found, (dict(runner.graphs.num_replays), llm.get_metrics())

    return run


def tree_of_prompts() -> list[list[int]]:
    """Two groups, one of them a tree of three levels, and a prompt that shares nothing."""
    draw = random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(3, 200) for _ in range(length)]

    root, other = text(24), text(17)
    branch = root + text(16)
    return [
        [*branch, *text(9)],
        [*branch, *text(3)],
        [*root, *text(5)],
        [*other, *text(2)],
        [*other, *text(9)],
        text(7),
    ]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of tokens that were read together, step by step."""
    found: list[int] = []
    prepare = Always.prepare

    def noted(self: Always, rows: StepRows) -> Any:
        metadata = prepare(self, rows)
        if isinstance(metadata, SharedMetadata):
            found.append(len(metadata.tokens))
        return metadata

    monkeypatch.setattr(Always, "prepare", noted)
    return found


def test_an_engine_gives_the_same_tokens_and_steps_that_share_are_replayed_in_pieces(
    answers: Answers, counted: list[int]
) -> None:
    lengths = [30, 5, 21, 26, 14, 30]
    expected, (plain, _) = answers(FlexAttention, lengths)
    found, (replays, _) = answers(always, lengths)
    assert found == expected and min(len(set(tokens)) for tokens in found) > 1
    assert max(counted) == 5 and len(counted) > 15

    def full(replays: dict[Any, int]) -> int:
        return sum(number for choice, number in replays.items() if choice.kind == "full")

    assert sum(replays.values()) == sum(plain.values()), "as many steps"
    assert 0 < full(replays) < full(plain) - 15, "steps of rows that share nothing replay whole graphs"


def test_a_member_that_is_preempted_in_the_middle_changes_no_token(
    answers: Answers, counted: list[int]
) -> None:
    lengths = [40, 38, 39, 36, 37, 40]
    expected, _ = answers(FlexAttention, lengths)
    found, (_, stats) = answers(always, lengths, num_gpu_blocks_override=24)
    assert found == expected and stats.num_preemptions > 0 and counted


def test_drafts_of_rows_that_share_change_no_token(answers: Answers, counted: list[int]) -> None:
    lengths = [24] * 6
    expected, _ = answers(FlexAttention, lengths)
    texts = [prompt + answer for prompt, answer in zip(tree_of_prompts(), expected)]

    def guess(llm: LLM) -> None:
        speculation_of(llm).drafter = ScriptedDrafter(texts, 0.3, 416)

    config = {"method": "ngram", "num_speculative_tokens": 3, "verification_cost": 0.0}
    found, (_, stats) = answers(always, lengths, prepared=guess, speculative_config=config)
    assert found == expected and stats.num_accepted_tokens > 20 and max(counted) > 6


def test_layers_with_windows_stay_plain_beside_those_that_share(answers: Answers, counted: list[int]) -> None:
    lengths = [20] * 6
    expected, _ = answers(FlexAttention, lengths, family="gemma3")
    found, _ = answers(always, lengths, family="gemma3")
    assert found == expected and counted
