"""How many tokens to guess, per request and step by step: as many as pay, and none where none pay.

With a chance ``a`` that a drafted token is accepted, k of them give 1 + a + a² + … + a^k tokens per step
(Leviathan et al. 2023), for the price of a step that verifies k tokens more. The k with the most tokens per
unit of time wins; where that is 0, drafting stops, and every now and then a short probe finds out whether the
text has become easier.
"""

from __future__ import annotations

from dataclasses import dataclass

PRIOR_ACCEPTED, PRIOR_TRIED = 0.3, 0.5
"""Assumed history of a new request: few tries, so that the first real ones count."""
DECAY = 0.95
"""Weight of older verifications at each new one: the last twenty or so decide."""
PROBE_TOKENS = 3
FIRST_PAUSE, LONGEST_PAUSE = 16, 128
"""Steps between probes of a request that does not draft: doubled after every probe that did not help."""


@dataclass(frozen=True)
class StepCost:
    """Times in units of a step with a single request and a single token.

    verify_fixed: extra time of a step that verifies anything at all. verify_token: of every drafted token,
    and of every further request in the step. draft_token: of guessing one token.
    """

    verify_fixed: float
    verify_token: float
    draft_token: float = 0.0

    def relative(self, k: int, batch_size: int) -> float:
        """Time of a step in which each of batch_size requests verifies k tokens,
        against one without drafts."""
        if k == 0:
            return 1.0
        extra = self.verify_fixed + k * self.draft_token + batch_size * k * self.verify_token
        return 1.0 + extra / (1.0 + (batch_size - 1) * self.verify_token)


@dataclass
class _Record:
    accepted: float = 0.0
    tried: float = 0.0
    pause: int = FIRST_PAUSE
    steps_until_probe: int = 0
    is_probing: bool = False


class DraftLengths:
    """Chooses k for every request; nothing else depends on what it chooses."""

    def __init__(self, max_length: int, cost: StepCost) -> None:
        self._max_length = max_length
        self.cost = cost
        self._records: dict[str, _Record] = {}

    def choose(self, request_id: str, batch_size: int) -> int:
        """How many tokens to guess for the next step, 0 to max_length."""
        record = self._records.setdefault(request_id, _Record())
        best = self._best(record, batch_size)
        if best > 0:
            record.pause, record.is_probing, record.steps_until_probe = FIRST_PAUSE, False, FIRST_PAUSE
            return best
        if record.is_probing:  # its last probe did not help, or nothing could be guessed yet
            return min(PROBE_TOKENS, self._max_length)
        record.steps_until_probe -= 1
        if record.steps_until_probe > 0:
            return 0
        record.is_probing = True
        return min(PROBE_TOKENS, self._max_length)

    def record(self, request_id: str, num_drafted: int, num_accepted: int) -> None:
        """A verification accepted the first num_accepted of num_drafted >= 1 tokens."""
        record = self._records.setdefault(request_id, _Record())
        record.accepted = DECAY * record.accepted + num_accepted
        record.tried = DECAY * record.tried + num_accepted + (num_accepted < num_drafted)
        if record.is_probing:
            record.is_probing = False
            record.steps_until_probe = record.pause
            record.pause = min(2 * record.pause, LONGEST_PAUSE)

    def forget(self, request_id: str) -> None:
        """The request left; unknown ids are ignored."""
        self._records.pop(request_id, None)

    def _best(self, record: _Record, batch_size: int) -> int:
        chance = (record.accepted + PRIOR_ACCEPTED) / (record.tried + PRIOR_TRIED)
        best, best_rate, tokens, survives = 0, 1.0, 1.0, 1.0
        for k in range(1, self._max_length + 1):
            survives *= chance
            tokens += survives
            rate = tokens / self.cost.relative(k, batch_size)
            if rate > best_rate:
                best, best_rate = k, rate
        return best
