"""Several workers on GPUs, as far as a CPU shows it:
who gets which GPU, what is refused, and collectives in graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM
from minivllm.checkpoints.choose import read_model_facts
from minivllm.config import EngineArgs
from minivllm.device.gpus import check_gpus, gpu_of_worker, gpus_of_engine, visible_gpus, workers_share_gpus
from minivllm.engine.resolve import check_workers, resolve
from minivllm.errors import ConfigError
from minivllm.executor import local_workers
from minivllm.executor.local_workers import LocalWorkers
from minivllm.executor.records.records import FromWorker
from tests.executor.captured_rank import SETTINGS, answers


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [
        (None, 4, ["0", "1", "2", "3"]),
        ("2,0", 2, ["2", "0"]),
        ("GPU-5f, MIG-7a,", 2, ["GPU-5f", "MIG-7a"]),
        ("0,1,9", 2, ["0", "1"]),
        ("", 0, []),
    ],
)
def test_each_worker_sees_one_of_the_gpus_that_the_engine_sees(
    monkeypatch: pytest.MonkeyPatch, names: str | None, count: int, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert visible_gpus() == expected
    assert [gpu_of_worker(place, count) for place in range(count) if count > 1] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in expected
    ]
    assert gpu_of_worker(0, 1) == {}


@pytest.mark.parametrize(
    ("count", "num_workers", "expected"),
    [
        (4, 1, ["0", "1", "2"]),
        (4, 2, ["0,1", "2,3"]),
        (3, 2, ["0,1", "2,0", "1,2"]),  # some are shared by two engines
        (1, 2, ["0", "0"]),
    ],
)
def test_engines_see_the_gpus_of_their_workers(
    monkeypatch: pytest.MonkeyPatch, count: int, num_workers: int, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = [gpus_of_engine(number, num_workers) for number in range(len(expected))]
    assert found == [{"CUDA_VISIBLE_DEVICES": names} for names in expected]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert workers_share_gpus(2) and not workers_share_gpus(1)
    assert [gpu_of_worker(place, 2) for place in range(2)] == [{"CUDA_VISIBLE_DEVICES": "0"}] * 2


def test_workers_without_a_gpu_each_are_refused(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_gpus(2, is_one_host=True, is_sized=False)
    check_gpus(3, is_one_host=True, is_sized=True)
    with pytest.raises(ConfigError, match="take a GPU each, but PyTorch sees 2 here: use 2 or less"):
        check_gpus(3, is_one_host=True, is_sized=False)
    model = tiny_model("llama")
    facts = read_model_facts(model, "auto", {}, "minivllm")
    check_workers(EngineArgs(model=str(model), tensor_parallel_size=2), facts, "cuda")
    with pytest.raises(ConfigError, match=r"4 workers .* would take a GPU each"):
        check_workers(
            EngineArgs(model=str(model), tensor_parallel_size=2, pipeline_parallel_size=2), facts, "cuda"
        )
    for more in ({"nnodes": 2, "node_key_file": "x"}, {"distributed_executor_backend": "external_launcher"}):
        with pytest.raises(ConfigError, match="on the GPUs of one host, started by minivllm itself"):
            check_workers(EngineArgs(model=str(model), tensor_parallel_size=2, **more), facts, "cuda")  # type: ignore[arg-type]


def test_workers_on_gpus_are_started_with_one_each_and_a_file_to_meet_in(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    """Up to what they are told; they end then, since there is no GPU here."""
    config, _ = resolve(
        EngineArgs(model=str(tiny_model("llama")), tensor_parallel_size=2, device="cpu", **SETTINGS)
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    started: list[dict[str, Any]] = []

    def start_process(command: Any, received: Any, environment: dict[str, str], *rest: Any) -> Any:
        started.append(environment)
        return original(command, received, environment, *rest)

    original = local_workers.start_process
    monkeypatch.setattr(local_workers, "start_process", start_process)
    told: list[Any] = []
    monkeypatch.setattr(local_workers.Channel, "send", lambda channel, record: told.append(record))
    workers = LocalWorkers(replace(config, device="cuda"), FromWorker, (sys.executable, "-c", "input()"))
    workers.close()
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in started] == ["6", "4"]
    assert all(start.segment is None and start.rendezvous is not None for start in told)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,4"


@pytest.mark.parametrize("mode", ["full_and_piecewise", pytest.param("piecewise", marks=pytest.mark.slow)])
def test_collectives_are_replayed_with_the_graphs_they_are_in(
    tiny_model: Callable[..., Path], tmp_path: Path, mode: str
) -> None:
    model = tiny_model("llama")
    with LLM(str(model), **SETTINGS) as llm:
        expected = answers(llm)
    command = [sys.executable, "-m", "tests.executor.captured_rank"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "ranks"), str(model), mode], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    outputs = [json.loads(rank.communicate(timeout=240)[0]) for rank in ranks]
    assert [output["tokens"] for output in outputs] == [expected, expected]
    assert outputs[0]["replays"] == outputs[1]["replays"]
    assert set(outputs[0]["replays"]) == ({"piecewise"} if mode == "piecewise" else {"full", "piecewise"})
