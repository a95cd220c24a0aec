"""How near experts come to what the machine can do (--benchmark-only): one layer shaped as Qwen3-30B-A3B's.

A single token has to read the weights of its experts: compare ``gigabytes_per_second`` with that of the stream. A
prompt of 512 tokens has to multiply: compare ``gigaflops`` with that of one dense product.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_triton_free.experts.routing import Routing, route
from kernels_triton_free.linear import can_pack, pack_weight, packed_linear
from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm.linear.experts import Experts
from minivllm.linear.layer import ChooseMethod, Shard, never_quantized
from minivllm.linear.quantized_methods import Int4Linear, Int8Linear

EXPERTS, TOP_K, HIDDEN, INNER, TURNS = 128, 8, 2048, 768, 16
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
        pytest.param("int4", marks=pytest.mark.skipif(not can_multiply_int4(), reason="no 4-bit operator here")),
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


def measure(benchmark: Any, work: Callable[[], Tensor], *, num_bytes: float = 0.0, flops: float = 0.0) -> bool:
    with torch.inference_mode():
        out: Tensor = benchmark(work)
    if benchmark.stats is not None:  # without --benchmark-only everything runs once, and nothing is timed
        seconds = benchmark.stats.stats.median
        benchmark.extra_info.update(gigabytes_per_second=num_bytes / seconds / 1e9, gigaflops=flops / seconds / 1e9)
    return bool(out.float().isfinite().all())


@FORMATS
def test_bench_experts_of_a_single_token(benchmark: Any, kind: str) -> None:
    experts = random_experts(kind)
    method, tensors = experts.method, experts.tensors
    # Other experts in every turn, so that none stays in a cache.
    routes = cycle([route(randn(1, EXPERTS).roll(turn), Routing(top_k=TOP_K)) for turn in range(TURNS)])
    x = randn(1, HIDDEN)
    active = sum(tensor.numel() * tensor.element_size() for tensor in tensors) * TOP_K / EXPERTS
    assert measure(benchmark, lambda: method.apply(x, *next(routes), tensors), num_bytes=active)


@FORMATS
def test_bench_experts_of_a_prompt_chunk(benchmark: Any, kind: str) -> None:
    experts = random_experts(kind)
    method, tensors, x = experts.method, experts.tensors, randn(512, HIDDEN)
    ids, weights = route(randn(512, EXPERTS), Routing(top_k=TOP_K))
    flops = 2.0 * 512 * TOP_K * 3 * INNER * HIDDEN
    assert measure(benchmark, lambda: method.apply(x, ids, weights, tensors), flops=flops)


def test_bench_stream(benchmark: Any) -> None:
    """Reading as a product of one row does, from far more than a cache holds: the bound of a single token."""
    weight, x = randn(16 * 1536, HIDDEN), randn(1, HIDDEN)
    num_bytes = weight.numel() * weight.element_size()
    assert measure(benchmark, lambda: torch.nn.functional.linear(x, weight), num_bytes=num_bytes)


@pytest.mark.skipif(not can_pack(BF16), reason="oneDNN cannot pack bfloat16 weights on this CPU")
def test_bench_dense_product_of_equal_flops(benchmark: Any) -> None:
    x, weight = randn(512 * TOP_K, HIDDEN), pack_weight(randn(3 * INNER, HIDDEN))
    flops = 2.0 * 512 * TOP_K * 3 * INNER * HIDDEN
    assert measure(benchmark, lambda: packed_linear(x, weight, None, 3 * INNER), flops=flops)
