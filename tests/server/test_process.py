"""The command itself: a real engine process behind ``minivllm serve``, official clients,
signals and deaths."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

LONG: dict[str, Any] = {
    "prompt": [5, 6, 7],
    "max_tokens": 450,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


class Command:
    """A running ``minivllm serve``."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self._log = log
        command = [
            sys.executable,
            "-m",
            "minivllm.cli.main",
            "serve",
            str(model),
            "--enforce-eager",
            "--port",
            "0",
        ]
        command += [
            "--max-model-len",
            "512",
            "--num-gpu-blocks-override",
            "60",
            "--served-model-name",
            "tiny",
            *flags,
        ]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.wait_for(r"Serving tiny on (http://[0-9.:]+)")
        self.url = re.findall(r"Serving tiny on (http://[0-9.:]+)", self.log)[0]

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while re.search(pattern, self.log) is None:
            assert self.process.poll() is None and time.monotonic() < end, self.log[-3000:]
            time.sleep(0.05)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60)


@pytest.fixture
def start(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def make(*flags: str) -> Command:
        commands.append(Command(tiny_model("llama"), tmp_path / f"log-{len(commands)}", *flags))
        return commands[-1]

    yield make
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.wait(30)


@pytest.mark.slow
def test_greedy_answers_equal_the_offline_engine_and_sigterm_ends_it_with_0(
    start: Callable[..., Command], tiny_model: Callable[..., Path]
) -> None:
    from minivllm import LLM, SamplingParams

    prompts = [[5, 6, 7], [9] * 20, [30, 31]]
    command = start("--stats-interval", "0.2", "--log-json")
    with command.client() as client:
        answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=12, temperature=0)
        served = [choice.text for choice in answer.choices]
        for prompt, text in zip(prompts, served):
            chunks = client.completions.create(
                model="tiny", prompt=prompt, max_tokens=12, temperature=0, stream=True
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == text
    with LLM(
        str(tiny_model("llama")), enforce_eager=True, max_model_len=512, num_gpu_blocks_override=60
    ) as llm:
        params = SamplingParams(max_tokens=12, temperature=0.0)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        assert served == [output.outputs[0].text for output in outputs]
    command.wait_for('"message": "running ')
    assert '"path": "/v1/completions", "status": 200' in command.log
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(60) == 0


@pytest.mark.slow
def test_sigterm_aborts_what_does_not_finish_with_an_error_chunk(start: Callable[..., Command]) -> None:
    command = start("--drain-timeout", "0")
    with command.client() as client:
        stream = client.completions.create(model="tiny", **LONG)
        next(iter(stream))
        command.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            for _ in stream:
                pass
    assert command.process.wait(60) == 0
    assert "1 requests did not finish in time" in command.log


@pytest.mark.slow
def test_a_second_signal_exits_at_once(start: Callable[..., Command]) -> None:
    command = start("--drain-timeout", "300")
    children = psutil.Process(command.process.pid).children(recursive=True)
    with command.client() as client:
        stream = client.completions.create(model="tiny", **LONG)
        next(iter(stream))
        command.process.send_signal(signal.SIGTERM)
        command.wait_for("SIGTERM: finishing")
        start_of_end = time.monotonic()
        command.process.send_signal(signal.SIGTERM)
        assert command.process.wait(60) == 0
        print(f"a second SIGTERM took {time.monotonic() - start_of_end:.2f} s")
    assert psutil.wait_procs(children, timeout=30)[1] == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_at_every_moment_of_the_end_change_neither_the_code_nor_the_log(
    ctrl_c_interrupts: None, start: Callable[..., Command], number: int
) -> None:
    command = start()
    children = psutil.Process(command.process.pid).children(recursive=True)
    command.process.send_signal(signal.SIGTERM)
    while command.process.poll() is None:
        command.process.send_signal(number)
        time.sleep(0.003)
    assert command.process.returncode == 0
    assert "Traceback" not in command.log
    assert psutil.wait_procs(children, timeout=30)[1] == []


@pytest.mark.slow
def test_a_single_signal_that_comes_while_the_engine_is_closed_is_no_death(
    start: Callable[..., Command],
) -> None:
    command = start()
    [engine, *_] = psutil.Process(command.process.pid).children()
    command.process.send_signal(signal.SIGTERM)
    command.wait_for("SIGTERM: finishing")
    while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.001)
    with suppress(ProcessLookupError):
        command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(60) == 0


def test_a_killed_core_reaches_every_client_health_and_the_exit_code(start: Callable[..., Command]) -> None:
    command = start()
    server = psutil.Process(command.process.pid)
    children = server.children(recursive=True)
    [core] = [
        child for child in children if child.memory_info().rss == max(c.memory_info().rss for c in children)
    ]
    with command.client() as client:
        streams = [client.completions.create(model="tiny", **LONG) for _ in range(3)]
        for stream in streams:
            next(iter(stream))
        os.kill(core.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(openai.APIError, match="engine has died"):
                for _ in stream:
                    pass
        assert httpx.get(f"{command.url}/health").status_code == 503
    assert command.process.wait(60) == 1
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_ctrl_c_ends_a_start_at_once_and_quietly(
    ctrl_c_interrupts: None, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As a terminal sends it: to the whole process group, here while the engine process imports."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "minivllm.cli.main", "serve", str(tiny_model("llama")), "--port", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    server = psutil.Process(process.pid)
    while not server.children():
        assert process.poll() is None, log.read_text()
        time.sleep(0.01)
    children = server.children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert psutil.wait_procs(children, timeout=30)[1] == []
    assert log.read_text() == ""


def test_an_engine_that_dies_before_anything_is_asked_ends_the_server(start: Callable[..., Command]) -> None:
    """The server listens to it from the start, which brings the engine's log lines too."""
    command = start("--stats-interval", "0")
    children = psutil.Process(command.process.pid).children(recursive=True)
    [core] = [
        child for child in children if child.memory_info().rss == max(c.memory_info().rss for c in children)
    ]
    os.kill(core.pid, signal.SIGKILL)
    assert command.process.wait(60) == 1
    assert "The engine has died, and the server stops" in command.log


def serve_nothing(*flags: str) -> subprocess.CompletedProcess[str]:
    """A server that cannot start."""
    command = [
        sys.executable,
        "-m",
        "minivllm.cli.main",
        "serve",
        "no-such-model",
        "--host",
        "0.0.0.0",
        *flags,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode in (1, 2) and "Traceback" not in result.stderr
    return result


def test_an_open_server_without_a_key_is_warned_of() -> None:
    assert re.search(r"WARNING +The server listens on 0\.0\.0\.0", serve_nothing("--port", "0").stderr)
    assert "WARNING" not in serve_nothing("--port", "0", "--api-key", "k").stderr


def test_a_taken_port_is_said_and_nothing_else() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (line,) = serve_nothing("--port", port).stderr.splitlines()
    assert f"cannot listen on 0.0.0.0 port {port}" in line
