"""What a spec says (window, chunk, soft cap, sinks),
against the definitions written with loops in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import kernels_triton_free.attention
import minivllm.attention.tiles
from minivllm.attention import AttentionBackend, AttentionContext, FlexAttention, SdpaAttention, StepRows
from minivllm.attention.lists.bounds import Run
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
from minivllm.compilation.regions import Region
from minivllm.device.buffers import MirroredTable, rounded_capacity
from minivllm.errors import ConfigError
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import LayerCache
from tests.attention.backends import (
    SmallTiles,
    attend_to_listed_blocks,
    laid_in_strips,
    listed_attention,
    new_context,
    uncompiled,
)
from tests.attention.random_batches import CPU, BatchShape

MAX_LENGTH, MAX_SEQS, VERIFY_SIZE = 40, 4, 3
Span = tuple[int, int]
"""Tokens of a request that are computed already, and tokens of this step."""


@dataclass
class Tables:
    """The block tables of a made-up step."""

    block_size: int
    block_table: MirroredTable
    kv_position: MirroredTable
    num_entered: int = 0


@dataclass
class Case:
    """A step of requests with these spans, in blocks that are scattered over the cache. runs: of each span,
    those that see themselves; none if they are not given."""

    spans: list[Span]
    spec: AttentionSpec
    block_size: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    tile_size: int = 4
    seed: int = 0
    runs: list[list[Run]] = field(default_factory=list)
    in_strips: bool = False
    sinks: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        rows = list(zip(self.spans, self.runs or [[]] * len(self.spans), strict=True))
        rows.sort(
            key=lambda row: (row[0][1] > 1, row[0][1] > VERIFY_SIZE or (row[0][1] > 1 and bool(row[1])))
        )
        self.spans, self.runs = [span for span, _ in rows], [runs for _, runs in rows]
        rng, generator = np.random.default_rng(self.seed), torch.Generator().manual_seed(self.seed)
        group, width = self.spec.query_group, -(-MAX_LENGTH // self.block_size)
        self.shape = BatchShape(
            MAX_SEQS, MAX_SEQS * MAX_LENGTH, MAX_LENGTH, self.block_size, MAX_SEQS * width + 2
        )
        self.k, self.v = (
            [torch.randn(sum(span), self.kv_heads, self.head_dim, generator=generator) for span in self.spans]
            for _ in range(2)
        )
        tokens = sum(count for _, count in self.spans)
        self.q = torch.randn(max(2, tokens), self.kv_heads, group, self.head_dim, generator=generator)
        self.sinks = torch.randn(self.kv_heads * group, generator=generator) if self.spec.has_sinks else None

        num_blocks, size = self.shape.num_blocks, self.block_size
        capacity = rounded_capacity(num_blocks)
        self.tables = Tables(size, MirroredTable(MAX_SEQS, width, CPU), MirroredTable(capacity, size, CPU))
        self.tables.kv_position.host[:] = rng.integers(0, MAX_LENGTH, (capacity, size))  # of earlier requests
        cache = torch.full((2, num_blocks, size, self.kv_heads, self.head_dim), torch.nan)
        cache[1, 0] = 7.0
        cache[1, 0, -1] = 0.0
        free = (1 + rng.permutation(num_blocks - 1)).tolist()
        self.slots = rng.permutation(MAX_SEQS)[: len(self.spans)]
        for slot, span, k, v in zip(self.slots, self.spans, self.k, self.v):
            for index in range(-(-sum(span) // size)):
                block, first = free.pop(), index * size
                self.tables.block_table.host[slot, index] = block
                self.tables.kv_position.host[block] = np.arange(first, first + size)
                cache[:, block] = 1e3
                own_k, own_v = k[first : first + size], v[first : first + size]
                cache[0, block, : len(own_k)], cache[1, block, : len(own_v)] = own_k, own_v
        self.cache = LayerCache(*cache)

    def rows(self) -> StepRows:
        starts, counts = (np.array(values, dtype=np.int64) for values in zip(*self.spans))
        single = int((counts == 1).sum())
        few = sum(1 < count <= VERIFY_SIZE and not runs for count, runs in zip(counts, self.runs))
        ahead = [
            max([query, *(end - 1 for begin, end in runs if begin <= query < end)])
            for (start, count), runs in zip(self.spans, self.runs)
            for query in range(start, start + count)
        ]
        step = StepRows(self.slots.astype(np.int64), starts, counts, single, few, max(2, len(ahead)))
        return step._replace(ahead=np.array(ahead)) if any(self.runs) else step

    def backend(self, make: Callable[..., AttentionBackend], device_type: str = "cpu") -> AttentionBackend:
        changes: dict[str, Any] = {
            "kv_heads": self.kv_heads,
            "query_group": self.spec.query_group,
            "head_dim": self.head_dim,
            "policy": SmallTiles(type=device_type, capability=(9, 0), tile_size=self.tile_size, together=24),
            "few_tokens": VERIFY_SIZE,
            "in_strips": self.in_strips,
        }
        return make(new_context(self.tables, self.shape, [self.spec], **changes))

    def attend(self, backend: AttentionBackend) -> Tensor:
        cache = laid_in_strips(self.cache) if self.in_strips else self.cache
        o = backend.attend(backend.prepare(self.rows()), cache, self.spec, self.q, self.sinks)
        assert bool(o.isfinite().all())
        return o[: sum(count for _, count in self.spans)]

    def by_definition(self, **without: Any) -> Tensor:
        """float64, key by key. without: what the spec should say instead."""
        spec = self.spec._replace(**without)
        out, token = torch.zeros_like(self.q, dtype=torch.float64), 0
        for (start, count), runs, k, v in zip(self.spans, self.runs, self.k, self.v):
            for query in range(start, start + count):
                for head in range(self.kv_heads * spec.query_group):
                    kv_head, member = divmod(head, spec.query_group)
                    total = (
                        math.exp(float(self.sinks[head]))
                        if spec.has_sinks and self.sinks is not None
                        else 0.0
                    )
                    for key in range(start + count):
                        in_run = any(begin <= query < end and begin <= key < end for begin, end in runs)
                        if key > query and not (spec.looks_ahead and in_run):
                            continue
                        if spec.window is not None and query - key >= spec.window:
                            continue
                        if spec.chunk is not None and query // spec.chunk > key // spec.chunk:
                            continue
                        score = (
                            float(self.q[token, kv_head, member].double() @ k[key, kv_head].double())
                            * spec.scale
                        )
                        if spec.soft_cap is not None:
                            score = spec.soft_cap * math.tanh(score / spec.soft_cap)
                        total += math.exp(score)
                        out[token, kv_head, member] += math.exp(score) * v[key, kv_head].double()
                    out[token, kv_head, member] /= total
                token += 1
        return out[:token]


@st.composite
def runs_of(draw: st.DrawFn, span: Span) -> list[Run]:
    """Runs that have tokens in the span and end in it; the first may begin in front of it."""
    start, end = span[0], sum(span)
    edges = draw(st.lists(st.integers(max(0, start - 6), end), max_size=6, unique=True))
    edges.sort()
    return [(begin, stop) for begin, stop in zip(edges[::2], edges[1::2]) if stop > start]


@st.composite
def cases(draw: st.DrawFn, in_strips: bool = False) -> Case:
    count = st.one_of(st.just(1), st.integers(1, VERIFY_SIZE), st.integers(1, 12))
    counts = draw(st.lists(count, min_size=1, max_size=MAX_SEQS))
    spans = [(draw(st.integers(0, MAX_LENGTH - count)), count) for count in counts]
    # Borders: a window or a chunk that ends at the end of a context, one before it or one behind it.
    end = sum(draw(st.sampled_from(spans)))
    border = st.sampled_from([max(1, end + change) for change in (-1, 0, 1)])
    length = st.one_of(st.none(), st.integers(1, 17), border)
    spec = AttentionSpec(
        window=draw(length),
        scale=draw(st.sampled_from([0.2, 1.0])),
        query_group=draw(st.sampled_from([1, 2, 3, 7])),
        chunk=draw(length),
        soft_cap=draw(st.sampled_from([None, 0.5, 30.0])),
        has_sinks=draw(st.booleans()),
        looks_ahead=draw(st.booleans()),
    )
    sizes, dims = ([16, 32, 64], [16]) if in_strips else ([2, 4, 8, 12, 64], [4, 6, 12])
    return Case(
        spans,
        spec,
        block_size=draw(st.sampled_from(sizes)),
        kv_heads=draw(st.sampled_from([1, 2])),
        head_dim=draw(st.sampled_from(dims)),
        tile_size=draw(st.sampled_from([2, 4, 5])),
        seed=draw(st.integers(0, 2**16)),
        runs=[draw(runs_of(span)) for span in spans] if draw(st.booleans()) else [],
        in_strips=in_strips,
    )


@pytest.fixture
def _on_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read the lists in plain operations in place of compiled ones."""
    monkeypatch.setattr(minivllm.attention.tiles, "paged_flex_attention", listed_attention)
    monkeypatch.setattr(kernels_triton_free.attention, "attend_to_blocks", attend_to_listed_blocks)


