"""Products over 8 and 4 bits against float64,
on both sides of the row count from which weights are restored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kernels_triton_free import quantized_linear as module
from kernels_triton_free.quantized_linear import (
    INT4_MAX_ROWS,
    INT8_MAX_ROWS,
    can_multiply_int4,
    int4_linear,
    int4_rows,
    int8_linear,
    int8_rows,
    pack_int4,
    restore_int4,
)

needs_int4 = pytest.mark.skipif(
    not can_multiply_int4(), reason="this CPU's order of 4-bit weights is not known"
)
DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
BIASES = pytest.mark.parametrize("has_bias", [False, True])


def rows_around(limit: int) -> list[int]:
    return [1, 2, limit - 1, limit, limit + 1, 2 * limit]


def int4_case(out: int, inner: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(packed, scale_and_zero, the weight in float64),
    from what the operator's documentation says a code means."""
    generator = torch.Generator().manual_seed(out + inner)
    codes = torch.randint(0, 16, (out, inner), generator=generator, dtype=torch.uint8)
    scale_and_zero = torch.randn(inner // group, out, 2, generator=generator).to(dtype)
    weight = torch.empty(out, inner, dtype=torch.float64)
    for column in range(inner):
        scale, zero = scale_and_zero[column // group].double().unbind(-1)
        weight[:, column] = (codes[:, column].double() - 8) * scale + zero
    return pack_int4(codes), scale_and_zero, weight


def int8_case(out: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out + inner)
    values = torch.randint(-127, 128, (out, inner), generator=generator, dtype=torch.int8)
    scale = (torch.rand(out, 1, generator=generator) / 100).to(dtype)
    return values, scale, values.double() * scale.double()


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tolerance: float) -> None:
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    assert out.shape == expected.shape and out.dtype == x.dtype
    assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()


def inputs(rows: int, inner: int, out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, inner, generator=generator).to(dtype), torch.randn(out, generator=generator).to(
        dtype
    )


@needs_int4
@DTYPES
@BIASES
@pytest.mark.parametrize(
    ("out", "inner", "group"), [(64, 32, 32), (192, 128, 64), (128, 384, 128), (64, 512, 256)]
)
@pytest.mark.parametrize("rows", rows_around(INT4_MAX_ROWS))
def test_int4_linear_equals_float64(
    rows: int, out: int, inner: int, group: int, has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    packed, scale_and_zero, weight = int4_case(out, inner, group, dtype)
    x, bias = inputs(rows, inner, out, dtype)
    own_bias = bias if has_bias else None
    check(int4_linear(x, packed, scale_and_zero, own_bias, group), x, weight, own_bias, tolerance)


@DTYPES
@BIASES
@pytest.mark.parametrize(("out", "inner"), [(64, 32), (33, 100), (7, 64)])
@pytest.mark.parametrize("rows", rows_around(INT8_MAX_ROWS))
def test_int8_linear_equals_float64(
    rows: int, out: int, inner: int, has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    values, scale, weight = int8_case(out, inner, dtype)
    x, bias = inputs(rows, inner, out, dtype)
    own_bias = bias if has_bias else None
    check(int8_linear(x, values, scale, own_bias), x, weight, own_bias, tolerance)


@needs_int4
def test_weights_restored_piece_by_piece_give_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, scale_and_zero, weight4 = int4_case(320, 64, 32, torch.float32)
    values, scale, weight8 = int8_case(320, 64, torch.float32)
    x, bias = inputs(INT4_MAX_ROWS + 1, 64, 320, torch.float32)
    monkeypatch.setattr(module, "RESTORED_ELEMENTS", 64 * 64 + 1)
    check(int4_linear(x, packed, scale_and_zero, bias, 32), x, weight4, bias, 1e-5)
    check(int8_linear(x, values, scale, bias), x, weight8, bias, 1e-5)


@needs_int4
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_and_gathered_rows_are_the_weight(dtype: torch.dtype) -> None:
    packed, scale_and_zero, weight = int4_case(192, 96, 32, dtype)
    indices = torch.tensor([0, 191, 31, 32, 63, 64, 100, 31])
    close = {"rtol": torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps * float(weight.abs().max())}
    rows = int4_rows(packed, scale_and_zero, indices, 32)
    torch.testing.assert_close(rows.to(dtype).double(), weight[indices], **close)
    torch.testing.assert_close(restore_int4(packed, scale_and_zero, 32).T.double(), weight, **close)
    values, scale, weight8 = int8_case(192, 96, dtype)
    torch.testing.assert_close(
        int8_rows(values, scale, indices).to(dtype).double(), weight8[indices], **close
    )


@needs_int4
def test_compiled_for_any_number_of_rows_the_operators_themselves_are_called() -> None:
    packed, scale_and_zero, weight4 = int4_case(64, 64, 32, torch.bfloat16)
    values, scale, weight8 = int8_case(64, 64, torch.bfloat16)
    graphs: list[object] = []

    def count(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> object:
        from torch._inductor.compile_fx import compile_fx

        graphs.append(graph)
        return compile_fx(graph, example_inputs)

    def both(
        x: Tensor, packed: Tensor, scale_and_zero: Tensor, values: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = x * 2
        return int4_linear(x, packed, scale_and_zero, None, 32) + 1, int8_linear(x, values, scale, None) + 1

    compiled = torch.compile(both, fullgraph=True, backend=count)
    for rows in (5, 2, INT8_MAX_ROWS, INT8_MAX_ROWS + 1, INT4_MAX_ROWS, INT4_MAX_ROWS + 1):
        x = inputs(rows, 64, 64, torch.bfloat16)[0]
        torch._dynamo.mark_dynamic(x, 0, min=2, max=65536)
        with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as profiled:
            four, eight = compiled(x, packed, scale_and_zero, values, scale)
        check(four - 1, 2 * x, weight4, None, 2e-2)
        check(eight - 1, 2 * x, weight8, None, 2e-2)
        called = {event.key for event in profiled.key_averages()}
        assert ("aten::_weight_int4pack_mm_for_cpu" in called) == (rows <= INT4_MAX_ROWS)
        assert ("aten::_weight_int8pack_mm" in called) == (rows <= INT8_MAX_ROWS)
    assert len(graphs) == 1


@needs_int4
@pytest.mark.parametrize("has_avx2_only", [False, True])
@DTYPES
def test_with_avx2_and_no_more_float32_calls_the_operator_for_one_row_of_4_bits(
    dtype: torch.dtype, tolerance: float, has_avx2_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HAS_AVX2_ONLY", has_avx2_only)
    packed, scale_and_zero, weight4 = int4_case(64, 64, 32, dtype)
    values, scale, weight8 = int8_case(64, 64, dtype)
    for rows in (1, 2, INT8_MAX_ROWS, INT4_MAX_ROWS + 1):
        x = inputs(rows, 64, 64, dtype)[0]
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            check(int4_linear(x, packed, scale_and_zero, None, 32), x, weight4, None, tolerance)
            check(int8_linear(x, values, scale, None), x, weight8, None, tolerance)
        called = {event.key for event in profiled.key_averages()}
        is_slow = has_avx2_only and dtype == torch.float32
        assert ("aten::_weight_int4pack_mm_for_cpu" in called) == (rows <= (1 if is_slow else INT4_MAX_ROWS))
        assert ("aten::_weight_int8pack_mm" in called) == (rows <= (0 if is_slow else INT8_MAX_ROWS))


def test_an_unknown_order_of_4_bit_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module._half_block.cache_clear()
    unordered = type(
        "Operator", (), {"default": staticmethod(lambda codes, tiles: codes.to(torch.uint8)[:, :1])}
    )
    monkeypatch.setattr(module.torch.ops.aten, "_convert_weight_to_int4pack_for_cpu", unordered)
    assert not can_multiply_int4()
    monkeypatch.undo()
    module._half_block.cache_clear()
