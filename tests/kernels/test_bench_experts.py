"""How near experts come to what the machine can do (--benchmark-only): one layer shaped as Qwen3-30B-A3B's.

    python -m pytest -n 0 --benchmark-only tests/kernels/test_bench_experts.py

A single token has to read the weights of its experts, as fast as a stream of weights is read: 70 % of that
are wanted. A prompt of 512 tokens has to multiply, as fast as one dense product of as many operations: 60 %
are wanted. Both shares are printed. Whole models of experts are measured with ``tests/random_model.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.experts.routing import Routing, route
from kernels_triton_free.linear import can_pack, pack_weight, packed_linear
from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm.linear.experts.experts import Experts
from minivllm.linear.layer import ChooseMethod, Shard, never_quantized
from minivllm.linear.methods.int4 import Int4Linear
from minivllm.linear.methods.int8 import Int8Linear

EXPERTS, TOP_K, HIDDEN, INNER, TURNS = 128, 8, 2048, 768, 16
PROMPT_OPERATIONS = 2.0 * 512 * TOP_K * 3 * INNER * HIDDEN
BF16 = torch.bfloat16
KINDS: dict[str, ChooseMethod] = {
    "bfloat16": never_quantized,
    "int8": lambda name, weight: Int8Linear(BF16),
    "int4": lambda name, weight: Int4Linear(weight.shape[0], 32, 4, BF16),
}
FORMATS = pytest.mark.parametrize(
    "kind",
    [
        "bfloat16",
        "int8",
        pytest.param(
            "int4", marks=pytest.mark.skipif(not can_multiply_int4(), reason="no 4-bit operator here")
        ),
    ],
)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(BF16)


def random_experts(kind: str) -> Experts:
    experts = Experts(
        EXPERTS,
        HIDDEN,
        INNER,
        bias=False,
        activation="silu",
        shard=Shard(),
        dtype=BF16,
        device=torch.device("cpu"),
        choose=KINDS[kind],
    )
    for expert in range(EXPERTS):
        for part, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        ):
            experts.load(expert, part, "weight", randn(*shape) / shape[1] ** 0.5)
    return experts


@pytest.fixture(scope="module")
def bounds() -> dict[str, float]:
    """What the first two benchmarks measured:
    gigabytes_per_second of the stream, gigaflops of the dense product."""
    return {}


def measure_and_check(benchmark: Any, work: Callable[[], Tensor], **amounts: float) -> dict[str, float]:
    """Amounts of work in a call, by the name of what they are per second -> so much a second;
    nothing is timed without --benchmark-only."""
    with torch.inference_mode():
        out: Tensor = benchmark(work)
    assert out.float().isfinite().all()
    if benchmark.stats is None:
        return {}
    speeds = {name: amount / benchmark.stats.stats.median / 1e9 for name, amount in amounts.items()}
    benchmark.extra_info.update(speeds)
    return speeds


def show(
    capsys: pytest.CaptureFixture[str], what: str, speeds: dict[str, float], bounds: dict[str, float]
) -> None:
    """One line for each speed, with its share of the bound, where that was measured before."""
    with capsys.disabled():
        for name, speed in speeds.items():
            share = f", {speed / bounds[name]:.0%} of the bound" if name in bounds else ""
            print(f"\n{what}: {speed:.1f} {name.replace('_', ' ')}{share}", end="")


def test_bench_stream(benchmark: Any, bounds: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    """Reading as a product of one row does, from far more than a cache holds: the bound of a single token."""
    weight, x = randn(16 * 1536, HIDDEN), randn(1, HIDDEN)
    speeds = measure_and_check(benchmark, lambda: F.linear(x, weight), gigabytes_per_second=weight.nbytes)
    show(capsys, "stream", speeds, bounds)
    bounds.update(speeds)


@pytest.mark.skipif(not can_pack(BF16), reason="oneDNN cannot pack bfloat16 weights on this CPU")
def test_bench_dense_product_of_equal_flops(
    benchmark: Any, bounds: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    x, weight = randn(512 * TOP_K, HIDDEN), pack_weight(randn(3 * INNER, HIDDEN))
    speeds = measure_and_check(
        benchmark, lambda: packed_linear(x, weight, None, 3 * INNER), gigaflops=PROMPT_OPERATIONS
    )
    show(capsys, "dense product", speeds, bounds)
    bounds.update(speeds)


@FORMATS
def test_bench_experts_of_a_single_token(
    benchmark: Any, kind: str, bounds: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    experts = random_experts(kind)
    method, tensors = experts.method, experts.tensors
    # Other experts in every turn, so that none stays in a cache.
    routes = cycle([route(randn(1, EXPERTS).roll(turn), Routing(top_k=TOP_K)) for turn in range(TURNS)])
    x = randn(1, HIDDEN)
    active = sum(tensor.numel() * tensor.element_size() for tensor in tensors) * TOP_K / EXPERTS
    speeds = measure_and_check(
        benchmark, lambda: method.apply(x, *next(routes), tensors), gigabytes_per_second=active
    )
    show(capsys, f"experts of one token, {kind}", speeds, bounds)


@FORMATS
def test_bench_experts_of_a_prompt_chunk(
    benchmark: Any, kind: str, bounds: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    experts = random_experts(kind)
    method, tensors, x = experts.method, experts.tensors, randn(512, HIDDEN)
    ids, weights = route(randn(512, EXPERTS), Routing(top_k=TOP_K))
    speeds = measure_and_check(
        benchmark, lambda: method.apply(x, ids, weights, tensors), gigaflops=PROMPT_OPERATIONS
    )
    show(capsys, f"experts of 512 tokens, {kind}", speeds, bounds)
