"""Few rows over packed weights: the words are those of the weight, and the loops give its product."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernels_triton_free.lora  # noqa: F401  (defines materialize)
from kernels_triton_free.linear import can_pack, pack_weight
from kernels_triton_free.packed.rows import MAX_ROWS, few_rows_linear, is_readable, words_of

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="oneDNN cannot pack bfloat16 weights on this CPU")


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
def test_few_rows_are_multiplied_as_in_float64(seed: int, rows: int, blocks: int, runs: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64 * blocks, 32 * runs, generator=generator).bfloat16()
    x = torch.randn(rows, 32 * runs, generator=generator)
    bias = torch.randn(64 * blocks, generator=generator) if has_bias else None
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


def test_the_words_keep_the_weight() -> None:
    weight = torch.randn(128, 64).bfloat16()
    words = packed(weight)
    copy = words.clone()
    gc.collect()
    others = [pack_weight(torch.zeros(128, 64, dtype=torch.bfloat16)) for _ in range(50)]
    assert torch.equal(words, copy) and len(others) == 50


@pytest.mark.parametrize("shape", [(100, 64), (64, 48), (32, 64)])
def test_what_is_padded_is_not_read(shape: tuple[int, int]) -> None:
    assert not is_readable(*shape)
