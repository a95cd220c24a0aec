"""The scheduler's view of one request: its tokens, how many of them are computed, and where it stands."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from minivllm.messages import EngineEvent, EngineRequest, EventType, FinishReason

if TYPE_CHECKING:
    import numpy as np


class RequestStatus(Enum):
    """WAITING and PREEMPTED requests are in the waiting queue, or beside it while keys and values are loaded
    for them; BLOCKED ones are set aside until what they need is there (a grammar); the rest have left."""

    WAITING = auto()
    BLOCKED = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()

    @property
    def is_finished(self) -> bool:
        return self in _FINISH_REASONS


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a request ends now. error: with FINISHED_ERROR, a sentence for its sender."""

    status: RequestStatus
    stop_reason: int | str | None = None
    error: str | None = None


class StopCondition(Protocol):
    """Watches the tokens of one request."""

    def append(self, token_id: int) -> Stop | None:
        """The next token of the output, in order, each once;
        not None ends the request with this token, or before it with FINISHED_ERROR."""
        ...


class TokenMaskSource(Protocol):
    """Says which tokens one request may take next. Moves on as its request's tokens become known."""

    def fill(self, rows: np.ndarray, draft_token_ids: list[int]) -> None:
        """Write one row per position into rows [1 + len(draft_token_ids), words] int32,
        all bits of which are set.

        Row k is for the token after the first k drafts; rows behind a draft that may not come are left as
        they are, since it will be rejected. Nothing is remembered of the drafts. May be called on another
        thread than ``append``, never at the same time.
        """
        ...

    def valid_drafts(self, draft_token_ids: list[int]) -> list[int]:
        """The longest beginning of the drafts that may come."""
        ...

    def forced_tokens(self) -> list[int]:
        """Tokens that are bound to come next, as drafts to jump ahead with; often none."""
        ...


class Request:
    """State of one request inside the engine core.

    Known tokens are the prompt and the answer so far (``num_tokens``). Drafts are guesses behind them and are
    not known. Computed tokens have their keys and values in the cache, or will have when the steps in flight
    are done. There is no prefill and no decode: ``num_computed_tokens`` catches up with ``num_tokens`` and
    the drafts, and a new token is sampled whenever it does. (vLLM V1's unified scheduler.)

    num_output_placeholders: steps in flight that will each add a token of unknown value. num_unsure_tokens:
    drafts in flight, which count as computed: as many tokens more at most. load_failed: keys and values that
    a connector promised did not arrive, so it is not asked again.
    has_waited_for_prefix: it was set aside, which happens once, for a step that computed more of its prompt
    for another request.
    num_settled_slots: up to so many tokens, drafts among them, a running request needs no more of the KV
    cache manager. branch_point: tokens of the longest prefix whose keys and values were cached when it was
    last looked for, whether or not its states were too.

    engine_request: what was sent, unchanged. max_tokens: of the answer, at most what max_model_len leaves.
    """

    def __init__(self, engine_request: EngineRequest) -> None:
        self.engine_request = engine_request
        self.request_id = engine_request.request_id
        self.sampling_params = engine_request.sampling_params
        self.max_tokens = engine_request.max_tokens
        self.lora_digest: str | None = None
        self.images = engine_request.images

        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.stop_conditions: list[StopCondition] = []
        self.token_mask: TokenMaskSource | None = None
        self.all_token_ids: list[int] = list(engine_request.prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.draft_token_ids: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_output_placeholders = 0
        self.num_unsure_tokens = 0
        self.num_preemptions = 0
        self.num_settled_slots = 0
        self.load_failed = False
        self.has_waited_for_prefix = False
        self.block_hashes: list[bytes] = []
        self.branch_point = 0
        self.events: list[EngineEvent] = []

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the answer so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self.status)

    @property
    def skips_prefix_cache(self) -> bool:
        """Means and prompt logprobs from the start need every prompt position computed:
        cached blocks are not read."""
        pooling, params = self.engine_request.pooling, self.sampling_params
        is_mean = pooling is not None and pooling.pooling == "mean"
        return is_mean or (params.prompt_logprobs is not None and params.prompt_logprobs_start <= 1)

    @cached_property
    def edits_logits(self) -> bool:
        """Whether its logits are changed before sampling, by which the tokens before may count."""
        params = self.sampling_params
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        edits = params.min_tokens, params.logit_bias, params.allowed_token_ids, params.bad_words
        return penalties != (0.0, 0.0, 1.0) or any(edits)

    @property
    def num_reusable_tokens(self) -> int:
        """Known tokens that may come from the prefix cache:
        one must run to give logits, and so must the one before the first prompt logprobs."""
        if self.skips_prefix_cache:
            return 0
        params, longest = self.sampling_params, len(self.all_token_ids) - 1
        return longest if params.prompt_logprobs is None else min(longest, params.prompt_logprobs_start - 1)

    def append_output_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)

    def record_event(self, event: EventType) -> None:
        self.events.append(EngineEvent(event, time.monotonic()))

    def take_events(self) -> list[EngineEvent]:
        events, self.events = self.events, []
        return events
