"""The engine of a command: its start, its log lines meanwhile, and one request followed to its end."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from minivllm.cli.terminal.terminal_text import dim, format_duration, format_rate, printable, styles
from minivllm.config import EngineArgs
from minivllm.errors import EngineDeadError, MinivllmError, ModelError, RequestError
from minivllm.messages import FinishReason

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.processing.outputs import RequestMetrics, RequestOutput
    from minivllm.sampling_params import SamplingParams


class ProgressHandler(logging.Handler):
    """Shows what the engine logs: the latest line as a status that disappears, warnings (``verbose``:
    all) to stay.

    So do records with ``extra={"is_notice": True}``:
    what a person should know, but is nothing to worry about.
    """

    def __init__(self, verbose: bool) -> None:
        super().__init__(logging.INFO)
        self._verbose = verbose
        self._status: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = printable(record.getMessage())
            if record.levelno >= logging.WARNING or self._verbose or getattr(record, "is_notice", False):
                self.note(message)
            elif self._status is not None:
                self._show(message)
        except Exception:
            self.handleError(record)

    def note(self, message: str) -> None:
        """Tell the user something that stays on the screen."""
        print(dim(printable(message), sys.stderr), file=sys.stderr, flush=True)

    @contextmanager
    def status(self, message: str) -> Iterator[None]:
        """Show ``message``, then the latest log line, until the block ends;
        nothing where stderr is no terminal."""
        if self._verbose or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console

        # rich redirects what is printed to stderr meanwhile, so warnings appear above the status.
        console = Console(stderr=True, highlight=False)
        self._status = console.status("", spinner="dots")
        self._show(message)
        try:
            with self._status:
                yield
        finally:
            self._status = None

    def _show(self, message: str) -> None:
        from rich.text import Text

        self._status.update(
            Text(message, style="dim" if styles(sys.stderr) else "", overflow="ellipsis", no_wrap=True)
        )


@contextmanager
def engine_log(verbose: bool) -> Iterator[ProgressHandler]:
    """Attach a ProgressHandler to the package's logger for the length of the block."""
    package = logging.getLogger("minivllm")
    handler = ProgressHandler(verbose)
    level, propagate = package.level, package.propagate
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False
    try:
        yield handler
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagate


def create_engine(args: EngineArgs) -> LLMEngine:
    """The in-process engine. torch is imported here, not earlier: help and usage errors stay quick."""
    from minivllm.frontend.llm_engine import LLMEngine

    return LLMEngine.from_args(args)


def fetch_model(args: EngineArgs) -> None:
    """Fetch the model if it is not there yet:
    a download draws its own progress bar, before the engine's status."""
    from minivllm.hub.fetch import resolve_model

    resolve_model(args.model, args.revision, weights=args.load_format != "dummy")


class EngineHost:
    """An engine whose model can be replaced. As a context it starts the first one and closes the last one."""

    def __init__(
        self, args: EngineArgs, log: ProgressHandler, params: Callable[[LLMEngine], SamplingParams]
    ) -> None:
        """params: the sampling settings to begin with, given an engine."""
        self._args = args
        self._log = log
        self._params = params
        self._engine: LLMEngine | None = None

    def __enter__(self) -> EngineHost:
        fetch_model(self._args)
        self._start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    @property
    def engine(self) -> LLMEngine:
        """The running engine. Raises EngineDeadError if there is none."""
        if self._engine is None:
            raise EngineDeadError("No model is loaded: start the chat again.")
        return self._engine

    def params(self) -> SamplingParams:
        return self._params(self.engine)

    def switch(self, model: str) -> LLMEngine:
        """Start ``model`` with the same options;
        what belongs to one model alone (tokenizer, revision, hf_overrides) is left out.

        Whatever can be told of a wrong name is told while the old engine runs. Then it has to go, because two
        models may not fit beside each other; if the new one fails, the old one is loaded again. Raises
        MinivllmError.
        """
        before, after = (
            self._args,
            replace(self._args, model=model, tokenizer=None, revision=None, hf_overrides=None),
        )
        fetch_model(after)
        self._stop()
        self._args = after
        try:
            self._start()
        except BaseException as error:
            self._args = before
            self._log.note(f"{model} could not be started; loading {before.model} again.")
            self._start()
            if isinstance(error, MinivllmError | KeyboardInterrupt):
                raise
            raise ModelError(f"{model} could not be started: {error}") from error
        return self.engine

    def _start(self) -> None:
        with self._log.status(f"Loading {self._args.model}"):
            self._engine = create_engine(self._args)

    def _stop(self) -> None:
        if self._engine is not None:
            # What is still being compiled in the background is finished first, for the next start.
            with self._log.status(f"Closing {self._args.model}"):
                self._engine.close()
            self._engine = None
            gc.collect()


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
    """The output of one request so far; token_ids includes the token that ended it, text does not.

    bandwidth_share: part of the memory bandwidth that decoding used; None if it is not known.
    failure: sentence that says why it ended early; empty if it did not, or the user stopped it.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    metrics: RequestMetrics | None = None
    bandwidth_share: float | None = None
    failure: str = ""

    def add(self, output: RequestOutput) -> str:
        """Take in one output of a DELTA stream and return its text.
        Raises RequestError if the engine gave up on it."""
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

    def fail(self, error: RequestError) -> None:
        """Something stopped it. Raises ``error`` if nothing was said yet,
        so that there is nothing to keep."""
        if not self.text:
            raise error
        self.interrupt()
        self.failure = str(error)

    @property
    def interrupted(self) -> bool:
        return self.finish_reason == FinishReason.ABORT

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_context_tokens(self) -> int:
        """Prompt and answer."""
        return self.num_prompt_tokens + self.num_output_tokens

    def record(self) -> dict[str, Any]:
        """As plain values for JSON; times in seconds, rates in tokens per second,
        null where there is no value."""
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "metrics": {name: getattr(self.metrics, name, None) for name in _METRICS},
            "bandwidth_share": self.bandwidth_share,
            **({"error": self.failure} if self.failure else {}),
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
