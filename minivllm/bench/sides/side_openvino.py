"""OpenVINO GenAI's ContinuousBatchingPipeline as a side of a comparison; its own way is the pipeline's ``generate``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from minivllm.bench.sides.drive import Progress, Task


class OpenvinoEngine:
    """The pipeline, step by step, on token ids."""

    def __init__(self, pipeline: Any, facts: dict[str, Any]) -> None:
        self._pipeline, self.facts = pipeline, facts
        self._handles: dict[int, Any] = {}
        self._left: dict[int, int] = {}

    def reset(self) -> None:
        """Nothing to do: prompts are fresh, and without a prefix cache blocks of finished requests are given back."""

    def add(self, index: int, task: Task) -> None:
        self._handles[index] = self._pipeline.add_request(index, _ids(task), _config(task))
        self._left[index] = task.max_tokens

    def step(self) -> Iterable[Progress]:
        self._pipeline.step()
        now = time.perf_counter()
        for index, handle in list(self._handles.items()):
            tokens: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            self._left[index] -= len(tokens)
            if finished := self._left[index] <= 0:
                del self._handles[index], self._left[index]
            if tokens:
                yield Progress(index, tokens, [now] * len(tokens), finished)

    def counters(self) -> dict[str, float]:
        return {}

    def own_way(self, tasks: Sequence[Task]) -> None:
        self._pipeline.generate([_ids(task) for task in tasks], [_config(task) for task in tasks])


def _ids(task: Task) -> Any:
    import numpy as np
    from openvino import Tensor

    return Tensor(np.array([task.prompt], dtype=np.int64))


def _config(task: Task) -> Any:
    from openvino_genai import GenerationConfig

    config = GenerationConfig()
    config.do_sample, config.ignore_eos, config.max_new_tokens = False, True, task.max_tokens
    return config


def load(arguments: dict[str, Any]) -> OpenvinoEngine:
    """arguments: path of the exported model, vocab_size, tokens of all running requests, running, and properties of
    the device."""
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.enable_prefix_caching = arguments["running"], False
    # Blocks of a CPU hold 32 tokens; every request may leave one of them half empty.
    scheduler.num_kv_blocks = arguments["tokens"] // 32 + 2 * arguments["running"] + 1
    scheduler.max_num_batched_tokens = 2048
    properties = arguments["properties"]
    pipeline = openvino_genai.ContinuousBatchingPipeline(arguments["path"], scheduler, "CPU", properties)
    facts = {
        "vocab_size": arguments["vocab_size"],
        "weights": arguments["weights"],
        "properties": properties,
        "version": openvino_genai.__version__,
        "own_way": "ContinuousBatchingPipeline.generate",
    }
    return OpenvinoEngine(pipeline, facts)
