"""Keys and values in strips: what is written is found again,
and single tokens attend as the reference does."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from kernels_triton_free.attention import gathered_sdpa_attention
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.paged_cache import gather_keys, gather_values, write_kv
from kernels_triton_free.strips.attention import MOST_HEADS_OF_TWO_STREAMS, Pairs, attend_to_strips
from kernels_triton_free.strips.layout import can_have_strips, strip_shapes
from kernels_triton_free.strips.visibility import Bounds
from minivllm.attention.lists.bounds import bounds_of
from minivllm.attention.lists.pair_lists import list_pairs
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.specs.attention import Reach

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def new_cache(
    blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    k, v = strip_shapes(block_size, kv_heads, dim, dtype)
    return torch.zeros(blocks, *k, dtype=dtype), torch.zeros(blocks, *v, dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(seed=st.integers(0, 2**31), parts=st.integers(1, 2), kv_heads=st.integers(1, 3))
def test_what_is_written_is_gathered_again_and_nothing_else_changes(
    dtype: torch.dtype, seed: int, parts: int, kv_heads: int
) -> None:
    strip = 64 // dtype.itemsize
    size, dim, blocks = strip * parts, strip * (3 - parts), 5
    generator = torch.Generator().manual_seed(seed)
    caches = new_cache(blocks, size, kv_heads, dim, dtype)
    plain = [torch.zeros(blocks, size, kv_heads, dim, dtype=dtype) for _ in range(2)]
    order = torch.tensor([3, 1, 4], dtype=torch.int32)
    for _ in range(2):
        slots = torch.randperm(blocks * size, generator=generator)[:7].to(torch.int32)
        k, v = torch.randn(2, 7, kv_heads, dim, generator=generator)
        write_kv(*caches, k, v, slots)
        write_kv(plain[0], plain[1], k, v, slots)
    for gather, strips, other in zip((gather_keys, gather_values), caches, plain):
        assert torch.equal(gather(strips, order), gather(other, order))


@pytest.mark.parametrize(
    ("block_size", "dim", "fits"), [(16, 16, True), (16, 24, False), (8, 64, False), (48, 80, True)]
)
def test_only_whole_strips_are_stored(block_size: int, dim: int, fits: bool) -> None:
    assert can_have_strips(block_size, dim, torch.float32) == fits
    assert not can_have_strips(block_size, dim, torch.float8_e4m3fn)


RULES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 21},
    "chunk": {"chunk": 32},
    "cap": {"soft_cap": 1.5},
    "rule": {
        "visibility": lambda query, key: (key <= query) & ((query - key) % 2 == 0),
        "score_change": lambda score, head, query, key: score - 0.1 * (head + 1) * (query - key),
    },
}


def attend(
    cache: tuple[Tensor, Tensor],
    table: np.ndarray,
    positions: np.ndarray,
    q: Tensor,
    padding: int,
    sinks: Tensor | None = None,
    **rule: Any,
) -> tuple[Tensor, list[Tensor]]:
    """What the kernel gives for rows in the batch slots 0, 1, …, and the reference of each one."""
    window, chunk = rule.pop("window", len(table[0]) * 99), rule.pop("chunk", len(table[0]) * 99)
    size, rows = cache[1].shape[3], len(positions)
    host = bounds_of(positions, Reach(window, chunk) if "visibility" not in rule else Reach())
    pairs = list_pairs(table, np.arange(rows), host, size, rows + padding)
    own_pairs = Pairs(*map(torch.from_numpy, pairs))
    high, low = (
        None if x is None else torch.from_numpy(np.append(x, [value] * padding).astype(np.int32))
        for x, value in zip(host, (-1, 0))
    )
    assert high is not None
    out = attend_to_strips(q, *cache, sinks, own_pairs, Bounds(high, low), scale=0.3, **rule)
    rule["sinks"] = sinks
    expected = []
    for row, position in enumerate(positions.tolist()):
        blocks = torch.from_numpy(table[row, : position // size + 1])
        first = max(0, position - window + 1, position // chunk * chunk)
        own = Bounds(torch.tensor([position]), torch.tensor([first]))
        one = q[row : row + 1], *cache, blocks, position
        expected.append(gathered_sdpa_attention(*one, bounds=own, scale=0.3, **rule)[0])
    return out, expected


@pytest.mark.parametrize("has_sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(
    seed=st.integers(0, 2**31),
    positions=st.lists(st.integers(0, 79), min_size=1, max_size=5),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    padding=st.integers(0, 2),
)
def test_rows_attend_as_the_reference_does(
    rule: dict[str, Any],
    has_sinks: bool,
    seed: int,
    positions: list[int],
    heads: tuple[int, int],
    padding: int,
) -> None:
    """Blocks of all rows lie anywhere, and values after a row's last token are large."""
    (kv_heads, group), size, dim, width = heads, 16, 32, 5
    generator = torch.Generator().manual_seed(seed)
    blocks = 1 + width * len(positions)
    k, v = new_cache(blocks, size, kv_heads, dim, torch.float32)
    k[1:].normal_(generator=generator), v[1:].normal_(generator=generator)
    order = 1 + torch.randperm(blocks - 1, generator=generator)
    table = order.view(len(positions), width).int().numpy()
    for row, position in enumerate(positions):
        behind = torch.arange(position + 1, width * size, dtype=torch.int32)
        slots = torch.from_numpy(table[row])[behind // size] * size + behind % size
        large = torch.full((len(slots), kv_heads, dim), 1e4)
        write_kv(k, v, large, large, slots)
    q = torch.randn(len(positions) + padding, kv_heads, group, dim, generator=generator)
    sinks = {"sinks": torch.randn(kv_heads * group, generator=generator)} if has_sinks else {}
    out, expected = attend((k, v), table, np.array(positions), q, padding, **rule, **sinks)
    assert bool(out.isfinite().all()), "padding must be finite"
    for one, other in zip(out, expected):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=str)
