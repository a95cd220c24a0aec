"""Measuring what both ways to attend to few tokens cost, with the shapes of an engine's layers.

Made-up requests read a cache of random numbers: that of an engine which starts has never been written, and
the operating system shows one page of zeros in all of its places, which is read faster than memory is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from minivllm.attention.costs.model import Costs, Way, Work, fit
from minivllm.attention.interface.backend import AttentionContext, StepRows
from minivllm.compilation.compiler import packages_directory
from minivllm.compilation.package_keys import environment, hash_of
from minivllm.device.buffers import MirroredTable
from minivllm.specs.caches import CacheSpec, LayerCache

logger = logging.getLogger(__name__)

LONGEST, MOST_BYTES = 1024, 16 << 20
"""Tokens of the longest made-up request, and size of the cache of all of them."""
SHORTEST = 64
"""Where requests are no longer than so many tokens, nothing is measured: no choice matters."""
SHAPES = (
    (1, 2, 4, False),
    (1, 8, 1, False),
    (4, 4, 4, False),
    (4, 8, 1, False),
    (4, 8, 1, True),
    (4, 16, 2, False),
    (8, 2, 2, True),
    (2, 96, 2, False),  # several tiles read one copy
)
"""Rows, tokens of each that are computed, where they end (LONGEST / n), and whether they share a prefix."""
ROUNDS = 3
"""Of which the fastest counts, after one that warms up."""


@dataclass
class MadeUpTables:
    """The block tables of made-up requests."""

    block_size: int
    block_table: MirroredTable
    kv_position: MirroredTable
    num_entered: int = 0


def tables_of(
    users: int, prefix: int, context: int, block_size: int, device: torch.device
) -> tuple[MadeUpTables, int]:
    """Block tables of users with so many tokens each, of which the whole blocks of ``prefix`` tokens are the
    same ones; and the number of blocks. They lie anywhere in the cache, as those of an old server do."""
    shared, width = prefix // block_size, -(-context // block_size)
    num_blocks = 1 + shared + users * (width - shared)
    blocks = 1 + np.random.default_rng(0).permutation(num_blocks - 1).astype(np.int32)
    table = MirroredTable(users, width, device)
    table.host[:, :shared] = blocks[:shared]
    table.host[:, shared:] = blocks[shared:].reshape(users, -1)
    return MadeUpTables(block_size, table, MirroredTable(num_blocks, block_size, device)), num_blocks


def random_cache(spec: CacheSpec, num_blocks: int, block_size: int, seed: int = 0) -> LayerCache:
    """Random keys and values, and zeros in the null block."""
    generator = torch.Generator().manual_seed(seed)
    shapes = spec.block_shapes(block_size)
    k, v = (torch.randn(num_blocks, *shape, generator=generator).to(spec.dtype) for shape in shapes)
    k[0], v[0] = 0, 0
    return LayerCache(k, v)


def measured_costs(pairs: Way, tiles: Way, context: AttentionContext) -> Costs | None:
    """What both ways cost for the layers of this context: as it was measured before by the same code for the
    same shapes on this machine, or else measured now. None where all requests are short."""
    longest = min(LONGEST, context.tables.block_table.host.shape[1] * context.tables.block_size)
    if longest < SHORTEST:
        return None
    path = _record(context)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=Costs)
    started = time.perf_counter()
    costs = Costs(*(fit(samples_of(way, context, longest)) for way in (pairs, tiles)))
    logger.info("Measured attention of few tokens in %.2f s.", time.perf_counter() - started)
    with contextlib.suppress(OSError):  # then the next start measures again
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=".attention_costs-")
        with open(descriptor, "wb") as file:
            file.write(msgspec.json.encode(costs))
        os.replace(part, path)
    return costs


def _record(context: AttentionContext) -> Path:
    """Where costs are kept, beside compiled code: they hold as long as that does."""
    shape = context.cache_spec, context.query_group, context.query_dtype, context.dtype, context.policy
    kinds = {spec.computation for spec in context.specs}
    key = repr((shape, context.tables.block_size, sorted(map(repr, kinds)), SHAPES, environment()))
    return packages_directory() / f"attention_costs-{hash_of(key.encode())}.json"


def samples_of(way: Way, context: AttentionContext, longest: int) -> list[tuple[Work, float]]:
    """Work of a layer, and the seconds that it took, of each of SHAPES."""
    block_size, generator = context.tables.block_size, torch.Generator().manual_seed(0)
    spec = min(context.specs, key=lambda spec: spec.reach.is_limited)
    longest = min(longest, MOST_BYTES // (max(SHAPES)[0] * context.cache_spec.bytes_per_token))
    sinks = torch.zeros(context.kv_heads * context.query_group) if spec.has_sinks else None
    samples = []
    for users, count, part, shares in SHAPES:
        start = max(1, longest // part - count)
        tables, num_blocks = tables_of(
            users, start if shares else 0, start + count, block_size, context.device
        )
        own, cache = way.over(tables), random_cache(context.cache_spec, num_blocks, block_size)
        counts = np.full(users, count)
        rows = StepRows(np.arange(users), np.full(users, start), counts, 0, users, users * count)
        shape = users * count, context.kv_heads, context.query_group, context.head_dim
        q = torch.randn(shape, generator=generator).to(context.query_dtype)
        prepared = own.prepare(rows, 0, 2)
        times = []
        for _ in range(1 + ROUNDS):
            started = time.perf_counter()
            own.attend(prepared, cache, spec, q, sinks)
            times.append(time.perf_counter() - started)
        samples.append((own.work(prepared)[spec.reach], min(times[1:])))
    return samples
