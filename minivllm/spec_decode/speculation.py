"""The model runner's side of speculative decoding: what the drafter may know, and what it learns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from minivllm.batch.persistent_batch import PersistentBatch, WorkerRequest
from minivllm.errors import ConfigError
from minivllm.plugins.points import DRAFTERS
from minivllm.spec_decode.adaptive import DraftLengths, StepCost
from minivllm.spec_decode.drafter import DraftContext, Drafter, DraftTask, Guesses, GuessingModel
from minivllm.spec_decode.early_exit import EarlyExit
from minivllm.spec_decode.lookup import NgramDrafter, SuffixDrafter
from minivllm.spec_decode.paged_draft import DraftDecoder

logger = logging.getLogger(__name__)

MEASUREMENTS = 5
"""Repetitions of each measured step; the fastest counts."""
DEFAULT_VERIFICATION_COST = 0.05
"""Where it is not measured: a step that reads all weights for one token computes a few more almost for
free."""


def ngram(context: DraftContext) -> Drafter:
    return NgramDrafter(context.settings.prompt_lookup_min, context.settings.prompt_lookup_max)


def suffix(context: DraftContext) -> Drafter:
    return SuffixDrafter(context.settings.suffix_max_cached_tokens)


def early_exit(context: DraftContext) -> Drafter:
    num_layers = context.settings.num_layers
    if num_layers is None:
        raise ValueError("num_layers is chosen when the engine's configuration is resolved.")
    return EarlyExit(context, num_layers)


def draft_model(context: DraftContext) -> Drafter:
    """Another model with the target's vocabulary."""
    model = context.draft_model
    if model is None:
        raise ValueError(f"{context.settings.method} needs a loaded model.")
    return DraftDecoder(context, model)


def make_speculation(context: DraftContext) -> Speculation:
    """Everything that speculative_config asks for. Verification costs what the user said, or the default
    until it is measured. Raises ConfigError."""
    settings = context.settings
    cost = DEFAULT_VERIFICATION_COST if settings.verification_cost is None else settings.verification_cost
    drafter: Drafter = DRAFTERS.load(settings.method)(context)
    missing = [
        name for name in ("propose", "finish", "cost_per_token", "models") if not hasattr(drafter, name)
    ]
    if missing:
        raise ConfigError(
            f"speculative_config['method'] is {settings.method!r}, whose drafter lacks {', '.join(missing)}: "
            "make it a "
            "subclass of minivllm.Drafter."
        )
    lengths = DraftLengths(settings.num_speculative_tokens, StepCost(0.0, cost, drafter.cost_per_token))
    logger.info(
        "Speculative decoding: %s, at most %d tokens.", settings.method, settings.num_speculative_tokens
    )
    return Speculation(drafter, lengths, context.batch, context.target.model.vocab_size)


def measured_step_cost(seconds_to_verify: Callable[[int], float], k: int) -> tuple[float, float]:
    """Cost of verification, in units of a step without drafts:
    (once, for every token), from steps with 0, 1 and k."""
    none, one, most = (min(seconds_to_verify(drafts) for _ in range(MEASUREMENTS)) for drafts in (0, 1, k))
    per_token = max(0.0, (most - one) / (k - 1) / none) if k > 1 else 0.0
    return max(0.0, one / none - 1.0 - per_token), per_token


class Speculation:
    """Asks a drafter for guesses, as many as pay, and learns from what becomes of them."""

    def __init__(
        self, drafter: Drafter, lengths: DraftLengths, batch: PersistentBatch, vocab_size: int
    ) -> None:
        self.drafter = drafter
        self.lengths = lengths
        self._batch = batch
        self._vocab_size = vocab_size
        self._has_warned = False

    @property
    def models(self) -> Sequence[GuessingModel]:
        """The models that the drafter guesses with."""
        return self.drafter.models

    def propose(
        self, drafted: Mapping[str, Sequence[int]], sampled: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """Guesses for every request that sampled something in this step,
        of which ``drafted`` had been verified."""
        for request_id, draft in drafted.items():
            self.lengths.record(request_id, len(draft), len(sampled[request_id]) - 1)
        tasks = {}
        for request_id in sampled:
            request = self._batch.requests[request_id]
            room = self._room(request)
            length = min(room, self.lengths.choose(request_id, len(sampled))) if room > 0 else 0
            if length > 0:
                token_ids = self._batch.token_ids.host[request.slot, : request.num_tokens]
                tasks[request_id] = DraftTask(
                    request_id, request.slot, token_ids, length, request.data.cache_salt
                )
        proposals = self.drafter.propose(list(tasks.values())) if tasks else {}
        sound = {
            task.request_id: self._sound(proposals.get(task.request_id, ()), task) for task in tasks.values()
        }
        return {request_id: guess for request_id, guess in sound.items() if guess}

    def guess_ahead(self, counts: Mapping[str, int], drafted: Mapping[str, Sequence[int]]) -> None:
        """Have so many guesses put behind the newest tokens of these requests, of which ``drafted`` were
        verified in this step."""
        requests = self._batch.requests
        guesses = [
            Guesses(requests[request_id], count, len(drafted.get(request_id, ())))
            for request_id, count in counts.items()
        ]
        if guesses:
            self.drafter.guess_ahead(guesses)

    def _sound(self, guess: Sequence[int], task: DraftTask) -> list[int]:
        """The part of a guess that can be verified:
        as many tokens as were asked for, up to the first that is none.

        The embedding of a token outside the vocabulary cannot be looked up, and drafters may be anybody's.
        """
        kept = list(guess[: task.max_tokens])
        if not kept or (min(kept) >= 0 and max(kept) < self._vocab_size):
            return kept
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The drafter %s guesses tokens outside the vocabulary of %d: they are dropped, and what "
                "follows them.",
                type(self.drafter).__name__,
                self._vocab_size,
            )
        return kept[: next(index for index, token in enumerate(kept) if not 0 <= token < self._vocab_size)]

    def take_costs(self, verify_fixed: float, verify_token: float) -> None:
        """From here on verification is taken to cost this; see StepCost."""
        self.lengths.cost = StepCost(verify_fixed, verify_token, self.lengths.cost.draft_token)

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests left; the batch still knows them."""
        for request_id in request_ids:
            request = self._batch.requests.get(request_id)
            if request is not None:
                self.lengths.forget(request_id)
                self.drafter.finish(request_id, request.output_token_ids, request.data.cache_salt)

    def _room(self, request: WorkerRequest) -> int:
        """The number of drafts that can still become tokens: one more token is always sampled after them."""
        limit = self._batch.max_model_len
        max_tokens = request.data.sampling_params.max_tokens
        if max_tokens is not None:
            limit = min(limit, len(request.data.prompt_token_ids) + max_tokens)
        return limit - request.num_tokens - 1
