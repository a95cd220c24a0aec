"""One request followed from submission to its end: its text, its tokens, its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.cli.terminal.terminal_text import format_duration, format_rate
from minivllm.errors import RequestError
from minivllm.messages import FinishReason

if TYPE_CHECKING:
    from minivllm.processing.outputs import RequestMetrics, RequestOutput

_METRICS = (
    "ttft",
    "queue_time",
    "prefill_time",
    "decode_time",
    "e2e_latency",
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
)


@dataclass(kw_only=True)
class Generation:
    """What has arrived of one request so far; token_ids includes the token that ended it, text does not.

    bandwidth_share: part of the memory bandwidth that decoding used; None if it is not known.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    bandwidth_share: float | None = None

    def add(self, output: RequestOutput) -> str:
        """Take in one output of a DELTA stream and return its text. Raises RequestError if the engine gave up on it."""
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        self.metrics = output.metrics
        new_text = ""
        for completion in output.outputs:
            new_text += completion.text
            self.token_ids.extend(completion.token_ids)
            if completion.finish_reason is not None:
                self.finish_reason = str(completion.finish_reason)
                self.stop_reason = completion.stop_reason
        self.text += new_text
        if output.error is not None:
            raise RequestError(output.error)
        return new_text

    def interrupt(self) -> None:
        """The user stopped it."""
        self.finish_reason = str(FinishReason.ABORT)

    @property
    def interrupted(self) -> bool:
        return self.finish_reason == FinishReason.ABORT

    @property
    def num_context_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + len(self.token_ids)

    def record(self) -> dict[str, Any]:
        """As plain values for JSON; times in seconds, rates in tokens per second, null where there is no value."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": len(self.token_ids),
            "metrics": {name: getattr(self.metrics, name, None) for name in _METRICS},
            "bandwidth_share": self.bandwidth_share,
        }

    def statistics_line(self, max_model_len: int) -> str:
        """The line under an answer; ``max_model_len`` is the size of the context [tokens]."""
        parts = []
        if self.metrics is not None:
            ttft, prefill = self.metrics.ttft, self.metrics.prefill_tokens_per_second
            decode = self.metrics.decode_tokens_per_second
            if ttft is not None:
                parts.append(f"TTFT {format_duration(ttft)}")
            if prefill is not None:
                parts.append(f"prefill {format_rate(prefill)} ({self.num_cached_tokens:,} cached)")
            elif self.num_cached_tokens:  # a server tells how many, but not how fast it computed the others
                parts.append(f"{self.num_cached_tokens:,} cached")
            if decode is not None:
                parts.append(f"decode {format_rate(decode)}")
                if self.bandwidth_share is not None:
                    parts.append(f"{100 * self.bandwidth_share:.0f} % of bandwidth bound")
        parts.append(f"ctx {self.num_context_tokens:,}/{max_model_len:,}")
        parts.append(f"stop: {self._stop_description()}")
        return " · ".join(parts)

    def _stop_description(self) -> str:
        if self.interrupted:
            return "interrupted"
        if self.finish_reason != FinishReason.STOP:
            return self.finish_reason or "unknown"
        if self.stop_reason is None:
            return "eos"
        return f"token {self.stop_reason}" if isinstance(self.stop_reason, int) else repr(self.stop_reason)
