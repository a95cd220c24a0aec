"""Products over tiles of 4 bits: by themselves and compiled, against the weight that the codes stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.cpu_code.template import generate_tiled_products
from kernels_triton_free.packed.int4_tiles import can_tile_int4, int4_tiled_linear, tile_int4
from kernels_triton_free.packed.tiles import AMX_OUTPUTS, outputs_of_tiles
from minivllm.compilation.compiler import cannot_compile_reason, only_marked_sizes_are_dynamic

needs_compiler = pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler"
)
needs_tiles = pytest.mark.skipif(not outputs_of_tiles(), reason="this CPU has no products of bfloat16")


def new_weight(outputs: int, inputs: int, group_size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs], scale_and_zero, and what both stand for, in float64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    both = torch.randn(inputs // group_size, outputs, 2, generator=generator).bfloat16()
    scale, zero = (part.T.repeat_interleave(group_size, 1).double() for part in both.unbind(2))
    return codes, both, (codes.double() - 8) * scale + zero


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Weights and the product are rounded to bfloat16;
    a sum of many rounded terms is off by less than each of them."""
    expected = x.double() @ weight.T
    off = (out.double() - expected - (0 if bias is None else bias.double())).norm()
    assert out.dtype == torch.bfloat16 and off <= 0.006 * expected.norm()


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    groups=st.integers(1, 3),
    group_size=st.sampled_from([32, 64, 128]),
    has_bias=st.booleans(),
)
def test_uncompiled_it_is_the_product(
    seed: int, rows: int, blocks: int, groups: int, group_size: int, has_bias: bool
) -> None:
    codes, both, weight = new_weight(AMX_OUTPUTS * blocks, groups * group_size, group_size, seed)
    x = torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(seed)).bfloat16()
    bias = torch.randn(len(weight)).bfloat16() if has_bias else None
    check(int4_tiled_linear(x, tile_int4(codes), both, bias, group_size), x, weight, bias)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((48, 64), torch.bfloat16), ((64, 48), torch.bfloat16), ((64, 64), torch.float32)]
)
def test_what_does_not_fit_has_no_tiles(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert not can_tile_int4(*shape, dtype)


@needs_tiles
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("shape", "group_size"), [((64, 64), 32), ((224, 256), 64), ((1536, 576), 32), ((96, 512), 256)]
)
def test_compiled_code_gives_the_product_of_any_number_of_rows(
    shape: tuple[int, int], group_size: int, has_bias: bool
) -> None:
    patch_inductor()
    generate_tiled_products()
    torch._dynamo.reset()
    codes, both, weight = new_weight(*shape, group_size)
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    tiles = tile_int4(codes)

    def doubled(x: Tensor, tiles: Tensor, both: Tensor, bias: Tensor | None) -> Tensor:
        return int4_tiled_linear(x * 2, tiles, both, bias, group_size) * 2

    compiled = torch.compile(doubled)
    for rows in (47, 2, 16, 17, 65, 400):
        x = torch.randn(rows, shape[1]).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        with only_marked_sizes_are_dynamic():
            check(compiled(x, tiles, both, bias) / 2, x * 2, weight, bias)
