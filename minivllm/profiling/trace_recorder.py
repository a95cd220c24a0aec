"""``--profile DIR``: a trace of the engine's steps with named ranges, for https://ui.perfetto.dev or chrome://tracing.

The ranges are the engine's spans. In a step: schedule, dispatch, execute (apply, prepare, first, between, last,
attention, sample, draft), wait (for the results) and output; with a connector, save_kv behind execute, and load_kv and
write_kv in threads of their own. With async scheduling on a CPU, execute runs in the
worker's thread beside the steps of the core. Workers in processes of their own write a file each.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from minivllm.errors import ConfigError, MinivllmError
from minivllm.profiling.spans import listen, torch_range

logger = logging.getLogger(__name__)

MAX_STEPS = 300
"""A trace is complete after that many steps: it grows by about a hundred kilobytes with each."""


class TraceRecorder:
    """Records the first MAX_STEPS steps of an engine core and writes them to a file of their own in ``directory``."""

    def __init__(self, directory: str, core: object, collective: Callable[..., list[Any]] | None = None) -> None:
        """core: the subject of the spans "step" that are counted. collective: calls a method of all workers, if they
        live in other processes. Raises ConfigError if the directory cannot be made."""
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile is {directory!r}, which cannot be made: {error.strerror}.") from None
        self.path = Path(directory) / f"minivllm-{os.getpid()}-{time.time_ns()}.json"
        self._core, self._collective = core, collective
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
        paths = [str(self.path)]
        if self._collective is not None:
            with suppress(MinivllmError):  # of workers that have died, or whose profile somebody else has stopped
                paths += self._collective("stop_profile")
        logger.warning(
            "Wrote a trace of %d steps to %s: open it at https://ui.perfetto.dev.", self._num_steps, ", ".join(paths)
        )
