"""transformers as a side of a comparison: ``generate`` runs everybody who is there as one batch to its end, and
``generate_batch`` batches continuously, in a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
)

from minivllm.bench.sides.drive import Progress, Task
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve
from minivllm.errors import ModelError

PAGE_SIZE = 64
SECONDS_TO_WAIT = 0.01
"""How long a step waits for a result before it looks whether a further request is due."""


class TokenClock(StoppingCriteria):
    """Writes down when each step of ``generate`` was over; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class GenerateEngine:
    """Static batches of at most ``running`` requests, padded on the left; whoever comes meanwhile waits."""

    def __init__(self, model: Any, facts: dict[str, Any], running: int) -> None:
        self._model, self.facts, self._running = model, facts, running
        self._waiting: dict[int, Task] = {}

    def reset(self) -> None:
        self._waiting = {}

    def add(self, index: int, task: Task) -> None:
        self._waiting[index] = task

    def step(self) -> Iterable[Progress]:
        waiting = list(self._waiting.items())
        batch, self._waiting = dict(waiting[: self._running]), dict(waiting[self._running :])
        clock = TokenClock()
        rows = self._generate(list(batch.values()), stopping_criteria=StoppingCriteriaList([clock]))
        for row, (index, task) in zip(rows, batch.items()):
            yield Progress(index, row[: task.max_tokens], clock.times[: task.max_tokens], finished=True)

    def counters(self) -> dict[str, float]:
        return {}

    def own_way(self, tasks: Sequence[Task]) -> None:
        for first in range(0, len(tasks), self._running):
            self._generate(tasks[first : first + self._running])

    def _generate(self, batch: Sequence[Task], **others: Any) -> list[list[int]]:
        longest = max(len(task.prompt) for task in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, task in enumerate(batch):
            ids[place, longest - len(task.prompt) :] = torch.tensor(task.prompt)
            mask[place, longest - len(task.prompt) :] = 1
        with torch.inference_mode():
            out = self._model.generate(
                ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=max(task.max_tokens for task in batch),
                do_sample=False,
                pad_token_id=0,
                **others,
            )
        rows: list[list[int]] = out[:, longest:].tolist()
        return rows


class ContinuousBatchingEngine:
    """A ContinuousBatchingManager; times are those that it records itself."""

    def __init__(self, model: Any, facts: dict[str, Any], num_blocks: int, max_batch_tokens: int) -> None:
        self.facts = facts | {"own_way": "the loop of generate_batch"}
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

    def own_way(self, tasks: Sequence[Task]) -> None:
        """For requests of equal output lengths."""
        self._manager.add_requests(inputs=[list(task.prompt) for task in tasks], max_new_tokens=tasks[0].max_tokens)
        unfinished = len(tasks)
        while unfinished:
            output = self._manager.get_result(timeout=1)
            if output is None and not self._manager.is_running():
                raise ModelError("transformers' continuous batching stopped; its reason is above.")
            unfinished -= output is not None and output.is_finished()


def load_model(arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The same weights as our engine's, in transformers. arguments: model and dtype. Raises ConfigError, ModelError."""
    config, decoder = resolve(EngineArgs(model=arguments["model"], dtype=arguments["dtype"]))
    directory, _, file = config.model_path.rpartition("/")
    source = {"gguf_file": file} if file.endswith(".gguf") else {}
    model = AutoModelForCausalLM.from_pretrained(
        directory if source else config.model_path, dtype=getattr(torch, config.dtype), **source
    )
    model = model.eval()
    torch.nn.Module.to(model, config.device)
    model.generation_config.eos_token_id = None
    facts = {"dtype": config.dtype, "device": config.device, "vocab_size": decoder.vocab_size}
    return model, facts | {"version": transformers.__version__, "own_way": "model.generate"}


def load(arguments: dict[str, Any]) -> GenerateEngine:
    """arguments: model, dtype, and running, requests at a time. Raises ConfigError or ModelError."""
    return GenerateEngine(*load_model(arguments), arguments["running"])


def load_continuous(arguments: dict[str, Any]) -> ContinuousBatchingEngine:
    """arguments: model, dtype, and longest, running: tokens of the longest request, requests at a time."""
    longest, running = arguments["longest"], arguments["running"]
    model, facts = load_model(arguments)
    return ContinuousBatchingEngine(
        model, facts, num_blocks=running * -(-longest // PAGE_SIZE) + 8, max_batch_tokens=max(2048, running)
    )
