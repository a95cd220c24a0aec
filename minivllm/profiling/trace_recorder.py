"""``--profile DIR``: a trace of the engine's steps with named ranges,
for https://ui.perfetto.dev or chrome://tracing.

The ranges are the engine's spans. In a step: schedule, dispatch, execute (apply, prepare, first, between,
last, attention, sample, draft), wait (for the results) and output. Where costs of attention were measured,
the name of an empty range after prepare says what attention of all layers should take. With a connector,
save_kv comes after execute, and load_kv and write_kv run in separate threads. With async scheduling on a CPU,
execute runs in the worker's thread beside the steps of the core. Workers in processes of their own are
processes of the same trace, with spans of what they exchange: "exchange" within a layer, "receive" and "send"
between stages.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, MinivllmError
from minivllm.profiling.spans import listen, torch_range

logger = logging.getLogger(__name__)

MAX_STEPS = 300
"""A trace is complete after that many steps: it grows by about a hundred kilobytes with each."""


class TraceRecorder:
    """Records the first MAX_STEPS steps of an engine core and writes them to a file of their own in
    ``directory``."""

    def __init__(
        self,
        directory: str,
        core: object,
        collective: Callable[..., list[Any]] | None = None,
        ranks: Sequence[str] = (),
    ) -> None:
        """core: the subject of the spans "step" that are counted. collective: calls a method of all workers,
        if they live in other processes. ranks: what these are called. Raises ConfigError if the directory
        cannot be made."""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile is {directory!r}, which cannot be made: {error.strerror}.") from None
        self.path = Path(directory) / f"minivllm-{os.getpid()}-{time.time_ns()}.json"
        self._core = core
        self._collective = collective
        self._ranks = ranks
        self._profiler: Any = None
        self._num_steps = 0
        self._listening = ExitStack()
        self._listening.enter_context(listen(self._begin))

    def _begin(self, name: str, subject: object) -> Callable[[], None] | None:
        is_step = name == "step" and subject is self._core
        if is_step and self._profiler is None:
            self._start()
        if self._profiler is None:
            return None
        end_range = torch_range(name)
        if not is_step:
            return end_range
        self._num_steps += 1

        def end_step() -> None:
            end_range()
            if self._num_steps == MAX_STEPS:
                self.stop()

        return end_step

    def _start(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        # Left to itself, the profiler follows the thread that starts it and not the worker's.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=activities, experimental_config=everywhere)
        self._profiler.start()
        if self._collective is not None:
            self._collective("start_profile", str(self.path.parent))
        logger.info("Recording the next %d steps.", MAX_STEPS)

    def stop(self) -> None:
        """Write what was recorded, once; nothing if no step ran."""
        self._listening.close()
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        profiler.export_chrome_trace(str(self.path))
        if self._collective is not None:
            with suppress(
                MinivllmError
            ):  # of workers that have died, or whose profile another caller has stopped
                merge_traces(self.path, dict(zip(self._ranks, self._collective("stop_profile"), strict=True)))
        logger.warning(
            "Wrote a trace of %d steps to %s: open it at https://ui.perfetto.dev.", self._num_steps, self.path
        )


def merge_traces(path: Path, workers: Mapping[str, str]) -> None:
    """Add the traces of workers to that of the engine core, each as a process of its own, and remove their
    files. workers: name -> path. All are of one host, whose clock they share."""
    whole = json.loads(path.read_text())
    base = whole.get("baseTimeNanoseconds", 0)
    events = [_named(event, "engine core", 0) for event in whole["traceEvents"]]
    for place, (name, worker) in enumerate(workers.items(), 1):
        part = json.loads(Path(worker).read_text())
        later = (part.get("baseTimeNanoseconds", 0) - base) / 1e3
        for event in part["traceEvents"]:
            if isinstance(event.get("pid"), int):  # others are about the recording itself
                if "ts" in event:
                    event["ts"] += later
                events.append(_named(event, name, place))
        Path(worker).unlink()
    path.write_text(json.dumps(whole | {"traceEvents": events}))


def _named(event: dict[str, Any], name: str, place: int) -> dict[str, Any]:
    """An event of the process that is shown as ``name``, ``place`` from above."""
    if event.get("ph") == "M" and isinstance(event.get("pid"), int):
        if event["name"] == "process_name":
            return event | {"args": {"name": name}}
        if event["name"] == "process_sort_index":
            return event | {"args": {"sort_index": place}}
        if event["name"] == "process_labels":
            return event | {"args": {"labels": ""}}
    return event
