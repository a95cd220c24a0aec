"""Building region packages in child processes: side by side, and aside while requests are served."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

logger = logging.getLogger(__name__)

NICENESS = 8
"""Of builds in the background, and of the scheduling groups they open. Each step is a factor of 1.25: beside
a process that never pauses, a build gets 14 % of every core by the kernel's weights, and ends. Short chat
answers decoded at 0.5 to 0.8 of their uncompiled speed meanwhile. At 19, or with SCHED_IDLE, it got 1 % and
less: a chat without pauses on two cores had six of nine regions after 240 s."""
MAX_REPORT_BYTES = 2**15
"""Of a child's log. A pipe holds twice as much without anybody reading it."""

POLL_SECONDS = 0.02

_lifelines: set[int] = set()
"""Descriptors whose end others wait for: what this process holds open for its children, and what
``close_in_children`` was told of. A child that inherits them must close them."""
_is_in_background = False
"""True in a child in the background and in its own children."""


def can_fork() -> bool:
    """True where a process with threads may be forked to generate code."""
    return sys.platform == "linux"


def close_in_children(descriptor: int) -> None:
    """Keep a descriptor from living on in the children that build packages, until ``forget_descriptor``."""
    _lifelines.add(descriptor)


def forget_descriptor(descriptor: int) -> None:
    """The descriptor is about to be closed."""
    _lifelines.discard(descriptor)


class Child:
    """A fork of this process that runs one function, because a traced graph is nothing to be sent elsewhere.

    It ends with this process, however that ends, even by kill -9: a pipe that only this process holds open
    tells it, and it takes the compilers it started with it. ``release`` makes the one exception: what a
    command leaves behind on purpose when it is done, a build in the background, may finish without it. What
    the child logs reaches this process's log when it is over.

    Only code may be generated in it: OpenMP's threads do not survive a fork.
    """

    def __init__(self, run: Callable[[], None], *, in_background: bool = False) -> None:
        """in_background: the child and its own children leave most of the machine to others: see NICENESS."""
        life, self._lifeline = os.pipe()
        _lifelines.add(self._lifeline)
        log, end_of_child = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _run_in_child(run, life, end_of_child, in_background)
        os.close(life)
        os.close(end_of_child)
        self._log = os.fdopen(log, "rb")
        self._status: int | None = None

    @property
    def succeeded(self) -> bool:
        return self._status == 0

    def is_running(self) -> bool:
        """False once it has ended; then its log is in this process's."""
        if self._status is None:
            ended = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                # A child that was killed leaves the C++ compilers of its process group running. The group is
                # ended before the child is reaped: until then its number belongs to no other process.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
                self._end(os.waitpid(self._pid, 0)[1])
        return self._status is None

    def release(self) -> None:
        """Let it go on without this process; how it goes is not heard of."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, b".")
        self.close()

    def close(self) -> None:
        """End it, unless it was released. The last call."""
        self._log.close()
        _lifelines.remove(self._lifeline)
        os.close(self._lifeline)
        if self._status is None:  # without a wait it stays among this process's children once it ended
            threading.Thread(target=os.waitpid, args=(self._pid, 0), daemon=True).start()

    def _end(self, status: int) -> None:
        self._status = status
        for line in self._log:
            with contextlib.suppress(ValueError):  # of a line that was cut when the child was killed
                level, message = json.loads(line)
                logger.log(level, "%s", message)
        self.close()


def _run_in_child(run: Callable[[], None], life: int, log: int, in_background: bool) -> NoReturn:
    """The exit status tells success."""
    global _is_in_background
    status = 1
    try:
        # A group of its own, which can be ended as a whole. Ctrl-C at the terminal is the parent's to handle.
        os.setsid()
        if in_background:
            os.nice(NICENESS)
            _is_in_background = True
        if _is_in_background:
            yield_as_a_group()
        while _lifelines:
            os.close(_lifelines.pop())
        # A reader of the parent's output should not wait for a child that goes on when the parent is over.
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        package = logging.getLogger("minivllm")
        package.handlers, package.propagate = [_LogToParent(log)], False
        package.setLevel(logging.INFO)
        threading.Thread(target=_end_with_parent, args=(life,), daemon=True).start()
        run()
        status = 0
    except BaseException:
        logger.warning("%s", traceback.format_exc())
    finally:
        os._exit(status)


def yield_as_a_group() -> None:
    """Give the session of this process the niceness of a build in the background.

    A session, which ``setsid`` opens, is a group of its own to Linux's scheduler, whose share does not depend
    on the niceness of its processes: it has a niceness itself, which starts at 0 in every child.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def _end_with_parent(life: int) -> None:
    if not os.read(life, 1):
        os.killpg(0, signal.SIGKILL)


class _LogToParent(logging.Handler):
    """Writes lines of JSON, as many as the pipe surely takes, since it may have no reader."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._room = MAX_REPORT_BYTES

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()[-MAX_REPORT_BYTES // 8 :]
        line = json.dumps([record.levelno, message]).encode() + b"\n"
        self._room -= len(line)
        if self._room >= 0:
            with contextlib.suppress(OSError):  # of a pipe whose reader has gone
                os.write(self._descriptor, line)


class PackageBuilds:
    """Builds packages side by side, one child process each and as many at a time as there are cores.

    Where forking is not safe, builds run one after another.
    """

    def __init__(self, settle: Callable[[], None], what: str = "regions") -> None:
        """settle: what every child does first. what: is built, for the log."""
        self._settle = settle
        self._what = what
        self._waiting: list[tuple[str, Callable[[], None]]] = []
        self._running: dict[str, tuple[Child, float]] = {}
        self._num_over = 0

    def start(self, name: str, build: Callable[[], None]) -> None:
        self._waiting.append((name, build))
        self._start_waiting()

    def wait(self) -> None:
        """Return when all builds are over, whether or not they succeeded.
        If an exception ends the wait, so do they."""
        if self._num_unfinished:
            count = self._num_over + self._num_unfinished
            logger.info("Compiling %d %s: %d done …", count, self._what, self._num_over)
        try:
            while self._num_unfinished:
                self._start_waiting()
                for name in [name for name, (child, _) in self._running.items() if not child.is_running()]:
                    self._take_end(name)
                time.sleep(POLL_SECONDS)
        except BaseException:
            for child, _ in self._running.values():
                child.close()
            raise

    def _take_end(self, name: str) -> None:
        child, started = self._running.pop(name)
        self._num_over += 1
        if child.succeeded:
            seconds, num_regions = time.perf_counter() - started, self._num_over + self._num_unfinished
            logger.info("Compiled %s in %.1f s: %d of %d.", name, seconds, self._num_over, num_regions)
        else:
            # Whatever went wrong, the region can still be compiled by torch.compile.
            logger.warning("Building a package for %s failed.", name)

    @property
    def _num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    def _start_waiting(self) -> None:
        while self._waiting and len(self._running) < (os.cpu_count() or 1):
            name, build = self._waiting.pop(0)
            if can_fork():
                self._running[name] = Child(functools.partial(self._build, build)), time.perf_counter()
                continue
            self._num_over += 1
            try:
                build()
            except Exception:
                logger.warning("Building a package for %s failed:\n%s", name, traceback.format_exc())

    def _build(self, build: Callable[[], None]) -> None:
        self._settle()
        build()
