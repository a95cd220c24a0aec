"""Prompt chunks by products of whole matrices: what is cut, what comes out, and how precise it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import minivllm.attention.tiles
from kernels_triton_free.attention import gathered_sdpa_attention
from kernels_triton_free.chunks.attention import attend_by_products
from minivllm.attention import AttentionRule, FlexAttention
from minivllm.attention.chunks import ChunkProducts
from minivllm.attention.lists import chunk_tiles
from minivllm.attention.lists.chunk_tiles import CACHED_SCORES, GOOD_QUERIES, MAX_QUERIES, MAX_SCORES, Tile, cut_chunks
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.compilation.region_packages import PackagedRegionCompiler, export_region
from minivllm.compilation.regions import Region
from minivllm.device.policy import DevicePolicy
from minivllm.models.decoder_config import AttentionSpec, Reach
from minivllm.models.model import LayerCache
from tests.attention.backends import laid_in_strips, listed_attention, new_context, specs_of
from tests.attention.random_batches import CPU, BatchShape, new_batch
from tests.attention.test_backends import SHAPE, VERIFY_SIZE, check_equal, random_step

FAST = DevicePolicy(type="cpu", multiplies_bfloat16=True)
SPECS = specs_of([Reach(), Reach(9), Reach(None, 11), Reach(12, 16), Reach(17)])
BFLOAT16: dict[str, Any] = dict.fromkeys(("dtype", "query_dtype", "cache_dtype"), torch.bfloat16)


@given(
    chunks=st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 2500)), min_size=1, max_size=12),
    heads=st.sampled_from([1, 9, 32, 128]),
)
def test_calls_hold_all_queries_in_order_and_are_bounded(chunks: list[tuple[int, int]], heads: int) -> None:
    calls = cut_chunks([Tile(slot, start, size) for slot, (start, size) in enumerate(chunks)], heads)
    queries = [(tile.slot, tile.start + index) for call in calls for tile in call for index in range(tile.size)]
    assert queries == [(slot, start + index) for slot, (start, size) in enumerate(chunks) for index in range(size)]
    for call in calls:
        most, longest = max(tile.size for tile in call), max(tile.start + tile.size for tile in call)
        padded, needed = len(call) * most * longest, sum(tile.size * (tile.start + tile.size) for tile in call)
        assert most <= MAX_QUERIES and padded <= 2 * needed
        assert padded * heads <= CACHED_SCORES or (len(call) == 1 and most <= GOOD_QUERIES)
        assert padded * heads <= MAX_SCORES or most == 1


@pytest.mark.parametrize("in_strips", [True, False], ids=["strips", "plain"])
@pytest.mark.parametrize("max_queries", [3, MAX_QUERIES])
@torch.inference_mode()
def test_mixed_batches_give_what_gathering_gives(
    in_strips: bool, max_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where what products round does not count; not compiled."""
    monkeypatch.setattr(ChunkProducts, "serves", lambda context, rule: True)
    monkeypatch.setattr(chunk_tiles, "MAX_QUERIES", max_queries)
    monkeypatch.setattr(minivllm.attention.tiles, "paged_flex_attention", listed_attention)
    batch = new_batch(SHAPE)
    context = new_context(batch.groups[0], SHAPE, SPECS, verify_size=VERIFY_SIZE, in_strips=in_strips)
    backend = FlexAttention(context)
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(40):
        rows, cache, q = random_step(rng, generator, batch)
        if rows:
            check_equal(batch, rows, cache, q, backend, AttentionRule(), SPECS, in_strips=in_strips)


def test_it_serves_what_it_can_compute_where_it_is_fast() -> None:
    def serves(specs: list[AttentionSpec] = SPECS, rule: AttentionRule | None = None, **changes: Any) -> bool:
        context = new_context(new_batch(SHAPE).groups[0], SHAPE, specs, **({**BFLOAT16, "policy": FAST} | changes))
        return ChunkProducts.serves(context, rule or AttentionRule())

    assert serves()
    assert not serves(policy=DevicePolicy(type="cpu")) and not serves(policy=DevicePolicy(type="cuda"))
    assert not serves(policy=DevicePolicy(type="cpu", multiplies_bfloat16=True, multiplies_bfloat16_tiles=True))
    assert not serves(query_dtype=torch.float32) and not serves(cache_dtype=torch.float32)
    assert not serves([*SPECS, SPECS[0]._replace(soft_cap=30.0)]) and not serves(specs_of([Reach(None, None, True)]))
    assert not serves(rule=AttentionRule(visibility=lambda query, key: key <= query))


def long_chunk(in_strips: bool) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Arguments of ``attend_by_products`` in bfloat16 with scores up to about 60, what float64 makes of them, and what
    is left of that in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    kv_heads, group, dim, count, start = 2, 3, 64, 96, 150
    q, k, v = (
        torch.randn(*shape, generator=generator).to(torch.bfloat16)
        for shape in ((count, kv_heads, group, dim), (40, 32, kv_heads, dim), (40, 32, kv_heads, dim))
    )
    q, blocks = q * 10, torch.randperm(39, generator=generator)[:8].to(torch.int32) + 1
    cache = LayerCache(k, v)
    expected = gathered_sdpa_attention(q.double(), k.double(), v.double(), blocks, start, scale=dim**-0.5)
    cache = laid_in_strips(cache) if in_strips else cache
    positions = torch.arange(start, start + count, dtype=torch.int32)
    first = torch.zeros(1, dtype=torch.int32)
    return (q[None], cache.k, cache.v, blocks[None], first, positions[None]), expected, expected.to(torch.bfloat16)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).square().mean().sqrt())


@pytest.mark.parametrize("in_strips", [True, False], ids=["strips", "plain"])
@torch.inference_mode()
def test_scores_of_bfloat16_are_precise_where_they_count(in_strips: bool) -> None:
    arguments, expected, rounded = long_chunk(in_strips)
    assert error(attend_by_products(*arguments, scale=0.125)[0], expected) < 3 * error(rounded, expected)


@pytest.mark.skipif(cannot_compile_reason(CPU) is not None, reason="there is no C++ compiler here")
@torch.inference_mode()
def test_compiled_code_is_as_precise(tmp_path: Any) -> None:
    """What is taken off the scores stays inside the product: apart from it, it would come too late."""
    regions: list[Region] = []

    def collect(region: Region) -> Callable:
        regions.append(region)
        return region.function

    shape = BatchShape(block_size=32, num_blocks=40)
    context = new_context(
        new_batch(shape).groups[0],
        shape,
        [AttentionSpec(None, 0.125, 3)],
        compile_region=collect,
        in_strips=True,
        kv_heads=2,
        head_dim=64,
        policy=FAST,
        **BFLOAT16,
    )
    FlexAttention(context)
    assert [region.name for region in regions] == ["decode attention over strips", "prompt attention by products"]
    export_region(regions[1], {})  # raises where it takes a size that varies for a constant
    compiled = PackagedRegionCompiler(tmp_path)(regions[1])
    arguments, expected, rounded = long_chunk(True)
    assert error(compiled(*arguments)[0], expected) < 3 * error(rounded, expected)