@settings(max_examples=80, deadline=None)
@given(case=cases())
@torch.inference_mode()
def test_the_reference_equals_the_definitions(case: Case) -> None:
    torch.testing.assert_close(
        case.attend(case.backend(SdpaAttention)).double(), case.by_definition(), rtol=0, atol=2e-5
    )


@pytest.mark.usefixtures("_on_lists")
@pytest.mark.parametrize(
    ("device_type", "in_strips"),
    [("cpu", False), ("cpu", True), ("cuda", False)],
    ids=["cpu", "strips", "cuda"],
)
@torch.inference_mode()
def test_lists_of_blocks_give_the_definitions_with_the_choices_of_each_device(
    device_type: str, in_strips: bool
) -> None:
    @settings(max_examples=80, deadline=None)
    @given(case=cases(in_strips))
    def check(case: Case) -> None:
        o = case.attend(case.backend(FlexAttention, device_type))
        torch.testing.assert_close(o.double(), case.by_definition(), rtol=0, atol=2e-5)

    check()


SPANS: list[Span] = [(30, 1), (17, 2), (8, 12), (0, 9)]
EVERYTHING = AttentionSpec(window=9, scale=0.5, query_group=3, chunk=16, soft_cap=0.6, has_sinks=True)
LEFT_OUT: dict[str, Any] = {"window": None, "chunk": None, "soft_cap": None, "has_sinks": False}
NEIGHBOURS = [{"window": 8}, {"window": 10}, {"chunk": 15}, {"chunk": 17}, {"soft_cap": 0.7}]


