"""How many drafted tokens were verified, and how many of them were kept."""

from __future__ import annotations


class DraftingStats:
    """Counters from the start of the engine.
    num_accepted_per_position[i]: verifications that kept draft token i."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_per_position: list[int] = []

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """One verification of ``num_drafted`` tokens kept the first ``num_accepted`` of them."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        missing = num_drafted - len(self.num_accepted_per_position)
        self.num_accepted_per_position += [0] * missing
        for position in range(num_accepted):
            self.num_accepted_per_position[position] += 1
