"""Drafting with a model: token by token, all requests side by side.

Where the target's token is drawn with the noise of its position, the draft is drawn with the very same noise: the two
agree as often as their distributions overlap, up to a factor of two of the best any coupling could do, and verification
needs to know nothing of the draft's probabilities (Gumbel coupling; Daliri et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from minivllm.spec_decode.drafter import Drafter, DraftTask, GuessingModel


class DraftModel(GuessingModel, Protocol):
    """A model that guesses over the persistent batch."""

    def num_places(self, slot: int) -> int:
        """How many positions of the request in this slot have a place in the KV cache."""

    def next_tokens(self, slots: np.ndarray, positions: np.ndarray) -> list[int]:
        """Compute the tokens that stand at ``positions`` of ``slots`` (int [R] each; everything before them is
        computed), guess the ones behind them, and write these into the batch."""


class AutoregressiveDrafter(Drafter):
    """Asks a model for one token after the other."""

    def __init__(self, model: DraftModel, cost_per_token: float) -> None:
        self._model = model
        self.cost_per_token = cost_per_token

    @property
    def models(self) -> Sequence[GuessingModel]:
        return (self._model,)

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        # The last guess is computed by verification, so of k guesses k - 1 need a place, behind the n known tokens.
        lengths = [min(task.max_tokens, self._model.num_places(task.slot) - len(task.token_ids) + 1) for task in tasks]
        proposals: dict[str, list[int]] = {task.request_id: [] for task, length in zip(tasks, lengths) if length > 0}
        for step in range(max(lengths, default=0)):
            active = [task for task, length in zip(tasks, lengths) if length > step]
            slots = np.array([task.slot for task in active], dtype=np.int64)
            positions = np.array([len(task.token_ids) - 1 + step for task in active], dtype=np.int64)
            for task, token_id in zip(active, self._model.next_tokens(slots, positions)):
                proposals[task.request_id].append(token_id)
        return proposals

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """Nothing is kept between steps."""
