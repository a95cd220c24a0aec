"""Few rows over packed weights: the words are those of the weight, and the loops give its product."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code

from kernels_triton_free.cpu_code.install import install
from kernels_triton_free.linear import can_pack, pack_weight, packed_linear
from kernels_triton_free.packed.memory import can_restore, memory_of, packed_in
from kernels_triton_free.packed.rows import (
    MAX_ROWS,
    few_rows_linear,
    few_rows_products,
    is_readable,
    outputs_together,
    words_of,
)

pytestmark = pytest.mark.skipif(
    not can_pack(torch.bfloat16), reason="oneDNN cannot pack bfloat16 weights on this CPU"
)


def packed(weight: torch.Tensor) -> torch.Tensor:
    if not is_readable(*weight.shape):
        pytest.skip("oneDNN packs in another order on this CPU")
    return words_of(pack_weight(weight))


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, MAX_ROWS),
    blocks=st.integers(1, 5),
    runs=st.integers(1, 9),
    has_bias=st.booleans(),
)
def test_few_rows_are_multiplied_as_in_float64(
    seed: int, rows: int, blocks: int, runs: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs = blocks * (outputs_together(64, 32) or 64)
    weight = torch.randn(outputs, 32 * runs, generator=generator).bfloat16()
    x = torch.randn(rows, 32 * runs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if has_bias else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    out = few_rows_linear(x, packed(weight), bias)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    rounded = few_rows_linear(x.bfloat16(), packed(weight), bias)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(
        rounded.double(),
        x.bfloat16().double() @ weight.double().T + (0 if bias is None else bias),
        rtol=8e-3,
        atol=1e-3,
    )


@torch._inductor.config.patch(force_disable_caches=True)
@pytest.mark.parametrize("outputs", [48, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 3, pytest.param(MAX_ROWS, marks=pytest.mark.slow)])
def test_compiled_code_is_one_loop_over_the_words_that_stores_every_sum_where_it_belongs(
    rows: int, outputs: int
) -> None:
    install()
    torch._dynamo.reset()
    words = torch.randn(3, 32, 2 * outputs).bfloat16().view(torch.int32)
    even, odd = (words << 16).view(torch.float32), (words & -(2**16)).view(torch.float32)
    weight = torch.stack([even, odd], 2).flatten(1, 2).transpose(1, 2).flatten(0, 1)
    x, bias = torch.randn(rows, 64), torch.randn(3 * outputs)
    compiled = torch.compile(few_rows_linear, dynamic=False)
    out, [code] = run_and_get_code(compiled, x, words, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
    assert code.count("Vectorized<int32_t>::loadu(") == outputs // 16, "each register once, for all rows"


def test_the_words_keep_the_weight() -> None:
    weight = torch.randn(128, 64).bfloat16()
    words = packed(weight)
    copy = words.clone()
    gc.collect()
    others = [pack_weight(torch.zeros(128, 64, dtype=torch.bfloat16)) for _ in range(50)]
    assert torch.equal(words, copy) and len(others) == 50


@pytest.mark.parametrize("shape", [(100, 64), (64, 48), (16, 64)])
def test_what_is_padded_is_not_read(shape: tuple[int, int]) -> None:
    assert not is_readable(*shape)


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, MAX_ROWS),
    picked=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    has_bias=st.booleans(),
)
def test_products_with_several_weights_are_those_of_each(
    seed: int, rows: int, picked: list[int], has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(5, 128, 96, generator=generator).bfloat16()
    words, which = torch.stack([packed(weight) for weight in weights]), torch.tensor(picked)
    x = torch.randn(rows, len(picked), 96, generator=generator)
    bias = torch.randn(5, 128, generator=generator) if has_bias else None
    expected = torch.einsum("rni,noi->rno", x.double(), weights[which].double())
    expected = expected if bias is None else expected + bias[which]
    out = few_rows_products(x, words[which], None if bias is None else bias[which])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 32), (192, 96), (100, 72), (7, 3)])
def test_a_weight_is_multiplied_wherever_its_bytes_lie(shape: tuple[int, int]) -> None:
    """Also one that is padded; and what is stacked needs the original no more."""
    assert can_restore()
    weights = [torch.randn(shape).bfloat16() for _ in range(3)]
    stack = torch.stack([memory_of(pack_weight(weight)) for weight in weights])
    gc.collect()
    for weight, memory in zip(weights, stack, strict=True):
        restored = packed_in(memory, *shape)
        assert restored.is_mkldnn and restored.shape == shape
        x = torch.randn(9, shape[1]).bfloat16()
        expected = packed_linear(x, pack_weight(weight), None, shape[0])
        assert torch.equal(packed_linear(x, restored, None, shape[0]), expected)
        assert expected.any()
