"""The model runner's side of speculative decoding: what the drafter may know, and what it learns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from minivllm.config import SpeculativeConfig
from minivllm.spec_decode.drafter import Drafter, DraftTask
from minivllm.spec_decode.ngram import NgramDrafter
from minivllm.spec_decode.speculator import Speculator
from minivllm.spec_decode.suffix import SuffixDrafter
from minivllm.worker.persistent_batch import PersistentBatch, WorkerRequest

DEFAULT_VERIFICATION_COST = 0.05
"""Where it is not measured: a step that reads all weights for one token computes a few more almost for free."""


def make_drafter(config: SpeculativeConfig) -> Drafter:
    """The drafter of config.method."""
    if config.method == "ngram":
        return NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    return SuffixDrafter(config.suffix_max_cached_tokens)


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
                tasks.append(DraftTask(request_id, request.slot, token_ids, room))
        return self.speculator.propose(tasks, len(sampled))

    def finish(self, request_ids: Iterable[str]) -> None:
        """These requests left; the batch still knows them."""
        for request_id in request_ids:
            request = self._batch.requests.get(request_id)
            if request is not None:
                self.speculator.finish(request_id, request.output_token_ids)

    def _room(self, request: WorkerRequest) -> int:
        """How many drafts can still become tokens: one more is always sampled behind them."""
        limit = self._batch.max_model_len
        max_tokens = request.data.sampling_params.max_tokens
        if max_tokens is not None:
            limit = min(limit, len(request.data.prompt_token_ids) + max_tokens)
        return limit - request.num_tokens - 1