@pytest.mark.parametrize("change", [*({name: LEFT_OUT[name]} for name in LEFT_OUT), *NEIGHBOURS], ids=str)
@torch.inference_mode()
def test_a_piece_that_is_left_out_or_off_by_one_is_noticed(change: dict[str, Any]) -> None:
    case = Case(SPANS, EVERYTHING)
    o = case.attend(case.backend(SdpaAttention)).double()
    assert (
        float((o - case.by_definition()).abs().max())
        < 2e-5
        < 2e-3
        < float((o - case.by_definition(**change)).abs().max())
    )


@pytest.mark.parametrize(
    "runs", [[], [(9, 16)], [(9, 15), (16, 20)], [(10, 17)]], ids=["none", "shorter", "split", "later"]
)
@torch.inference_mode()
def test_an_image_that_does_not_see_itself_as_it_should_is_noticed(runs: list[Run]) -> None:
    spec = EVERYTHING._replace(looks_ahead=True, chunk=None)
    case = Case([(8, 12), (30, 1)], spec, runs=[[(9, 17)], []])
    o = case.attend(case.backend(SdpaAttention)).double()
    assert float((o - case.by_definition()).abs().max()) < 2e-5
    case.runs = [runs, []]
    assert float((o - case.by_definition()).abs().max()) > 2e-3


