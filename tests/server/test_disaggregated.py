"""Prefill and decode servers as real processes:
tokens are those of one engine, after any death at any time."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import psutil
import pytest
from openai.types import Completion
from typer.testing import CliRunner

from minivllm import LLM, SamplingParams
from minivllm.cli import commands
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.server.proxy import children as children_module
from minivllm.server.proxy.children import Child, Children, Shape
from minivllm.server.proxy.relay import RelaySettings
from tests.parity_reference import random_prompts

PROMPTS = random_prompts((150, 151, 33, 90, 5), seed=11)
KEY = {"authorization": "Bearer secret"}
FLAGS = ["--enforce-eager", "--dtype", "float32", "--max-model-len", "512", "--num-gpu-blocks-override", "80"]
SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 5}]


class Disaggregated:
    """A running ``minivllm serve --disaggregated``, with its servers by name."""

    def __init__(self, model: Path, log: Path, shape: str, *flags: str) -> None:
        self._log = log
        command = [sys.executable, "-m", "minivllm.cli.main", "serve", str(model), "--disaggregated", shape]
        command += ["--min-prefill-tokens", "8", "--port", "0", "--served-model-name", "tiny", *FLAGS, *flags]
        environment = {**os.environ, "MINIVLLM_API_KEY": "secret"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.wait_for(r"The proxy of .* listens on (http://[0-9.:]+)")
        self.url = re.findall(r"listens on (http://[0-9.:]+)", self.log)[0]
        self.urls = dict(re.findall(r"The (\w+ \d) server is ready at (http://[0-9.]+:\d+)", self.log))
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: str, seconds: float = 180.0) -> None:
        end = time.monotonic() + seconds
        while re.search(pattern, self.log) is None:
            assert self.process.poll() is None and time.monotonic() < end, self.log[-3000:]
            time.sleep(0.05)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="secret", max_retries=0, timeout=120)

    def server(self, name: str) -> psutil.Process:
        """The HTTP server of that name."""
        port = int(self.urls[name].rpartition(":")[2])
        for child in self.children:
            if child.is_running() and any(
                one.laddr.port == port and one.status == psutil.CONN_LISTEN
                for one in child.net_connections("tcp")
            ):
                return child
        raise AssertionError(f"{name} does not listen")

    def processes(self, name: str) -> list[psutil.Process]:
        """The engine of the server of that name, and the server."""
        server = self.server(name)
        return [*server.children(recursive=True), server]

    def kill(self, name: str) -> None:
        """kill -9 of the server and of its engine."""
        for one in self.processes(name):
            one.kill()

    def metric(self, name: str, url: str) -> float:
        found = re.findall(rf"^{name} (\S+)$", httpx.get(f"{url}/metrics", headers=KEY).text, re.MULTILINE)
        return float(found[0])

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert psutil.wait_procs(self.children, timeout=30)[1] == []
        return code


@pytest.fixture
def start(tiny_model: Callable[..., Path], tmp_path: Path) -> Iterator[Callable[..., Disaggregated]]:
    started: list[Disaggregated] = []

    def make(shape: str = "1P1D", *flags: str, family: str = "llama") -> Disaggregated:
        started.append(Disaggregated(tiny_model(family), tmp_path / f"log-{len(started)}", shape, *flags))
        return started[-1]

    yield make
    for one in started:
        for process in [one.process, *one.children]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        one.process.wait(30)


@pytest.fixture(scope="module")
def expected(tiny_model: Callable[..., Path]) -> list[list[str]]:
    return answers_of_one_engine(tiny_model("llama"))


def answers_of_one_engine(model: Path) -> list[list[str]]:
    """To every prompt, for each kind of sampling."""
    settings: dict[str, Any] = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512}
    with LLM(str(model), num_gpu_blocks_override=80, **settings) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        return [
            [
                one.outputs[0].text
                for one in llm.generate(
                    prompts, SamplingParams(max_tokens=24, ignore_eos=True, **kind), use_tqdm=False
                )
            ]
            for kind in SAMPLING
        ]


def ask(client: openai.OpenAI, prompt: list[int], kind: dict[str, Any], stream: bool) -> str:
    body: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 24, **kind}
    body["extra_body"] = {"ignore_eos": True}
    if stream:
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**body, stream=True))
    return client.completions.create(**body).choices[0].text


def test_tokens_are_those_of_one_engine_and_sigterm_ends_all(
    start: Callable[..., Disaggregated], expected: list[list[str]]
) -> None:
    """With the official client: streams, answers in one piece, a client that leaves;
    then a prefill server dies."""
    running = start()
    with running.client() as client:
        for kind, answers in zip(SAMPLING, expected):
            assert [ask(client, prompt, kind, stream=kind is SAMPLING[0]) for prompt in PROMPTS] == answers
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
        first = client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=1, temperature=0)
        assert expected[0][0].startswith(first.choices[0].text)
        loaded = 'minivllm_kv_transfer_loaded_bytes_total{engine="0",tier="LookupBufferConnector"}'
        assert running.metric(re.escape(loaded), running.urls["decode 1"]) > 0
        assert running.metric('minivllm_proxy_requests_total{way="prefill_failed"}', running.url) == 0
        stream = client.completions.create(
            model="tiny", prompt=PROMPTS[0], max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        end = time.monotonic() + 30
        while any(
            running.metric('minivllm_num_requests_running{engine="0"}', url) for url in running.urls.values()
        ):
            assert time.monotonic() < end
            time.sleep(0.02)
        running.kill("prefill 1")
        running.wait_for("The prefill 1 server was killed by SIGKILL")
        fresh = [prompt[::-1] for prompt in PROMPTS]
        assert all(ask(client, prompt, SAMPLING[0], stream=True) for prompt in fresh)
        assert [ask(client, prompt, SAMPLING[0], stream=True) for prompt in PROMPTS] == expected[0]
        running.wait_for("The prefill 1 server serves again")
        assert httpx.get(f"{running.url}/ready", timeout=30).json() == {
            "status": "ok",
            "prefill": 1,
            "decode": 1,
        }
        ways = 'minivllm_proxy_requests_total{way="prefill"}'
        before, end = running.metric(ways, running.url), time.monotonic() + 60
        while running.metric(ways, running.url) == before:
            assert time.monotonic() < end, "the server that was started again gets no prompts"
            assert [ask(client, prompt, SAMPLING[0], stream=True) for prompt in PROMPTS] == expected[0]
    assert running.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", ["granite-hybrid", "lfm2", "qwen2-window"])
def test_models_with_states_and_windows_are_served_apart(
    start: Callable[..., Disaggregated], tiny_model: Callable[..., Path], family: str
) -> None:
    running = start(family=family)
    with running.client() as client:
        for kind, answers in zip(SAMPLING, answers_of_one_engine(tiny_model(family))):
            assert [ask(client, prompt, kind, stream=True) for prompt in PROMPTS] == answers
    for name in ("loaded_bytes", "failed_blocks"):
        metric = f'minivllm_kv_transfer_{name}_total{{engine="0",tier="LookupBufferConnector"}}'
        assert (running.metric(re.escape(metric), running.urls["decode 1"]) > 0) == (name == "loaded_bytes")
    assert running.stop() == 0


@pytest.mark.slow
def test_decode_servers_that_die_end_their_streams_others_go_on_and_all_are_started_again(
    start: Callable[..., Disaggregated], expected: list[list[str]]
) -> None:
    running = start("1P2D")
    victims = running.processes("decode 1")  # looking for them takes as long as many tokens
    with running.client() as client, ThreadPoolExecutor(6) as pool:

        def begin(number: int) -> openai.Stream[Completion]:
            stream = client.completions.create(
                model="tiny",
                prompt=[4 + number] * 100,
                max_tokens=390,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            return stream

        streams = list(pool.map(begin, range(6)))
        for victim in victims:
            victim.kill()
        endings = []
        for stream in streams:
            try:
                endings.append(sum(1 for _ in stream))
            except openai.APIError as error:
                assert "server that wrote this answer has gone" in str(error) or "engine has died" in str(
                    error
                )
                endings.append(0)
        assert 0 in endings and any(endings), "some were written by the one, some by the other"
        running.wait_for("The decode 1 server was killed by SIGKILL")
        for kind, answers in zip(SAMPLING, expected):
            assert [ask(client, prompt, kind, stream=True) for prompt in PROMPTS] == answers
        running.kill("decode 2")
        for number in (1, 2):
            running.wait_for(f"The decode {number} server serves again")
        assert ask(client, PROMPTS[0], SAMPLING[0], stream=True) == expected[0][0]
    assert running.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["prefill 1", "decode 1"])
def test_a_kill_at_any_moment_leaves_right_tokens_or_an_error(
    start: Callable[..., Disaggregated], expected: list[list[str]], victim: str
) -> None:
    """While prompts are computed, blocks travel and answers are written, by many clients."""
    for pause in (0.0, 0.05, 0.15, 0.4):
        running = start("2P2D")
        answers: list[tuple[int, int, str | None]] = []

        def one(kind: int, number: int, running: Disaggregated = running, answers: Any = answers) -> None:
            with running.client() as client:
                try:
                    text = ask(client, PROMPTS[number], SAMPLING[kind], stream=number % 2 == 0)
                except openai.APIError:
                    text = None
                answers.append((kind, number, text))

        threads = [
            threading.Thread(target=one, args=(kind, number))
            for _ in range(2)
            for kind in range(2)
            for number in range(len(PROMPTS))
        ]
        for thread in threads:
            thread.start()
        time.sleep(pause)
        running.kill(victim)
        for thread in threads:
            thread.join(120)
        assert len(answers) == len(threads)
        assert all(text in (None, expected[kind][number]) for kind, number, text in answers)
        if victim == "prefill 1":
            assert all(text is not None for _, _, text in answers)
        with running.client() as client:
            assert [ask(client, prompt, SAMPLING[0], stream=True) for prompt in PROMPTS] == expected[0]
        assert running.stop() == 0


@pytest.mark.slow
def test_a_frozen_prefill_server_delays_by_its_deadlines_and_ctrl_c_ends_all(
    start: Callable[..., Disaggregated], expected: list[list[str]]
) -> None:
    """Frozen after it has announced its blocks:
    the load ends at its deadline, and the prompt is recomputed."""
    running = start()
    with running.client() as client:
        httpx.post(
            f"{running.urls['prefill 1']}/v1/completions",
            json={"prompt": PROMPTS[0], "max_tokens": 1},
            headers=KEY,
            timeout=60,
        )
        server = running.server("prefill 1")
        frozen = [server, *server.children(recursive=True)]
        for one in frozen:
            one.suspend()
        body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(
            f"{running.urls['decode 1']}/v1/completions", json=body, headers=KEY, timeout=60
        ).json()
        assert answer["choices"][0]["text"] == expected[0][0]
        for one in frozen:
            one.resume()
        assert ask(client, PROMPTS[1], SAMPLING[0], stream=True) == expected[0][1]
    assert running.stop(signal.SIGINT) == 0


@pytest.mark.slow
def test_servers_end_with_the_command_even_by_kill_9_and_leave_no_directory(
    start: Callable[..., Disaggregated], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path.parents[-2] / f"minivllm{os.getpid()}"  # short enough for the paths of sockets
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    running = start()
    assert len(list(directory.glob("minivllm-*"))) == 3, "of the command, and of the engines of two servers"
    os.kill(running.process.pid, signal.SIGKILL)
    assert psutil.wait_procs(running.children, timeout=60)[1] == []
    assert list(directory.glob("minivllm-*")) == []
    shutil.rmtree(directory)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once_with_0(start: Callable[..., Disaggregated]) -> None:
    running = start("1P1D", "--drain-timeout", "300")
    with running.client() as client:
        stream = client.completions.create(
            model="tiny", prompt=PROMPTS[3], max_tokens=390, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        for one in (running.server("decode 1"), *running.server("decode 1").children(recursive=True)):
            one.suspend()  # it neither writes on nor ends by itself
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert running.stop() == 0
    assert "Traceback" not in running.log


@pytest.mark.slow
def test_a_server_that_cannot_start_is_named(tiny_model: Callable[..., Path]) -> None:
    command = [
        sys.executable,
        "-m",
        "minivllm.cli.main",
        "serve",
        str(tiny_model("llama")),
        "--disaggregated",
        "1P1D",
    ]
    command += ["--port", "0", "--num-gpu-blocks-override", "2", "--max-model-len", "512", "--enforce-eager"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert result.returncode == 1
    assert re.search(r"minivllm: The (prefill|decode) 1 server ended with status \d", result.stderr)
    assert "Traceback" not in result.stderr


class StandInChild(Child):
    """A process that says it is ready, and lives on until it is killed, except for the starts that fail."""

    def __init__(self, name: str, script: str) -> None:
        self.name, self.does_start, self.url = name, True, ""
        self.scripts = ["import time; time.sleep(600)", script]
        self.start()

    def start(self) -> None:
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)


def stand_ins(monkeypatch: pytest.MonkeyPatch, script: str) -> Children:
    """One prefill and two decode servers. script: what they run when they are started again."""
    made = Children.__new__(Children)
    made.prefill = [StandInChild("prefill 1", script)]
    made.decode = [StandInChild(f"decode {number}", script) for number in (1, 2)]
    made.all = [*made.prefill, *made.decode]

    async def becomes_ready(_: httpx.AsyncClient, child: Child) -> bool:
        if "sleep" not in str(child.process.args):
            await child.ended()
        return not child.has_ended

    monkeypatch.setattr(children_module, "_becomes_ready", becomes_ready)
    monkeypatch.setattr(children_module, "FIRST_PAUSE", 0.05)
    return made


def test_servers_that_end_are_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = stand_ins(monkeypatch, "import time; time.sleep(600)")

    async def main() -> None:
        watching = asyncio.create_task(made.watch())
        for _ in range(2):  # also once more
            killed = [child.process for child in made.all]
            made.kill()
            while any(child.process in killed or child.has_ended for child in made.all):
                await asyncio.sleep(0.01)
        assert not watching.done()
        watching.cancel()

    with caplog.at_level("WARNING"):
        asyncio.run(asyncio.wait_for(main(), 60))
    made.kill()
    assert caplog.text.count("was killed by SIGKILL") == 6
    assert "The prefill 1 server serves again" in caplog.text


def test_it_is_the_end_when_no_decode_server_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_ins(monkeypatch, "raise SystemExit(7)")

    async def main() -> None:
        watching = asyncio.create_task(made.watch())
        made.prefill[0].process.kill()
        made.decode[0].process.kill()
        while made.prefill[0].does_start or made.decode[0].does_start:
            await asyncio.sleep(0.01)
        assert not watching.done(), "one decode server is left"
        made.decode[1].process.kill()
        with pytest.raises(EngineDeadError, match=r"No decode server is left, .*ended with status 7"):
            await watching

    asyncio.run(asyncio.wait_for(main(), 60))
    made.kill()


def test_the_flags_of_the_proxy_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    relays: list[RelaySettings] = []

    class NoServers:
        prefill = decode = (SimpleNamespace(url="http://127.0.0.1:9"),)

        def __init__(self, *_: object) -> None: ...

        async def wait_until_ready(self) -> None: ...

        def close(self) -> None: ...

    async def run(relay: RelaySettings, *_: object) -> bool:
        relays.append(relay)
        return False

    monkeypatch.setattr(children_module, "Children", NoServers)
    monkeypatch.setattr("minivllm.cli.proxy._run", run)
    monkeypatch.setattr("minivllm.cli.engine.engine_start.fetch_model", lambda args: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    flags = ["--prefill-timeout", "4.5", "--min-prefill-tokens", "7", "--request-timeout", "9"]
    try:
        result = CliRunner().invoke(commands.app, ["serve", "--disaggregated", "1P1D", "--port", "0", *flags])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert result.exit_code == 0, result.output
    assert (relays[0].prefill_timeout, relays[0].min_prefill_tokens, relays[0].timeout) == (4.5, 7, 9.0)


@pytest.mark.parametrize("text", ["", "1P", "P1D", "0P1D", "1P0D", "9P8D", "1p1d", "100P1D"])
def test_a_shape_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="must be like 1P1D"):
        Shape.parse(text)
    assert Shape.parse("2P3D") == Shape(2, 3)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--min-prefill-tokens", "5"], "--min-prefill-tokens needs --disaggregated"),
        (["--prefill-timeout", "5"], "--prefill-timeout needs --disaggregated"),
        (
            ["--disaggregated", "1P1D", "--kv-transfer-config", '{"kv_connector": "OffloadingConnector"}'],
            "itself",
        ),
        (["--disaggregated", "1P1D", "--cors-origin", "*"], "goes with neither"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], sentence: str) -> None:
    command = [sys.executable, "-m", "minivllm.cli.main", "serve", "--port", "0", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and sentence in result.stderr, result.stderr
