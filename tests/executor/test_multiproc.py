"""The multi-process executor under faults, with mocks in place of workers:
who learns what, and what is left behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from minivllm.errors import ConfigError, EngineDeadError, MinivllmError
from minivllm.executor.multiproc import MultiprocExecutor
from minivllm.messages import SchedulerOutput, TokenMasks
from minivllm.simulation.executor import simulated_config
from tests.patience import ERROR_SECONDS, spare_seconds

CONFIG = simulated_config(model="mock", model_path="mock")
STEP = SchedulerOutput(num_scheduled_tokens={"a": 1})
ROOT = Path(__file__).parents[2]


def command(fault: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.executor.mock_worker", fault)


def start(fault: str = "none", size: int = 2, heartbeat_timeout: float = 300.0) -> MultiprocExecutor:
    config = replace(CONFIG, tensor_parallel_size=size, heartbeat_timeout=heartbeat_timeout)
    return MultiprocExecutor(config, cast(Any, SimpleNamespace(vocab_size=100)), command(fault))


@contextmanager
def nothing_left() -> Iterator[list[int]]:
    """Neither a process, nor a thread, nor a descriptor: shared memory has no other name.
    Yields further processes."""
    files, threads, processes = descriptors(), set(threading.enumerate()), children()
    pids: list[int] = []
    yield pids

    def left() -> tuple[int, set[threading.Thread], set[int]]:
        # Threads of tests that came before may end meanwhile.
        return descriptors() - files, set(threading.enumerate()) - threads, children() - processes

    wait_until(lambda: left() == (0, set(), set()))
    assert left() == (0, set(), set())
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_steps_calls_and_masks_reach_all_workers_and_the_first_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "minivllm"), nothing_left() as pids:
        executor = start(size=3)
        pids += executor.pids
        assert [group.num_blocks for group in executor.kv_groups] == [10]  # the smallest cache of any
        assert executor.collective("weight_checksums") == [[0.0], [1.0], [2.0]]
        first, second = executor.execute_model(STEP), executor.execute_model(STEP)
        masked = executor.execute_model(STEP, lambda: TokenMasks(first_rows={}, bits=b"", words=42))
        assert [pending.result().sampled_token_ids for pending in (first, second)] == [{"a": [7]}] * 2
        assert masked.result().sampled_token_ids == {"a": [42]}
        executor.shutdown()
        executor.shutdown()
    assert {f"hello from {rank}" for rank in range(3)} <= {record.getMessage() for record in caplog.records}


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            "start:1",
            EngineDeadError,
            r"(?s)worker of rank 1 died of OSError: no such device.*Traceback.*mock_worker",
        ),
        (
            "load_model:0",
            EngineDeadError,
            r"(?s)worker of rank 0 died of KeyError.*mock_worker\.py.*in answer",
        ),
        ("config:1", ConfigError, "^the weights are no good.$"),
    ],
)
def test_who_cannot_start_says_why(fault: str, kind: type[MinivllmError], message: str) -> None:
    with nothing_left(), pytest.raises(kind, match=message):
        start(fault)


def test_a_worker_that_raises_in_a_step_ends_the_group_with_its_traceback() -> None:
    with nothing_left() as pids:
        executor = start("step:1")
        pids += executor.pids
        told: list[MinivllmError] = []
        executor.when_dead(told.append)
        # The output rank may have been faster: then the next step hears of it.
        with pytest.raises(
            EngineDeadError, match=r"(?s)rank 1 died of ValueError: the model has a fever.*in serve"
        ):
            for _ in range(100):
                executor.execute_model(STEP).result()
        with pytest.raises(EngineDeadError, match="fever"):
            executor.collective("weight_checksums")
        assert len(told) == 1 and "fever" in str(told[0])
        executor.shutdown()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_samples_other_tokens_ends_the_group_and_is_named(rank: int) -> None:
    with nothing_left():
        executor = start(f"differ:{rank}", size=3)
        for _ in range(4):
            executor.execute_model(STEP).result()
        # The output rank may be faster than the others: then the next step hears of it.
        with pytest.raises(
            EngineDeadError, match=f"In step 5 of the engine the worker of rank {rank} sampled other"
        ):
            for _ in range(100):
                executor.execute_model(STEP).result()
        executor.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_in_a_step_is_named_to_who_waits(rank: int) -> None:
    with nothing_left():
        executor = start("hang:0")
        pending = executor.execute_model(STEP)
        killed = time.monotonic()
        os.kill(executor.pids[rank], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker of rank {rank} was killed by SIGKILL"):
            pending.result()
        assert time.monotonic() - killed < ERROR_SECONDS + spare_seconds()
        executor.shutdown()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_worker_that_hangs_is_named_with_where_it_is(rank: int) -> None:
    with nothing_left():
        executor = start(f"hang:{rank}", size=3, heartbeat_timeout=0.4)
        message = rf"(?s)worker of rank {rank} hangs: its step has taken 0\.3 s.*a mock that has hang"
        with pytest.raises(EngineDeadError, match=message):
            executor.execute_model(STEP).result()
        executor.shutdown()


def test_a_worker_that_does_not_even_answer_is_named() -> None:
    with nothing_left():
        executor = start("hang:0", heartbeat_timeout=0.4)
        os.kill(executor.pids[1], signal.SIGSTOP)
        with pytest.raises(
            EngineDeadError, match=r"worker of rank 1 hangs: .* It could not say where it was"
        ):
            executor.execute_model(STEP).result()
        executor.shutdown()


def test_a_worker_killed_while_nothing_runs_is_told_at_once() -> None:
    with nothing_left() as pids:
        executor = start()
        told = threading.Event()
        executor.when_dead(lambda error: told.set())
        pids += executor.pids
        os.kill(executor.pids[1], signal.SIGKILL)
        assert told.wait(1.0)
        for call in (lambda: executor.execute_model(STEP), lambda: executor.transfers.take(may_wait=True)):
            with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
                call()
        executor.shutdown()


def test_a_death_ends_the_wait_of_who_fills_the_ring() -> None:
    with nothing_left():
        executor = start("hang:1")
        threading.Timer(0.5, lambda: os.kill(executor.pids[1], signal.SIGKILL)).start()
        large = SchedulerOutput(num_scheduled_tokens={f"request-{index}": 1 for index in range(20_000)})
        with pytest.raises(EngineDeadError, match="rank 1 was killed"):
            for _ in range(100):
                executor.execute_model(large)
        executor.shutdown()


def test_workers_end_with_the_process_that_started_them() -> None:
    program = (
        "import os, sys; sys.path.insert(0, os.getcwd());"
        "from tests.executor.test_multiproc import start;"
        "print(*start().pids, flush=True); os.kill(os.getpid(), 9)"
    )
    read, write = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", program],
        {**os.environ, "PYTHONPATH": str(ROOT)},
        file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)],
    )
    os.close(write)
    with os.fdopen(read) as output:
        pids = [int(word) for word in output.read().split()]
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL and len(pids) == 2
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)), 3.0)


def test_an_executor_that_is_dropped_takes_its_workers_along() -> None:
    with nothing_left() as pids:
        executor = start()
        pids += executor.pids
        del executor
        assert wait_until(lambda: not any(map(psutil.pid_exists, pids)), 5.0)
