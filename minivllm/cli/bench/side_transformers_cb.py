"""transformers' continuous batching (``generate_batch``) as a side of a comparison. It runs in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig

from minivllm.cli.bench.drive import Progress, Task
from minivllm.cli.bench.side_transformers import load_model
from minivllm.errors import ModelError

PAGE_SIZE = 64
SECONDS_TO_WAIT = 0.01
"""How long a step waits for a result before it looks whether a further request is due."""


class ContinuousBatchingEngine:
    """A ContinuousBatchingManager; times are those that it records itself."""

    def __init__(self, model: Any, facts: dict[str, Any], num_blocks: int, max_batch_tokens: int) -> None:
        self.facts = facts
        self._manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens
            ),
        )
        self._manager.start()

    def reset(self) -> None:
        """Nothing to do: prompts are fresh, and blocks of finished requests are given back."""

    def add(self, index: int, task: Task) -> None:
        added = self._manager.add_request(
            list(task.prompt),
            request_id=str(index),
            max_new_tokens=task.max_tokens,
            record_timestamps=True,
            eos_token_id=-1,
        )
        if added is None:
            raise ModelError("transformers' continuous batching no longer takes requests.")

    def step(self) -> Iterable[Progress]:
        output = self._manager.get_result(timeout=SECONDS_TO_WAIT)
        if output is None:
            if not self._manager.is_running():
                raise ModelError("transformers' continuous batching stopped; its reason is above.")
            return
        tokens = list(output.generated_tokens)
        error = None if output.error is None else f"TransformersError: {output.error}"
        yield Progress(int(output.request_id), tokens, list(output.timestamps or ()), output.is_finished(), error)

    def counters(self) -> dict[str, float]:
        return {}


def load(arguments: dict[str, Any]) -> ContinuousBatchingEngine:
    """arguments: model, dtype, and longest, running: tokens of the longest request, requests at a time."""
    longest, running = arguments["longest"], arguments["running"]
    model, facts = load_model(arguments)
    return ContinuousBatchingEngine(
        model, facts, num_blocks=running * -(-longest // PAGE_SIZE) + 8, max_batch_tokens=max(2048, running)
    )
