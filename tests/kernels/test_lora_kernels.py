"""Low-rank updates of mixed batches equal the row-by-row reference, whatever other rows and adapters hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_triton_free.lora import add_low_rank, add_low_rank_reference


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.integers(1, 6),
    st.sampled_from([(8,), (5, 7), (8, 2, 2)]),
    st.integers(0, 1000),
)
def test_every_row_gets_the_update_of_its_own_adapter(
    slots: list[int], rank: int, sizes: tuple[int, ...], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, width = len(slots), sum(sizes)
    out, x, a, b = random(rows, width), random(rows, 9), random(len(sizes), 3, rank, 9), random(width, 3, rank)
    index = torch.tensor(slots, dtype=torch.int32)
    torch.testing.assert_close(
        add_low_rank(out, x, a, b, index, sizes), add_low_rank_reference(out, x, a, b, index, sizes)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_adapter_whose_products_overflow_harms_no_other_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 8, generator=generator).to(dtype)
    out = torch.randn(3, 4, generator=generator).to(dtype)
    a = torch.randn(1, 2, 2, 8, generator=generator).to(dtype)
    b = torch.randn(4, 2, 2, generator=generator).to(dtype)
    slots = torch.tensor([0, 1, 2], dtype=torch.int32)
    expected = add_low_rank(out, x, a, b, slots, (4,))
    a[:, 1] = torch.finfo(dtype).max
    updated = add_low_rank(out, x, a, b, slots, (4,))
    assert not updated[2].isfinite().all()
    torch.testing.assert_close(updated[:2], expected[:2], rtol=0, atol=0)
    torch.testing.assert_close(updated[0], out[0], rtol=0, atol=0)
