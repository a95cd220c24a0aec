"""Prefill and decode servers on one host: started, waited for, watched, ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from minivllm.device.cores import share_of_cores
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.executor.records.child_reports import describe_exit
from minivllm.executor.records.private_directories import PrivateDirectory

logger = logging.getLogger(__name__)

MAX_SERVERS = 16
POLL_SECONDS = 0.1
READY_SECONDS = 5.0
"""How long a server that listens may take to say that it is ready, before it is asked again."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds before the second try to start a server that ended; twice as long before every later one, up to the
longest. The first try comes at once."""
STABLE_SECONDS = 60.0
"""A server that has lived so long begins with the first try again."""
KILL_SECONDS = 5.0
"""Seconds for a server to end beyond its drain_timeout."""


@dataclass(frozen=True)
class Shape:
    """How many prefill and decode servers."""

    num_prefill: int
    num_decode: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """ "1P1D", "2P3D". Raises ConfigError."""
        found = re.fullmatch(r"([1-9]\d?)P([1-9]\d?)D", text)
        if found is None or int(found[1]) + int(found[2]) > MAX_SERVERS:
            raise ConfigError(
                f"--disaggregated is {text!r}, but must be like 1P1D or 2P1D: so many servers that compute "
                "prompts, "
                f"and so many that write answers, {MAX_SERVERS} in all."
            )
        return cls(int(found[1]), int(found[2]))


class Child:
    """A running server, which ends when ``life_fd`` has no writer any more. name: "prefill 1". url: where it
    will listen. command: "serve" or "proxy", and its flags but for --port. num_sharing: workers that share
    the cores with those of this server, and they themselves. directory: for sockets, which it removes if its
    parent is killed. does_start: it was ready once, or is starting for the first time, and has not failed to
    start again since."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        api_keys: Sequence[str],
        life_fd: int,
        num_sharing: int = 1,
        directory: str = "",
    ) -> None:
        self.name = name
        self.does_start = True
        # Bound and not listening, so that no other process is given the port before the server listens there.
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = str(self._port.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        arguments = [str(life_fd), directory, *command, "--port", port]
        self._command = [sys.executable, "-P", "-m", "minivllm.server.proxy.child", *arguments]
        self._life_fd = life_fd
        self._environment = {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "MINIVLLM_API_KEY": " ".join(api_keys),
            **share_of_cores(num_sharing),
        }
        self.start()

    def start(self) -> None:
        """Start its process, also again."""
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            pass_fds=(self._life_fd,),
            start_new_session=True,  # Ctrl-C is for the parent, which lets answers end first
            env={**os.environ, **self._environment},
        )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def ending(self) -> str:
        """How it ended, a sentence."""
        return describe_exit(f"{self.name} server", self.process.returncode)

    def kill(self) -> None:
        """End it at once, with its engine and workers, even if they are stopped."""
        if not self.has_ended:
            os.killpg(self.process.pid, signal.SIGKILL)

    async def ended(self) -> None:
        """Return when the process has ended."""
        while not self.has_ended:
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._port.close()


