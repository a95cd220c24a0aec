"""Real workers on two nodes, which are process groups of this host:
the tokens of one process, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from minivllm.cli.engine.options import engine_flags
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.simulation.ranks import virtual_llm
from tests.executor.small_engine import command_of
from tests.executor.test_multiproc import wait_until
from tests.executor.test_nodes import free_port, write_key
from tests.executor.test_tensor_parallel import UNEVEN, answers, arguments, logprobs
from tests.patience import ERROR_SECONDS, spare_seconds


def two_nodes(model: Path, tmp_path: Path, **layout: Any) -> dict[str, Any]:
    key = tmp_path / "node.key"
    if not key.exists():
        write_key(key)
    return arguments(model, nnodes=2, master_port=free_port(), node_key_file=str(key), **layout)


@contextlib.contextmanager
def second_node(given: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """What the second terminal runs."""
    flags = engine_flags(EngineArgs(**given, node_rank=1))
    command = [sys.executable, "-m", "minivllm", "serve", given["model"], *flags]
    node = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield node
    finally:
        node.kill()
        node.communicate()


def workers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [one for one in children if "minivllm.executor.worker_process" in command_of(one)]


def test_two_nodes_give_the_very_bits_of_one_process(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    with virtual_llm(**arguments(model, dtype="bfloat16", tensor_parallel_size=2)) as llm:
        expected = answers(llm), logprobs(llm)
    given = two_nodes(model, tmp_path, dtype="bfloat16", tensor_parallel_size=2)
    with second_node(given) as node, LLM(**given) as llm:
        assert (answers(llm), logprobs(llm)) == expected
        call = llm.llm_engine.client.call
        call("sleep", 2)
        call("wake_up")
        assert (answers(llm), logprobs(llm)) == expected
        workers = [*workers_of(os.getpid()), *workers_of(node.pid)]
        killed = time.monotonic()
        node.kill()
        with pytest.raises(EngineDeadError, match=r"The connection to node 1 \(127\.0\.0\.1\) was lost"):
            answers(llm)
        assert time.monotonic() - killed < ERROR_SECONDS + spare_seconds()
    assert wait_until(lambda: not any(worker.is_running() for worker in workers), 3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": True},
        {"tensor_parallel_size": 2, "speculative_config": {"method": "ngram", "verification_cost": 0.0}},
    ],
    ids=str,
)
def test_layouts_of_two_nodes_give_the_tokens_of_one_process(
    tiny_model: Callable[..., Path], tmp_path: Path, layout: dict[str, Any]
) -> None:
    model = tiny_model("llama-biases", **{**UNEVEN, "num_hidden_layers": 4})
    with LLM(**arguments(model)) as llm:
        expected = answers(llm)
    given = two_nodes(model, tmp_path, **layout)
    with second_node(given) as node:
        with LLM(**given) as llm:
            assert answers(llm) == expected
        assert node.wait(10) == 0
        assert node.stderr is not None and "Node 0 has ended, and so does this node." in node.stderr.read()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["node", "worker of the node", "engine", "frontend is closed"])
def test_streams_hear_of_an_end_on_any_node(
    tiny_model: Callable[..., Path], tmp_path: Path, victim: str
) -> None:
    # The first node chooses how long steps are.
    given = two_nodes(
        tiny_model("llama", num_hidden_layers=2),
        tmp_path,
        tensor_parallel_size=2,
        max_num_batched_tokens=None,
    )
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    async def run(node: subprocess.Popen[str]) -> tuple[str, float]:
        killed, message = 0.0, ""
        async with AsyncLLM.from_args(EngineArgs(**given)) as llm:
            [engine] = [
                one
                for one in psutil.Process().children()
                if "minivllm.engine_process.process" in command_of(one)
            ]
            pids = {"node": node.pid, "worker of the node": workers_of(node.pid)[0].pid, "engine": engine.pid}
            try:
                async for _ in llm.generate({"prompt_token_ids": [5, 6, 7]}, params):
                    if not killed and victim in pids:
                        killed = time.monotonic()
                        os.kill(pids[victim], signal.SIGKILL)
            except EngineDeadError as error:
                message = str(error)
            seconds = time.monotonic() - killed
        return message, seconds

    with second_node(given) as node:
        message, seconds = asyncio.run(run(node))
        expected = {
            "node": "connection to node 1",
            "worker of the node": "worker of rank 1 was killed by SIGKILL",
            "engine": "engine process was killed by SIGKILL",
        }.get(victim, "")
        assert expected in message
        assert victim == "frontend is closed" or seconds < ERROR_SECONDS + spare_seconds()
        assert node.wait(10) == {"node": -signal.SIGKILL, "frontend is closed": 0}.get(victim, 1)
        assert workers_of(os.getpid()) == []


@pytest.mark.slow
def test_two_servers_with_other_models_end_with_a_sentence(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    given = two_nodes(tiny_model("llama"), tmp_path, tensor_parallel_size=2)
    with second_node({**given, "model": str(tiny_model("llama-biases"))}) as node:
        with pytest.raises(ConfigError, match="Node 1 has other files of the model than node 0"):
            LLM(**given)
        assert node.wait(10) == 2
        assert node.stderr is not None and "other files of the model" in node.stderr.read()


def test_an_engine_is_on_the_first_node_only(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="only the first node has an engine: `minivllm serve` runs the others"
    ):
        LLM(**two_nodes(tiny_model("llama"), tmp_path, tensor_parallel_size=2), node_rank=1)


def run_ip(*arguments: str) -> bool:
    return subprocess.run(["ip", *arguments], capture_output=True).returncode == 0


@pytest.fixture
def two_networks() -> Iterator[tuple[list[str], list[str], str]]:
    """Commands that run others in a network of their own each, joined by a cable,
    and the address of the first."""
    names = [f"minivllm-{os.getpid()}-{number}" for number in range(2)]
    if shutil.which("ip") is None or not all(run_ip("netns", "add", name) for name in names):
        pytest.skip("no network namespaces can be made here")
    try:
        assert run_ip(
            "link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "cable1", "netns", names[1]
        )
        for number, name in enumerate(names):
            assert run_ip("-n", name, "address", "add", f"10.77.0.{1 + number}/24", "dev", f"cable{number}")
            for device in ("lo", f"cable{number}"):
                assert run_ip("-n", name, "link", "set", device, "up")
        first, second = (["ip", "netns", "exec", name] for name in names)
        yield first, second, "10.77.0.1"
    finally:
        for name in names:
            run_ip("netns", "delete", name)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_two_networks_give_the_tokens_of_one_process(
    two_networks: tuple[list[str], list[str], str],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    layout: Any,
) -> None:
    first, second, address = two_networks
    model = tiny_model("llama-biases", **UNEVEN)
    with LLM(**arguments(model)) as llm:
        [output] = llm.generate(["some words"], SamplingParams(temperature=0.0, max_tokens=20))
    given = two_nodes(model, tmp_path, master_addr=address, **layout)
    program = [sys.executable, "-m", "minivllm"]
    flags = [given["model"], *engine_flags(EngineArgs(**given))]
    prompt = ["-p", "some words", "--temperature", "0", "--max-tokens", "20", "--json"]
    node = subprocess.Popen([*second, *program, "serve", *flags, "--node-rank", "1"])
    told = subprocess.run(
        [*first, *program, "generate", "--model", *flags, *prompt], capture_output=True, timeout=100
    )
    assert json.loads(told.stdout)["token_ids"] == list(output.outputs[0].token_ids)
    assert node.wait(10) == 0


@pytest.mark.slow
def test_a_network_that_falls_silent_ends_both_nodes(
    two_networks: tuple[list[str], list[str], str], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """A cable that is pulled says nothing: the signs of life stop coming."""
    first, second, address = two_networks
    given = two_nodes(
        tiny_model("llama"),
        tmp_path,
        master_addr=address,
        tensor_parallel_size=2,
        max_num_batched_tokens=None,
    )
    program = [sys.executable, "-m", "minivllm", "serve", given["model"], *engine_flags(EngineArgs(**given))]
    nodes = [
        subprocess.Popen([*network, *program, *more], stderr=subprocess.PIPE, text=True)
        for network, more in ((first, ["--port", "0"]), (second, ["--node-rank", "1"]))
    ]
    assert nodes[0].stderr is not None
    for line in nodes[0].stderr:
        if "Serving" in line:
            break
    pulled = time.monotonic()
    assert run_ip("-n", first[-1], "link", "set", "cable0", "down")
    rest = [node.communicate(timeout=30)[1] for node in nodes]
    assert time.monotonic() - pulled < 20
    assert "The connection to node 1 (10.77.0.2) was lost" in rest[0] and nodes[0].returncode == 1
    assert "The connection to node 0 at 10.77.0.1" in rest[1] and nodes[1].returncode == 1
