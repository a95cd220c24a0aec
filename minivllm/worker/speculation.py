"""The model runner's side of speculative decoding: what the drafter may know, and what it learns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from minivllm.config import SpeculativeConfig
from minivllm.models.decoder import Decoder
from minivllm.models.eagle_head import EagleHead
from minivllm.spec_decode.adaptive import DraftLengths, StepCost
from minivllm.spec_decode.autoregressive import AutoregressiveDrafter
from minivllm.spec_decode.drafter import Drafter, DraftTask
from minivllm.spec_decode.ngram import NgramDrafter
from minivllm.spec_decode.speculator import Speculator
from minivllm.spec_decode.suffix import SuffixDrafter
from minivllm.worker.draft_model import DraftDecoder
from minivllm.worker.eagle import EagleDraft
from minivllm.worker.early_exit import EarlyExit, weights_per_token
from minivllm.worker.persistent_batch import PersistentBatch, WorkerRequest

if TYPE_CHECKING:
    from minivllm.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MEASUREMENTS = 5
"""Repetitions of each measured step; the fastest counts."""
DEFAULT_VERIFICATION_COST = 0.05
"""Where it is not measured: a step that reads all weights for one token computes a few more almost for free."""


def make_drafter(config: SpeculativeConfig, runner: ModelRunner, draft_decoder: Decoder | None = None) -> Drafter:
    """The drafter of config.method. draft_decoder: the loaded model or head of those methods that have one."""
    target = runner.decoder.config
    whole = weights_per_token(target, target.num_layers)
    if config.method == "early_exit":
        assert config.num_layers is not None
        share = weights_per_token(target, config.num_layers) / whole
        return AutoregressiveDrafter(EarlyExit(runner, config.num_layers), share)
    if isinstance(draft_decoder, EagleHead):
        share = draft_decoder.eagle.num_weights_per_token / whole
        return AutoregressiveDrafter(EagleDraft(runner, draft_decoder), share)
    if draft_decoder is not None:
        draft = draft_decoder.config
        share = weights_per_token(draft, draft.num_layers) / whole
        return AutoregressiveDrafter(DraftDecoder(runner, draft_decoder), share)
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    return SuffixDrafter(config.suffix_max_cached_tokens)


def make_speculation(
    config: SpeculativeConfig, runner: ModelRunner, draft_decoder: Decoder | None = None
) -> Speculation:
    """Everything that config asks for. Verification costs what the user said, or the default until it is measured."""
    cost = DEFAULT_VERIFICATION_COST if config.verification_cost is None else config.verification_cost
    drafter = make_drafter(config, runner, draft_decoder)
    lengths = DraftLengths(config.num_speculative_tokens, StepCost(0.0, cost, drafter.cost_per_token))
    logger.info("Speculative decoding: %s, at most %d tokens.", config.method, config.num_speculative_tokens)
    return Speculation(Speculator(drafter, lengths), runner.batch)


def measured_step_cost(seconds_to_verify: Callable[[int], float], k: int) -> tuple[float, float]:
    """What verifying costs, in units of a step without drafts: (once, for every token), from steps with 0, 1 and k."""
    none, one, most = (min(seconds_to_verify(drafts) for _ in range(MEASUREMENTS)) for drafts in (0, 1, k))
    per_token = max(0.0, (most - one) / (k - 1) / none) if k > 1 else 0.0
    return max(0.0, one / none - 1.0 - per_token), per_token


class Speculation:
    """Lets a speculator guess for the requests of the persistent batch."""

    def __init__(self, speculator: Speculator, batch: PersistentBatch) -> None:
        self.speculator, self._batch = speculator, batch

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
