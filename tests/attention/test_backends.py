"""Backends give what the gathering reference gives, over random mixed batches;
and what the extension point can carry."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kernels_triton_free.attention
import minivllm.attention.pairs
import minivllm.attention.tiles
from minivllm.attention import (
    AttentionBackend,
    AttentionContext,
    AttentionRule,
    BlockTables,
    FlexAttention,
    SdpaAttention,
    StepRows,
    in_step_order,
)
from minivllm.attention.gathered import GatheredTiles
from minivllm.attention.pairs import RowPairs
from minivllm.batch.persistent_batch import PersistentBatch
from minivllm.batch.step_inputs import Row, StepInputBuilder, StepInputs
from minivllm.compilation.compiler import RegionCompiler, cannot_compile_reason
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler, export_region
from minivllm.compilation.regions import Region
from minivllm.device.buffers import MirroredTable
from minivllm.errors import ConfigError
from minivllm.specs.attention import AttentionSpec, Reach
from minivllm.specs.caches import LayerCache
from tests.attention.backends import (
    CPU_POLICY,
    CUDA_POLICY,
    GROUP,
    HEAD_DIM,
    KV_HEADS,
    SmallTiles,
    attend_to_listed_blocks,
    laid_in_strips,
    listed_attention,
    new_context,
    specs_of,
)
from tests.attention.random_batches import CPU, BatchShape, block_ids, finish_all, new_batch, random_rows

SPECS = specs_of([Reach(None), Reach(9)])
VARIANTS = [
    spec._replace(soft_cap=1.5)
    for spec in specs_of([Reach(9, None, True), Reach(None, 11), Reach(12, 16, True)])
]
LOOKING_AHEAD = specs_of(
    [Reach(looks_ahead=True), Reach(9, looks_ahead=True), Reach(20), Reach(11, None, True, True)]
)
SINKS = 2 * torch.randn(KV_HEADS * GROUP, generator=torch.Generator().manual_seed(0))
VERIFY_SIZE = 4
SHAPE = BatchShape(max_num_seqs=9, max_model_len=128, block_size=16, num_blocks=76)


def build(batch: PersistentBatch, rows: Sequence[Row], backend: AttentionBackend) -> StepInputs:
    builder = StepInputBuilder(
        batch, max_num_batched_tokens=SHAPE.max_num_batched_tokens, few_tokens=VERIFY_SIZE, device=CPU
    )
    return builder.build(rows, 2, backend.prepare)


def poisoned_cache(batch: PersistentBatch, generator: torch.Generator) -> LayerCache:
    """NaN wherever no request owns the block; large numbers past the end of each request. The null block has
    NaN as well, but for the values of its last slot, which are zero."""
    k, v = torch.full((2, SHAPE.num_blocks, SHAPE.block_size, KV_HEADS, HEAD_DIM), torch.nan)
    v[0] = 0.0
    for request in batch.requests.values():
        for cache in (k, v):
            blocks = block_ids(batch, request)
            cache[blocks] = torch.randn(
                len(blocks), SHAPE.block_size, KV_HEADS, HEAD_DIM, generator=generator
            )
    return LayerCache(k, v)


def spoil_tails(cache: LayerCache, batch: PersistentBatch, ends: dict[str, int]) -> None:
    for name, end in ends.items():
        last = block_ids(batch, batch.requests[name])[-1]
        used = (end - 1) % SHAPE.block_size + 1
        cache.k[last, used:] *= 1e4
        cache.v[last, used:] *= 1e4


def random_step(
    rng: random.Random, generator: torch.Generator, batch: PersistentBatch
) -> tuple[list[Row], LayerCache, Tensor]:
    """Rows of an emptied batch, a cache in which no other blocks may be read,
    and queries of all their tokens."""
    finish_all(batch)
    rows = random_rows(rng, SHAPE, batch)
    cache = poisoned_cache(batch, generator)
    ends = {row.request.data.request_id: row.start + row.count for row in rows}
    shared = {block for row in rows for block in block_ids(batch, row.request)[:-1]}
    own = {
        name: end for name, end in ends.items() if block_ids(batch, batch.requests[name])[-1] not in shared
    }
    spoil_tails(cache, batch, own)
    tokens = max(2, sum(row.count for row in rows))
    return rows, cache, torch.randn(tokens, KV_HEADS, GROUP, HEAD_DIM, generator=generator)


def check_equal(
    batch: PersistentBatch,
    rows: Sequence[Row],
    cache: LayerCache,
    q: Tensor,
    backend: AttentionBackend,
    rule: AttentionRule,
    specs: Sequence[AttentionSpec] = SPECS,
    *,
    in_strips: bool = False,
) -> None:
    context = new_context(batch.groups[0], SHAPE, specs, in_strips=in_strips)
    reference = SdpaAttention(context, rule)
    cache = laid_in_strips(cache) if in_strips else cache
    inputs, expected_inputs = build(batch, rows, backend), build(batch, rows, reference)
    for spec in context.specs:
        sinks = SINKS if spec.has_sinks else None
        out = backend.attend(inputs.attention, cache, spec, q, sinks)
        expected = reference.attend(expected_inputs.attention, cache, spec, q, sinks)[: inputs.num_tokens]
        assert bool(expected.isfinite().all()), "the reference itself must not read what it does not own"
        torch.testing.assert_close(out[: inputs.num_tokens], expected, rtol=1e-5, atol=1e-5)
        assert bool(out.isfinite().all()), "padding must be finite, for it is written into the null block"


def fading(score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - 0.1 * (head + 1) * (query - key)


def every_other(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((query - key) % 2 == 0)


RULES = {
    "causal": AttentionRule(),
    "other rule": AttentionRule(every_other, fading),
    "other scores": AttentionRule(score_change=fading),
}


@pytest.mark.parametrize(
    ("rule", "specs"),
    [
        *((rule, specs) for rule in RULES.values() for specs in (SPECS, SPECS[:1], VARIANTS)),
        (RULES["causal"], LOOKING_AHEAD),
        (RULES["causal"], LOOKING_AHEAD[:1]),
    ],
    ids=[
        *(f"{rule}, {specs}" for rule in RULES for specs in ("windows", "no windows", "all that specs say")),
        "causal, images in windows",
        "causal, images",
    ],
)
@pytest.mark.parametrize(
    ("policy", "in_strips", "has_room"),
    [
        (CPU_POLICY, True, True),
        (CPU_POLICY, True, False),
        (CPU_POLICY, False, True),
        (CUDA_POLICY, False, True),
    ],
    ids=["cpu", "cpu without room for few tokens", "cpu without strips", "cuda"],
)
@torch.inference_mode()
def test_listed_blocks_give_what_gathering_gives_with_the_choices_of_each_device(
    policy: Any,
    in_strips: bool,
    has_room: bool,
    rule: AttentionRule,
    specs: Sequence[AttentionSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists, padding and packing, without compiling:
    the kernel is replaced by plain operations on the same lists."""
    monkeypatch.setattr(minivllm.attention.tiles, "paged_flex_attention", listed_attention)
    monkeypatch.setattr(kernels_triton_free.attention, "attend_to_blocks", attend_to_listed_blocks)
    monkeypatch.setattr(RowPairs, "has_room", lambda self, rows: has_room)
    batch = new_batch(SHAPE)
    together = 2 * SHAPE.block_size
    small = SmallTiles(type=policy.type, capability=policy.capability, tile_size=4, together=together)
    context = new_context(
        batch.groups[0], SHAPE, specs, policy=small, few_tokens=VERIFY_SIZE, in_strips=in_strips
    )
    backend = FlexAttention(context, rule)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(20):
        rows, cache, q = random_step(rng, generator, batch)
        if rows:
            check_equal(batch, rows, cache, q, backend, rule, specs, in_strips=in_strips)


