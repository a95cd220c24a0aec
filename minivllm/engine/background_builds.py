"""When the workers change over to code that is compiled in the background: all of them behind the same step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 0.5
"""Asking waits for the steps in flight."""


class BackgroundBuilds:
    """Decides for all workers, since how long each compiles depends on the clock: a part of a model that was compiled
    rounds otherwise than one that was not, and stages warm up together.

    collective: see Executor. They change over at once if everything is found on disk.
    """

    def __init__(self, collective: Callable[..., list[Any]]) -> None:
        self._collective, self._next = collective, 0.0
        if all(collective("is_compiled")):
            collective("change_over")
            self.are_done = True
            return
        collective("serve_uncompiled")
        self.are_done = False
        self.poll()

    def poll(self) -> None:
        """Between two steps: change over if all workers can."""
        if self.are_done or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SECONDS_BETWEEN
        if all(self._collective("is_compiled")):
            self._collective("change_over")
            self.are_done = True
            logger.info("The model is compiled.")
