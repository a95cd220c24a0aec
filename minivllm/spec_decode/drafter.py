"""What a drafter is: something that guesses the tokens that follow. Guesses cost time when wrong, never correctness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class DraftTask:
    """One request that wants guesses.

    token_ids [n] int: prompt and output so far; a view, valid until the next step. max_tokens: guess at most so many,
    at least 1. slot: where the request lives in the persistent batch. cache_salt: the tenant; guesses may show what
    others were told only among those of the same one.
    """

    request_id: str
    slot: int
    token_ids: np.ndarray
    max_tokens: int
    cache_salt: str | None = None


class Drafter(Protocol):
    """Guesses deterministically: the same tokens known, the same guesses.

    cost_per_token: time to guess one token, as a share of a step of the model with a single token.
    """

    cost_per_token: float

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        """Guesses by request id, 1 to max_tokens of them; requests it knows nothing for are left out."""

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """The request left with this output; its state can go. cache_salt: see DraftTask."""
