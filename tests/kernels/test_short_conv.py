"""Short convolutions over packed rows, against a loop over every request in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels_triton_free.state.rows import StateRows
from kernels_triton_free.state.short_conv import short_conv

CHANNELS, SLOTS = 5, 9


def rows_of(counts: list[int], read: list[int], write: list[int]) -> StateRows:
    starts = [sum(counts[:row]) for row in range(len(counts))]
    token_rows = [row for row, count in enumerate(counts) for _ in range(count)]
    offsets = [place for count in counts for place in range(count)]
    parts = (
        torch.tensor(part, dtype=torch.int32) for part in (read, write, starts, counts, token_rows, offsets)
    )
    return StateRows(*parts)


def one_by_one(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(outputs of one request, its state behind them), token by token."""
    out = []
    for token in x:
        window = torch.cat([state, token[None]])
        out.append((window * weight.T).sum(0) + (0 if bias is None else bias))
        state = window[1:]
    return torch.stack(out) if out else x, state


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 0], [1, 5, 2, 1], [0, 7, 1, 3]])
@pytest.mark.parametrize("has_bias", [False, True])
def test_rows_are_convolved_as_if_each_were_alone(taps: int, counts: list[int], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(taps + sum(counts))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, state, weight = (
        random(sum(counts), CHANNELS),
        random(SLOTS, taps - 1, CHANNELS),
        random(CHANNELS, taps),
    )
    bias = random(CHANNELS) if has_bias else None
    state[0] = 0
    state[-1] = torch.nan  # what padding wrote
    read = [0, 3, 4, 5][: len(counts)]
    write = [1, 3, 6, 5][: len(counts)]
    before, rows = state.clone(), rows_of(counts, read, write)
    out = short_conv(x, state, rows, weight, bias)
    first = 0
    for row, count in enumerate(counts):
        expected, after = one_by_one(x[first : first + count], before[read[row]], weight, bias)
        torch.testing.assert_close(out[first : first + count], expected)
        torch.testing.assert_close(state[write[row]], after)
        first += count
    untouched = [slot for slot in range(SLOTS) if slot not in write]
    assert torch.equal(state[untouched].nan_to_num(), before[untouched].nan_to_num()), (
        "other slots stay as they are"
    )
