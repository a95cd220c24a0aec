"""vLLM as a side of a comparison, through its step-by-step LLMEngine."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind

from minivllm.cli.bench.drive import Progress, Task


class VllmEngine:
    """vllm.LLMEngine on token ids."""

    def __init__(self, engine: Any, vocab_size: int) -> None:
        self._engine = engine
        self.facts: dict[str, Any] = {"vocab_size": vocab_size}

    def reset(self) -> None:
        self._engine.reset_prefix_cache()

    def add(self, index: int, task: Task) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=task.max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._engine.add_request(str(index), {"prompt_token_ids": task.prompt}, params)

    def step(self) -> Iterable[Progress]:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens = [token for completion in output.outputs for token in completion.token_ids]
            yield Progress(int(output.request_id), tokens, [now] * len(tokens), output.finished)

    def counters(self) -> dict[str, float]:
        return {}


def load(arguments: dict[str, Any]) -> VllmEngine:
    """arguments: those of vllm.EngineArgs."""
    engine = LLMEngine.from_engine_args(EngineArgs(disable_log_stats=True, **arguments))
    return VllmEngine(engine, engine.model_config.get_vocab_size())
