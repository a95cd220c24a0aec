"""Outputs for users: completions, log-probabilities and timings of a request, in vLLM's shape."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from minivllm.messages import EngineEvent, EventType


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position.

    rank: 1 is the likeliest token. decoded_token: its text; None for a model without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


PositionLogprobMap = dict[int, Logprob]
"""Token id -> Logprob; the token that stands at the position comes first, then the likeliest ones,
or those of logprob_token_ids."""


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a prompt; in a delta stream text, token_ids and logprobs hold only what is new.

    token_ids keeps the token that ended the completion; text leaves it out (unless
    include_stop_str_in_output). cumulative_logprob: sum over the completion so far; None unless logprobs were
    asked for.
    finish_reason: "stop", "length", "abort", "error", or None while it runs.
    stop_reason: the stop string, stop expression or stop token id that ended it;
    None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobMap] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, and how fast. All times are time.monotonic() [seconds].

    arrival_time: the frontend received the request. queued_time, first_scheduled_time: from the engine core.
    first_token_time, last_token_time, finished_time: the frontend received the token / the end.
    The object belongs to a running request and is updated in place until the request has finished. With n > 1
    there is one for all completions: first token of any, last token of any, tokens of all.
    """

    arrival_time: float
    num_prompt_tokens: int
    num_sequences: int = 1
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    def record_events(self, events: Iterable[EngineEvent]) -> None:
        """Take over what the engine core reports; of repeated events the first one counts."""
        for event in events:
            if event.type is EventType.QUEUED and self.queued_time is None:
                self.queued_time = event.timestamp
            elif event.type is EventType.SCHEDULED and self.first_scheduled_time is None:
                self.first_scheduled_time = event.timestamp
            elif event.type is EventType.PREEMPTED:
                self.num_preemptions += 1

    def record_tokens(self, num_tokens: int, now: float) -> None:
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        self.num_generation_tokens += num_tokens

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival [seconds]."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def queue_time(self) -> float | None:
        """Arrival until the scheduler first gave the request tokens [seconds]."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        """First scheduled until the first token [seconds]."""
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        """First token until the last one [seconds]."""
        return _between(self.first_token_time, self.last_token_time)

    @property
    def e2e_latency(self) -> float | None:
        """Arrival until the end [seconds]."""
        return _between(self.arrival_time, self.finished_time)

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Prompt tokens that had to be computed, per second of prefill."""
        return _rate(self.num_prompt_tokens - self.num_cached_tokens, self.prefill_time)

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after each sequence's first, per second of decode; None below two tokens."""
        return _rate(self.num_generation_tokens - self.num_sequences, self.decode_time)

    @property
    def tpot(self) -> float | None:
        """Time per output token of one sequence, the first token left out [seconds]."""
        rate = self.decode_tokens_per_second
        return None if rate is None else self.num_sequences / rate


@dataclass(slots=True)
class RequestOutput:
    """State of a request after a step, or after its end.

    prompt: the text, if the prompt was given as text or messages. prompt_logprobs: one entry per prompt
    token, None for the first one, which nothing precedes, and for those before prompt_logprobs_start; in a
    delta stream it comes once. outputs: in order of their index; a delta stream lists only completions with
    something new. num_cached_tokens: prompt tokens that came from the prefix cache. error: why the engine
    gave up on the request (finish_reason is then "error"). embedding: the vector [hidden] of a request that
    was prepared with PoolingParams, which has no tokens.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobMap | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(
        default_factory=lambda: RequestMetrics(arrival_time=0.0, num_prompt_tokens=0)
    )
    error: str | None = None
    embedding: list[float] | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """One prompt as a vector [hidden]. num_cached_tokens: prompt tokens that came from the prefix cache."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _rate(count: int, seconds: float | None) -> float | None:
    return None if seconds is None or seconds <= 0 or count <= 0 else count / seconds
