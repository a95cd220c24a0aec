"""The engine process under faults, with a mock in place of the model:
who learns what, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.config import EngineArgs
from minivllm.engine_process import connection as connection_module
from minivllm.engine_process.connection import EngineConnection
from minivllm.engine_process.process_clients import AsyncProcessClient, ProcessClient
from minivllm.engine_process.protocol import frames
from minivllm.errors import ConfigError, EngineDeadError, MinivllmError, ModelError, RequestError
from minivllm.executor.records import private_directories
from minivllm.executor.records.private_directories import LOCK_FILE, PrivateDirectory
from minivllm.messages import EngineOutput, EngineRequest, FinishReason, SchedulerStats
from minivllm.sampling_params import SamplingParams
from tests import mock_engine
from tests.mock_engine import COMMAND, CRASH, HANG, RAISE, expected_tokens


def connect(model: str = "mock", **arguments: Any) -> EngineConnection:
    return EngineConnection(EngineArgs(model=model, **arguments), COMMAND)


def request(request_id: str, prompt: list[int], max_tokens: int = 8) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        max_tokens=max_tokens,
        seed=0,
        arrival_time=0.0,
    )


def generate(client: ProcessClient, *requests: EngineRequest) -> dict[str, EngineOutput]:
    """Run requests to their end; for each, the last output with all its tokens."""
    for each in requests:
        client.add_request(each)
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    last: dict[str, EngineOutput] = {}
    while client.has_unfinished_requests():
        for output in client.get_outputs():
            if output.request_id not in tokens:
                continue  # what a mutated frame happened to ask for
            tokens[output.request_id] += output.new_token_ids
            output.new_token_ids = tokens[output.request_id]
            last[output.request_id] = output
    return last


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture(scope="module")
def connection() -> Iterator[EngineConnection]:
    """An engine that no test kills."""
    connection = connect()
    yield connection
    connection.close()


@pytest.fixture
def client(connection: EngineConnection) -> Iterator[ProcessClient]:
    client = ProcessClient(connection)
    yield client
    while (stats := client.stats()).num_running + stats.num_waiting:
        pass  # what mutated frames happened to ask for ends, too
    client.call("check_integrity")
    assert stats.kv_cache_usage == 0.0


# Sockets and messages


def test_only_the_user_can_reach_the_sockets_and_they_are_removed() -> None:
    connection = connect()
    directory = Path(connection._directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    sockets = [path for path in directory.iterdir() if stat.S_ISSOCK(path.stat().st_mode)]
    assert [stat.S_IMODE(path.stat().st_mode) for path in sockets] == [0o600, 0o600]
    connection.close()
    assert not directory.exists() and is_gone(connection.process.pid)
    connection.close()


def test_ctrl_c_while_the_process_is_made_ends_it_quietly(
    ctrl_c_interrupts: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The engine has not been told yet what to start, and the frontend not where it is."""
    started: list[subprocess.Popen[bytes]] = []
    directories: list[Path] = []
    make_process, make_directory = subprocess.Popen, connection_module.PrivateDirectory

    def interrupted(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        started.append(make_process(*arguments, **settings))
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        return started[0]

    def recorded() -> PrivateDirectory:
        directory = make_directory()
        directories.append(directory.path)
        return directory

    monkeypatch.setattr(connection_module.subprocess, "Popen", interrupted)
    monkeypatch.setattr(connection_module, "PrivateDirectory", recorded)
    with pytest.raises(KeyboardInterrupt):
        connect()
    gc.collect()
    assert started[0].poll() == 0
    assert not directories[0].exists()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Short enough for sockets inside, wherever the tests keep their files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


def test_the_directory_of_a_killed_owner_is_removed_by_the_next_start(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of owners that live stay, and what is no such directory."""
    tmp_path = short_directory
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    script = (
        "import tempfile, sys, time\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from minivllm.executor.records.private_directories import PrivateDirectory\n"
        "print(PrivateDirectory().path, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        killed = Path(owner.stdout.readline().strip())
        (killed / "socket").touch()
        (tmp_path / "minivllm-other").mkdir()
        (tmp_path / "other").mkdir()
        first = PrivateDirectory()
        assert killed.exists(), "its owner lives"
        owner.kill()
        owner.wait()
    second = PrivateDirectory()
    assert {one.name for one in tmp_path.iterdir()} == {
        "minivllm-other",
        "other",
        first.path.name,
        second.path.name,
    }
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700 and (first.path / LOCK_FILE).exists()
    first.remove()
    second.remove()
    assert {one.name for one in tmp_path.iterdir()} == {"minivllm-other", "other"}


def test_a_long_directory_for_temporary_files_is_left_for_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 25)))
    directory = PrivateDirectory()
    assert directory.path.parent == Path("/tmp")
    assert len(os.fsencode(directory.path / frames.REQUESTS_SOCKET)) <= private_directories.MAX_SOCKET_PATH
    directory.remove()


def test_closing_gives_every_descriptor_and_thread_back() -> None:
    connect().close()
    this = psutil.Process()
    before = this.num_fds(), this.num_threads()
    connect().close()
    assert (this.num_fds(), this.num_threads()) == before


def test_requests_run_together_and_each_gets_its_own_tokens(client: ProcessClient) -> None:
    prompts = [[number, *range(2, 2 + number)] for number in range(3, 40)]
    outputs = generate(client, *(request(f"r{prompt[0]}", prompt) for prompt in prompts))
    for prompt in prompts:
        output = outputs[f"r{prompt[0]}"]
        assert output.new_token_ids == expected_tokens(prompt, 8)
        assert output.finish_reason is FinishReason.LENGTH


def test_ready_carries_what_the_engine_resolved(client: ProcessClient) -> None:
    assert client.config.scheduler.max_model_len == 256
    assert (client.model_vocab_size, client.eos_token_ids) == (1000, (1,))
    assert [(group.name, group.num_blocks) for group in client.kv_groups] == [("full attention", 100)]


def test_bad_request_gets_an_error_and_nobody_else_notices(client: ProcessClient) -> None:
    outputs = generate(client, request("good", [5, 6]), request("too long", [5] * 300), request("fine", [7]))
    assert outputs["too long"].finish_reason is FinishReason.ERROR
    assert "300 tokens, but max_model_len is 256" in str(outputs["too long"].error)
    assert outputs["good"].new_token_ids == expected_tokens([5, 6], 8)
    assert outputs["fine"].new_token_ids == expected_tokens([7], 8)


def test_calls_are_answered_while_requests_run_and_lose_no_output(client: ProcessClient) -> None:
    client.add_request(request("a", [9, 9], max_tokens=50))
    stats = [client.stats() for _ in range(5)]
    assert all(isinstance(each, SchedulerStats) for each in stats)
    tokens: list[int] = []
    while client.has_unfinished_requests():
        tokens += [token for output in client.get_outputs() for token in output.new_token_ids]
    assert tokens == expected_tokens([9, 9], 50)
    assert client.get_outputs() == []


@pytest.mark.parametrize("call", [("shutdown",), ("__init__",), ("stats", 1), ("no such thing",)])
def test_only_what_is_listed_can_be_called(client: ProcessClient, call: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError, match="cannot be called"):
        client.call(*call)


def test_log_of_the_engine_goes_to_the_loggers_of_the_frontend(
    connection: EngineConnection, client: ProcessClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        connection._router.send_multipart([connection._identity, b"\xc1"])
        client.call("heartbeat")
    assert [(record.name, record.levelname) for record in caplog.records] == [
        ("minivllm.engine_process.process", "WARNING")
    ]
    assert "malformed" in caplog.text


VALID = frames.Codec().encode(frames.Add(request("v", [1, 2, 3])))
MUTATIONS = st.one_of(
    st.binary(max_size=64),
    st.tuples(st.integers(0, len(VALID) - 1), st.binary(min_size=1, max_size=4)).map(
        lambda change: VALID[: change[0]] + change[1] + VALID[change[0] + len(change[1]) :]
    ),
    st.integers(0, len(VALID) - 1).map(lambda length: VALID[:length]),
    st.sampled_from([b"\x91" * 5000, b"\xdd\xff\xff\xff\xff", b"\x85" + b"\xa4type\xa3add" * 5]),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(MUTATIONS, min_size=1, max_size=8))
def test_malformed_frames_to_the_engine_are_harmless(
    connection: EngineConnection, client: ProcessClient, sent: list[bytes]
) -> None:
    """Whatever arrives where requests arrive: the engine serves on, and keeps nothing of it."""
    for frame in sent:
        connection._router.send_multipart([connection._identity, frame])
    outputs = generate(client, request("mine", [11, 12]))
    assert outputs["mine"].new_token_ids == expected_tokens([11, 12], 8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(st.lists(MUTATIONS, min_size=1, max_size=3), min_size=1, max_size=4))
def test_malformed_frames_to_the_frontend_are_harmless(
    connection: EngineConnection, client: ProcessClient, sent: list[list[bytes]]
) -> None:
    """A peer of the same user that knows the sockets' paths sends to both of them."""
    context = zmq.Context()
    try:
        for kind, name in ((zmq.PUSH, frames.OUTPUTS_SOCKET), (zmq.DEALER, frames.REQUESTS_SOCKET)):
            socket = context.socket(kind)
            socket.connect(f"ipc://{connection._directory}/{name}")
            for parts in sent:
                socket.send_multipart(parts)
        assert generate(client, request("mine", [11, 12]))["mine"].new_token_ids == expected_tokens(
            [11, 12], 8
        )
    finally:
        context.destroy(linger=0)


def test_abort_frees_the_blocks_within_one_step() -> None:
    connection = connect("mock:0.02")
    client = ProcessClient(connection)
    for number in range(8):
        client.add_request(request(f"r{number}", [number + 2] * 40, max_tokens=200))
    while client.stats().num_running < 8:
        pass
    client.abort([f"r{number}" for number in range(4)])
    before, after = client.stats(), client.stats()
    assert (before.num_running, after.num_running) == (4, 4)
    client.abort([f"r{number}" for number in range(8)])
    aborted = client.stats()
    assert (aborted.num_running, aborted.kv_cache_usage) == (0, 0.0)
    assert aborted.num_steps - after.num_steps <= 1
    client.close()


# Starting


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ("no-config", ConfigError, "^max_model_len is 1, but must be 2.$"),
        ("no-model", ModelError, "^There is no such model.$"),
        ("bug", EngineDeadError, r"(?s)died of KeyError.*mock_engine\.py.*raise KeyError\(\"lm_head\"\)"),
        ("exit", EngineDeadError, "ended with status 7"),
    ],
)
def test_start_that_fails_raises_its_own_error_and_leaves_nothing(
    model: str, error: type[MinivllmError], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(error, match=text) as raised:
        connect(model)
    assert raised.type is error
    assert list(tmp_path.iterdir()) == []


def test_a_deep_temporary_directory_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    connect().close()
    assert list(deep.iterdir()) == []


# Dying


def fail(client: ProcessClient, first_token: int) -> EngineDeadError:
    client.add_request(request("fine", [5], max_tokens=200))
    client.get_outputs()
    client.add_request(request("bad", [first_token, 3]))
    with pytest.raises(EngineDeadError) as raised:
        while True:
            client.get_outputs()
    return raised.value


@pytest.mark.parametrize(
    ("first_token", "text"),
    [
        (RAISE, r"(?s)died of ValueError: the model has a fever.*mock_engine\.py.*in run"),
        (CRASH, r"(?s)killed by SIGSEGV.*mock_engine\.py.*in run"),
        (HANG, r"(?s)not answered for 1\.5 s and was killed.*mock_engine\.py.*in run"),
    ],
)
def test_death_in_a_step_tells_everybody_where_it_happened(first_token: int, text: str) -> None:
    connection = connect(heartbeat_timeout=1.5)
    client = ProcessClient(connection)
    error = fail(client, first_token)
    assert re.search(text, str(error)), str(error)
    for use in (client.get_outputs, client.stats, lambda: client.add_request(request("late", [5]))):
        with pytest.raises(EngineDeadError) as again:
            use()
        assert again.value is error
    client.close()
    assert is_gone(connection.process.pid)


def test_kill_is_noticed_while_waiting_and_while_sending() -> None:
    for waits in (True, False):
        client = ProcessClient(connection := connect("mock:0.01"))
        client.add_request(request("a", [5], max_tokens=200))
        client.get_outputs()
        os.kill(connection.process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"killed by SIGKILL.*memory runs out"):
            while True:
                if waits:
                    client.get_outputs()
                else:
                    client.add_request(request("b", [6]))
        client.close()
        assert not Path(connection._directory).exists()


def test_ctrl_c_and_sigterm_leave_the_end_to_the_frontend() -> None:
    connection = connect()
    client = ProcessClient(connection)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(connection.process.pid, number)
    assert generate(client, request("a", [5]))["a"].new_token_ids == expected_tokens([5], 8)
    client.close()


PARENT = """
import sys, time
sys.path[:0] = {tests!r}
from tests.engine.test_engine_process import connect, request, ProcessClient
connection = connect({model!r})
client = ProcessClient(connection)
client.add_request(request("a", [{first}], max_tokens=200))
print(connection.process.pid, connection._directory, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(("model", "first_token"), [("mock:0.01", 5), ("mock", HANG)])
def test_death_of_the_parent_ends_the_engine_even_in_a_step_that_hangs(model: str, first_token: int) -> None:
    program = PARENT.format(tests=[str(Path(__file__).parents[2])], model=model, first=first_token)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    assert psutil.pid_exists(int(pid)) and Path(directory).exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: is_gone(int(pid)) and not Path(directory).exists())


def test_program_that_forgets_to_close_leaves_nothing(tmp_path: Path) -> None:
    program = PARENT.format(tests=[str(Path(__file__).parents[2])], model="mock", first=5).replace(
        "time.sleep(1000)", ""
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    pid, directory = done.stdout.split()
    assert is_gone(int(pid)) and not Path(directory).exists()


# The asynchronous client


def test_asynchronous_client_tells_of_a_death_once_and_fails_every_call() -> None:
    async def main() -> None:
        connection = connect(heartbeat_timeout=60)
        client = AsyncProcessClient(connection)
        deaths: list[EngineDeadError] = []

        async def ignore(outputs: list[EngineOutput]) -> None:
            pass

        client.start(ignore, deaths.append)
        os.kill(connection.process.pid, signal.SIGSTOP)
        calls = [asyncio.ensure_future(client.call("stats")) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(connection.process.pid, signal.SIGKILL)
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results == [client.dead_error] * 3 and deaths == [client.dead_error]
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await client.call("stats")
        await client.close()
        assert len(deaths) == 1
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_mock_engine_needs_no_torch() -> None:
    """Else these tests would start slowly;
    and the frontend's half of a process split would carry torch along."""
    names = ("connection", "process_clients", "process", "client")
    modules = ", ".join(f"minivllm.engine_process.{name}" for name in names)
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert mock_engine.VOCAB_SIZE == 1000
