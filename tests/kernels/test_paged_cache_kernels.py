"""Writing, copying and gathering pages against plain Python loops."""

from __future__ import annotations

import random

import pytest
import torch

from kernels_triton_free.paged_cache import copy_pages, gather_pages, write_kv

PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM = 7, 4, 2, 8


def new_cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
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
    assert torch.equal(k_cache, expected_k) and torch.equal(v_cache, expected_v)


def test_padding_writes_all_go_to_the_null_page() -> None:
    k_cache, v_cache = new_cache(), new_cache()
    ones = torch.ones(5, KV_HEADS, HEAD_DIM)
    write_kv(k_cache, v_cache, ones, ones, torch.tensor([9, 0, 0, 0, 0], dtype=torch.int32))
    assert k_cache[1:].sum() == v_cache[1:].sum() == KV_HEADS * HEAD_DIM
    assert torch.equal(k_cache[2, 1], ones[0])


def test_copy_pages_copies_whole_pages_and_nothing_else() -> None:
    cache = torch.randn(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    before = cache.clone()
    copy_pages(cache, torch.tensor([1, 4, 1]), torch.tensor([2, 0, 6]))
    expected = before.clone()
    expected[2], expected[0], expected[6] = before[1], before[4], before[1]
    assert torch.equal(cache, expected)


def test_gather_pages_puts_the_pages_of_a_request_in_order() -> None:
    cache = torch.randn(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    gathered = gather_pages(cache, torch.tensor([5, 2, 3], dtype=torch.int32))
    assert gathered.is_contiguous() and gathered.shape == (3 * PAGE_SIZE, KV_HEADS, HEAD_DIM)
    assert torch.equal(gathered, torch.cat([cache[5], cache[2], cache[3]]))
