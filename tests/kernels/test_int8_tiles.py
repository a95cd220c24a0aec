"""Products over tiles of 8 bits: by themselves and compiled, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton_free.activation import gated_product
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.cpu_code.template import generate_tiled_products
from kernels_triton_free.packed.int8_tiles import (
    LARGEST,
    ROTATED,
    ZERO,
    Int8Tiles,
    can_tile_int8,
    int8_tiled_linear,
    int8_tiled_linear_halves,
    rotate_weight,
    round_tokens,
    tile_int8,
)
from kernels_triton_free.packed.tiles import OUTPUTS
from minivllm.compilation.compiler import cannot_compile_reason, only_marked_sizes_are_dynamic
from minivllm.weights.stored_weight import round_to_int8_rows

needs_compiler = pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler"
)
needs_tiles = pytest.mark.skipif(not can_tile_int8(64, 64), reason="this CPU multiplies no tiles of 8 bits")


def rotated(x: Tensor) -> Tensor:
    """float64, by the definition: the sign of i and j is that of how many bits they have in common."""
    signs = torch.tensor(
        [[(-1.0) ** (i & j).bit_count() for j in range(ROTATED)] for i in range(ROTATED)]
    ).double()
    return torch.einsum("ij,rjc->ric", signs, x.double().view(len(x), ROTATED, -1)).flatten(1)


def new_weight(outputs: int, inputs: int, seed: int = 0) -> tuple[Int8Tiles, Tensor]:
    """Tiles, and what they multiply rotated inputs with, in float64."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    values, scale = round_to_int8_rows(rotate_weight(weight), torch.float32)
    return tile_int8(values, scale), values.double() * scale.double() / ROTATED


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of the numbers that inputs are rounded to."""
    numbers, scale = (tensor.double() for tensor in round_tokens(x))
    return ((numbers - ZERO) * scale) @ weight.T + (0 if bias is None else bias.double())


def is_near(out: Tensor, expected: Tensor) -> bool:
    """Up to a result of bfloat16, since the numbers are multiplied exactly."""
    return out.dtype == torch.bfloat16 and bool(
        (out.double() - expected).norm() <= 0.006 * expected.norm() + 1e-9
    )


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 20),
    blocks=st.integers(1, 3),
    columns=st.integers(1, 12),
    has_bias=st.booleans(),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_uncompiled_it_is_the_product(
    seed: int, rows: int, blocks: int, columns: int, has_bias: bool, shift: float
) -> None:
    tiles, weight = new_weight(OUTPUTS * blocks, ROTATED * columns, seed)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, weight.shape[1], generator=generator) + shift).bfloat16()
    bias = torch.randn(len(weight), generator=generator).bfloat16() if has_bias else None
    assert is_near(int8_tiled_linear(x, tiles, bias), product(x, weight, bias))


@given(
    seed=st.integers(0, 2**31),
    inputs=st.sampled_from([16, 48, 576]),
    outlier=st.sampled_from([1.0, 30.0, 300.0]),
)
def test_a_rounded_product_is_that_of_the_inputs_also_where_one_is_much_larger(
    seed: int, inputs: int, outlier: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(OUTPUTS, inputs, generator=generator), torch.randn(9, inputs, generator=generator)
    x[:, seed % inputs] *= outlier
    values, scale = round_to_int8_rows(rotate_weight(weight), torch.float32)
    out = int8_tiled_linear(x, tile_int8(values, scale))
    exact = x.double() @ weight.double().T
    assert out.dtype == torch.float32 and (out.double() - exact).norm() <= 0.03 * exact.norm()


@given(seed=st.integers(0, 2**31), low=st.floats(-100, 100), width=st.floats(0, 100))
def test_tokens_are_rotated_and_rounded_to_the_nearest_step_with_all_steps_in_use(
    seed: int, low: float, width: float
) -> None:
    x = low + width * torch.rand(3, 64, generator=torch.Generator().manual_seed(seed))
    numbers, scale = round_tokens(x)
    assert numbers.dtype == torch.uint8
    assert (((numbers.double() - ZERO) * scale - rotated(x)).abs() <= 0.501 * scale + 1e-9).all()
    assert ((numbers.int() - ZERO).abs().amax(1) == LARGEST).all() or x.abs().max() < 1e-6


def test_a_token_of_zeros_gives_the_bias() -> None:
    tiles, _ = new_weight(OUTPUTS, 64)
    bias = torch.randn(OUTPUTS).bfloat16()
    assert torch.equal(
        int8_tiled_linear(torch.zeros(2, 64, dtype=torch.bfloat16), tiles, bias), bias.expand(2, -1)
    )


def test_the_largest_numbers_do_not_overflow() -> None:
    inputs = 32_768
    values = torch.full((OUTPUTS, inputs), 127, dtype=torch.int8)
    values[1::2] = -127
    tiles = tile_int8(values, torch.ones(OUTPUTS, 1))
    x = torch.zeros(2, inputs)
    x[0, : inputs // ROTATED], x[1, : inputs // ROTATED] = 1, -1  # whose sums are all alike
    out = int8_tiled_linear(x, tiles)
    signs = torch.tensor([1.0, -1.0])
    torch.testing.assert_close(out, inputs * 127 / ROTATED * signs[:, None] * signs.repeat(OUTPUTS // 2))


@pytest.mark.parametrize("shape", [(48, 64), (64, 72)])
def test_what_does_not_fit_has_no_tiles(shape: tuple[int, int]) -> None:
    assert not can_tile_int8(*shape)


@needs_tiles
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (192, 256), (576, 1536)])
def test_compiled_code_gives_the_product_of_any_number_of_rows(
    shape: tuple[int, int], has_bias: bool
) -> None:
    patch_inductor()
    generate_tiled_products()
    torch._dynamo.reset()
    tiles, weight = new_weight(*shape)
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None

    def doubled(x: Tensor, tiles: Tensor, scale: Tensor, surplus: Tensor, bias: Tensor | None) -> Tensor:
        return int8_tiled_linear(x * 2, Int8Tiles(tiles, scale, surplus), bias) * 2

    compiled = torch.compile(doubled)
    for rows in (47, 2, 16, 17, 65, 400):
        x = torch.randn(rows, shape[1]).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        with only_marked_sizes_are_dynamic():
            assert is_near(compiled(x, *tiles, bias) / 2, product(x * 2, weight, bias))


@needs_tiles
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_compiled_halves_are_those_of_the_product_and_what_follows_is_computed_with_them(
    activation: str,
) -> None:
    patch_inductor()
    generate_tiled_products()
    torch._dynamo.reset()
    tiles, weight = new_weight(256, 64)

    def gated(x: Tensor, tiles: Tensor, scale: Tensor, surplus: Tensor) -> Tensor:
        return gated_product(*int8_tiled_linear_halves(x, Int8Tiles(tiles, scale, surplus)), activation)

    compiled = torch.compile(gated)
    for rows in (47, 2, 16, 400):
        x = torch.randn(rows, 64).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        with only_marked_sizes_are_dynamic():
            out = compiled(x, *tiles)
        gate, up = product(x, weight, None).chunk(2, 1)
        expected = (F.silu(gate) if activation == "silu" else F.gelu(gate)) * up
        assert is_near(out, expected) or (out.double() - expected).norm() <= 0.01 * expected.norm()
