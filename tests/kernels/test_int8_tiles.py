"""Products over tiles of 8 bits: by themselves and compiled, against the values that rounded inputs stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton_free.inductor.patches import patch_inductor
from kernels_triton_free.packed.int8_tiles import Int8Tiles, can_tile_int8, int8_tiled_linear, round_tokens, tile_int8
from kernels_triton_free.packed.template import generate_tiled_products
from kernels_triton_free.packed.tiles import OUTPUTS
from minivllm.compilation.compiler import cannot_compile_reason, only_marked_sizes_are_dynamic
from minivllm.linear.methods.stored_weight import round_to_int8_rows

needs_compiler = pytest.mark.skipif(cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler")


def new_weight(outputs: int, inputs: int, parts: int, seed: int = 0) -> tuple[Int8Tiles, Tensor]:
    """Tiles, and what they stand for, in float64."""
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))
    rounded = [round_to_int8_rows(part, torch.float32) for part in weight.chunk(parts, dim=1)]
    return tile_int8(rounded), torch.cat([values.double() * scale.double() for values, scale in rounded], dim=1)


def check(out: Tensor, x: Tensor, weight: Tensor, parts: int, bias: Tensor | None) -> None:
    """Rounded inputs are multiplied exactly; the result is rounded to bfloat16. Against the inputs themselves, what
    is lost is that of 8 bits."""
    numbers, scale, zero = (tensor.double() for tensor in round_tokens(x.view(len(x), parts, -1)))
    added = 0 if bias is None else bias.double()
    expected = ((numbers - zero) * scale).flatten(1) @ weight.T
    exact = x.double() @ weight.T
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected - added).norm() <= 0.006 * (expected + added).norm() + 1e-9
    assert (expected - exact).norm() <= 0.03 * exact.norm() + 1e-9


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 20),
    blocks=st.integers(1, 3),
    groups=st.integers(8, 24),
    parts=st.sampled_from([1, 2, 4]),
    has_bias=st.booleans(),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_uncompiled_it_is_the_product(
    seed: int, rows: int, blocks: int, groups: int, parts: int, has_bias: bool, shift: float
) -> None:
    tiles, weight = new_weight(OUTPUTS * blocks, 4 * parts * groups, parts, seed)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, weight.shape[1], generator=generator) + shift).bfloat16()
    bias = torch.randn(len(weight), generator=generator).bfloat16() if has_bias else None
    numbers, scale, zero = (tensor.double() for tensor in round_tokens(x.view(rows, parts, -1)))
    expected = ((numbers - zero) * scale).flatten(1) @ weight.T + (0 if bias is None else bias.double())
    out = int8_tiled_linear(x, tiles, bias)
    assert out.dtype == x.dtype and (out.double() - expected).norm() <= 0.006 * expected.norm()


@given(seed=st.integers(0, 2**31), low=st.floats(-100, 100), width=st.floats(0, 100))
def test_tokens_are_rounded_by_less_than_a_step_and_zero_not_at_all(seed: int, low: float, width: float) -> None:
    x = low + width * torch.rand(3, 1, 64, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 0] = 0
    numbers, scale, zero = round_tokens(x)
    back = (numbers.float() - zero) * scale
    assert ((back - x).abs() <= scale * 1.01 + 1e-6).all() and back[0, 0, 0] == 0


def test_a_token_of_zeros_gives_the_bias() -> None:
    tiles, _ = new_weight(OUTPUTS, 64, 1)
    bias = torch.randn(OUTPUTS).bfloat16()
    assert torch.equal(int8_tiled_linear(torch.zeros(2, 64, dtype=torch.bfloat16), tiles, bias), bias.expand(2, -1))


@pytest.mark.parametrize("shape", [(48, 64, 1), (64, 66, 1), (64, 72, 4)])
def test_what_does_not_fit_has_no_tiles(shape: tuple[int, int, int]) -> None:
    assert not can_tile_int8(*shape)


@pytest.mark.skipif(not can_tile_int8(64, 64), reason="this CPU multiplies no tiles of 8 bits")
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("shape", "parts"), [((64, 64), 1), ((192, 256), 1), ((576, 1536), 4)])
def test_compiled_code_gives_the_product_of_any_number_of_rows(
    shape: tuple[int, int], parts: int, has_bias: bool
) -> None:
    patch_inductor()
    generate_tiled_products()
    torch._dynamo.reset()
    tiles, weight = new_weight(*shape, parts)
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None

    def doubled(x: Tensor, tiles: Tensor, scale: Tensor, sums: Tensor, bias: Tensor | None) -> Tensor:
        return int8_tiled_linear(x * 2, Int8Tiles(tiles, scale, sums), bias) * 2

    compiled = torch.compile(doubled)
    for rows in (47, 2, 16, 17, 65, 400):
        x = torch.randn(rows, shape[1]).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        with only_marked_sizes_are_dynamic():
            check(compiled(x, *tiles, bias) / 2, x * 2, weight, parts, bias)
