"""What attention costs: the fit, the work that is counted, the choice between two ways, and what is measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels_triton_free.attention
from minivllm import LLM, SamplingParams
from minivllm.attention import AttentionContext, AttentionRule, FlexAttention, SdpaAttention, StepRows
from minivllm.attention.costs import calibration
from minivllm.attention.costs.calibration import random_cache, tables_of
from minivllm.attention.costs.model import ASSUMED, Cost, Costs, Work, fit
from minivllm.attention.gathered import GatheredTiles
from minivllm.attention.pairs import RowPairs
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import Region
from minivllm.messages import SchedulerStats
from minivllm.metrics.prometheus import ServerMetrics
from minivllm.specs.attention import Reach
from minivllm.worker.worker import Worker
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
from tests.attention.test_tiles_of_several_rows import BLOCK_SIZE, CHUNKS, TILE, Chunk, context_of, made

REACHES = st.sampled_from([Reach(), Reach(window=9), Reach(chunk=12)])
BYTES_PER_TOKEN = 2 * 2 * 16 * 4  # K and V, KV heads, dimensions, float32
FREE, COSTLY = Cost(0, 0, 1e-9), Cost(0, 0, 1e-3)


@given(
    st.lists(
        st.tuples(st.integers(0, 10**8), st.integers(1, 10**6), st.floats(1e-5, 1e-1)),
        min_size=1,
        max_size=9,
    )
)
def test_a_fit_is_the_least_squares_solution_without_negative_numbers(
    given: list[tuple[int, int, float]],
) -> None:
    """By the conditions of Karush, Kuhn and Tucker: no step that is allowed makes the relative errors smaller."""
    cost = fit([(Work(size, products), seconds) for size, products, seconds in given])
    equations = np.array([[1 / s, b / s, p / s] for b, p, s in given])
    columns = np.linalg.norm(equations, axis=0)
    slope = equations.T @ (equations @ np.array(cost) - 1)
    for value, change, column in zip(cost, slope, columns):
        assert value >= 0
        if column:
            assert change / column > -1e-3, "a larger number would not fit better"
            assert value == 0 or abs(change / column) < 1e-3, "nor would a smaller one"


def test_a_fit_finds_the_costs_that_times_were_made_from() -> None:
    cost = Cost(2e-5, 3e-10, 4e-9)
    work = [Work(size, products) for size in (10**5, 10**6) for products in (10**3, 10**5)]
    np.testing.assert_allclose(fit([(one, cost.seconds(one)) for one in work]), cost, rtol=1e-6)
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([])


@settings(max_examples=100)
@given(CHUNKS, REACHES)
def test_the_work_of_pairs_is_that_of_every_token_and_every_block_it_sees(
    chunks: list[Chunk], reach: Reach
) -> None:
    tables, num_blocks, rows = made(chunks)
    pairs = RowPairs(context_of(tables, num_blocks, rows, reach, in_strips=True), AttentionRule())
    num_pairs = 0
    for start, count in zip(rows.starts.tolist(), rows.counts.tolist()):
        for position in range(start, start + count):
            first = 0 if reach.window is None else max(0, position - reach.window + 1)
            first = first if reach.chunk is None else position - position % reach.chunk
            num_pairs += position // BLOCK_SIZE - first // BLOCK_SIZE + 1
    keys = num_pairs * BLOCK_SIZE
    assert pairs.expected_work(rows) == {reach: Work(keys * BYTES_PER_TOKEN, keys)}
    done = pairs.work(pairs.prepare(rows, 0, 2))[reach].num_products
    assert done - keys in (0, BLOCK_SIZE), "one pair in which nothing is seen may come beside them"


@settings(max_examples=100)
@given(CHUNKS, REACHES)
def test_tiles_do_the_work_that_is_expected(chunks: list[Chunk], reach: Reach) -> None:
    tables, num_blocks, rows = made(chunks)
    context = context_of(tables, num_blocks, rows, reach)
    tiles = GatheredTiles(context, AttentionRule(), "prompt attention", TILE, rows.num_padded)
    expected, prepared = tiles.expected_work(rows)[reach], tiles.prepare(rows, 0, 2)
    done = tiles.work(prepared)[reach]
    assert done.num_products == expected.num_products
    lists, read = prepared.lists[reach], 0
    for count in (lists.partial_count, lists.full_count):
        assert count is not None
        read += int(count.sum())
    assert done.num_products == read * TILE * 2 * BLOCK_SIZE
    if len({tuple(table[:1]) for table in tables.block_table.host.tolist()}) < len(chunks):
        assert prepared.step_blocks is not None
        assert done.num_bytes == prepared.step_blocks.numel() * BLOCK_SIZE * BYTES_PER_TOKEN


@pytest.mark.parametrize("costs", [Costs(pairs=FREE, tiles=COSTLY), Costs(pairs=COSTLY, tiles=FREE)])
def test_few_tokens_take_the_way_that_costs_less_and_attend_alike(
    costs: Costs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_triton_free.attention, "attend_to_blocks", attend_to_listed_blocks)
    context, rows = in_strips()
    attention, judge, spec = FlexAttention(context), SdpaAttention(context), context.specs[0]
    assert attention.expected_seconds(attention.prepare(rows)) == {}, "nothing was measured yet"
    assert attention._choice is not None
    attention._choice.costs = costs
    metadata = attention.prepare(rows)
    kinds = [type(part.kind) for part in metadata.parts]
    assert kinds == ([RowPairs] if costs.pairs is FREE else [RowPairs, GatheredTiles])
    cache = random_cache(context.cache_spec, context.num_blocks, context.tables.block_size)
    q = torch.randn(rows.num_padded, KV_HEADS, GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        attention.attend(metadata, cache, spec, q),
        judge.attend(judge.prepare(rows), cache, spec, q),
        rtol=1e-5,
        atol=1e-5,
    )
    works = [part.kind.work(part.tiles)[Reach()] for part in metadata.parts]  # type: ignore[union-attr]
    expected = sum(cost.seconds(work) for cost, work in zip(costs, works))
    assert attention.expected_seconds(metadata) == {Reach(): pytest.approx(expected)}


def in_strips(max_model_len: int = 128) -> tuple[AttentionContext, StepRows]:
    """Four requests with blocks of 16 tokens, of which they share the first four; one of them decodes, and
    the others compute few tokens."""
    tables, num_blocks = tables_of(4, min(64, max_model_len), max_model_len, 16, CPU)
    starts, counts = np.array([100, 70, 90, 64]), np.array([1, 3, 4, 2])
    rows = StepRows(np.arange(4), starts, counts, 1, 3, int(counts.sum()))
    shape = BatchShape(4, rows.num_padded, max_model_len, 16, num_blocks)
    policy = SmallTiles(type="cpu", tile_size=TILE, together=32)
    specs = specs_of([Reach()])
    return new_context(tables, shape, specs, policy=policy, few_tokens=5, in_strips=True), rows


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are kept."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # compilers set it: then it is what it was, afterwards
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))
    monkeypatch.setattr(kernels_triton_free.attention, "attend_to_blocks", attend_to_listed_blocks)
    return tmp_path / "regions"


def costs_of(context: AttentionContext) -> Costs:
    attention = FlexAttention(context)
    attention.calibrate()
    assert attention._choice is not None
    return attention._choice.costs


def test_costs_are_measured_once_for_each_kind_of_layer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context, rows = in_strips()
    before = context.tables.block_table.host.copy()
    costs = costs_of(context)
    assert costs is not ASSUMED and all(min(cost) >= 0 and max(cost) > 0 for cost in costs)
    assert np.array_equal(before, context.tables.block_table.host), "tables of real requests are left alone"
    attention = FlexAttention(context)
    attention.calibrate()
    assert attention.expected_seconds(attention.prepare(rows))[Reach()] > 0

    with monkeypatch.context() as patches:
        patches.setattr(calibration, "samples_of", None)
        assert costs_of(context) == costs, "what is kept is not measured again"
    kept = list(home.iterdir())
    assert len(kept) == 1
    other = replace(context, specs=(context.specs[0]._replace(soft_cap=30.0),))
    costs_of(other)
    assert len(list(home.iterdir())) == 2, "a layer of another kind has costs of its own"


@pytest.mark.parametrize("content", [b"", b"{}", b'["a","b"]', b"[[1,2,3]]"])
def test_a_damaged_record_is_measured_again(home: Path, content: bytes) -> None:
    context, _ = in_strips()
    costs_of(context)
    (kept,) = home.iterdir()
    kept.write_bytes(content)
    assert min(map(min, costs_of(context))) >= 0
    assert kept.read_bytes() != content and len(list(home.iterdir())) == 1


def test_nothing_is_measured_where_there_is_no_choice(home: Path) -> None:
    context, _ = in_strips()
    assert costs_of(replace(context, few_tokens=1)) is ASSUMED, "rows of few tokens never come"
    short, _ = in_strips(max_model_len=48)
    assert costs_of(short) is ASSUMED
    plain = FlexAttention(replace(context, in_strips=False))
    plain.calibrate()
    assert plain._choice is None and not home.exists()


class ExpectsAMillisecond(SdpaAttention):
    """A backend that says what a layer should take."""

    def calibrate(self) -> None:
        raise AssertionError("nothing is compiled here")

    def expected_seconds(self, metadata: object) -> dict[Reach, float]:
        return {Reach(): 1e-3}


def test_an_engine_tells_what_attention_took_beside_what_it_should_take(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Three layers and four steps."""
    model = str(tiny_model("llama"))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def run(**arguments: Any) -> tuple[SchedulerStats, float]:
        with LLM(model, enforce_eager=True, max_model_len=64, num_gpu_blocks_override=9, **arguments) as llm:
            started = time.perf_counter()
            llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
            return llm.get_metrics(), time.perf_counter() - started

    stats, took = run(attention_backend=f"{__name__}:ExpectsAMillisecond", profile=str(tmp_path / "traces"))
    assert stats.expected_attention_seconds == pytest.approx(3 * 4 * 1e-3)
    assert 0 < stats.measured_attention_seconds < took
    [trace] = (tmp_path / "traces").iterdir()
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("attention should take 3000 us") == 4
    metrics = ServerMetrics()
    metrics.look_at_engines([stats], [0])
    text = metrics.exposition().decode()
    assert 'minivllm_attention_expected_seconds_total{engine="0"} 0.012' in text
    assert f'minivllm_attention_seconds_total{{engine="0"}} {stats.measured_attention_seconds}' in text

    stats, _ = run()
    assert stats.expected_attention_seconds == stats.measured_attention_seconds == 0, "nothing was expected"


