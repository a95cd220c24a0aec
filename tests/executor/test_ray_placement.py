"""What is decided and said around Ray, without a cluster:
how many nodes, who learns the secret, what is refused."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm import EngineArgs
from minivllm.config import NodesConfig, engine_args
from minivllm.engine_process.ray import executor as ray_executor
from minivllm.engine_process.ray.agent import run_node
from minivllm.engine_process.ray.choice import choose_nodes
from minivllm.engine_process.ray.executor import Placement
from minivllm.engine_process.ray.messages import Launch, Left, NodeStart, Place, Placed, ToPlacer
from minivllm.errors import ConfigError, EngineDeadError, ModelError
from minivllm.executor.multiproc import MultiprocExecutor
from minivllm.executor.nodes.agent import NodeAgent
from minivllm.executor.records.child_reports import ErrorInfo, Log
from minivllm.executor.records.records import Channel, Died
from tests.executor.node_program import SETTINGS
from tests.executor.small_engine import command_of
from tests.executor.test_multiproc import CONFIG, STEP, command, nothing_left

WORKERS = replace(CONFIG, tensor_parallel_size=2, executor="mp")


@pytest.fixture(autouse=True)
def ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "find_spec", lambda name: object())


def ray_args(**more: Any) -> EngineArgs:
    return EngineArgs(**{"distributed_executor_backend": "ray", "tensor_parallel_size": 2, **more})


@given(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=5), st.none() | st.integers(1, 5))
def test_the_fewest_nodes_are_chosen_that_hold_the_workers_evenly(
    num_workers: int, room: list[int], nnodes: int | None
) -> None:
    def can_be(count: int) -> bool:
        groups = [group for group in combinations(range(len(room)), count) if 0 in group]
        return num_workers % count == 0 and any(
            all(room[node] * count >= num_workers for node in group) for group in groups
        )

    asked = range(1, num_workers + 1) if nnodes is None else [nnodes]
    assert choose_nodes(num_workers, room, nnodes) == next((count for count in asked if can_be(count)), None)


@pytest.mark.parametrize(
    "more",
    [
        {"node_key_file": "node.key"},
        {"master_addr": "10.0.0.1"},
        {"master_port": 7000},
        {"nnodes": 2, "node_rank": 1},
        {"data_parallel_size": 2},
        {"kv_transfer_config": {"kv_connector": "OffloadingConnector"}},
    ],
    ids=str,
)
def test_what_does_not_go_with_ray_is_named(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"is 'ray', which does not go with {[*more][-1]}: leave that out"):
        ray_args(**more)


def test_nodes_that_cannot_share_evenly_are_refused_before_ray_is_asked() -> None:
    with pytest.raises(ConfigError, match="make 2 workers, which so many nodes cannot share evenly"):
        ray_args(nnodes=3)
    assert ray_args(nnodes=2).executor == "ray"


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_args, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs Ray: pip install 'minivllm\[ray\]'"):
        ray_args()


class Ended:
    """The process that talks to Ray, as a thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self._thread = thread

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        return 0

    def kill(self) -> None:
        pass


FakeRay = Callable[[Callable[[Channel], None]], None]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    """Have a function talk to an engine in place of that process."""
    threads = []

    def use(serve: Callable[[Channel], None]) -> None:
        def start(_: Any, received: Any, environment: Any) -> tuple[Ended, Channel]:
            own, theirs = socket.socketpair()
            channel = Channel(theirs, ToPlacer)

            def run() -> None:
                serve(channel)
                channel.close()

            threads.append(threading.Thread(target=run, daemon=True))
            threads[-1].start()
            return Ended(threads[-1]), Channel(own, received)

        monkeypatch.setattr(ray_executor, "start_process", start)
        monkeypatch.setattr(ray_executor, "settings_of", lambda config: SETTINGS)

    yield use
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_nodes_that_ray_starts_serve_as_others_and_the_secret_stays_between_them(
    fake_ray: FakeRay, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Any] = []

    def serve(channel: Channel) -> None:
        place: Place = channel.receive_one()
        channel.send(Log("minivllm.ray", 30, "there is no room yet"))
        channel.send(Placed(2, "127.0.0.1"))
        order: Launch = channel.receive_one()
        [start] = [msgspec.msgpack.decode(start, type=NodeStart) for start in order.starts]
        agent = NodeAgent(replace(WORKERS, nodes=start.node), SETTINGS, command("none"), start.secret)
        heard.extend((place, start, agent.run()))

    fake_ray(serve)
    facts = cast(Any, SimpleNamespace(vocab_size=100))
    with caplog.at_level("DEBUG", "minivllm"), nothing_left():
        placement = Placement(ray_args(), WORKERS)
        executor = MultiprocExecutor(placement.config, facts, command("none"), placement.head())
        assert executor.collective("weight_checksums") == [[0.0], [1.0]]
        assert executor.execute_model(STEP).result().sampled_token_ids == {"a": [7]}
        commands = "".join(map(command_of, psutil.Process().children(recursive=True)))
        executor.shutdown()
        placement.close()
    place, start, status = heard
    assert status == 0 and (place.num_workers, place.nnodes, place.resource) == (2, None, "CPU")
    assert start.args == ray_args() and start.directory == os.getcwd() and len(start.secret) == 32
    shown = f"{caplog.text}{commands}{placement.config}{msgspec.json.encode(placement.config).decode()}"
    assert "there is no room yet" in shown
    assert start.secret.hex() not in shown and repr(start.secret) not in shown
    with Other(fake_ray) as other:
        assert other.secret != start.secret


