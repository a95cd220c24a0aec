"""Plain and packed products against float64."""

from __future__ import annotations

import pytest
import torch

from kernels_triton_free import linear as linear_module
from kernels_triton_free.linear import can_pack, linear, pack_weight, packed_linear, single_row_sums

needs_packing = pytest.mark.skipif(
    not can_pack(torch.bfloat16), reason="oneDNN cannot pack bfloat16 weights on this CPU"
)


def random_operands(rows: int, inner: int, outer: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows * 1000 + outer)
    shapes = ((rows, inner), (outer, inner), (outer,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def product_float64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_linear_equals_float64(rows: int, has_bias: bool) -> None:
    x, weight, bias = random_operands(rows, 48, 40, torch.float32)
    own_bias = bias if has_bias else None
    torch.testing.assert_close(
        linear(x, weight, own_bias).double(), product_float64(x, weight, own_bias), rtol=1e-5, atol=1e-5
    )


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (576, 49), (33, 7)])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_packed_linear_equals_float64(rows: int, inner: int, outer: int, has_bias: bool) -> None:
    x, weight, bias = random_operands(rows, inner, outer, torch.bfloat16)
    own_bias = bias if has_bias else None
    original = weight.clone()
    out = packed_linear(x, pack_weight(weight), own_bias, outer)
    assert out.shape == (rows, outer) and out.dtype == torch.bfloat16
    assert torch.equal(weight, original), "packing must leave the weight it was given"
    # Products are summed in float32 and rounded once:
    # half a unit in the last place of bfloat16, of the larger terms.
    torch.testing.assert_close(
        out.double(), product_float64(x, weight, own_bias), rtol=2**-8, atol=2**-8 * inner**0.5
    )


@needs_packing
def test_a_row_of_a_packed_product_does_not_depend_on_how_the_weight_was_laid_out_before() -> None:
    x, weight, _ = random_operands(3, 64, 32, torch.bfloat16)
    transposed = weight.T.contiguous().T
    assert not transposed.is_contiguous()
    assert torch.equal(
        packed_linear(x, pack_weight(transposed), None, 32), packed_linear(x, pack_weight(weight), None, 32)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_only_bfloat16_is_packed(dtype: torch.dtype) -> None:
    assert not can_pack(dtype)


@pytest.mark.parametrize(("available", "supported"), [(False, True), (True, False)])
def test_nothing_is_packed_where_onednn_or_its_bfloat16_products_are_missing(
    monkeypatch: pytest.MonkeyPatch, available: bool, supported: bool
) -> None:
    monkeypatch.setattr(linear_module.torch.backends.mkldnn, "is_available", lambda: available)
    monkeypatch.setattr(linear_module.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    assert not can_pack(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_of_a_single_row_equal_the_product(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x, weight = torch.randn(1, 96, dtype=torch.float64), torch.randn(40, 96, dtype=torch.float64)
    halves = [x.to(dtype).chunk(2, dim=1), weight.to(dtype).chunk(2, dim=1)]
    out = torch.compile(single_row_sums, dynamic=False, fullgraph=True)(*halves)
    expected = x.to(dtype).double() @ weight.to(dtype).double().T
    assert out.dtype == torch.float32 and out.shape == (1, 40)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