class AsItIs(RegionCompiler):
    """Takes the place of a compiler in a worker that believes everything compiled."""

    def __init__(self) -> None:
        super().__init__(True)

    def _make(self, region: Region) -> Callable:
        return region.function


def test_an_engine_measures_in_its_warm_up(
    home: Path, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts behind one prefix, and single tokens."""
    monkeypatch.setattr(Worker, "_make_compiler", lambda self: AsItIs())
    prompts = [{"prompt_token_ids": [*range(3, 60), 60 + index, 9]} for index in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    arguments: Any = {
        "dtype": "float32",
        "block_size": 16,
        "max_model_len": 96,
        "num_gpu_blocks_override": 30,
    }
    arguments |= {"compile_in_background": False}
    model = str(tiny_model("llama"))

    def run(**changes: Any) -> tuple[list[list[int]], SchedulerStats]:
        with LLM(model, **arguments | changes) as llm:
            llm.generate(prompts[0], params, use_tqdm=False)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs], llm.get_metrics()

    tokens, stats = run()
    assert stats.expected_attention_seconds > 0 and stats.measured_attention_seconds > 0
    (kept,) = home.glob("attention_costs-*.json")
    for costs in Costs(pairs=FREE, tiles=COSTLY), Costs(pairs=COSTLY, tiles=FREE):
        kept.write_bytes(msgspec.json.encode(costs))
        assert run()[0] == tokens, "wrong costs change no token"
