"""``minivllm bench attention``: decode attention of users that share a prefix, on a CPU.

Pairs of a row and a block are computed block by block, as the engine does, and row by row, as it does where
nothing is shared. Both orders take turns in one process. No model is needed: keys, values and queries are
random numbers.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
import typer

from kernels_triton_free.strips.layout import can_have_strips
from minivllm.attention import AttentionContext, StepRows
from minivllm.attention.lists.shared_prefixes import Readers
from minivllm.attention.pairs import PairMetadata, RowPairs
from minivllm.attention.rule import CAUSAL
from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Measurement, OutputOptions, compared, make_report, publish
from minivllm.cli.engine.options import with_options
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
from minivllm.device.buffers import MirroredTable
from minivllm.device.policy import DevicePolicy
from minivllm.errors import ConfigError
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import CacheSpec, LayerCache

BLOCK_SIZE = 64
CPU = torch.device("cpu")
SAME = "Both orders give the same result, bit for bit."


class RowByRow(RowPairs):
    """Pairs in the order of their rows, whatever they share."""

    def shared_blocks(self, rows: StepRows) -> Readers | None:
        return None


@dataclass
class Tables:
    """The block tables of made-up requests."""

    block_size: int
    block_table: MirroredTable
    kv_position: MirroredTable
    num_entered: int = 0


def tables_of(users: int, prefix: int, context: int) -> tuple[Tables, int]:
    """Block tables of users with so many tokens each, of which the whole blocks of ``prefix`` tokens are the
    same ones; and the number of blocks. They lie anywhere in the cache, as those of an old server do."""
    shared, width = prefix // BLOCK_SIZE, -(-context // BLOCK_SIZE)
    num_blocks = 1 + shared + users * (width - shared)
    blocks = 1 + np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32)
    table = MirroredTable(users, width, CPU)
    table.host[:, :shared] = blocks[:shared]
    table.host[:, shared:] = blocks[shared:].reshape(users, -1)
    return Tables(BLOCK_SIZE, table, MirroredTable(num_blocks, BLOCK_SIZE, CPU)), num_blocks


def random_caches(layers: int, num_blocks: int, spec: CacheSpec) -> list[LayerCache]:
    """Keys and values of so many layers."""
    shapes = spec.block_shapes(BLOCK_SIZE)
    return [
        LayerCache(*(torch.randn(num_blocks, *shape).to(spec.dtype) for shape in shapes))
        for _ in range(layers)
    ]


@with_options
def attention(
    output: OutputOptions,
    users: Annotated[int, typer.Option(min=2, help="Users that decode together.")] = 10,
    prefix: Annotated[int, typer.Option(min=64, help="Tokens that they share.")] = 10240,
    suffix: Annotated[int, typer.Option(min=1, help="Further tokens of each user.")] = 200,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each with a cache of its own.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 3,
    query_group: Annotated[int, typer.Option(min=1, help="Query heads of a KV head.")] = 3,
    head_dim: Annotated[int, typer.Option(min=16, help="Dimensions of a head.")] = 64,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of keys and values.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=2, help="Rounds, in each of which both orders run.")] = 10,
) -> None:
    """Measure decode attention of users that share a prefix, block by block and row by row, on a CPU.

    Processor time does not count what other programs do meanwhile. A second case shares nothing.

    Example: minivllm bench attention --users 32 --prefix 2048
    """
    reason = cannot_compile_reason(CPU)
    cache_dtype = getattr(torch, dtype)
    if reason is not None:
        raise ConfigError(f"There is no compiled attention to measure: {reason}.")
    if not can_have_strips(BLOCK_SIZE, head_dim, cache_dtype):
        raise ConfigError(f"Heads of {head_dim} dimensions are no whole strips: give a multiple of 32.")
    spec = AttentionSpec(None, head_dim**-0.5, query_group)
    compiler, context = PackagedRegionCompiler(), prefix + suffix
    measurements: list[Measurement] = []
    for case, shared in (("shared prefix", prefix), ("nothing shared", 0)):
        tables, num_blocks = tables_of(users, shared, context)
        made = AttentionContext(
            specs=(spec,), kv_heads=kv_heads, query_group=query_group, head_dim=head_dim, dtype=cache_dtype,
            query_dtype=cache_dtype, cache_dtype=cache_dtype, tables=tables, num_blocks=num_blocks,
            max_num_seqs=users, max_num_batched_tokens=users, verify_size=0, compile_region=compiler,
            compiles=True, policy=DevicePolicy.of(CPU), device=CPU, in_strips=True,
        )  # fmt: skip
        sides = {
            "block by block": RowPairs(made, CAUSAL),
            "row by row": RowByRow(made, CAUSAL),
        }
        compiler.build()
        caches = random_caches(layers, num_blocks, made.cache_spec)
        q = torch.randn(users, kv_heads, query_group, head_dim).to(cache_dtype)
        rows = StepRows(
            np.arange(users), np.full(users, context - 1), np.ones(users, dtype=np.int64), users, 0, users
        )
        measurements += measure(case, sides, rows, caches, spec, q, repeats)
    by_side = [[one for one in measurements if one.side == side] for side in ("block by block", "row by row")]
    comparisons = [
        found
        for ours, theirs in zip(*by_side)
        for found in compared({ours.metric: ours}, {theirs.metric: theirs})
    ]
    shares = [
        f"{ours.case}: {median(ours.samples) / median(theirs.samples):.2f} × the {ours.metric} of row by row"
        for ours, theirs in zip(*by_side)
    ]
    shape = {"users": users, "prefix": prefix, "suffix": suffix, "layers": layers, "dtype": dtype}
    shape |= {"kv_heads": kv_heads, "query_group": query_group, "head_dim": head_dim}
    publish(
        make_report("attention", shape, measurements, comparisons, [*shares, SAME]),
        output,
    )


def measure(
    case: str,
    sides: dict[str, RowPairs],
    rows: StepRows,
    caches: list[LayerCache],
    spec: AttentionSpec,
    q: torch.Tensor,
    repeats: int,
) -> list[Measurement]:
    """Times of a layer, and of making the lists of a step [ms], of both sides in turns. RuntimeError if their
    results differ."""
    lists: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    elapsed: dict[str, list[float]] = {side: [] for side in sides}
    with torch.inference_mode():
        for repeat in range(-1, repeats):  # the first round warms up
            results = []
            for side in list(sides)[:: 1 if repeat % 2 else -1]:
                before = time.process_time()
                prepared: PairMetadata = sides[side].prepare(rows, 0, len(rows.slots))
                started, begun = time.process_time(), time.perf_counter()
                for cache in caches:
                    out = sides[side].attend(prepared, cache, spec, q)
                if repeat >= 0:
                    lists[side].append(1e3 * (started - before))
                    processor[side].append(1e3 * (time.process_time() - started) / len(caches))
                    elapsed[side].append(1e3 * (time.perf_counter() - begun) / len(caches))
                results.append(out)
            if not torch.equal(*results):
                raise RuntimeError(f"{case}: the order of pairs changed the result.")
    figures = {"processor time of a layer": processor, "time of a layer": elapsed, "lists of a step": lists}
    return [
        Measurement(case, side, metric, "ms", "lower", samples)
        for metric, of_side in figures.items()
        for side, samples in of_side.items()
    ]
