"""Workers on several nodes behind one executor, with mocks in place of workers:
who learns what, and who gets in."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from minivllm import EngineArgs
from minivllm.config import EngineConfig, NodesConfig
from minivllm.distributed.secure_sockets import SecureSockets
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.executor.multiproc import MultiprocExecutor
from minivllm.executor.nodes.agent import NodeAgent
from minivllm.executor.nodes.head import HeadNode
from minivllm.executor.nodes.messages import FromWorker, Hello, settings_of, versions
from minivllm.messages import SchedulerOutput, TokenMasks
from tests.executor.node_program import SETTINGS, start
from tests.executor.small_engine import command_of
from tests.executor.test_multiproc import CONFIG, STEP, command, nothing_left, wait_until
from tests.patience import ERROR_SECONDS, spare_seconds


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "node.key")


def write_key(path: Path) -> Path:
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def config_of(key_file: Path, rank: int = 0, nnodes: int = 2, workers: int = 2, **more: Any) -> EngineConfig:
    nodes = NodesConfig(
        nnodes=nnodes,
        node_rank=rank,
        master_addr="127.0.0.1",
        master_port=free_port(),
        key_file=str(key_file),
    )
    return replace(CONFIG, tensor_parallel_size=workers, executor="mp", nodes=nodes, **more)


def on_node(config: EngineConfig, rank: int) -> EngineConfig:
    assert config.nodes is not None
    return replace(config, nodes=replace(config.nodes, node_rank=rank))


@dataclass
class Cluster:
    executor: MultiprocExecutor
    agents: list[Future[int]]


@contextlib.contextmanager
def cluster(config: EngineConfig, fault: str = "none") -> Iterator[Cluster]:
    """The first node here, the others in threads."""
    assert config.nodes is not None
    with ThreadPoolExecutor(config.nodes.nnodes) as pool:
        agents = [
            pool.submit(NodeAgent(on_node(config, rank), SETTINGS, command(fault)).run)
            for rank in range(1, config.nodes.nnodes)
        ]
        executor = start(config, fault)
        try:
            yield Cluster(executor, agents)
        finally:
            executor.shutdown()


def test_steps_calls_and_masks_reach_the_workers_of_all_nodes(
    key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "minivllm"), nothing_left():
        with cluster(config_of(key_file, nnodes=3, workers=6)) as nodes:
            executor = nodes.executor
            assert [group.num_blocks for group in executor.kv_groups] == [10]  # the smallest cache of any
            assert executor.collective("weight_checksums") == [[float(rank)] for rank in range(6)]
            first, second = executor.execute_model(STEP), executor.execute_model(STEP)
            masked = executor.execute_model(STEP, lambda: TokenMasks(first_rows={}, bits=b"", words=42))
            assert [pending.result().sampled_token_ids for pending in (first, second)] == [{"a": [7]}] * 2
            assert masked.result().sampled_token_ids == {"a": [42]}
            large = SchedulerOutput(num_scheduled_tokens={f"{index:01000}": 1 for index in range(5000)})
            assert len(executor.execute_model(large).result().sampled_token_ids) == 5000  # larger than a ring
        assert [agent.result(5) for agent in nodes.agents] == [0, 0]
    assert {f"hello from {rank}" for rank in range(6)} <= {record.getMessage() for record in caplog.records}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param(
            "start:1",
            r"(?s)worker of rank 1 died of OSError: no such device.*Traceback.*mock_worker",
            marks=pytest.mark.slow,
        ),
        ("step:1", r"(?s)worker of rank 1 died of ValueError: the model has a fever.*in serve"),
        pytest.param(
            "step:0",
            r"(?s)worker of rank 0 died of ValueError: the model has a fever.*in serve",
            marks=pytest.mark.slow,
        ),
        ("differ:1", "In step 5 of the engine the worker of rank 1 sampled other"),
        pytest.param(
            "hang:1",
            r"(?s)worker of rank 1 hangs: its step has taken 0\.3 s.*a mock that has hang",
            marks=pytest.mark.slow,
        ),
        pytest.param("config:1", "^the weights are no good.$", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_fails_on_any_node_ends_all_with_its_reason(
    key_file: Path, fault: str, message: str
) -> None:
    config = config_of(key_file, heartbeat_timeout=0.4 if "hang" in fault else 300)
    with nothing_left(), pytest.raises((EngineDeadError, ConfigError), match=message):  # noqa: SIM117
        with cluster(config, fault) as nodes:
            deadline = time.monotonic() + 20  # the rank that answers may be faster than news of another one
            while time.monotonic() < deadline:
                nodes.executor.execute_model(STEP).result()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_worker_killed_on_any_node_is_named_within_a_second(key_file: Path, rank: int) -> None:
    with nothing_left(), cluster(config_of(key_file), "hang:0") as nodes:
        told = threading.Event()
        nodes.executor.when_dead(lambda error: told.set())
        pending = nodes.executor.execute_model(STEP)
        [pid] = [
            child.pid
            for child in psutil.Process().children()
            if (child.pid in nodes.executor.pids) == (rank == 0)
            and "tests.executor.mock_worker" in command_of(child)
        ]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=rf"worker of rank {rank} was killed by SIGKILL"):
            pending.result()
        assert time.monotonic() - killed < ERROR_SECONDS + spare_seconds() and told.wait(1.0)
        assert nodes.agents[0].result(5) == 1


def agent_program(config: EngineConfig, fault: str = "none") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.executor.node_program", msgspec.json.encode(config).decode(), fault],
        stderr=subprocess.PIPE,
    )


@pytest.mark.slow
def test_a_node_that_is_killed_is_named_within_a_second_and_its_workers_end(key_file: Path) -> None:
    config = config_of(key_file)
    with nothing_left():
        agent = agent_program(on_node(config, 1))
        executor = start(config)
        workers = [child.pid for child in psutil.Process(agent.pid).children()]
        assert len(workers) == 1
        told: list[float] = []
        executor.when_dead(lambda error: told.append(time.monotonic()))
        killed = time.monotonic()
        agent.kill()
        assert wait_until(lambda: bool(told)) and told[0] - killed < 1.0
        with pytest.raises(EngineDeadError, match=r"The connection to node 1 \(127\.0\.0\.1\) was lost"):
            executor.execute_model(STEP)
        assert wait_until(lambda: not any(map(psutil.pid_exists, workers)), 2.0)
        executor.shutdown()
        agent.communicate()


@pytest.mark.slow
def test_nodes_end_with_the_first_one_that_is_killed(key_file: Path) -> None:
    config = config_of(key_file)
    program = (
        "import os, sys, msgspec; sys.path.insert(0, os.getcwd());"
        "from tests.executor.node_program import *;"
        "executor = start(read(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    with nothing_left(), ThreadPoolExecutor(1) as pool:
        agent = pool.submit(NodeAgent(on_node(config, 1), SETTINGS, command("none")).run)
        head = subprocess.Popen([sys.executable, "-c", program, msgspec.json.encode(config).decode()])
        assert head.wait(60) == -signal.SIGKILL
        with pytest.raises(
            EngineDeadError, match=r"The connection to node 0 at 127\.0\.0\.1, port \d+ was lost"
        ):
            agent.result(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**SETTINGS, "dtype": '"bfloat16"'},
            'Node 1 has dtype "bfloat16", but node 0 has "float32": give the same',
        ),
        ({**SETTINGS, "the model's files": '"abd"'}, "Node 1 has other files of the model than node 0"),
        ({**SETTINGS, "new": "1"}, "Node 1 has new 1, but node 0 has nothing"),
    ],
)
def test_a_node_with_another_model_or_settings_ends_both_with_a_sentence(
    key_file: Path, settings: dict[str, str], message: str
) -> None:
    config = config_of(key_file)
    with nothing_left(), ThreadPoolExecutor(1) as pool:
        agent = pool.submit(NodeAgent(on_node(config, 1), settings, command("none")).run)
        with pytest.raises(ConfigError, match=message):
            HeadNode(config, SETTINGS)
        with pytest.raises(ConfigError, match=message):
            agent.result(5)


def test_versions_are_compared_before_settings(key_file: Path) -> None:
    config = config_of(key_file)
    agent = NodeAgent(on_node(config, 1), {}, command("none"))
    agent._hello = msgspec.structs.replace(agent._hello, versions={**versions(), "torch": "9.9"})
    with nothing_left(), ThreadPoolExecutor(1) as pool:
        result = pool.submit(agent.run)
        with pytest.raises(ConfigError, match=r"Node 1 has torch 9\.9, but node 0 has .* install the same"):
            HeadNode(config, SETTINGS)
        with pytest.raises(ConfigError, match="install the same"):
            result.result(5)


def test_a_node_with_another_key_is_not_let_in_and_hears_why(key_file: Path, tmp_path: Path) -> None:
    config = config_of(key_file)
    other = on_node(config, 1)
    other = replace(other, nodes=replace(other.nodes, key_file=str(write_key(tmp_path / "other.key"))))
    with nothing_left(), cluster(config) as nodes:
        with pytest.raises(ConfigError, match="does not answer as a first node with the same key does"):
            NodeAgent(other, SETTINGS, command("none")).run()
        assert nodes.executor.execute_model(STEP).result().sampled_token_ids == {"a": [7]}


@pytest.mark.slow
def test_a_second_node_of_a_rank_is_refused_and_the_others_go_on(key_file: Path) -> None:
    config = config_of(key_file, nnodes=3, workers=3)
    with nothing_left(), ThreadPoolExecutor(4) as pool:
        head = pool.submit(HeadNode, config, SETTINGS)
        agents = [pool.submit(NodeAgent(on_node(config, 1), SETTINGS, command("none")).run) for _ in range(2)]
        assert wait_until(lambda: any(agent.done() for agent in agents))
        [late] = [agent for agent in agents if agent.done()]
        with pytest.raises(ConfigError, match="There is a node 1 already"):
            late.result()
        pool.submit(NodeAgent(on_node(config, 2), SETTINGS, command("none")).run)
        executor = start(config, head=head.result(20))
        with pytest.raises(ConfigError, match="Node 0 serves with all of its nodes already"):
            NodeAgent(on_node(config, 2), SETTINGS, command("none")).run()
        assert executor.execute_model(STEP).result().sampled_token_ids == {"a": [7]}
        executor.shutdown()


def test_a_node_that_leaves_before_all_are_there_may_come_again(key_file: Path) -> None:
    config = config_of(key_file, nnodes=3, workers=3)
    assert config.nodes is not None
    with nothing_left(), ThreadPoolExecutor(3) as pool:
        head = pool.submit(HeadNode, config, SETTINGS)
        sockets, address = SecureSockets(key_file.read_bytes()), f"tcp://127.0.0.1:{config.nodes.master_port}"
        early, late = (sockets.client(zmq.DEALER, address) for _ in range(2))
        for node in (early, late):
            node.connect(address)
        early.send(msgspec.msgpack.encode(Hello(1, versions(), SETTINGS)))
        late.send(msgspec.msgpack.encode(Hello(1, versions(), SETTINGS)))
        # One of them is told that the other one is there.
        assert wait_until(lambda: bool(early.poll(0) or late.poll(0)))
        for node in (early, late):
            node.close()
        sockets.close()
        agents = []
        for rank in (1, 2):
            time.sleep(0.2)
            agents.append(pool.submit(NodeAgent(on_node(config, rank), SETTINGS, command("none")).run))
        executor = start(config, head=head.result(20))
        assert executor.execute_model(STEP).result().sampled_token_ids == {"a": [7]}
        executor.shutdown()
        assert [agent.result(5) for agent in agents] == [0, 0]


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def strangers(port: int, server_key: bytes) -> None:
    """What reaches the port without the key: no ZeroMQ at all, none that is secure, and an unknown client."""
    with socket.create_connection(("127.0.0.1", port)) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(500))
    context = zmq.Context()
    for make_secure in (False, True):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 200)
        if make_secure:
            public, private = zmq.curve_keypair()
            stranger.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            stranger.setsockopt(zmq.CURVE_PUBLICKEY, public)
            stranger.setsockopt(zmq.CURVE_SECRETKEY, private)
        stranger.connect(f"tcp://127.0.0.1:{port}")
        with contextlib.suppress(zmq.Again):  # refused already
            stranger.send(msgspec.msgpack.encode(Hello(1, versions(), SETTINGS)), zmq.NOBLOCK)
        stranger.close()
    context.term()


def test_nobody_takes_part_without_the_key(key_file: Path) -> None:
    """Not even who has found out the public key of the first node;
    and garbage of who has the key ends nothing."""
    config = config_of(key_file)
    assert config.nodes is not None
    with nothing_left(), ThreadPoolExecutor(2) as pool:
        head = pool.submit(HeadNode, config, SETTINGS)
        insider = SecureSockets(key_file.read_bytes())
        assert wait_until(partial(is_listening, config.nodes.master_port))
        strangers(config.nodes.master_port, insider._server[0])
        address = f"tcp://127.0.0.1:{config.nodes.master_port}"
        dealer = insider.client(zmq.DEALER, address)
        dealer.connect(address)
        for garbage in (
            b"",
            b"\xc1",
            os.urandom(300),
            msgspec.msgpack.encode(FromWorker(99, msgspec.Raw(b"\xc0"))),
        ):
            dealer.send(garbage)
            assert dealer.poll(5000) and b"another version" in dealer.recv()
        assert not head.done()
        agent = pool.submit(NodeAgent(on_node(config, 1), SETTINGS, command("none")).run)
        executor = start(config, head=head.result(20))
        strangers(config.nodes.master_port, insider._server[0])
        dealer.send(msgspec.msgpack.encode(FromWorker(1, msgspec.Raw(b"\xc0"))))
        assert dealer.poll(5000) and b"all of its nodes" in dealer.recv()
        assert executor.execute_model(STEP).result().sampled_token_ids == {"a": [7]}
        executor.shutdown()
        assert agent.result(5) == 0
        dealer.close()
        insider.close()


def test_the_first_node_says_where_it_cannot_listen(key_file: Path) -> None:
    config = config_of(key_file)
    assert config.nodes is not None
    message = r"cannot listen at 127.0.0.1, port \d+ \(Address already in use\)"
    with (
        socket.create_server(("127.0.0.1", config.nodes.master_port)),
        pytest.raises(ConfigError, match=message),
    ):
        HeadNode(config, SETTINGS)
    far = replace(config, nodes=replace(config.nodes, master_addr="192.0.2.1"))
    with pytest.raises(ConfigError, match="must be an address of this host"):
        HeadNode(far, SETTINGS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"node_rank": 2},
            "node_rank is 2, but nnodes is 2: nodes are counted from 0, so it must be at most 1",
        ),
        ({"node_rank": -1}, "node_rank is -1, but must be at least 0"),
        ({"tensor_parallel_size": 3}, "make 3 workers, which so many nodes cannot share evenly"),
        (
            {"node_key_file": None},
            "there is no node_key_file: nodes talk only to those who know the same secret",
        ),
        ({"data_parallel_size": 2}, "data_parallel_size is 2: set only one of them"),
        (
            {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
            "kv_transfer_config needs all workers on one",
        ),
        ({"master_port": 70000}, "master_port is 70000, but must be at most 65535"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_is_loaded(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**{"nnodes": 2, "tensor_parallel_size": 2, "node_key_file": "node.key", **given})


@pytest.mark.parametrize(
    ("contents", "mode", "message"),
    [
        (None, 0, "cannot be read"),
        ("x" * 64, 0o644, "can be read by other users"),
        ("short", 0o600, "has 5 bytes"),
    ],
)
def test_keys_that_are_no_secrets_are_refused(
    tmp_path: Path, contents: str | None, mode: int, message: str
) -> None:
    path = tmp_path / "key"
    if contents is not None:
        path.write_text(contents)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        HeadNode(config_of(path), SETTINGS)


def test_settings_name_what_workers_compute_with_and_not_where_it_lies(
    tiny_model: Callable[..., Path],
) -> None:
    first, second = tiny_model("llama"), tiny_model("llama", num_hidden_layers=1)
    config = replace(CONFIG, model_path=str(first))
    short_steps = replace(config.scheduler, max_num_batched_tokens=128)
    same = replace(config, model="another name", profile="/somewhere", scheduler=short_steps)
    assert settings_of(config) == settings_of(same)
    other = replace(config, model_path=str(second), seed=1, cache=replace(config.cache, block_size=8))
    mine, theirs = settings_of(config), settings_of(other)
    assert {name for name in mine if mine[name] != theirs[name]} == {
        "the model's files",
        "seed",
        "cache.block_size",
    }
