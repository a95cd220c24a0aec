"""Compilation in the background:
the engine answers uncompiled, and all workers change over after the same step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Time between two looks at the builds: each look waits for the steps in flight."""
REPORT_SECONDS = 20.0
"""Time between two lines of progress in the log."""


class BackgroundBuilds:
    """Decides for all workers when they use compiled code.

    How long each worker compiles depends on the clock. Compiled code rounds differently from uncompiled code,
    and pipeline stages warm up together, so the change happens in all of them at once: at the start if every
    package is on disk.

    collective: see Executor.
    """

    def __init__(self, collective: Callable[..., list[Any]]) -> None:
        self._collective = collective
        self._begun = self._next_poll = time.monotonic()
        self._next_report = self._begun + REPORT_SECONDS
        self._num_built_before, num_regions, _ = self._progress()
        self.are_done = self._num_built_before == num_regions or not all(collective("serve_uncompiled"))
        if self.are_done:
            collective("change_over")
            return
        # A warning reaches standard error in a program that has not set up logging.
        logger.warning(
            "Compiling the model for this machine in the background, %d of %d regions: some minutes, once. "
            "Answers come from slower, uncompiled code until then.",
            num_regions - self._num_built_before,
            num_regions,
        )

    def poll(self) -> None:
        """Called between two steps: change over if all workers can, and report progress now and then."""
        now = time.monotonic()
        if self.are_done or now < self._next_poll:
            return
        self._next_poll = now + POLL_SECONDS
        num_built, num_regions, is_building = self._progress()
        if num_built == num_regions:
            self._collective("change_over")
            self.are_done = True
            logger.info("The model is compiled, after %.0f s.", now - self._begun, extra={"is_notice": True})
        elif not is_building:
            self.are_done = True
            logger.warning(
                "%d of %d regions could not be compiled, so answers stay uncompiled, which is slower. A "
                "start that "
                "waits for the compiler (--wait-for-compilation, compile_in_background=False) says why.",
                num_regions - num_built,
                num_regions,
            )
        elif now >= self._next_report:
            self._next_report = now + REPORT_SECONDS
            logger.info(
                "%s", progress_line(num_built, num_regions, self._num_built_before, now - self._begun)
            )

    def _progress(self) -> tuple[int, int, bool]:
        """(regions that are built, all regions, whether anything is being built), over all workers."""
        built, regions, are_building = zip(*self._collective("build_progress"))
        return sum(built), sum(regions), any(are_building)


def progress_line(num_built: int, num_regions: int, num_built_before: int, seconds: float) -> str:
    """Progress for the log, with an estimate as soon as one build has ended;
    builds take about equally long."""
    line = f"Compiling in the background: {num_built} of {num_regions} regions after {seconds:.0f} s"
    num_new = num_built - num_built_before
    if num_new == 0:
        return f"{line}."
    left = seconds / num_new * (num_regions - num_built)
    return (
        f"{line}, about {left:.0f} s left." if left < 90 else f"{line}, about {left / 60:.0f} minutes left."
    )
