"""Builds in child processes: what they say, what they hold open, and what becomes of them when their parent ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from minivllm.models.file_lock import exclusive
from minivllm.worker.package_builds import PackageBuilds

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="builds are child processes on Linux only")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was never built"
        time.sleep(0.02)


@pytest.mark.parametrize("in_background", [False, True])
def test_the_parent_tells_why_a_build_failed(in_background: bool, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no such instruction" + "!" * 100_000)

    builds = PackageBuilds(in_background=in_background)
    builds.start("last", fail)
    with caplog.at_level(logging.WARNING, logger="minivllm"):
        builds.wait()
    (record,) = caplog.records
    assert "Building a package for last failed" in record.getMessage() and "!!!" in record.getMessage()
    assert not builds.are_running()


LEAVE = """
import sys, time
from pathlib import Path
from minivllm.worker.package_builds import PackageBuilds

def build(name):
    print("building", name, flush=True)
    time.sleep(1.0)
    (Path(sys.argv[1]) / name).touch()

builds = PackageBuilds(in_background=True)
for name in "abcdef":
    builds.start(name, lambda name=name: build(name))
builds.leave()
print("over", flush=True)
"""


def test_builds_that_are_left_are_finished_and_hold_nothing_open_of_a_process_that_is_over(tmp_path: Path) -> None:
    """As in ``minivllm chat -p hi | tail``: the pipe ends with the process."""
    done = subprocess.run([sys.executable, "-c", LEAVE, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
    assert len(list(tmp_path.iterdir())) < 6
    for name in "abcdef":
        wait_for(tmp_path / name)


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
