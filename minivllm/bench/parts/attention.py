"""``minivllm bench attention``: attention of users that share a prefix, on a CPU.

While they decode, pairs of a row and a block are computed block by block, as the engine does, and row by row,
as it does where nothing is shared. Where each has a few new tokens of a prompt, these lie in query tiles
together, as the engine has them, and in tiles for each user. Both ways take turns in one process. Beside what
a layer takes stands what it should take, by costs that are measured first, as an engine does that starts. Of
chunks so short that the engine chooses between pairs and tiles, both are measured and expected. No model is
needed: keys, values and queries are random numbers.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer

from kernels_triton_free.strips.layout import can_have_strips
from minivllm.attention import AttentionContext, StepRows
from minivllm.attention.costs.calibration import random_cache, samples_of, tables_of
from minivllm.attention.costs.model import Costs, fit
from minivllm.attention.gathered import GatheredTiles
from minivllm.attention.interface.rule import CAUSAL
from minivllm.attention.lists.key_groups import KeyGroups
from minivllm.attention.lists.shared_prefixes import Readers
from minivllm.attention.pairs import RowPairs
from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Measurement, OutputOptions, compared, make_report, publish
from minivllm.cli.engine.options import with_options
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
from minivllm.device.policy import DevicePolicy
from minivllm.errors import ConfigError
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import CacheSpec, LayerCache

BLOCK_SIZE = 64
CPU = torch.device("cpu")
SIDES, WAYS = ("together", "each for itself"), ("pairs", "tiles")
EXPECTED = "expected time of a layer"
FEW = 2, 4, 8, 16
"""Tokens of chunks for which an engine chooses between the two ways."""
SAME = "Together and each for itself give the same result, bit for bit."


class RowByRow(RowPairs):
    """Pairs in the order of their rows, whatever they share."""

    def shared_blocks(self, rows: StepRows) -> Readers | None:
        return None


class TilesOfOneRow(GatheredTiles):
    """Tiles of prompt chunks, none of which holds several rows. The code is the same."""

    def _bundles(self, groups: KeyGroups | None, counts: np.ndarray) -> np.ndarray | None:
        return None


Kernels = RowPairs | GatheredTiles


def random_caches(layers: int, num_blocks: int, spec: CacheSpec) -> list[LayerCache]:
    """Keys and values of so many layers."""
    return [random_cache(spec, num_blocks, BLOCK_SIZE, seed) for seed in range(layers)]


@with_options
def attention(
    output: OutputOptions,
    users: Annotated[int, typer.Option(min=2, help="Users that decode together.")] = 10,
    prefix: Annotated[int, typer.Option(min=64, help="Tokens that they share.")] = 10240,
    suffix: Annotated[int, typer.Option(min=1, help="Further tokens of each user who decodes.")] = 200,
    question: Annotated[int, typer.Option(min=2, help="New tokens of each user who asks.")] = 20,
    layers: Annotated[int, typer.Option(min=1, help="Layers, each with a cache of its own.")] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="KV heads of a layer.")] = 3,
    query_group: Annotated[int, typer.Option(min=1, help="Query heads of a KV head.")] = 3,
    head_dim: Annotated[int, typer.Option(min=16, help="Dimensions of a head.")] = 64,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of keys and values.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(min=2, help="Rounds, in each of which both ways run.")] = 10,
) -> None:
    """Measure attention of users that share a prefix, together and each for itself, on a CPU.

    Users decode, or each asks a short question. Processor time does not count what other programs do
    meanwhile. Further cases share nothing.

    Example: minivllm bench attention --users 32 --prefix 2048
    """
    reason = cannot_compile_reason(CPU)
    cache_dtype = getattr(torch, dtype)
    if reason is not None:
        raise ConfigError(f"There is no compiled attention to measure: {reason}.")
    if not can_have_strips(BLOCK_SIZE, head_dim, cache_dtype):
        raise ConfigError(f"Heads of {head_dim} dimensions are no whole strips: give a multiple of 32.")
    spec = AttentionSpec(None, head_dim**-0.5, query_group)
    compiler, policy = PackagedRegionCompiler(), DevicePolicy.of(CPU)
    computed = policy.prompt_attention_dtype(cache_dtype)
    size = policy.query_tile_size(query_group, computed)
    longest = policy.pair_tokens(prefix + max(suffix, question))
    few = [count for count in FEW if count != question and count <= longest]
    measurements: list[Measurement] = []
    sides: dict[str, Kernels]
    costs: Costs | None = None
    for shares, shared in (("shared prefix", prefix), ("nothing shared", 0)):
        for count in (1, question, *few):
            context = prefix + (suffix if count == 1 else count)
            tables, num_blocks = tables_of(users, shared, context, BLOCK_SIZE, CPU)
            made = AttentionContext(
                specs=(spec,), kv_heads=kv_heads, query_group=query_group, head_dim=head_dim,
                dtype=cache_dtype, query_dtype=cache_dtype, cache_dtype=cache_dtype, tables=tables,
                num_blocks=num_blocks, max_num_seqs=users, max_num_batched_tokens=users * count,
                few_tokens=0, compile_region=compiler, compiles=True, policy=policy, device=CPU,
                in_strips=True,
            )  # fmt: skip
            capacity = max(policy.min_tiles, users * -(-max(question, *FEW) // size) + 2)
            pairs, by_row = RowPairs(made, CAUSAL), RowByRow(made, CAUSAL)
            tiles, of_one_row = (
                kind(made, CAUSAL, "prompt attention", size, capacity, compute_dtype=computed)
                for kind in (GatheredTiles, TilesOfOneRow)
            )
            compiler.build()
            if costs is None:
                costs = Costs(*(fit(samples_of(way, made, context)) for way in (pairs, tiles)))
            caches = random_caches(layers, num_blocks, made.cache_spec)
            q = torch.randn(users * count, kv_heads, query_group, head_dim).to(cache_dtype)
            counts = np.full(users, count)
            num_single = users if count == 1 else 0
            rows = StepRows(np.arange(users), context - counts, counts, num_single, 0, len(q))
            if count == 1:
                what, sides = "decode", {SIDES[0]: pairs, SIDES[1]: by_row}
            elif count == question:
                what, sides = f"questions of {count} tokens", {SIDES[0]: tiles, SIDES[1]: of_one_row}
            else:
                what, sides = f"chunks of {count} tokens", {WAYS[0]: pairs, WAYS[1]: tiles}
            measurements += measure(f"{what}, {shares}", sides, costs, rows, caches, spec, q, repeats)
    comparisons, notes = [], []
    of_sides = [[one for one in measurements if one.side in both] for both in zip(SIDES, WAYS)]
    for ours, theirs in zip(*of_sides):
        comparisons += compared({ours.metric: ours}, {theirs.metric: theirs})
        ratio = median(ours.samples) / median(theirs.samples)
        notes.append(f"{ours.case}: {ratio:.2f} × the {ours.metric} of {theirs.side}")
    shape = {"users": users, "prefix": prefix, "suffix": suffix, "layers": layers, "dtype": dtype}
    shape |= {"kv_heads": kv_heads, "query_group": query_group, "head_dim": head_dim}
    shape["question"] = question
    publish(make_report("attention", shape, measurements, comparisons, [*notes, SAME]), output)


def measure(
    case: str,
    sides: dict[str, Kernels],
    costs: Costs,
    rows: StepRows,
    caches: list[LayerCache],
    spec: AttentionSpec,
    q: torch.Tensor,
    repeats: int,
) -> list[Measurement]:
    """Times of a layer, and of making the lists of a step [ms], of two sides in turns, and what a layer
    should take. RuntimeError if their results differ."""
    lists: dict[str, list[float]] = {side: [] for side in sides}
    processor: dict[str, list[float]] = {side: [] for side in sides}
    elapsed: dict[str, list[float]] = {side: [] for side in sides}
    expected: dict[str, list[float]] = {}
    with torch.inference_mode():
        for repeat in range(-1, repeats):  # the first round warms up
            results = []
            for side, kernels in list(sides.items())[:: 1 if repeat % 2 else -1]:
                before = time.process_time()
                prepared: Any = kernels.prepare(rows, 0, len(rows.slots) if rows.num_single else 2)
                started, begun = time.process_time(), time.perf_counter()
                for cache in caches:
                    out = kernels.attend(prepared, cache, spec, q)
                if repeat >= 0:
                    lists[side].append(1e3 * (started - before))
                    processor[side].append(1e3 * (time.process_time() - started) / len(caches))
                    elapsed[side].append(1e3 * (time.perf_counter() - begun) / len(caches))
                cost = costs.pairs if isinstance(kernels, RowPairs) else costs.tiles
                expected[side] = [1e3 * cost.seconds(kernels.work(prepared)[spec.reach])]
                results.append(out)
            if tuple(sides) == SIDES and not torch.equal(*results):
                raise RuntimeError(f"{case}: the two ways differ.")
    measured = {"processor time of a layer": processor, "time of a layer": elapsed, "lists of a step": lists}
    return [
        Measurement(case, side, metric, "ms", "lower", of_side[side])
        for metric, of_side in ({EXPECTED: expected} | measured).items()
        for side in sides
    ]
