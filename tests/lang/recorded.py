"""Engines for tests of programs: one that records what a program asks for, and one that is scripted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError
from minivllm.lang.engines import Settings, SteppedEngine
from minivllm.processing.outputs import CompletionOutput, RequestOutput
from minivllm.tokenizer.tokenizer import Tokenizer

Asked = tuple[list[int], SamplingParams, list[int]]
"""Token ids of the prompt, parameters, sampled token ids."""


class RecordedEngine(SteppedEngine):
    """Keeps all requests, in the order in which they finish."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self.asked: list[Asked] = []

    async def complete(self, token_ids: list[int], params: SamplingParams, settings: Settings) -> RequestOutput:
        output = await super().complete(token_ids, params, settings)
        self.asked.append((list(token_ids), params, list(output.outputs[0].token_ids)))
        return output


@contextmanager
def counted(llm: LLM) -> Iterator[Callable[[], int]]:
    """A function that tells how many tokens the engine has computed since."""
    before = llm.get_metrics().num_computed_tokens
    yield lambda: llm.get_metrics().num_computed_tokens - before


def tree_size(asked: Sequence[Asked]) -> int:
    """Tokens of the tree of all texts: every beginning counts once. The last sampled token is never computed."""
    nodes = set[tuple[int, int]]()
    ids: dict[tuple[int, int], int] = {}
    for prompt, _, sampled in asked:
        node = 0
        for token in [*prompt, *sampled[:-1]]:
            node = ids.setdefault((node, token), len(ids) + 1)
            nodes.add((node, token))
    return len(nodes)


class ScriptedEngine:
    """Answers each request with what a function makes of its prompt: a text, or token ids and a reason to stop."""

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[list[int]], Any] = lambda prompt: "an answer") -> None:
        self.frontend: Any = SimpleNamespace(
            tokenizer=tokenizer,
            get_default_sampling_params=SamplingParams,
            config=SimpleNamespace(scheduler=SimpleNamespace(max_model_len=1000)),
        )
        self._answer = answer
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []

    async def complete(self, token_ids: list[int], params: SamplingParams, settings: Settings) -> RequestOutput:
        self.prompts.append(list(token_ids))
        self.params.append(params)
        answer = self._answer(token_ids)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            answer = (self.frontend.tokenizer.encode(answer, add_special_tokens=False), answer, "length", None)
        sampled, text, finish_reason, stop_reason = answer
        completion = CompletionOutput(0, text, sampled, finish_reason=finish_reason, stop_reason=stop_reason)
        return RequestOutput("r", None, token_ids, [completion], True)


def refusal(error: Exception | None) -> str:
    """The sentence of a RequestError."""
    assert isinstance(error, RequestError), error
    return str(error)