class Other:
    """A second start, up to what its nodes are given."""

    def __init__(self, fake_ray: FakeRay) -> None:
        def serve(channel: Channel) -> None:
            channel.receive_one()
            channel.send(Placed(2, "127.0.0.1"))
            [start] = channel.receive_one().starts
            self.secret = msgspec.msgpack.decode(start, type=NodeStart).secret
            channel.receive()

        fake_ray(serve)
        self._done = self._placement = Placement(ray_args(), WORKERS)

    def __enter__(self) -> Other:
        self._placement.start(1)
        while not hasattr(self, "secret"):
            threading.Event().wait(0.01)
        return self

    def __exit__(self, *exception: object) -> None:
        self._placement.close()


def fail(error: Exception) -> ErrorInfo:
    return ErrorInfo.of(error)


@pytest.mark.parametrize(
    ("placed", "last", "kind", "message"),
    [
        (None, Died(fail(ConfigError("There is no room."))), ConfigError, "^There is no room.$"),
        (None, None, EngineDeadError, "process that talks to Ray ended with status 0"),
        (
            2,
            Left("node 1 (10.0.0.2)", fail(ModelError("No weights."))),
            ModelError,
            r"^Node 1 \(10.0.0.2\): No weights.$",
        ),
        (
            2,
            Left("node 1 (10.0.0.2)", fail(ImportError("no minivllm"))),
            EngineDeadError,
            r"process of node 1 \(10.0.0.2\) died of ImportError: Node 1 \(10.0.0.2\): no minivllm",
        ),
        (2, Left("node 1 (10.0.0.2)", None), EngineDeadError, r"process of node 1 \(10.0.0.2\) has ended"),
        (2, None, EngineDeadError, "process that talks to Ray ended"),
    ],
    ids=str,
)
def test_what_keeps_a_node_away_is_told_while_the_engine_waits(
    fake_ray: FakeRay, placed: int | None, last: Any, kind: type[Exception], message: str
) -> None:
    def serve(channel: Channel) -> None:
        channel.receive_one()
        if placed is not None:
            channel.send(Placed(placed, "127.0.0.1"))
            channel.receive_one()
        if last is not None:
            channel.send(last)
            channel.receive()

    fake_ray(serve)
    with pytest.raises(kind, match=message), nothing_left():
        placement = Placement(ray_args(), WORKERS)
        try:
            placement.head()
        finally:
            placement.close()


def test_one_node_needs_no_connections(fake_ray: FakeRay) -> None:
    def serve(channel: Channel) -> None:
        channel.receive_one()
        channel.send(Placed(1, "127.0.0.1"))
        assert channel.receive() is None

    fake_ray(serve)
    placement = Placement(ray_args(), WORKERS)
    assert placement.config == WORKERS and placement.head() is None
    placement.close()


def test_a_node_says_why_it_cannot_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # as Ray does
    node = NodesConfig(nnodes=2, node_rank=1, master_addr="127.0.0.1", master_port=1, key_file="")
    args = ray_args(model="./no-such-model", device="cpu")
    for threads in ("3", None):
        start = NodeStart(args, node, secrets.token_bytes(32), str(tmp_path), threads)
        told = msgspec.msgpack.decode(run_node(msgspec.msgpack.encode(start)), type=ErrorInfo)
        assert told.kind == "ModelError" and "no-such-model" in told.message
        assert os.environ.get("OMP_NUM_THREADS") == threads and os.getcwd() == str(tmp_path)