def test_chunks_of_few_tokens_are_pairs_unless_these_would_be_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows of 3 tokens with 7 and 8 blocks are 45 pairs; decoding, 9 requests have 9 * 8 at most."""
    tables = new_batch(SHAPE).groups[0]
    tables.block_table.host[:2] = 1 + np.arange(16).reshape(2, 8)
    starts, counts = np.array([7 * 16 - 3, 7 * 16]), np.array([3, 3])
    rows = StepRows(np.arange(2), starts, counts, 0, 2, 6)

    def kinds_of(max_num_seqs: int) -> list[type]:
        changes: dict[str, Any] = {"few_tokens": VERIFY_SIZE, "in_strips": True, "max_num_seqs": max_num_seqs}
        backend = FlexAttention(new_context(tables, SHAPE, SPECS[:1], **changes))
        return [type(part.kind) for part in backend.prepare(rows).parts]

    monkeypatch.setattr(minivllm.attention.pairs, "MOST_BYTES", 0)
    assert kinds_of(6) == [RowPairs] and kinds_of(5) == [GatheredTiles]
    monkeypatch.setattr(minivllm.attention.pairs, "MOST_BYTES", 45 * KV_HEADS * GROUP * HEAD_DIM * 4)
    assert kinds_of(5) == [RowPairs]


@pytest.mark.parametrize("in_strips", [True, False], ids=["strips", "plain"])
def test_packages_of_attention_serve_every_size(in_strips: bool) -> None:
    """Tracing raises where it takes a size that varies for a constant;
    torch.compile would then take over, at every start."""
    regions: list[Region] = []

    def collect(region: Region) -> Callable:
        regions.append(region)
        return region.function

    tables = new_batch(SHAPE).groups[0]
    FlexAttention(new_context(tables, SHAPE, SPECS[:1], compile_region=collect, in_strips=in_strips))
    assert [region.name for region in regions][-1] == "prompt attention" and len(regions) == 2
    for region in regions:
        export_region(region, {})
        if region.has_code_for("single"):
            export_region(region.fixed("single"), {})
    assert regions[0].has_code_for("single")


@pytest.mark.slow
@pytest.mark.skipif(
    cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler for packages here"
)
@torch.inference_mode()
def test_a_single_row_attends_by_code_of_its_own_and_is_not_padded(tmp_path: Path) -> None:
    """The first call builds the package that it needs, and no other."""
    compiler = PackagedRegionCompiler(tmp_path / "regions")
    batch, generator, rng = new_batch(SHAPE), torch.Generator().manual_seed(0), random.Random(0)
    context = new_context(
        batch.groups[0],
        SHAPE,
        VARIANTS[:1],
        compile_region=compiler,
        in_strips=True,
    )
    compiled, reference, compared = RowPairs(context, AttentionRule()), SdpaAttention(context), 0
    while compared < 20:
        rows, cache, q = random_step(rng, generator, batch)
        cache = laid_in_strips(cache)
        for row in (row for row in rows if row.count == 1):
            one = np.ones(1, dtype=np.int64)
            step = StepRows(
                one * row.request.slot, one * row.start, one, num_single=1, num_few=0, num_padded=1
            )
            out = compiled.attend(compiled.prepare(step, 0, 1), cache, VARIANTS[0], q[:1], SINKS)
            expected = reference.attend(reference.prepare(step), cache, VARIANTS[0], q[:1], SINKS)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            compared += 1
    built = [packaged.region.name for packaged in compiler._regions.values() if packaged.is_ready]
    assert built == ["decode attention over strips of one row"]


@pytest.mark.slow
@pytest.mark.skipif(
    cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler for torch.compile here"
)
@pytest.mark.parametrize("in_strips", [True, False], ids=["strips", "plain"])
@pytest.mark.parametrize(
    ("rule", "specs"),
    [
        (RULES["causal"], SPECS),
        (RULES["other rule"], SPECS),
        (RULES["causal"], VARIANTS),
        (RULES["causal"], LOOKING_AHEAD),
    ],
    ids=["causal", "other rule", "all that specs say", "images"],
)
@torch.inference_mode()
def test_compiled_attention_equals_gathering_on_random_mixed_batches_without_recompiling(
    rule: AttentionRule, specs: Sequence[AttentionSpec], in_strips: bool
) -> None:
    torch._dynamo.reset()
    batch = new_batch(SHAPE)
    compiler = RegionCompiler(enabled=True)
    small = SmallTiles(type="cpu", tile_size=4, together=2 * SHAPE.block_size)
    context = new_context(
        batch.groups[0],
        SHAPE,
        specs,
        policy=small,
        few_tokens=VERIFY_SIZE,
        compile_region=compiler,
        in_strips=in_strips,
    )
    compiled = FlexAttention(context, rule)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    kinds: set[tuple[bool, bool, bool]] = set()
    compared = 0
    while compared < 60 or (len(kinds) < 7 and compared < 200):
        rows, cache, q = random_step(rng, generator, batch)
        if compared > 0 and rng.random() < 0.2:
            rows = [row for row in rows if 1 < row.count <= VERIFY_SIZE and not row.runs]
        _, singles, few = in_step_order(rows, VERIFY_SIZE)
        several = len(rows) - singles - few
        if not rows or (compared == 0 and (singles < 2 or few < 2 or several < 3)):
            # Compiled at the first call, where sizes that may differ must differ, as in a worker's warm-up.
            continue
        own = q[: max(2, sum(row.count for row in rows))]
        check_equal(batch, rows, cache, own, compiled, rule, specs, in_strips=in_strips)
        if compared == 0:
            compiler.freeze()
        compared += 1
        kinds.add((singles > 0, few > 0, several > 0))
    assert compiler.num_recompilations == 0
    assert len(kinds) == 7, "every mixture of single tokens, drafts and chunks was seen"


@dataclass
class GroupTables:
    """The block tables of one KV group."""

    block_size: int
    block_table: MirroredTable
    kv_position: MirroredTable
    num_entered: int = 0


class GroupedAttention:
    """A backend for each KV group, as one backend: what a model with several kinds of cache will want."""

    decode_batches: Sequence[int] = ()

    def __init__(self, groups: dict[AttentionSpec, AttentionBackend]) -> None:
        self._groups = groups

    def prepare(self, rows: StepRows) -> dict[AttentionSpec, Any]:
        return {spec: backend.prepare(rows) for spec, backend in self._groups.items()}

    def attend(
        self,
        metadata: dict[AttentionSpec, Any],
        cache: LayerCache,
        spec: AttentionSpec,
        q: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self._groups[spec].attend(metadata[spec], cache, spec, q, sinks)


@torch.inference_mode()
def test_kv_groups_with_tables_and_windows_of_their_own_are_one_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second group has freed the blocks in front of its window:
    nothing may read the null block in their place."""
    monkeypatch.setattr(minivllm.attention.tiles, "paged_flex_attention", listed_attention)
    monkeypatch.setattr(kernels_triton_free.attention, "attend_to_blocks", attend_to_listed_blocks)
    batch = new_batch(SHAPE)
    contexts: list[AttentionContext] = []
    for spec in SPECS:
        table = MirroredTable(*batch.groups[0].block_table.host.shape, CPU)
        own: BlockTables = GroupTables(SHAPE.block_size, table, batch.groups[0].kv_position)
        contexts.append(new_context(own, SHAPE, [spec], policy=CUDA_POLICY, few_tokens=VERIFY_SIZE))
    grouped = GroupedAttention({context.specs[0]: FlexAttention(context) for context in contexts})
    rng, generator = random.Random(1), torch.Generator().manual_seed(1)
    num_freed = 0
    for _ in range(20):
        rows, cache, q = random_step(rng, generator, batch)
        for context in contexts:
            window = context.specs[0].window
            tables = context.tables.block_table.host
            tables[:] = batch.groups[0].block_table.host
            for row in rows if window is not None else ():
                first_block = max(0, row.start - window + 1) // SHAPE.block_size
                tables[row.request.slot, :first_block] = 0
                num_freed += first_block
        if rows:
            check_equal(batch, rows, cache, q, grouped, AttentionRule())
    assert num_freed > 20


def test_a_rule_for_layers_whose_images_see_themselves_is_refused() -> None:
    context = new_context(new_batch(SHAPE).groups[0], SHAPE, LOOKING_AHEAD[:1])
    for make in FlexAttention, SdpaAttention:
        with pytest.raises(ConfigError, match="let images see themselves, which such a rule cannot say"):
            make(context, RULES["other scores"])
