"""The compiled backend gives what the gathering reference gives, over random mixed batches and without recompiling."""

from __future__ import annotations

import random

import pytest
import torch
from random_batches import CPU, BatchShape, finish_all, new_batch, random_rows

from minivllm.models.decoder import LayerCache
from minivllm.worker.attention_backend import FlexAttentionBackend, GatherSdpaBackend
from minivllm.worker.compiler import RegionCompiler, cannot_compile_reason
from minivllm.worker.persistent_batch import PersistentBatch
from minivllm.worker.step_inputs import StepInputBuilder

KV_HEADS, GROUP, HEAD_DIM = 2, 3, 16
SCALE = HEAD_DIM**-0.5
WINDOWS: list[int | None] = [None, 9]
VERIFY_SIZE = 4
SHAPE = BatchShape(max_num_seqs=9, num_pages=72)


def poisoned_cache(batch: PersistentBatch, generator: torch.Generator) -> LayerCache:
    """NaN wherever no request owns the page, the null page included; large numbers past the end of each request."""
    k, v = torch.full((2, SHAPE.num_pages, SHAPE.page_size, KV_HEADS, HEAD_DIM), torch.nan)
    for request in batch.requests.values():
        for cache in (k, v):
            pages = request.data.block_ids[0]
            cache[pages] = torch.randn(len(pages), SHAPE.page_size, KV_HEADS, HEAD_DIM, generator=generator)
    return LayerCache(k, v)


def spoil_tails(cache: LayerCache, batch: PersistentBatch, ends: dict[str, int]) -> None:
    for name, end in ends.items():
        last = batch.requests[name].data.block_ids[0][-1]
        used = (end - 1) % SHAPE.page_size + 1
        cache.k[last, used:] *= 1e4
        cache.v[last, used:] *= 1e4


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler for torch.compile here")
@torch.inference_mode()
def test_compiled_attention_equals_gathering_on_random_mixed_batches_without_recompiling() -> None:
    torch._dynamo.reset()
    batch = new_batch(SHAPE)
    builder = StepInputBuilder(
        batch,
        max_num_seqs=SHAPE.max_num_seqs,
        max_num_batched_tokens=SHAPE.max_num_batched_tokens,
        num_pages=SHAPE.num_pages,
        tile_size=4,
        windows=WINDOWS,
        gathers_pages=True,
        device=CPU,
        verify_size=VERIFY_SIZE,
    )
    compiler = RegionCompiler(enabled=True)
    compiled = FlexAttentionBackend(compiler, WINDOWS, SCALE, torch.float32, CPU, verifies=True)
    reference = GatherSdpaBackend(batch, SCALE)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    kinds: set[tuple[bool, bool, bool]] = set()
    compared = 0
    while compared < 60:
        finish_all(batch)
        rows = sorted(random_rows(rng, SHAPE, batch), key=lambda row: row.count)
        if compared > 0 and rng.random() < 0.2:
            rows = [row for row in rows if 1 < row.count <= VERIFY_SIZE]
        singles, several = sum(row.count == 1 for row in rows), sum(row.count > VERIFY_SIZE for row in rows)
        few = len(rows) - singles - several
        if compared == 0 and (singles < 2 or few < 2 or several < 3):
            # Compiled at the first call, where sizes that may differ must differ, as in a worker's warm-up.
            continue
        if not rows:
            continue
        inputs = builder.build(rows)
        cache = poisoned_cache(batch, generator)
        ends = {row.request.data.request_id: row.start + row.count for row in rows}
        shared = {page for row in rows for page in row.request.data.block_ids[0][:-1]}
        spoil_tails(
            cache, batch, {n: e for n, e in ends.items() if batch.requests[n].data.block_ids[0][-1] not in shared}
        )
        padded = max(2, inputs.num_tokens)
        q = torch.randn(padded, KV_HEADS, GROUP, HEAD_DIM, generator=generator)
        for window in WINDOWS:
            out = compiled.attend(inputs, cache, window, q)[: inputs.num_tokens]
            expected = reference.attend(inputs, cache, window, q)[: inputs.num_tokens]
            assert bool(expected.isfinite().all()), "the reference itself must not read what it does not own"
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        if compared == 0:
            compiler.freeze()
        compared += 1
        kinds.add((singles > 0, few > 0, several > 0))
    assert compiler.num_recompilations == 0
    assert len(kinds) == 7, "every mixture of single tokens, drafts and chunks was seen"
