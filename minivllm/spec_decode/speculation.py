"""The model runner's side of speculative decoding: what the drafter may know, and what it learns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

from minivllm.batch.persistent_batch import PersistentBatch, WorkerRequest
from minivllm.errors import ConfigError
from minivllm.models.eagle.head import EagleHead
from minivllm.plugins import DRAFTERS
from minivllm.spec_decode.adaptive import DraftLengths, StepCost
from minivllm.spec_decode.autoregressive import AutoregressiveDrafter
from minivllm.spec_decode.draft_model import DraftDecoder
from minivllm.spec_decode.drafter import DraftContext, Drafter, DraftTask, GuessingModel
from minivllm.spec_decode.eagle import EagleDraft
from minivllm.spec_decode.early_exit import EarlyExit, weights_per_token
from minivllm.spec_decode.ngram import NgramDrafter
from minivllm.spec_decode.speculator import Speculator
from minivllm.spec_decode.suffix import SuffixDrafter

logger = logging.getLogger(__name__)

MEASUREMENTS = 5
"""Repetitions of each measured step; the fastest counts."""
DEFAULT_VERIFICATION_COST = 0.05
"""Where it is not measured: a step that reads all weights for one token computes a few more almost for free."""


def ngram(context: DraftContext) -> Drafter:
    return NgramDrafter(context.settings.prompt_lookup_min, context.settings.prompt_lookup_max)


def suffix(context: DraftContext) -> Drafter:
    return SuffixDrafter(context.settings.suffix_max_cached_tokens)


def early_exit(context: DraftContext) -> Drafter:
    num_layers = context.settings.num_layers
    if num_layers is None:
        raise ValueError("num_layers is chosen when the engine's configuration is resolved.")
    share = weights_per_token(context.target.decoder.config, num_layers) / _target_weights(context)
    return AutoregressiveDrafter(EarlyExit(context, num_layers), share)


def draft_model(context: DraftContext) -> Drafter:
    """Another decoder, or an EAGLE head."""
    decoder = context.draft_decoder
    if decoder is None:
        raise ValueError(f"{context.settings.method} needs a loaded model.")
    if isinstance(decoder, EagleHead):
        share = decoder.eagle.num_weights_per_token / _target_weights(context)
        return AutoregressiveDrafter(EagleDraft(context, decoder), share)
    share = weights_per_token(decoder.config, decoder.config.num_layers) / _target_weights(context)
    return AutoregressiveDrafter(DraftDecoder(context, decoder), share)


def _target_weights(context: DraftContext) -> int:
    config = context.target.decoder.config
    return weights_per_token(config, config.num_layers)


def make_speculation(context: DraftContext) -> Speculation:
    """Everything that speculative_config asks for. Verification costs what the user said, or the default until it is
    measured. Raises ConfigError."""
    settings = context.settings
    cost = DEFAULT_VERIFICATION_COST if settings.verification_cost is None else settings.verification_cost
    drafter: Drafter = DRAFTERS.load(settings.method)(context)
    missing = [name for name in ("propose", "finish", "cost_per_token", "models") if not hasattr(drafter, name)]
    if missing:
        raise ConfigError(
            f"speculative_config['method'] is {settings.method!r}, whose drafter lacks {', '.join(missing)}: make it a "
            "subclass of minivllm.Drafter."
        )
    lengths = DraftLengths(settings.num_speculative_tokens, StepCost(0.0, cost, drafter.cost_per_token))
    logger.info("Speculative decoding: %s, at most %d tokens.", settings.method, settings.num_speculative_tokens)
    return Speculation(Speculator(drafter, lengths), context.batch)


def measured_step_cost(seconds_to_verify: Callable[[int], float], k: int) -> tuple[float, float]:
    """What verifying costs, in units of a step without drafts: (once, for every token), from steps with 0, 1 and k."""
    none, one, most = (min(seconds_to_verify(drafts) for _ in range(MEASUREMENTS)) for drafts in (0, 1, k))
    per_token = max(0.0, (most - one) / (k - 1) / none) if k > 1 else 0.0
    return max(0.0, one / none - 1.0 - per_token), per_token


class Speculation:
    """Lets a speculator guess for the requests of the persistent batch."""

    def __init__(self, speculator: Speculator, batch: PersistentBatch) -> None:
        self.speculator, self._batch = speculator, batch

    @property
    def models(self) -> Sequence[GuessingModel]:
        """The models that the drafter guesses with."""
        return self.speculator.drafter.models

    def propose(
        self, drafted: Mapping[str, Sequence[int]], sampled: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """Guesses for every request that sampled something in this step, of which ``drafted`` had been verified."""
        for request_id, draft in drafted.items():
            self.speculator.record(request_id, len(draft), len(sampled[request_id]) - 1)
        tasks = []
        for request_id in sampled:
            request = self._batch.requests[request_id]
            room = self._room(request)
            if room > 0:
                token_ids = self._batch.token_ids.host[request.slot, : request.num_tokens]
                tasks.append(DraftTask(request_id, request.slot, token_ids, room, request.data.cache_salt))
        return self.speculator.propose(tasks, len(sampled))

    def take_costs(self, verify_fixed: float, verify_token: float) -> None:
        """From here on verification is taken to cost this; see StepCost."""
        lengths = self.speculator.lengths
        lengths.cost = StepCost(verify_fixed, verify_token, lengths.cost.draft_token)

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests left; the batch still knows them."""
        for request_id in request_ids:
            request = self._batch.requests.get(request_id)
            if request is not None:
                self.speculator.finish(request_id, request.output_token_ids, request.data.cache_salt)

    def _room(self, request: WorkerRequest) -> int:
        """How many drafts can still become tokens: one more is always sampled behind them."""
        limit = self._batch.max_model_len
        max_tokens = request.data.sampling_params.max_tokens
        if max_tokens is not None:
            limit = min(limit, len(request.data.prompt_token_ids) + max_tokens)
        return limit - request.num_tokens - 1
