"""An engine in the processes of torchrun: every rank runs the same script and gets the same answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from minivllm.cli.engine.options import engine_flags
from minivllm.errors import ConfigError
from minivllm.simulation.ranks import virtual_llm
from tests.executor.test_pipeline_parallel import words
from tests.executor.test_tensor_parallel import UNEVEN, answers, arguments


def torchrun(*command: str, size: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(size),
        "-m",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=200, env=environment)


def launched(model: Path, **more: Any) -> dict[str, Any]:
    return arguments(model, tensor_parallel_size=2, distributed_executor_backend="external_launcher", **more)


def test_every_rank_is_answered_as_one_engine_would(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    with virtual_llm(**arguments(model, tensor_parallel_size=2)) as llm:
        expected = json.loads(json.dumps([answers(llm), words(llm), llm.collective_rpc("weight_checksums")]))
    out = tmp_path / "answers"
    done = torchrun("tests.executor.torchrun_script", json.dumps(launched(model)), str(out))
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(Path(f"{out}{rank}").read_text()) for rank in range(2))
    assert first == second
    assert first[:3] == expected and first[3] and "10" in first[4] and first[5] == expected[0]


@pytest.mark.parametrize(
    "is_ours",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["alone", "beside the group of a script"],
)
@pytest.mark.parametrize("ends", ["close()", "__del__", "exit"])
def test_nothing_is_left_of_a_process_group_when_its_process_ends(
    tmp_path: Path, is_ours: bool, ends: str
) -> None:
    """gloo's threads live as long as the group is referenced,
    and abort a process whose interpreter has ended."""
    code = f"""
import atexit, gc, os, weakref
atexit.register(lambda: print("left" if group() is None else "still there"))  # the last one to be called
import torch, torch.distributed as dist
from minivllm.distributed.gloo import GlooCommunicator

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
store = dist.FileStore({str(tmp_path / "ranks")!r}, 1)
if not {is_ours}:
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
communicator = GlooCommunicator(0, 1)
group = weakref.ref(communicator._group)
assert group() is not None and communicator.all_reduce(torch.ones(3)).tolist() == [1, 1, 1]
if {ends!r} == "close()":
    communicator.close()
    assert group() is None and dist.is_initialized() == (not {is_ours})
elif {ends!r} == "__del__":
    del communicator
    gc.collect()
    assert group() is None
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "left\n", done.stdout + done.stderr


@pytest.mark.slow
def test_generate_prints_once(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    with LLM(**arguments(model)) as llm:
        [output] = llm.generate(["some words"], SamplingParams(temperature=0.0, max_tokens=20))
    flags = ["--model", str(model), *engine_flags(EngineArgs(**launched(model)))]
    sampling = ["--temperature", "0", "--max-tokens", "20"]
    done = torchrun("minivllm", "generate", *flags, "-p", "some words", *sampling, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == list(output.outputs[0].token_ids)


@pytest.mark.slow
def test_ranks_that_make_other_calls_are_told(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    done = torchrun(
        "tests.executor.torchrun_script", json.dumps(launched(tiny_model("llama"))), str(tmp_path), "apart"
    )
    assert done.returncode != 0 and "every rank must make the same calls" in done.stderr


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "torchrun did not start this process: use torchrun --nproc-per-node 2 SCRIPT"),
        (
            {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"},
            "torchrun started 3 processes: use",
        ),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "use minivllm's own nnodes there"),
    ],
)
def test_processes_that_do_not_fit_are_refused(
    tiny_model: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    message: str,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        LLM(**launched(tiny_model("llama")))


@pytest.mark.parametrize(
    "more",
    [
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"multiprocess": True},
        {"async_scheduling": True},
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_named(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"which does not go with {next(iter(more))}"):
        EngineArgs(tensor_parallel_size=2, distributed_executor_backend="external_launcher", **more)


@pytest.mark.slow
def test_an_engine_process_is_none_of_torchruns(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="is for LLM and generate"):
        AsyncLLM.from_args(EngineArgs(**launched(tiny_model("llama"))))