class Children:
    """The servers of one shape, which exchange blocks through sockets in a private directory and divide the
    cores.

    command: "serve", the model and its flags. num_workers: of each.
    They end with this process, whatever ends it.
    """

    def __init__(
        self,
        shape: Shape,
        command: Sequence[str],
        api_keys: Sequence[str],
        drain_timeout: float,
        num_workers: int = 1,
    ) -> None:
        self._drain_timeout = drain_timeout
        self._directory = PrivateDirectory()
        self._life_fd, self._life = os.pipe()
        addresses = [f"unix://{self._directory.path}/{number}" for number in range(shape.num_prefill)]

        def start(name: str, role: str, extra: dict[str, Any]) -> Child:
            config = {
                "kv_connector": "LookupBufferConnector",
                "kv_role": role,
                "kv_connector_extra_config": extra,
            }
            own = [*command, f"--kv-transfer-config={json.dumps(config)}"]
            num_sharing = num_workers * (shape.num_prefill + shape.num_decode)
            return Child(name, own, api_keys, self._life_fd, num_sharing, str(self._directory.path))

        self.prefill = [
            start(f"prefill {n}", "kv_producer", {"address": one}) for n, one in enumerate(addresses, 1)
        ]
        self.decode = [
            start(f"decode {n + 1}", "kv_consumer", {"peers": addresses}) for n in range(shape.num_decode)
        ]
        self.all = [*self.prefill, *self.decode]

    async def wait_until_ready(self) -> None:
        """Raises EngineDeadError for one that ends instead."""
        await wait_until_ready(self.all)

    async def watch(self) -> None:
        """Start servers that end again.
        Raises EngineDeadError when no decode server runs, and none starts again."""
        async with httpx.AsyncClient(timeout=READY_SECONDS, trust_env=False) as client:
            tasks = [asyncio.ensure_future(self._keep_up(child, client)) for child in self.all]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    async def _keep_up(self, child: Child, client: httpx.AsyncClient) -> None:
        """Start it whenever it has ended: at once, and later and later if it does not live long."""
        num_tries, up_since = 0, time.monotonic()
        while True:
            await child.ended()
            logger.error(child.ending)
            if time.monotonic() - up_since >= STABLE_SECONDS:
                num_tries = 0
            await asyncio.sleep(
                min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (num_tries - 1)) if num_tries else 0.0
            )
            num_tries += 1
            child.start()
            up_since = time.monotonic()
            child.does_start = await _becomes_ready(client, child)
            if child.does_start:
                logger.warning("The %s server serves again.", child.name)
            elif not any(one.does_start for one in self.decode):
                raise EngineDeadError(f"No decode server is left, and none starts again. {child.ending}")

    def kill(self) -> None:
        """End all at once; ``close`` then has nothing to wait for."""
        for child in self.all:
            child.kill()

    def close(self) -> None:
        """End all that run."""
        end_all(self.all, self._drain_timeout + KILL_SECONDS)
        os.close(self._life)
        os.close(self._life_fd)
        self._directory.remove()


async def wait_until_ready(children: Sequence[Child]) -> None:
    """Raises EngineDeadError for one that ends instead."""
    async with httpx.AsyncClient(timeout=READY_SECONDS, trust_env=False) as client:
        waits = [asyncio.ensure_future(_becomes_ready(client, child)) for child in children]
        try:
            for wait in asyncio.as_completed(waits):
                if not await wait:
                    raise EngineDeadError(next(one.ending for one in children if one.has_ended))
        finally:
            for wait in waits:
                wait.cancel()
    for child in children:
        logger.info("The %s server is ready at %s.", child.name, child.url)


async def _becomes_ready(client: httpx.AsyncClient, child: Child) -> bool:
    """Wait until it serves; False if it ends instead."""

    async def is_ready() -> None:
        while True:
            with suppress(httpx.HTTPError):
                if (await client.get(f"{child.url}/ready")).is_success:
                    return
            await asyncio.sleep(POLL_SECONDS)

    ready, ended = asyncio.ensure_future(is_ready()), asyncio.ensure_future(child.ended())
    try:
        await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
        return not child.has_ended
    finally:
        for task in (ready, ended):
            task.cancel()


def end_all(children: Sequence[Child], seconds: float) -> None:
    """SIGTERM, and SIGKILL to those that do not end in time."""
    for child in children:
        if not child.has_ended:
            child.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            logger.warning("The %s server does not end, and is killed.", child.name)
            child.kill()
            child.process.wait()
        child.close()


@contextmanager
def started_child(name: str, command: Sequence[str]) -> Iterator[Child]:
    """A single server, ready, for the length of the block. Raises EngineDeadError if it ends instead."""
    life_fd, life = os.pipe()
    child = Child(name, command, (), life_fd)
    os.close(life_fd)
    try:
        asyncio.run(wait_until_ready([child]))
        yield child
    finally:
        os.close(life)
        end_all([child], KILL_SECONDS)
