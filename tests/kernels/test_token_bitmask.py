"""The token bitmask, judged bit by bit in plain Python."""

from __future__ import annotations

import pytest
import torch

from kernels_triton_free.sampling.token_bitmask import apply_token_bitmask_, bitmask_words

SIZES = [1, 31, 32, 33, 416, 1000]


def random_case(rows: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + vocab_size)
    logits = torch.randn(rows, vocab_size, generator=generator).to(dtype)
    words = torch.randint(-(2**31), 2**31, (rows, bitmask_words(vocab_size)), generator=generator)
    return logits, words.to(torch.int32)


def expected(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    result = logits.clone()
    for row, words in enumerate(bitmask.tolist()):
        for token in range(logits.shape[1]):
            if not (words[token // 32] % 2**32) >> (token % 32) & 1:
                result[row, token] = -torch.inf
    return result


@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_logit_stays_exactly_where_its_bit_is_set(vocab_size: int, dtype: torch.dtype) -> None:
    logits, bitmask = random_case(3, vocab_size, dtype)
    result = apply_token_bitmask_(logits.clone(), bitmask)
    assert result.dtype == dtype
    assert torch.equal(result, expected(logits, bitmask))


def test_all_bits_set_change_nothing_and_none_set_leave_nothing() -> None:
    logits, _ = random_case(2, 100, torch.float32)
    bitmask = torch.tensor([[-1] * 4, [0] * 4], dtype=torch.int32)
    result = apply_token_bitmask_(logits.clone(), bitmask)
    assert torch.equal(result[0], logits[0])
    assert bool((result[1] == -torch.inf).all())


def test_logits_change_in_place_and_infinite_ones_are_masked_too() -> None:
    logits = torch.tensor([[torch.inf, torch.inf, -torch.inf, -torch.inf]])
    result = apply_token_bitmask_(logits, torch.tensor([[0b0101]], dtype=torch.int32))
    assert result.data_ptr() == logits.data_ptr()
    assert logits.tolist() == [[torch.inf, -torch.inf, -torch.inf, -torch.inf]]


@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (2, 5)])
def test_a_bitmask_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"need \(2, 4\)"):
        apply_token_bitmask_(torch.zeros(2, 100), torch.zeros(shape, dtype=torch.int32))
