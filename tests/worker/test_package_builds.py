"""Builds in child processes: what they say, what they hold open,
and what becomes of them when their parent ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from minivllm.compilation.packaged.package_builds import NICENESS, Child, PackageBuilds
from minivllm.hub.fetch import exclusive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="builds are child processes on Linux only")


def wait_until(is_so: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_parent_tells_why_a_build_failed(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction" + "!" * 100_000)

    builds = PackageBuilds(settle=lambda: None)
    builds.start("last", fail)
    with caplog.at_level(logging.WARNING, logger="minivllm"):
        builds.wait()
    assert "Building a package for last failed" in caplog.text and "!!!" in caplog.text


def test_what_a_child_in_the_background_logs_is_logged_by_its_parent_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def work() -> None:
        for index in range(10_000):  # more than a pipe holds
            logging.getLogger("minivllm.test").info("line %d\nof a log", index)

    with caplog.at_level(logging.INFO, logger="minivllm"):
        child = Child(work, in_background=True)
        wait_until(lambda: not child.is_running(), "the child waits for a reader")
    assert child.succeeded and caplog.messages[:2] == ["line 0\nof a log", "line 1\nof a log"]


def test_a_child_in_the_background_and_its_own_children_yield(tmp_path: Path) -> None:
    """Their sessions too, each of which is a scheduling group of its own on most desktops."""

    def note(name: str) -> None:
        group = Path("/proc/self/autogroup")
        own = group.read_text() if group.is_file() else f"nice {NICENESS}"
        (tmp_path / name).write_text(
            f"{os.sched_getscheduler(0) == os.SCHED_OTHER} {os.nice(0)} {own.split()[-1]}"
        )

    def work() -> None:
        note("outer")
        inner = Child(lambda: note("inner"))
        wait_until(lambda: not inner.is_running(), "the child's child never ended")

    own_niceness = os.nice(0)
    child = Child(work, in_background=True)
    wait_until(lambda: not child.is_running(), "the child never ended")
    for name in ("outer", "inner"):
        assert (tmp_path / name).read_text() == f"True {min(19, own_niceness + NICENESS)} {NICENESS}"
    foreground = Child(lambda: note("foreground"))
    wait_until(lambda: not foreground.is_running(), "the child never ended")
    assert (tmp_path / "foreground").read_text().startswith(f"True {own_niceness} ")
    assert os.nice(0) == own_niceness


def test_a_build_in_the_background_gets_enough_to_end_and_leaves_enough() -> None:
    """By the weights of Linux's scheduler, beside two threads that never pause and wait for one another."""
    weight = 1024 / 1.25**NICENESS
    share = weight / (1024 + weight)
    assert share >= 0.1, "the build would hardly go on"
    assert 1 - 2 * share >= 0.6, "both threads are held up, at worst one after the other"


PARENT = """
import os, signal, subprocess, sys, time
from pathlib import Path
from minivllm.compilation.packaged.package_builds import Child, PackageBuilds

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background without it

def build(name):
    compiler = subprocess.Popen(["sleep", "0.5" if sys.argv[2] == "leave" else "600"])
    (Path(sys.argv[1]) / f"{name}.pids").write_text(f"{os.getpid()} {compiler.pid}")
    print("building", name, flush=True)
    compiler.wait()
    (Path(sys.argv[1]) / name).touch()

def build_all():
    builds = PackageBuilds(settle=lambda: None)
    for name in "abcd":
        builds.start(name, lambda name=name: build(name))
    builds.wait()

if sys.argv[2] == "foreground":
    print("ready", flush=True)
    build_all()
child = Child(build_all, in_background=True)
print("ready", flush=True)
if sys.argv[2] == "leave":
    child.release()
    sys.exit()
time.sleep(600)
"""


def start_parent(directory: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, str(directory), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("how", "end"),
    [("foreground", signal.SIGKILL), ("foreground", signal.SIGINT), ("background", signal.SIGKILL)],
)
def test_builders_and_their_compilers_end_with_a_parent_that_is_killed(
    tmp_path: Path, how: str, end: int
) -> None:
    parent = start_parent(tmp_path, how)
    wait_until(lambda: list(tmp_path.glob("*.pids")), "nothing was ever built")
    time.sleep(0.1)
    parent.send_signal(end)
    parent.wait(timeout=60)
    pids = [int(pid) for path in tmp_path.glob("*.pids") for pid in path.read_text().split()]
    wait_until(lambda: not any(map(is_alive, pids)), "a builder lives on")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".pids"]


def test_builds_that_are_left_are_finished_and_hold_nothing_open_of_a_process_that_is_over(
    tmp_path: Path,
) -> None:
    """As in ``minivllm chat -p hi | tail``: the pipe ends with the process."""
    parent = start_parent(tmp_path, "leave")
    assert parent.communicate(timeout=120) == ("ready\n", "") and parent.returncode == 0
    assert not (tmp_path / "d").exists()
    for name in "abcd":
        wait_until((tmp_path / name).exists, f"{name} was never built")


@pytest.mark.parametrize("leave", [Child.close, Child.release])
def test_nothing_is_left_of_a_child_that_is_not_asked_about_again(leave: Callable[[Child], None]) -> None:
    child = Child(lambda: time.sleep(0.2))
    assert child.is_running()
    before = {process.pid for process in psutil.Process().children()}
    leave(child)
    wait_until(
        lambda: len({process.pid for process in psutil.Process().children()}) < len(before),
        "a zombie is left",
    )


def test_a_lock_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    inside: list[str] = []

    def second() -> None:
        with exclusive(tmp_path / "lock"):
            inside.append("second")

    with exclusive(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.2)
        inside.append("first")
    thread.join()
    assert inside == ["first", "second"]


def test_a_child_that_is_killed_leaves_no_compiler_running(tmp_path: Path) -> None:
    noted = tmp_path / "compiler"

    def compile_for_long() -> None:
        compiler = subprocess.Popen(["sleep", "300"])
        noted.with_suffix(".new").write_text(str(compiler.pid))
        noted.with_suffix(".new").rename(noted)
        compiler.wait()

    child = Child(compile_for_long)
    while not noted.exists():
        assert child.is_running()
        time.sleep(0.01)
    compiler = psutil.Process(int(noted.read_text()))
    os.kill(child._pid, signal.SIGKILL)
    while child.is_running():
        time.sleep(0.01)
    assert not child.succeeded
    compiler.wait(timeout=60)
