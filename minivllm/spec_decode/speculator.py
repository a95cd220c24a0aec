"""Guess for those for whom it pays, and learn from what became of the guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minivllm.spec_decode.adaptive import DraftLengths
from minivllm.spec_decode.drafter import Drafter, DraftTask


class Speculator:
    """A drafter, and how many tokens it is asked for."""

    def __init__(self, drafter: Drafter, lengths: DraftLengths) -> None:
        self.drafter, self.lengths = drafter, lengths

    def propose(self, tasks: Sequence[DraftTask], batch_size: int) -> dict[str, list[int]]:
        """Guesses by request id. task.max_tokens: what the request has room for; batch_size: rows of a step."""
        worth_it = []
        for task in tasks:
            length = min(task.max_tokens, self.lengths.choose(task.request_id, batch_size))
            if length > 0:
                worth_it.append(replace(task, max_tokens=length))
        return self.drafter.propose(worth_it) if worth_it else {}

    def record(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """What a verification found."""
        self.lengths.record(request_id, num_drafted, num_accepted)

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        """The request left with this output; see Drafter.finish."""
        self.lengths.forget(request_id)
        self.drafter.finish(request_id, output_token_ids, cache_salt)
