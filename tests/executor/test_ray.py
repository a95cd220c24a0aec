"""Workers on a real Ray cluster, two raylets of this host:
the tokens of one process, every end told, nothing left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm import LLM
from minivllm.engine_process.ray import executor as ray_executor
from minivllm.errors import ConfigError, EngineDeadError
from tests.executor.small_engine import command_of
from tests.executor.test_multiproc import wait_until
from tests.executor.test_tensor_parallel import UNEVEN, answers, arguments

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@contextlib.contextmanager
def raylets(monkeypatch: pytest.MonkeyPatch, *cpus: int) -> Iterator[None]:
    """A cluster of so many, with so many CPUs each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster()
    try:
        for count in cpus:
            cluster.add_node(num_cpus=count, object_store_memory=80 * 2**20, include_dashboard=False)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield
    finally:
        cluster.shutdown()


def running(*words: str) -> list[psutil.Process]:
    """Processes whose command has one of these words."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(word in " ".join(process.cmdline()) for word in words):
                found.append(process)
    return found


def agents() -> list[psutil.Process]:
    return running("ray::minivllm node")


def nothing_is_left() -> bool:
    ours = ("ray::minivllm node", "executor.worker_process", "ray.placer")
    return wait_until(lambda: not running(*ours), 30)


def on_ray(model: Path, **more: Any) -> dict[str, Any]:
    return arguments(model, distributed_executor_backend="ray", **more)


def test_two_raylets_give_the_tokens_of_one_process(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray.cloudpickle

    from minivllm.engine_process.ray.agent import run_node

    assert len(ray.cloudpickle.dumps(run_node)) < 120  # its name, and nothing of ours
    model = tiny_model("llama-biases", **UNEVEN)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm)
    with raylets(monkeypatch, 1, 1):
        for layout in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "multiprocess": True}):
            with LLM(**on_ray(model, **layout)) as llm:
                assert answers(llm) == expected
                assert len(agents()) == 1 and llm.llm_engine.client.config.nodes.nnodes == 2
            assert nothing_is_left()
        monkeypatch.setattr(ray_executor, "PLACEMENT_SECONDS", 2.0)
        with pytest.raises(
            ConfigError, match=r"no room for 3 workers: .* 1 CPU \(this node\), .* not changed in 2 s"
        ):
            LLM(**on_ray(model, tensor_parallel_size=3))
        with LLM(**on_ray(model)), pytest.raises(ConfigError, match="of its 2 CPU in all 1 are free"):
            LLM(**on_ray(model, tensor_parallel_size=2))
        assert nothing_is_left()
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(ConfigError, match=r"is in no Ray cluster .*ray start --head"):
        LLM(**on_ray(model))


@pytest.mark.parametrize("victim", ["worker", "agent", "raylet"])
def test_a_death_on_another_node_is_told(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    model = tiny_model("llama")
    with raylets(monkeypatch, 1, 1), LLM(**on_ray(model, tensor_parallel_size=2)) as llm:
        answers(llm)
        [agent] = agents()
        [worker] = [one for one in agent.children(recursive=True) if "worker_process" in command_of(one)]
        raylet = next(one for one in agent.parents() if "raylet" in one.name())
        os.kill({"worker": worker, "agent": agent, "raylet": raylet}[victim].pid, signal.SIGKILL)
        expected = "worker of rank 1 was killed by SIGKILL" if victim == "worker" else "connection to node 1"
        with pytest.raises(EngineDeadError, match=expected):
            while True:
                answers(llm)
        llm.close()
        assert nothing_is_left()


def test_an_engine_that_is_killed_leaves_nothing(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (
        "import json, os, sys; from minivllm import LLM;"
        "llm = LLM(**json.loads(sys.argv[1])); print('ready', flush=True); sys.stdin.read()"
    )
    import json

    given = json.dumps(on_ray(tiny_model("llama"), tensor_parallel_size=2))
    with raylets(monkeypatch, 1, 1):
        with subprocess.Popen(
            [sys.executable, "-c", program, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as engine:
            assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
            assert len(agents()) == 1
            engine.kill()
        assert nothing_is_left()
