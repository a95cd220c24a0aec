"""Causal depthwise convolution over packed rows, each of which goes on from a state of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton_free.state.rows import StateRows


def short_conv(
    x: Tensor, state: Tensor, rows: StateRows, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [tokens, channels] -> weights times the last tokens of the same row, summed, plus bias:
    same shape and dtype.

    state [slots, taps - 1, channels], in place: the last inputs of each row, oldest first. weight [channels,
    taps], its last column for the token itself; bias [channels]. Both are indexed as one list of inputs, so
    that there is no loop over rows. Computed in the dtype of x.
    """
    taps = weight.shape[1]
    before = state[rows.read]  # [rows, taps - 1, channels]
    inputs = torch.cat((before.flatten(0, 1).to(x.dtype), x))
    num_before = before.shape[0] * before.shape[1]

    def last_inputs(row: Tensor, end: Tensor, count: int) -> Tensor:
        """Where the last ``count`` inputs of a row lie, up to its place ``end``, which is not one of them."""
        place = end[:, None] + torch.arange(-count, 0, device=x.device)
        row = row[:, None]
        in_state = row * (taps - 1) + place + (taps - 1)
        return torch.where(place < 0, in_state, num_before + rows.starts[row] + place)

    window = inputs[last_inputs(rows.token_rows, rows.offsets + 1, taps)]  # [tokens, taps, channels]
    out = (window * weight.T.to(x.dtype)).sum(1)
    every = torch.arange(before.shape[0], device=x.device)
    state[rows.write] = inputs[last_inputs(every, rows.counts, taps - 1)].to(state.dtype)
    return out if bias is None else out + bias.to(x.dtype)
