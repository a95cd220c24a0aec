"""``--profile DIR``: a trace of the engine's steps with named ranges, for https://ui.perfetto.dev or chrome://tracing.

Ranges are put around methods of the parts that exist, when a trace is asked for; otherwise nothing is there that could
cost anything. In a step: schedule, execute (prepare, first, between, last, attention, sample), wait (for the results)
and output. With async scheduling on a CPU, execute runs in the worker's thread beside the steps of the core.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_STEPS = 300
"""A trace is complete after that many steps: it grows by about a hundred kilobytes with each."""


def recorded(name: str, function: Callable) -> Callable:
    """``function`` inside a named range of the trace."""
    from torch.profiler import record_function

    @functools.wraps(function, updated=())
    def in_range(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return in_range


def record_method(owner: Any, method: str, name: str) -> None:
    """Put every call of ``owner.method`` into a named range."""
    setattr(owner, method, recorded(name, getattr(owner, method)))


def record_runner(runner: Any) -> None:
    """Name what a worker's ModelRunner does in a step: execute, and in it prepare, each region, attention, sample."""
    decoder = runner.decoder
    record_method(runner.model, "build", "prepare")
    record_method(decoder, "_first", "first")
    decoder._between = [recorded("between", region) for region in decoder._between]
    record_method(decoder, "_last", "last")
    record_method(runner.model.attention, "attend", "attention")
    record_method(runner, "_sample", "sample")
    record_method(runner, "launch", "execute")


class TraceRecorder:
    """Records the first MAX_STEPS steps of an engine core and writes them to a file of their own in ``directory``."""

    def __init__(self, directory: str, core: Any) -> None:
        """core: an EngineCore. Raises ConfigError if the directory cannot be made."""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile is {directory!r}, which cannot be made: {error.strerror}.") from None
        self.path = Path(directory) / f"minivllm-{os.getpid()}-{time.time_ns()}.json"
        self._profiler: Any = None
        self._num_steps = 0
        record_method(core.scheduler, "schedule", "schedule")
        record_method(core._in_flight, "take", "wait")
        record_method(core.scheduler, "update_from_output", "output")
        self._step = recorded("step", core.step)
        core.step = self._recorded_step

    def _recorded_step(self) -> Any:
        if self._num_steps == 0:
            self._start()
        self._num_steps += 1
        outputs = self._step()
        if self._num_steps == MAX_STEPS:
            self.stop()
        return outputs

    def _start(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        # Left to itself, the profiler follows the thread that starts it and not the worker's.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=activities, experimental_config=everywhere)
        self._profiler.start()
        logger.info("Recording the next %d steps.", MAX_STEPS)

    def stop(self) -> None:
        """Write what was recorded, once; nothing if no step ran."""
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        profiler.export_chrome_trace(str(self.path))
        logger.warning(
            "Wrote a trace of %d steps to %s: open it at https://ui.perfetto.dev.", self._num_steps, self.path
        )
