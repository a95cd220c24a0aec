"""Drafters that know too much or too little: to be put in the place of an engine's own."""

from __future__ import annotations

import random
from collections.abc import Sequence

from minivllm import LLM
from minivllm.spec_decode.drafter import DraftTask
from minivllm.spec_decode.speculation import Speculation


class ScriptedDrafter:
    """Knows the texts that will come, and gets every token wrong with a probability."""

    cost_per_token = 0.0
    models = ()

    def __init__(self, texts: Sequence[Sequence[int]], error_rate: float, vocab_size: int) -> None:
        self._texts, self._error_rate, self._vocab_size = (
            [list(text) for text in texts],
            error_rate,
            vocab_size,
        )
        self._rng = random.Random(0)
        self.num_proposed = 0

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        proposals = {}
        for task in tasks:
            known = task.token_ids.tolist()
            text = next((text for text in self._texts if text[: len(known)] == known), known)
            guess = text[len(known) : len(known) + task.max_tokens]
            proposals[task.request_id] = [
                (token + 1) % self._vocab_size if self._rng.random() < self._error_rate else token
                for token in guess
            ]
            self.num_proposed += len(guess)
        return {request_id: guess for request_id, guess in proposals.items() if guess}

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """Scripts are kept."""


def speculation_of(llm: LLM) -> Speculation:
    """What asks the drafter of an in-process engine."""
    return llm.llm_engine.client.core.executor.worker.runner.speculation  # type: ignore[attr-defined]
