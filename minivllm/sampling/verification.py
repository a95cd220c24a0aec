"""Verification: which drafted tokens would the model itself have said?

At every drafted position the target token is sampled exactly as without speculation, with the position's own
noise (``kernels_triton_free/sampling/noise.py``), and a drafted token is accepted if it is that token. The
first mismatch ends the row, and the sampled token stands in its place; after a row without mismatch one more
token comes for free (the bonus token). So the tokens of a request, seeded or not, are the same with any
drafter and with none.

Rejection sampling (Leviathan et al. 2023, Chen et al. 2023) accepts a draft d with min(1, p(d) / q(d)). For a
deterministic drafter, q = 1 at d, that is p(d):
just the probability that the sample is d, so nothing is lost here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from minivllm.device.buffers import to_device
from minivllm.messages import PositionLogprobs
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.sampling_state import SamplingState

Verified = tuple[list[int], list[PositionLogprobs]]
"""New tokens of one row, and their log-probabilities where asked for."""


class Accepted(NamedTuple):
    """What verification on the device gives for R rows with at most n drafts, int64: the first ``counts`` [R]
    of token_ids [R, 1 + n] are new tokens; ``offsets`` [R, 1 + n]: how many come before each. A row with
    fewer drafts repeats its last entry."""

    token_ids: Tensor
    counts: Tensor
    offsets: Tensor


def accept(token_ids: Tensor, inputs: Tensor, num_drafts: np.ndarray) -> Accepted:
    """Compare drafts with what was sampled, without waiting for the device.

    token_ids int64 [sum of 1 + num_drafts]: sampled after the last known token of every row in turn, and
    after each of its drafts; inputs int: these tokens and drafts. num_drafts int64 [R]: of every row.
    """
    offsets = np.minimum(np.arange(1 + int(num_drafts.max())), num_drafts[:, None])
    first = np.cumsum(1 + num_drafts) - 1 - num_drafts
    offset, place = to_device(np.stack([offsets, first[:, None] + offsets]), token_ids.device)
    sampled, given = token_ids[place], inputs[place]
    # A repeated entry is no draft of its own.
    agrees = (sampled[:, :-1] == given[:, 1:]) & (offset[:, 1:] > offset[:, :-1])
    return Accepted(sampled, 1 + agrees.long().cumprod(1).sum(1), offset)


def verify(
    sampler: Sampler,
    record: SamplingState,
    logits: Tensor,
    slots: np.ndarray,
    positions: np.ndarray,
    drafts: Sequence[Sequence[int]],
) -> list[Verified]:
    """Sample the tokens of R rows and record them.

    logits [sum of 1 + len(draft), V]: of every row in turn, after its last known token and after each drafted
    one. slots, positions [R] int: slot of each row, tokens known of it. drafts: drafted tokens of each row,
    often none. Returns 1 to 1 + len(draft) tokens per row. A row that depends on its output is verified
    position by position, with every accepted token recorded before the next one is sampled; all others in one
    go.
    """
    num_rows = len(slots)
    counts = np.fromiter((1 + len(draft) for draft in drafts), np.int64, num_rows)
    first = np.cumsum(counts) - counts
    waits = (counts > 1) & sampler.depends_on_output(slots)
    now = np.where(waits, 1, counts)
    done = np.zeros(num_rows, dtype=np.int64)  # positions sampled of each row
    results: list[Verified] = [([], []) for _ in range(num_rows)]
    rows = np.arange(num_rows)
    while len(rows) > 0:
        row_of = np.repeat(rows, now[rows])
        offsets = (
            np.arange(len(row_of)) - np.repeat(np.cumsum(now[rows]) - now[rows], now[rows]) + done[row_of]
        )
        places = first[row_of] + offsets
        chosen = logits if len(places) == len(logits) else logits[to_device(places, logits.device)]
        sampled = sampler(chosen, slots[row_of], positions[row_of] + offsets)
        token_ids = sampled.token_ids.tolist()
        kept: list[int] = []
        going_on: list[int] = []
        start = 0
        for row in rows.tolist():
            draft, (tokens, logprobs) = drafts[row], results[row]
            end = start + int(now[row])
            while True:
                tokens.append(token_ids[start])
                kept.append(start)
                entry = sampled.logprobs[start]
                if entry is not None:
                    logprobs.append(entry)
                agrees = len(tokens) <= len(draft) and draft[len(tokens) - 1] == token_ids[start]
                start += 1
                if not agrees or start == end:
                    break
            if agrees and waits[row]:
                going_on.append(row)
            start = end
        record.append(slots[row_of[kept]], np.asarray(token_ids, dtype=np.int64)[kept])
        rows = np.asarray(going_on, dtype=np.int64)
        done[rows] += 1
    return results
