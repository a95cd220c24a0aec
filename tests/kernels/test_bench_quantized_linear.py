"""Where the quantised operators stop being faster than a dense product over restored weights
(--benchmark-only).

Weights of a 135M-parameter model's widest layer, more of them in turn than a cache holds,
as in a model's step.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import pytest
import torch
from torch import Tensor

from kernels_triton_free import quantized_linear as module
from kernels_triton_free.linear import can_pack, pack_weight, packed_linear
from kernels_triton_free.quantized_linear import can_multiply_int4, int4_linear, int8_linear, pack_int4

OUT, IN, GROUP, WEIGHTS = 3072, 576, 32, 48
EVERY_ROW_COUNT = 1_000_000
ROWS = pytest.mark.parametrize("rows", [1, 4, 8, 16, 24, 32, 48, 64, 80, 512])
WAYS = pytest.mark.parametrize("limit", [EVERY_ROW_COUNT, 0], ids=["operator", "restored"])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def measure(benchmark: Callable, product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> bool:
    """Time the product over the weights in turn; whether all results are finite."""
    turns = cycle(weights)
    with torch.inference_mode():
        benchmark(lambda: product(next(turns)))
        return all(bool(product(weight).isfinite().all()) for weight in weights)


@ROWS
@WAYS
def test_bench_int8_linear(
    benchmark: Callable, monkeypatch: pytest.MonkeyPatch, rows: int, limit: int
) -> None:
    monkeypatch.setattr(module, "INT8_MAX_ROWS", limit)
    x, scale = random(rows, IN), random(OUT, 1).abs()
    weights = [torch.randint(-127, 128, (OUT, IN), dtype=torch.int8) for _ in range(WEIGHTS)]
    assert measure(benchmark, lambda weight: int8_linear(x, weight, scale, None), weights)


@pytest.mark.skipif(not can_multiply_int4(), reason="this CPU's order of 4-bit weights is not known")
@ROWS
@WAYS
def test_bench_int4_linear(
    benchmark: Callable, monkeypatch: pytest.MonkeyPatch, rows: int, limit: int
) -> None:
    monkeypatch.setattr(module, "INT4_MAX_ROWS", limit)
    x, scale_and_zero = random(rows, IN), random(IN // GROUP, OUT, 2)
    weights = [pack_int4(torch.randint(0, 16, (OUT, IN), dtype=torch.uint8)) for _ in range(WEIGHTS)]
    assert measure(benchmark, lambda weight: int4_linear(x, weight, scale_and_zero, None, GROUP), weights)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN cannot pack bfloat16 weights on this CPU")
@ROWS
def test_bench_packed_linear_in_turn(benchmark: Callable, rows: int) -> None:
    x = random(rows, IN)
    weights = [pack_weight(random(OUT, IN)) for _ in range(WEIGHTS)]
    assert measure(benchmark, lambda weight: packed_linear(x, weight, None, OUT), weights)