@pytest.mark.parametrize("chunk", [1, 7, 8, 9])
@torch.inference_mode()
def test_a_chunk_reads_no_block_in_front_of_it(chunk: int) -> None:
    """The other blocks of the request may be freed and hold anything."""
    case = Case([(23, 1), (24, 1)], EVERYTHING._replace(window=None, chunk=chunk))
    expected = case.by_definition()
    for slot, (start, _) in zip(case.slots, case.spans):
        case.tables.block_table.host[slot, : start // chunk * chunk // case.block_size] = 0
    backend = case.backend(FlexAttention)
    tiles = backend.prepare(case.rows()).parts[0].tiles
    lists = tiles.lists[case.spec.reach]
    read = lists.partial_count[:2].flatten() + lists.full_count[:2].flatten() - 1  # but for that of the sinks
    blocks = [
        start // case.block_size - start // chunk * chunk // case.block_size + 1 for start, _ in case.spans
    ]
    assert read.tolist() == blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minivllm.attention.tiles, "paged_flex_attention", listed_attention)
        o = case.attend(case.backend(FlexAttention))
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=2e-5)


def test_specs_that_differ_have_lists_by_reach_and_kernels_by_computation() -> None:
    """A cap or a scale changes the kernel, and what a layer reaches changes the lists alone."""
    regions: list[Region] = []

    def compile_region(region: Region) -> Callable:
        regions.append(region)
        return uncompiled(region)

    case = Case(SPANS, EVERYTHING)
    specs = [
        EVERYTHING,
        EVERYTHING._replace(soft_cap=None),
        EVERYTHING._replace(scale=1.0),
        EVERYTHING._replace(chunk=8),
        EVERYTHING._replace(window=None, chunk=None, looks_ahead=True),
    ]
    context = new_context(
        case.tables, case.shape, specs, compile_region=compile_region, query_group=3, head_dim=8
    )
    parts = FlexAttention(context).prepare(case.rows()).parts
    assert all(set(part.tiles.lists) == {specs[n].reach for n in (0, 3, 4)} for part in parts)
    kernels = {(region.name, repr(region.constants)) for region in regions}
    assert len(kernels) == len(regions) == len({region.name for region in regions}) * 3
    for region in regions:
        [sinks] = [spec for name, spec in region.tensors() if name == "sinks"]
        assert (sinks.shape, sinks.dtype) == ((6,), torch.float32)


def test_sinks_in_blocks_of_one_token_are_refused() -> None:
    case = Case([(3, 1)], EVERYTHING)
    case.tables.block_size = 1
    with pytest.raises(
        ConfigError, match="block_size is 1, but attention sinks need blocks of 2 tokens at least"
    ):
        case.backend(FlexAttention)


@pytest.mark.slow
@pytest.mark.skipif(
    cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler for torch.compile here"
)
@torch.inference_mode()
def test_packages_on_disk_compute_all_that_a_spec_says(tmp_path: Path) -> None:
    compiler = PackagedRegionCompiler(tmp_path)
    for spans in (SPANS, [(39, 1)], [(20, 2), (9, 3), (31, 1), (1, 1)]):
        case = Case(list(spans), EVERYTHING, tile_size=8)
        backend = case.backend(partial(make_flex, compiler))
        compiler.build()
        torch.testing.assert_close(case.attend(backend).double(), case.by_definition(), rtol=0, atol=2e-5)


def make_flex(compiler: PackagedRegionCompiler, context: AttentionContext) -> AttentionBackend:
    return FlexAttention(replace(context, compile_region=compiler))
