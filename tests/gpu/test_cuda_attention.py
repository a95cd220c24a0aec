"""Compiled paged attention on a CUDA device, judged by the definition in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from kernels_triton_free.attention import paged_flex_attention
from minivllm.device.policy import DevicePolicy
from tests.gpu.paged_case import make_case, reference, run_decode, run_prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here"),
]

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest absolute error for normally distributed values; float32 products may run as TF32."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Every size of the cache is one more kernel of a check."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def compiled(
    head_dim: int, window: int | None = None, *, tile_size: int = 1, dtype: torch.dtype = torch.bfloat16
):
    options = DevicePolicy(type="cuda").kernel_options(64, head_dim, dtype, tile_size, window is not None)
    bound = partial(paged_flex_attention, scale=head_dim**-0.5, kernel_options=options)
    return torch.compile(bound, fullgraph=True, dynamic=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_equals_the_definition(head_dim: int, group: int, dtype: torch.dtype) -> None:
    choose = random.Random(head_dim * 10 + group)
    device = torch.device("cuda")
    attention = compiled(head_dim, dtype=dtype)
    for bucket in (2, 3, 8, 64) if dtype is torch.bfloat16 and group == 3 else (3,):
        for requests in {1, bucket - 1, bucket}:
            lengths = [choose.choice([1, 63, 64, 65, choose.randint(2, 700)]) for _ in range(requests)]
            case = make_case(
                lengths,
                [1] * requests,
                kv_heads=2,
                group=group,
                head_dim=head_dim,
                dtype=dtype,
                device=device,
            )
            error = (run_decode(attention, case, bucket).double() - reference(case)).abs().max()
            assert error < TOLERANCE[dtype], f"bucket {bucket}, {requests} requests of {lengths}: {error}"


@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_several_queries_equal_the_definition(head_dim: int, group: int) -> None:
    attention = compiled(head_dim, tile_size=128)
    case = make_case(
        [300, 130, 65, 64, 1],
        [300, 2, 65, 7, 1],
        kv_heads=2,
        group=group,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    error = (run_prefill(attention, case, tile_size=128).double() - reference(case)).abs().max()
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [1, 24, 64, 100])
def test_a_sliding_window_hides_what_lies_before_it(window: int) -> None:
    device, shape = torch.device("cuda"), {"kv_heads": 2, "group": 3, "head_dim": 64, "dtype": torch.bfloat16}
    decode = make_case([300, 65, 20], [1, 1, 1], device=device, **shape)
    error = (
        (run_decode(compiled(64, window), decode, 3, window).double() - reference(decode, window)).abs().max()
    )
    assert error < TOLERANCE[torch.bfloat16]
    prefill = make_case([300, 65], [290, 65], device=device, **shape)
    error = (
        (
            run_prefill(compiled(64, window, tile_size=128), prefill, 128, window).double()
            - reference(prefill, window)
        )
        .abs()
        .max()
    )
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pages_of_eight_bits_are_read_as_what_they_hold(cache_dtype: torch.dtype) -> None:
    if cache_dtype is torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot convert e4m3")
    device, shape = torch.device("cuda"), {"kv_heads": 2, "group": 3, "head_dim": 64, "dtype": torch.bfloat16}
    decode = make_case([300, 65, 20], [1, 1, 1], device=device, cache_dtype=cache_dtype, **shape)
    error = (run_decode(compiled(64), decode, 3).double() - reference(decode)).abs().max()
    assert error < TOLERANCE[torch.bfloat16]
    prefill = make_case([300, 65], [290, 65], device=device, cache_dtype=cache_dtype, **shape)
    error = (run_prefill(compiled(64, tile_size=128), prefill, 128).double() - reference(prefill)).abs().max()
    assert error < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize(
    "options",
    [
        {"num_stages": 3},
        {"BLOCK_N": 16, "SPLIT_KV": 8, "num_warps": 4, "num_stages": 2},
        {"BLOCK_N": 32, "SPLIT_KV": 1, "num_warps": 8, "num_stages": 1},
    ],
    ids=str,
)
def test_kernel_options_change_no_result(options: dict[str, int]) -> None:
    case = make_case(
        [300, 65, 20],
        [1] * 3,
        kv_heads=2,
        group=4,
        head_dim=128,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    bound = partial(paged_flex_attention, scale=case.scale, kernel_options=options)
    attention = torch.compile(bound, fullgraph=True, dynamic=False)
    assert (run_decode(attention, case, 3).double() - reference(case)).abs().max() < TOLERANCE[torch.bfloat16]
