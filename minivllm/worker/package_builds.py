"""Building region packages side by side, each in a child process."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

logger = logging.getLogger(__name__)

NICENESS = 19
MAX_REPORT_BYTES = 2**15
"""Of a build's failure. A pipe holds twice as much without anybody reading it."""


@dataclass(frozen=True)
class _Build:
    """A child at work. report: the descriptor to read from what went wrong."""

    name: str
    started: float
    report: int


class PackageBuilds:
    """Builds packages side by side, one child process each and as many at a time as there are cores.

    A child is a fork of this process, because what it compiles, a traced graph, is nothing to be sent elsewhere. It
    only generates code and waits for the C++ compiler. Where forking is not safe, builds run one after another.
    """

    def __init__(self, *, in_background: bool = False) -> None:
        """in_background: builds yield to everything else, and Ctrl-C at the terminal does not end them."""
        self._in_background = in_background
        self._waiting: list[tuple[str, Callable[[], None]]] = []
        self._running: dict[int, _Build] = {}
        self._num_over = 0
        self._forks = sys.platform == "linux"

    def start(self, name: str, build: Callable[[], None]) -> None:
        self._waiting.append((name, build))
        self._start_waiting()

    def are_running(self) -> bool:
        """True while a build is not over."""
        for pid in list(self._running):
            self._take_end(pid, os.WNOHANG)
        self._start_waiting()
        return bool(self._running)

    def wait(self) -> None:
        """Return when all builds are over, whether or not they succeeded."""
        if self._num_unfinished:
            logger.info("Compiling %d regions: %d done …", self._num_over + self._num_unfinished, self._num_over)
        while self._waiting or self._running:
            self._start_waiting()
            if self._running:
                self._take_end(next(iter(self._running)))

    def leave(self) -> None:
        """Let what is not over be built by processes that may outlive this one; how that goes is not heard of."""
        builds, self._waiting = [build for _, build in self._waiting], []
        if builds:

            def one_after_another() -> None:
                for build in builds:
                    build()

            _, report = self._fork(one_after_another)
            os.close(report)
        for build in self._running.values():
            os.close(build.report)
        self._running.clear()

    def _take_end(self, pid: int, options: int = 0) -> None:
        ended, status = os.waitpid(pid, options)
        if not ended:
            return
        build = self._running.pop(pid)
        with os.fdopen(build.report, "rb") as pipe:
            report = pipe.read().decode(errors="replace")
        self._num_over += 1
        if status == 0:
            seconds, num_regions = time.perf_counter() - build.started, self._num_over + self._num_unfinished
            logger.info("Compiled %s in %.1f s: %d of %d.", build.name, seconds, self._num_over, num_regions)
        else:
            # Whatever went wrong, the region can still be compiled by torch.compile.
            logger.warning("Building a package for %s failed:\n%s", build.name, report)

    @property
    def _num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < (os.cpu_count() or 1):
            name, build = self._waiting.pop(0)
            if self._forks:
                started = time.perf_counter()
                pid, report = self._fork(build)
                self._running[pid] = _Build(name, started, report)
                continue
            self._num_over += 1
            try:
                build()
            except Exception:
                logger.warning("Building a package for %s failed:\n%s", name, traceback.format_exc())

    def _fork(self, build: Callable[[], None]) -> tuple[int, int]:
        """Run build in a child process: its id, and where its failure can be read. Its exit status tells success."""
        threads = torch.get_num_threads()
        report, end_of_child = os.pipe()
        pid = os.fork()
        if pid:
            os.close(end_of_child)
            return pid, report
        status = 1
        try:
            self._settle_in_child()
            from torch._inductor import config

            # OpenMP's threads do not survive a fork, so the child may not start a parallel region; the code that it
            # generates is for as many threads as the parent has.
            torch.set_num_threads(1)
            config.cpp.threads = threads
            build()
            status = 0
        except BaseException:
            os.write(end_of_child, traceback.format_exc().encode()[-MAX_REPORT_BYTES:])
        finally:
            os._exit(status)

    def _settle_in_child(self) -> None:
        """Whoever reads what this process prints should not wait for a child that goes on when the process is over."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        if self._in_background:
            os.setsid()
            os.nice(NICENESS)
