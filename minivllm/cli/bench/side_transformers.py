"""transformers' ``generate`` as a side of a comparison: everybody who is there runs as one batch, to its end."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from minivllm.cli.bench.drive import Progress, Task
from minivllm.config import EngineArgs
from minivllm.engine.resolve import resolve


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
        longest = max(len(task.prompt) for task in batch.values())
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for place, task in enumerate(batch.values()):
            ids[place, longest - len(task.prompt) :] = torch.tensor(task.prompt)
            mask[place, longest - len(task.prompt) :] = 1
        clock = TokenClock()
        with torch.inference_mode():
            out = self._model.generate(
                ids.to(self._model.device),
                attention_mask=mask.to(self._model.device),
                max_new_tokens=max(task.max_tokens for task in batch.values()),
                do_sample=False,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        rows: list[list[int]] = out[:, longest:].tolist()
        for row, (index, task) in zip(rows, batch.items()):
            yield Progress(index, row[: task.max_tokens], clock.times[: task.max_tokens], finished=True)

    def counters(self) -> dict[str, float]:
        return {}


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
    return model, {"dtype": config.dtype, "device": config.device, "vocab_size": decoder.vocab_size}


def load(arguments: dict[str, Any]) -> GenerateEngine:
    """arguments: model, dtype, and running, requests at a time. Raises ConfigError or ModelError."""
    return GenerateEngine(*load_model(arguments), arguments["running"])
