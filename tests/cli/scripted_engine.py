"""An engine without a model, for tests of the command line: it answers from a script, one character per step.

Run as a program it is the ``minivllm`` command on that engine,
so that a test can drive it through a terminal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from minivllm.config import EngineArgs, EngineConfig, SchedulerConfig
from minivllm.errors import ModelError, RequestError
from minivllm.messages import SchedulerStats
from minivllm.processing.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.sampling_params import OutputKind, SamplingParams
from minivllm.simulation.executor import simulated_config

PAGE = 8


class CharacterTokenizer:
    """One token per character; the chat template writes ``<role>text`` and a newline per message."""

    def __init__(self, has_chat_template: bool = True, can_think: bool = False) -> None:
        self.has_chat_template = has_chat_template
        self.chat_template = "{{ enable_thinking }}" if can_think else "a template"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = True, **names: bool
    ) -> list[int]:
        text = "".join(f"<{message['role']}>{message['content']}\n" for message in messages)
        thoughts = "<think>" if names.get("enable_thinking") else ""
        return self.encode(text + ("<assistant>" + thoughts if add_generation_prompt else ""))


def echo(prompt: str) -> str:
    """The last line the user wrote, in capitals;
    ``forever`` never ends, ``escape`` answers with control characters."""
    question = prompt.removesuffix("\n<assistant>").rpartition("<user>")[2]
    if "forever" in question:
        return "on and " * 10_000
    if "escape" in question:
        return "\x1b[31mred\x1b[0m\x07 \x1b]0;title\x07plain\x9b2J"
    return question.upper()


@dataclass
class _Running:
    prompt_token_ids: list[int]
    answer: str
    params: SamplingParams
    num_cached_tokens: int
    metrics: RequestMetrics
    num_sent: int = 0


@dataclass
class _Client:
    config: EngineConfig


@dataclass
class ScriptedEngine:
    """The part of LLMEngine that the command line uses. aborted: ids of the requests that were aborted."""

    max_model_len: int = 512
    answer: Callable[[str], str] = echo
    has_chat_template: bool = True
    can_think: bool = False
    seconds_per_step: float = 0.0
    num_steps: int = 0
    closed: bool = False
    aborted: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    default_params: SamplingParams = field(default_factory=SamplingParams)
    _running: dict[str, _Running] = field(default_factory=dict)
    _seen: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = CharacterTokenizer(self.has_chat_template, self.can_think)
        scheduler = SchedulerConfig(max_model_len=self.max_model_len)
        self.client = _Client(simulated_config(scheduler, model="scripted", model_path="/nonexistent"))

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, priority: int = 0) -> None:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        if len(ids) >= self.max_model_len:
            raise RequestError(f"The prompt has {len(ids)} tokens, but at most {self.max_model_len - 1} fit.")
        assert params.output_kind is OutputKind.DELTA
        cached = max((_common_prefix(ids, other) for other in self._seen), default=0) // PAGE * PAGE
        self._seen.append(list(ids))
        text = self.tokenizer.decode(ids)
        self.prompts.append(text)
        self.params.append(params)
        metrics = RequestMetrics(
            arrival_time=time.monotonic(), num_prompt_tokens=len(ids), num_cached_tokens=cached
        )
        metrics.first_scheduled_time = metrics.arrival_time
        self._running[request_id] = _Running(
            ids, self.answer(text), params, min(cached, len(ids) - 1), metrics
        )

    def get_default_sampling_params(self) -> SamplingParams:
        return self.default_params

    def stats(self) -> SchedulerStats:
        return SchedulerStats(num_steps=self.num_steps, prefix_cache_queried_tokens=100)

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        self.num_steps += 1
        time.sleep(self.seconds_per_step)
        return [self._advance(request_id) for request_id in list(self._running)]

    def _advance(self, request_id: str) -> RequestOutput:
        request = self._running[request_id]
        text = request.answer[request.num_sent : request.num_sent + 1]
        request.num_sent += 1
        reason = None
        if request.num_sent > len(request.answer):
            reason = "stop"
        elif request.num_sent == request.params.max_tokens:
            reason = "length"
        request.metrics.record_tokens(1, time.monotonic())
        completion = CompletionOutput(
            index=0, text=text, token_ids=self.tokenizer.encode(text) or [0], finish_reason=reason
        )
        if reason is not None:
            del self._running[request_id]
            self._seen.append(request.prompt_token_ids + self.tokenizer.encode(request.answer))
        return RequestOutput(
            request_id=request_id,
            prompt=None,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=reason is not None,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
        )

    def abort_request(self, request_ids: list[str]) -> list[RequestOutput]:
        for request_id in request_ids:
            if self._running.pop(request_id, None) is not None:
                self.aborted.append(request_id)
        return []

    def close(self) -> None:
        self.closed = True


def _common_prefix(first: list[int], second: list[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def create_scripted_engine(args: EngineArgs) -> ScriptedEngine:
    """Stands in for the command line's create_engine; a model named ``missing`` cannot be found."""
    if args.model == "missing":
        raise ModelError("There is no model 'missing'; give a short name, a directory or a .gguf file.")
    return ScriptedEngine(
        max_model_len=args.max_model_len or 512,
        has_chat_template=args.model != "base",
        seconds_per_step=float(os.environ.get("SCRIPTED_SECONDS_PER_STEP", "0")),
    )


if __name__ == "__main__":
    from minivllm.cli.engine import engine_start
    from minivllm.cli.main import main

    engine_start.create_engine = create_scripted_engine  # type: ignore[assignment]
    engine_start.fetch_model = lambda args: None
    main()
