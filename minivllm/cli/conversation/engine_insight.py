"""A chat's view of an engine in the same process:
the steps of an answer, and the bytes each of them must read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from minivllm.profiling.spans import listen

if TYPE_CHECKING:
    from minivllm.cli.engine.engine_start import Generation
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.messages import SchedulerOutput
    from minivllm.simulation.steps import TraceStep

CPU_PROBE_BYTES, GPU_PROBE_BYTES = 128 * 2**20, 2**30
PROBE_CALLS = 3
REQUEST_NAME = "R1"


class EngineInsight:
    """Follows the scheduler of an engine whose core is in this process; of another one it sees nothing."""

    def __init__(self, engine: LLMEngine) -> None:
        self._core: Any = getattr(engine.client, "core", None)
        self._weight_bytes: int | None = None
        self._recorded: list[SchedulerOutput] = []

    @property
    def is_possible(self) -> bool:
        return self._core is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A new answer is generated meanwhile: forget the steps of the last one, and note its own."""
        self._recorded = []
        with listen(self._note, ("dispatch",)):
            yield

    def _note(self, name: str, subject: object) -> None:
        step: SchedulerOutput = cast("SchedulerOutput", subject)
        if step.num_scheduled_tokens:
            self._recorded.append(step)

    def steps(self, generation: Generation) -> list[TraceStep]:
        """The scheduler's steps for the last answer, the only request of its time, as R1."""
        from minivllm.simulation.steps import TraceStep

        left = generation.num_prompt_tokens - generation.num_cached_tokens
        known, steps = left, []
        for index, recorded in enumerate(self._recorded):
            tokens = recorded.total_num_scheduled_tokens
            is_decoding = left <= 0
            preempted = [REQUEST_NAME] if recorded.preempted_request_ids else []
            if preempted:
                left = known
            left -= tokens
            known += 1 if left <= 0 else 0
            steps.append(
                TraceStep(
                    step=index,
                    num_scheduled_tokens={REQUEST_NAME: tokens},
                    decoding=frozenset([REQUEST_NAME] if is_decoding and not preempted else []),
                    preempted=preempted,
                    finished=[REQUEST_NAME] if index == len(self._recorded) - 1 else [],
                )
            )
        return steps

    def bandwidth_share(self, generation: Generation) -> float | None:
        """Part of the memory bandwidth that decoding used: what its steps had to read, by the time they took.

        None where it cannot be known: another process, several workers, an answer of one token.
        """
        runner = getattr(getattr(getattr(self._core, "executor", None), "worker", None), "runner", None)
        seconds = None if generation.metrics is None else generation.metrics.decode_time
        num_steps = sum(bool(step.decoding) for step in self.steps(generation)) if runner is not None else 0
        if runner is None or not seconds or num_steps == 0:
            return None
        from minivllm.simulation import bounds

        model = runner.model
        if self._weight_bytes is None:
            self._weight_bytes = bounds.weight_bytes(model)
        context = generation.num_prompt_tokens + len(generation.token_ids) / 2
        kv_bytes = bounds.kv_tokens_read(model.config, context) * bounds.kv_bytes_per_token(model)
        bandwidth = _bandwidth(self._core.config.device)
        return num_steps * (self._weight_bytes + kv_bytes) / bandwidth / seconds


@functools.cache
def _bandwidth(device: str) -> float:
    """Of reading memory [bytes/s], measured once per process in about a tenth of a second,
    after the first answer."""
    import torch

    from minivllm.simulation.bounds import read_bandwidth

    with torch.inference_mode():
        on_gpu = torch.device(device).type == "cuda"
        return read_bandwidth(
            torch.device(device), GPU_PROBE_BYTES if on_gpu else CPU_PROBE_BYTES, PROBE_CALLS
        )
