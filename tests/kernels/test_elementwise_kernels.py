"""Norm, rotary embedding and activation against float64, and the rotary frequencies against transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels_triton_free.activation import gated_activation
from kernels_triton_free.compiler.quick_silu import quick_silu
from kernels_triton_free.norm import rms_norm
from kernels_triton_free.rotary import (
    apply_rotary,
    default_frequencies,
    dynamic_frequencies,
    linear_frequencies,
    llama3_frequencies,
    rotary_table,
    yarn_frequencies,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
THETA, DIM, ORIGINAL = 10000.0, 64, 512


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm_float64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (5, 576), (3, 9, 64)])
def test_rms_norm_equals_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype) * 5, random(shape[-1], seed=1, dtype=dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        out.double(), rms_norm_float64(x, weight, 1e-5), rtol=tolerance, atol=tolerance
    )


def test_rms_norm_of_large_bfloat16_values_does_not_overflow_and_of_zeros_is_zero() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(torch.full((1, 4), 1e18, dtype=torch.bfloat16), weight, 1e-5), weight[None])
    assert torch.equal(
        rms_norm(torch.zeros(1, 4, dtype=torch.bfloat16), weight, 1e-5), torch.zeros(1, 4).bfloat16()
    )


def silu_float64(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu_float64(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh_float64(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu", silu_float64),
        ("gelu", gelu_float64),
        ("gelu_pytorch_tanh", gelu_tanh_float64),
        ("relu", torch.relu),
    ],
)
def test_gated_activation_equals_float64(name: str, reference: Any, dtype: torch.dtype) -> None:
    gate_up = random(5, 2 * 48, dtype=dtype) * 3
    gate, up = gate_up[:, :48].double(), gate_up[:, 48:].double()
    out = gated_activation(gate_up, name)
    assert out.shape == (5, 48) and out.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(out.double(), reference(gate) * up, rtol=tolerance, atol=tolerance)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"tanh.*silu, gelu, gelu_pytorch_tanh or relu"):
        gated_activation(random(1, 4), "tanh")


def transformers_frequencies(
    kind: str, seq_len: int | None = None, **parameters: Any
) -> tuple[Tensor, float]:
    config = LlamaConfig(
        hidden_size=DIM * 4,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **parameters},
    )
    frequencies, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=seq_len)
    return frequencies.double(), attention_factor


def assert_same_frequencies(own: Tensor, reference: Tensor) -> None:
    assert own.dtype == torch.float64 and own.shape == (DIM // 2,)
    torch.testing.assert_close(own, reference, rtol=2e-6, atol=0.0)


def test_default_frequencies_follow_the_paper() -> None:
    expected = torch.tensor([THETA ** (-2 * i / DIM) for i in range(DIM // 2)], dtype=torch.float64)
    torch.testing.assert_close(default_frequencies(DIM, THETA), expected, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("factor", [1.0, 2.0, 7.5])
def test_linear_frequencies_equal_transformers(factor: float) -> None:
    reference, _ = transformers_frequencies("linear", factor=factor)
    assert_same_frequencies(linear_frequencies(DIM, THETA, factor), reference)


@pytest.mark.parametrize("length", [1, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL])
@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
def test_dynamic_frequencies_equal_transformers_at_every_length(factor: float, length: int) -> None:
    reference, _ = transformers_frequencies("dynamic", seq_len=length, factor=factor)
    assert_same_frequencies(dynamic_frequencies(DIM, THETA, factor, ORIGINAL, length), reference)


@pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.0, 3.0)])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_frequencies_equal_transformers(factor: float, low: float, high: float) -> None:
    reference, _ = transformers_frequencies(
        "llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=ORIGINAL // 4,
    )
    assert_same_frequencies(llama3_frequencies(DIM, THETA, factor, low, high, ORIGINAL // 4), reference)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("original", [32, ORIGINAL // 4])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_frequencies_equal_transformers(fast: float, slow: float, original: int, truncate: bool) -> None:
    reference, _ = transformers_frequencies(
        "yarn",
        factor=4.0,
        beta_fast=fast,
        beta_slow=slow,
        truncate=truncate,
        original_max_position_embeddings=original,
    )
    assert_same_frequencies(yarn_frequencies(DIM, THETA, 4.0, fast, slow, original, truncate), reference)


def test_the_rotary_table_is_exact_to_float32_even_at_far_positions() -> None:
    frequencies = default_frequencies(DIM, 500000.0)
    table = rotary_table(frequencies, 100_001, attention_factor=1.25)
    assert table.shape == (100_001, DIM) and table.dtype == torch.float32
    position = 100_000
    expected = [1.25 * f(position * float(w)) for f in (math.cos, math.sin) for w in frequencies]
    torch.testing.assert_close(table[position], torch.tensor(expected), rtol=0.0, atol=1e-7)


def rotate_with_complex_numbers(x: Tensor, frequencies: Tensor, positions: Tensor) -> Tensor:
    """Pairs (i, i + dim / 2) as complex numbers times e^(i * angle), in float64."""
    half = len(frequencies)
    x = x.double()
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    turn = torch.polar(torch.ones((), dtype=torch.float64), positions.double()[:, None] * frequencies)
    rotated = pairs * turn.view(len(positions), *(1,) * (x.dim() - 2), half)
    return torch.cat([rotated.real, rotated.imag, x[..., 2 * half :]], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotated", [16, 8, 2])
@pytest.mark.parametrize("heads", [(), (3,), (2, 3)])
def test_apply_rotary_equals_complex_rotation_of_the_leading_elements(
    heads: tuple[int, ...], rotated: int, dtype: torch.dtype
) -> None:
    positions = torch.tensor([0, 1, 63, 500, 7])
    frequencies = default_frequencies(rotated, THETA)
    x = random(len(positions), *heads, 16, dtype=dtype)
    out = apply_rotary(x, rotary_table(frequencies, 512)[positions])
    assert out.dtype == dtype and out.shape == x.shape
    assert torch.equal(out[..., rotated:], x[..., rotated:]), (
        "the part that does not rotate must come back as it was"
    )
    expected = rotate_with_complex_numbers(x, frequencies, positions)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_products_of_rotated_vectors_depend_on_the_distance_of_their_positions_only() -> None:
    table = rotary_table(default_frequencies(32, THETA), 1024)
    q, k = random(1, 32), random(1, 32, seed=1)

    def product(query_position: int, key_position: int) -> Tensor:
        query = apply_rotary(q, table[query_position : query_position + 1])
        return (query * apply_rotary(k, table[key_position : key_position + 1])).sum()

    for distance in (0, 1, 17, 400):
        torch.testing.assert_close(product(distance, 0), product(distance + 600, 600), rtol=1e-4, atol=1e-4)


def test_quick_silu_is_silu_to_far_less_than_bfloat16_shows() -> None:
    x = torch.cat(
        [torch.linspace(-30, 30, 600_001), torch.tensor([-3e38, -1e4, -200.0, 200.0, 1e4, 3e38, -0.0, 0.0])]
    )
    expected = torch.nn.functional.silu(x.double())
    torch.testing.assert_close(quick_silu(x).double(), expected, atol=1e-5, rtol=1e-6)
    assert quick_silu(torch.tensor([torch.nan])).isnan().all()
