"""Beam search outside the engine:
every round extends all live beams by one-token requests that ask for logprobs.

The engine knows no beams. The prefix cache keeps what beams have in common, so a round computes the last,
unfilled block of every beam. The search itself is that of Hugging Face transformers: the best ``2 *
beam_width`` continuations are looked at, so that enough of them go on when others end, and finished ones
compete by their length-normalised score.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from minivllm.errors import RequestError
from minivllm.processing.beam_search_params import BeamSearchParams
from minivllm.processing.outputs import PositionLogprobMap
from minivllm.sampling_params import MAX_LOGPROBS


@dataclass(slots=True)
class BeamSequence:
    """One sequence that was found.

    score: cumulative_logprob / length ** length_penalty. finish_reason: "stop" or "length". text: without
    special tokens; empty for a model without a tokenizer.
    """

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str
    text: str = ""


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSequence]


@dataclass(slots=True)
class Beam:
    """Generated tokens of a live beam, and the sum of their logprobs."""

    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class BeamSearch:
    """The search for one prompt: ``beams`` are to be extended, ``advance`` takes what came back,
    until ``done``."""

    def __init__(self, params: BeamSearchParams, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        # So many that beam_width of them go on even if every beam is continued by every end-of-sequence id.
        self._num_candidates = max(2, 1 + len(self._eos_token_ids)) * params.beam_width
        self.num_logprobs = min(self._num_candidates, vocab_size)
        if self.num_logprobs > MAX_LOGPROBS:
            raise RequestError(
                f"beam_width is {params.beam_width}, but must be at most "
                f"{MAX_LOGPROBS * params.beam_width // self._num_candidates} for a model with "
                f"{len(self._eos_token_ids)} end-of-sequence ids."
            )
        self.beams = [Beam()]
        self.done = False
        self._length = 0
        self._finished: list[BeamSequence] = []

    @property
    def sequences(self) -> list[BeamSequence]:
        """The finished sequences so far, best first, at most ``n``."""
        return self._finished[: self._params.n or self._params.beam_width]

    def advance(self, logprobs: Sequence[PositionLogprobMap]) -> None:
        """One round. logprobs: of the next token of each beam,
        at least the ``num_logprobs`` likeliest ones."""
        params, width = self._params, self._params.beam_width
        self._length += 1
        candidates = [
            (beam.cumulative_logprob + entry.logprob, beam, token_id)
            for beam, entries in zip(self.beams, logprobs)
            for token_id, entry in entries.items()
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        live: list[Beam] = []
        ended: list[BeamSequence] = []
        for place, (total, beam, token_id) in enumerate(candidates[: self._num_candidates]):
            token_ids = [*beam.token_ids, token_id]
            is_eos = token_id in self._eos_token_ids
            if not is_eos and self._length < params.max_tokens:
                if len(live) < width:
                    live.append(Beam(token_ids, total))
            elif place < width:  # what ranks below only stands by, in case that too few of the best go on
                ended.append(
                    BeamSequence(token_ids, total, self._score(total), "stop" if is_eos else "length")
                )
        if not (params.early_stopping is True and len(self._finished) == width):
            # sorted() is stable: of equal scores the one that ended first stays ahead.
            self._finished = sorted([*self._finished, *ended], key=lambda sequence: -sequence.score)[:width]
        self.beams = live
        self.done = not live or (
            len(self._finished) == width and not self._may_improve(live[0].cumulative_logprob)
        )

    def _may_improve(self, best_live: float) -> bool:
        """True if a live beam may still replace the worst of the finished sequences,
        of which there are enough."""
        params = self._params
        if params.early_stopping is True:
            return False
        at_best_length = params.early_stopping == "never" and params.length_penalty > 0
        length = params.max_tokens if at_best_length else self._length
        return self._score(best_live, length) > self._finished[-1].score

    def _score(self, cumulative_logprob: float, length: int | None = None) -> float:
        return cumulative_logprob / math.pow(length or self._length, self._params.length_penalty)


Extend = Callable[[list[tuple[int, list[int], int]]], list[PositionLogprobMap]]
"""Next-token logprobs of sequences, each given as (index of its prompt, generated tokens,
how many logprobs)."""


def run_searches(searches: Sequence[BeamSearch], extend: Extend) -> None:
    """Run all searches to their end, side by side:
    every round extends the live beams of all of them in one batch."""
    while active := [(index, search) for index, search in enumerate(searches) if not search.done]:
        asked = [
            (index, beam.token_ids, search.num_logprobs) for index, search in active for beam in search.beams
        ]
        results = extend(asked)
        start = 0
        for _, search in active:
            count = len(search.beams)
            search.advance(results[start : start + count])
            start += count
