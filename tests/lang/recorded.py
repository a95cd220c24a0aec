"""For tests of programs: a scripted engine, and a count of what a real one computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError
from minivllm.lang.engines import Settings
from minivllm.processing.outputs import CompletionOutput, RequestOutput
from minivllm.tokenizer.tokenizer import Tokenizer


@contextmanager
def counted(llm: LLM) -> Iterator[Callable[[], int]]:
    """A function that tells how many tokens the engine has computed since."""
    before = llm.get_metrics().num_computed_tokens
    yield lambda: llm.get_metrics().num_computed_tokens - before


class ScriptedEngine:
    """Answers each request with what a function makes of its prompt:
    a text, or token ids and a reason to stop."""

    def __init__(
        self, tokenizer: Tokenizer, answer: Callable[[list[int]], Any] = lambda prompt: "an answer"
    ) -> None:
        self.frontend: Any = SimpleNamespace(
            tokenizer=tokenizer,
            images=None,
            get_default_sampling_params=SamplingParams,
            config=SimpleNamespace(scheduler=SimpleNamespace(max_model_len=1000)),
        )
        self._answer = answer
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []

    async def complete(
        self, token_ids: list[int], params: SamplingParams, settings: Settings, pictures: Any = ()
    ) -> RequestOutput:
        self.prompts.append(list(token_ids))
        self.params.append(params)
        answer = self._answer(token_ids)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            answer = (
                self.frontend.tokenizer.encode(answer, add_special_tokens=False),
                answer,
                "length",
                None,
            )
        sampled, text, finish_reason, stop_reason = answer
        completion = CompletionOutput(0, text, sampled, finish_reason=finish_reason, stop_reason=stop_reason)
        return RequestOutput("r", None, token_ids, [completion], True)


def refusal(error: Exception | None) -> str:
    """The sentence of a RequestError."""
    assert isinstance(error, RequestError), error
    return str(error)
