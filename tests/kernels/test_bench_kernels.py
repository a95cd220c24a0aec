"""Time of every kernel at the sizes of a 135M-parameter model (run with --benchmark-only).

16 requests decode with 300 to 500 tokens of context each, or one prompt of 512 tokens is computed. What the
engine compiles is compiled here; elementwise kernels run uncompiled as well, to compare with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernels_triton_free.activation import gated_activation
from kernels_triton_free.attention import (
    TileLists,
    gathered_flex_attention,
    gathered_sdpa_attention,
    pack_tiles,
    paged_flex_attention,
    unpack_tiles,
)
from kernels_triton_free.linear import can_pack, linear, pack_weight, packed_linear
from kernels_triton_free.norm import rms_norm
from kernels_triton_free.paged_cache import gather_blocks, write_kv
from kernels_triton_free.rotary import apply_rotary, default_frequencies, rotary_table
from kernels_triton_free.strips.visibility import Bounds
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.models.norms import AddNorm, RmsNorm

HIDDEN, INNER, KV_HEADS, GROUP, HEAD_DIM, PAGE_SIZE = 576, 1536, 3, 3, 64, 64
REQUESTS, PROMPT, PAGES_PER_REQUEST, TILE_SIZE = 16, 512, 8, 32
NUM_PAGES = 1 + REQUESTS * PAGES_PER_REQUEST
SCALE = HEAD_DIM**-0.5
TOKENS = pytest.mark.parametrize("tokens", [REQUESTS, PROMPT])


@pytest.fixture(params=["eager", "compiled"])
def built(request: pytest.FixtureRequest) -> Callable[[Callable], Callable]:
    """Turns a kernel into what is timed."""
    if request.param == "eager":
        return lambda function: function
    return compiled


def compiled(function: Callable) -> Callable:
    reason = cannot_compile_reason(torch.device("cpu"))
    if reason is not None:
        pytest.skip(reason)
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def measure_and_check(benchmark: Callable, function: Callable, *arguments: object) -> None:
    """Time the function; what it computes (in place, if it returns nothing) must be finite:
    NaN is fast to make."""
    with torch.inference_mode():
        result = function(*arguments)
        benchmark(function, *arguments)
    written = [
        value for value in tree_leaves(arguments if result is None else result) if isinstance(value, Tensor)
    ]
    assert written, "the kernel neither returned nor was given a tensor"
    assert all(bool(value.isfinite().all()) for value in written if not value.is_mkldnn)


@TOKENS
def test_bench_rms_norm(benchmark: Callable, built: Callable, tokens: int) -> None:
    measure_and_check(benchmark, built(rms_norm), random(tokens, HIDDEN), random(HIDDEN), 1e-5)


@TOKENS
def test_bench_add_norm(benchmark: Callable, built: Callable, tokens: int) -> None:
    measure_and_check(
        benchmark,
        built(AddNorm(RmsNorm(1e-5))),
        random(tokens, HIDDEN),
        random(tokens, HIDDEN),
        random(HIDDEN),
    )


@TOKENS
def test_bench_gated_activation(benchmark: Callable, built: Callable, tokens: int) -> None:
    measure_and_check(benchmark, built(gated_activation), random(tokens, 2 * INNER), "silu")


@TOKENS
def test_bench_apply_rotary(benchmark: Callable, built: Callable, tokens: int) -> None:
    table = rotary_table(default_frequencies(HEAD_DIM, 10000.0), tokens)
    measure_and_check(benchmark, built(apply_rotary), random(tokens, KV_HEADS * GROUP, HEAD_DIM), table)


def test_bench_rotary_table(benchmark: Callable) -> None:
    measure_and_check(benchmark, rotary_table, default_frequencies(HEAD_DIM, 10000.0), 8192)


@TOKENS
def test_bench_write_kv(benchmark: Callable, built: Callable, tokens: int) -> None:
    k_cache, v_cache = random(2, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    k, v = random(2, tokens, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    slots = torch.randperm(NUM_PAGES * PAGE_SIZE, generator=torch.Generator().manual_seed(0))[:tokens].int()
    measure_and_check(benchmark, built(write_kv), k_cache, v_cache, k, v, slots)


def test_bench_gather_blocks(benchmark: Callable) -> None:
    measure_and_check(
        benchmark, gather_blocks, random(NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM), torch.arange(1, 9)
    )


@TOKENS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bench_linear(benchmark: Callable, tokens: int, dtype: torch.dtype) -> None:
    measure_and_check(
        benchmark, linear, random(tokens, HIDDEN, dtype=dtype), random(2 * INNER, HIDDEN, dtype=dtype)
    )


@TOKENS
@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN cannot pack bfloat16 weights on this CPU")
def test_bench_packed_linear(benchmark: Callable, tokens: int) -> None:
    weight = pack_weight(random(2 * INNER, HIDDEN, dtype=torch.bfloat16))
    measure_and_check(
        benchmark, packed_linear, random(tokens, HIDDEN, dtype=torch.bfloat16), weight, None, 2 * INNER
    )


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN cannot pack bfloat16 weights on this CPU")
def test_bench_pack_weight(benchmark: Callable) -> None:
    measure_and_check(benchmark, pack_weight, random(2 * INNER, HIDDEN, dtype=torch.bfloat16))


def caches() -> tuple[Tensor, Tensor, Tensor]:
    """K and V of all pages, and the position that each slot holds; request r owns the pages after 1 + 8 r."""
    k_cache, v_cache = random(2, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    index = (torch.arange(NUM_PAGES) - 1).clamp(min=0) % PAGES_PER_REQUEST
    kv_position = index[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)
    return k_cache, v_cache, kv_position.flatten().int()


def contexts() -> list[int]:
    return [300 + 200 * request // REQUESTS for request in range(REQUESTS)]


def page_lists(tiles: list[tuple[int, int, int]], width: int) -> TileLists:
    """Lists of tiles (first position, last position, first page of the request)."""
    counts = torch.zeros(2, len(tiles), 1, 1, dtype=torch.int32)
    pages = torch.zeros(2, len(tiles), 1, 1, width, dtype=torch.int32)
    for tile, (first, last, page) in enumerate(tiles):
        full, end = (first + 1) // PAGE_SIZE, last // PAGE_SIZE + 1
        counts[0, tile], counts[1, tile] = end - full, full
        pages[0, tile, 0, 0, : end - full] = torch.arange(page + full, page + end)
        pages[1, tile, 0, 0, :full] = torch.arange(page, page + full)
    return TileLists(counts[0], pages[0], counts[1], pages[1])


def bound(function: Callable) -> Callable:
    return partial(function, scale=SCALE, kernel_options={"PARTITION_SIZE": 1})


def test_bench_decode_attention(benchmark: Callable) -> None:
    k_cache, v_cache, kv_position = caches()
    tiles = [(n - 1, n - 1, 1 + request * PAGES_PER_REQUEST) for request, n in enumerate(contexts())]
    q_position = torch.tensor([[first] for first, _, _ in tiles], dtype=torch.int32)
    q = random(REQUESTS, KV_HEADS, GROUP, HEAD_DIM)
    attend = compiled(bound(paged_flex_attention))
    measure_and_check(
        benchmark, attend, q, k_cache, v_cache, page_lists(tiles, NUM_PAGES), Bounds(q_position), kv_position
    )


def test_bench_decode_attention_by_gathering(benchmark: Callable) -> None:
    k_cache, v_cache, _ = caches()
    q = random(REQUESTS, 1, KV_HEADS, GROUP, HEAD_DIM)

    def attend() -> list[Tensor]:
        outputs = []
        for request, n in enumerate(contexts()):
            first = 1 + request * PAGES_PER_REQUEST
            pages = torch.arange(first, first + -(-n // PAGE_SIZE))
            outputs.append(gathered_sdpa_attention(q[request], k_cache, v_cache, pages, n - 1, scale=SCALE))
        return outputs

    measure_and_check(benchmark, attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bench_prefill_attention(benchmark: Callable, dtype: torch.dtype) -> None:
    k_cache, v_cache, kv_position = caches()
    starts = range(0, PROMPT, TILE_SIZE)
    # Positions in the copy of the step's pages equal those of the first request in the cache,
    # less the null page.
    lists = page_lists([(start, start + TILE_SIZE - 1, 0) for start in starts], PAGES_PER_REQUEST)
    q_position = torch.arange(PROMPT, dtype=torch.int32).view(-1, TILE_SIZE)
    q = random(len(starts), KV_HEADS, TILE_SIZE * GROUP, HEAD_DIM, dtype=dtype)
    step_pages = torch.arange(1, 1 + PAGES_PER_REQUEST, dtype=torch.int32)[:, None]
    attend = compiled(bound(gathered_flex_attention))
    measure_and_check(
        benchmark,
        attend,
        q,
        k_cache,
        v_cache,
        step_pages,
        lists,
        Bounds(q_position),
        kv_position[PAGE_SIZE:].clone(),
    )


def test_bench_prefill_attention_by_gathering(benchmark: Callable) -> None:
    k_cache, v_cache, _ = caches()
    q = random(PROMPT, KV_HEADS, GROUP, HEAD_DIM)
    pages = torch.arange(1, 1 + PAGES_PER_REQUEST)
    measure_and_check(benchmark, partial(gathered_sdpa_attention, scale=SCALE), q, k_cache, v_cache, pages, 0)


def test_bench_pack_and_unpack_tiles(benchmark: Callable) -> None:
    q, tokens = random(PROMPT, KV_HEADS, GROUP, HEAD_DIM), torch.arange(PROMPT)
    measure_and_check(benchmark, lambda: unpack_tiles(pack_tiles(q, tokens, TILE_SIZE), tokens, TILE_SIZE))
