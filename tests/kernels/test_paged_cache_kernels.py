"""Writing, copying and gathering pages against plain Python loops."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from kernels_triton_free.paged_cache import gather_blocks, rounded, write_kv

pytestmark = pytest.mark.smoke

PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM = 7, 4, 2, 8


def new_cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize(
    "cache_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", range(5))
def test_write_kv_changes_exactly_the_slots_it_is_given(
    seed: int, slot_dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    slots = rng.sample(range(PAGES * PAGE_SIZE), rng.randint(1, 12))
    k = torch.randn(len(slots), KV_HEADS, HEAD_DIM, generator=generator)
    v = torch.randn(len(slots), KV_HEADS, HEAD_DIM, generator=generator)
    k_cache, v_cache = new_cache(cache_dtype), new_cache(cache_dtype)
    expected_k, expected_v = new_cache(cache_dtype), new_cache(cache_dtype)
    for token, slot in enumerate(slots):
        expected_k[slot // PAGE_SIZE, slot % PAGE_SIZE] = k[token].to(cache_dtype)
        expected_v[slot // PAGE_SIZE, slot % PAGE_SIZE] = v[token].to(cache_dtype)
    write_kv(k_cache, v_cache, k, v, torch.tensor(slots, dtype=slot_dtype))
    assert torch.equal(k_cache.float(), expected_k.float()) and torch.equal(
        v_cache.float(), expected_v.float()
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bits_hold_the_nearest_value_there_is_and_no_nan(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, generator=generator) * 10 ** torch.empty(4000).uniform_(-4, 6, generator=generator)
    x = torch.cat([x, torch.tensor([0.0, -0.0, 448, 464, 465, -1e30, torch.inf, -torch.inf])])
    representable = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    representable = representable[representable.isfinite()]
    nearest = (x.double()[:, None] - representable.double()).abs().min(1).values
    largest = torch.full_like(x, torch.finfo(dtype).max).copysign(x)
    error = (x.double() - rounded(x, dtype).double()).abs()
    assert torch.equal(rounded(x, dtype).float()[x.isinf()], largest[x.isinf()])
    assert torch.equal(error[x.isfinite()], nearest[x.isfinite()])


def test_padding_writes_all_go_to_the_null_page() -> None:
    k_cache, v_cache = new_cache(), new_cache()
    ones = torch.ones(5, KV_HEADS, HEAD_DIM)
    write_kv(k_cache, v_cache, ones, ones, torch.tensor([9, 0, 0, 0, 0], dtype=torch.int32))
    assert k_cache[1:].sum() == v_cache[1:].sum() == KV_HEADS * HEAD_DIM
    assert torch.equal(k_cache[2, 1], ones[0])


def test_gather_blocks_puts_the_pages_of_a_request_in_order() -> None:
    cache = torch.randn(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    gathered = gather_blocks(cache, torch.tensor([5, 2, 3], dtype=torch.int32))
    assert gathered.is_contiguous() and gathered.shape == (3 * PAGE_SIZE, KV_HEADS, HEAD_DIM)
    eight_bits = gather_blocks(cache.to(torch.float8_e4m3fn), torch.tensor([5, 2, 3], dtype=torch.int32))
    assert torch.equal(eight_bits.float(), gathered.to(torch.float8_e4m3fn).float())
    assert torch.equal(gathered, torch.cat([cache[5], cache[2], cache[3]]))


def test_compiled_code_writes_into_the_cache_itself() -> None:
    """A copy of all of a cache of 36 GB, there and back,
    took 50 of the 52 ms of a step of Qwen3-0.6B on an H100."""
    torch._dynamo.reset()
    k_cache, v_cache, expected = (
        torch.zeros(50, 16, 2, 8),
        torch.zeros(50, 16, 2, 8),
        torch.zeros(50 * 16, 2, 8),
    )
    k, slots = torch.randn(5, 2, 8), torch.tensor([3, 700, 16, 31, 799], dtype=torch.int32)
    expected[slots] = k
    _, [code] = run_and_get_code(torch.compile(write_kv, dynamic=False), k_cache, v_cache, k, 2 * k, slots)
    assert torch.equal(k_cache.view(-1, 2, 8), expected) and torch.equal(v_cache, 2 * k_cache)
    allocated = re.findall(r"= empty_strided\w*\(\(([\d, ]+)\)", code)
    assert all(
        math.prod(int(size) for size in sizes.split(",") if size.strip()) <= k.numel() for sizes in allocated
    )
    assert str(k_cache.numel()) not in re.findall(r"\d+", code)