def test_sums_are_in_float32_whatever_the_cache_holds(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = (cache.normal_(generator=generator) for cache in new_cache(21, 64, 2, 64, dtype))
    table, positions = np.arange(1, 21, dtype=np.int32).reshape(1, -1), np.array([1200])
    q = torch.randn(1, 2, 3, 64, generator=generator).to(dtype)
    out, _ = attend((k, v), table, positions, q, 0)
    wide, expected = attend((k.float(), v.float()), table, positions, q.float(), 0)
    assert (out.float() - expected[0]).abs().max() <= 0.51 * torch.finfo(dtype).eps * expected[0].abs().max()
    torch.testing.assert_close(wide[0], expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="there is no C++ compiler here"
)
@pytest.mark.parametrize(("kv_heads", "step"), [(2, 64 * 64), (1, 64 * 64)], ids=["next head", "next block"])
def test_compiled_loops_over_a_cache_ask_for_what_comes_next_and_others_do_not(
    kv_heads: int, step: int
) -> None:
    """K and V each once, a head further, or, where there is one head, a block,
    or the next strips of it if the block is not read in one round."""
    patch_inductor()
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    k, v = (cache.normal_(generator=generator) for cache in new_cache(21, 64, kv_heads, 64, torch.bfloat16))
    table = 1 + torch.randperm(20, generator=generator).int().numpy().reshape(2, 10)
    positions = np.array([600, 300])
    host = list_pairs(table, np.arange(2), bounds_of(positions, Reach()), 64, 2)
    pairs, bounds = Pairs(*map(torch.from_numpy, host)), Bounds(torch.from_numpy(positions.astype(np.int32)))
    q = torch.randn(2, kv_heads, 3, 64, generator=generator).bfloat16()
    compiled = torch.compile(partial(attend_to_strips, scale=0.125), fullgraph=True)
    out, [code] = run_and_get_code(compiled, q, k, v, None, pairs, bounds)
    torch.testing.assert_close(
        out, attend_to_strips(q, k, v, None, pairs, bounds, scale=0.125), rtol=1e-2, atol=1e-2
    )
    found = [
        int(place)
        for place in re.findall(r"__builtin_prefetch\(in_ptr\d+ \+ static_cast<int64_t>\((\d+)L", code)
    ]
    streams = 2 if q.shape[2] <= MOST_HEADS_OF_TWO_STREAMS else 1
    step = step if kv_heads > 1 or streams == 2 else 2048
    assert sorted(place for place in found if place >= 2048) == sorted(2 * [step, step + 2048][:streams]), (
        "of K and V"
    )
    _, [other] = run_and_get_code(torch.compile(lambda x: x.float().sum(1)), torch.randn(40, 640).bfloat16())
    assert "__builtin_prefetch" not in other
