"""Prefill and decode servers on one host: started, waited for, watched, ended."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from minivllm.device.cores import share_of_cores
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.executor.wire.child_reports import describe_exit

logger = logging.getLogger(__name__)

MAX_SERVERS = 16
POLL_SECONDS = 0.1
KILL_SECONDS = 5.0
"""What a server gets beyond its drain_timeout."""


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
                f"--disaggregated is {text!r}, but must be like 1P1D or 2P1D: so many servers that compute prompts, "
                f"and so many that write answers, {MAX_SERVERS} in all."
            )
        return cls(int(found[1]), int(found[2]))


class Child:
    """A running server, which ends when nobody holds ``life_fd`` open any longer. name: "prefill 1". url: where it will
    listen. command: "serve" or "proxy", and its flags but for --port. num_sharing: workers that share the cores with
    those of this server, and they themselves."""

    def __init__(
        self, name: str, command: Sequence[str], api_keys: Sequence[str], life_fd: int, num_sharing: int = 1
    ) -> None:
        self.name = name
        # Bound and not listening, so that nobody else is given the port before the server listens there.
        self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        port = self._port.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        path = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minivllm.server.proxy.child", str(life_fd), *command, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            pass_fds=(life_fd,),
            start_new_session=True,  # Ctrl-C is for the parent, which lets answers end first
            env={
                **os.environ,
                "PYTHONPATH": path,
                "MINIVLLM_API_KEY": " ".join(api_keys),
                **share_of_cores(num_sharing),
            },
        )

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def ending(self) -> str:
        """How it ended, a sentence."""
        return describe_exit(f"{self.name} server", self.process.returncode)

    def close(self) -> None:
        self._port.close()


class Children:
    """The servers of one shape, which exchange blocks through sockets in a private directory and divide the cores.

    command: "serve", the model and its flags. num_workers: of each. They end with this process, whatever ends it.
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
        self._directory = tempfile.mkdtemp(prefix="minivllm-")
        life_fd, self._life = os.pipe()
        addresses = [f"unix://{self._directory}/{number}" for number in range(shape.num_prefill)]

        def start(name: str, role: str, extra: dict[str, Any]) -> Child:
            config = {"kv_connector": "LookupBufferConnector", "kv_role": role, "kv_connector_extra_config": extra}
            own = [*command, f"--kv-transfer-config={json.dumps(config)}"]
            return Child(name, own, api_keys, life_fd, num_workers * (shape.num_prefill + shape.num_decode))

        self.prefill = [start(f"prefill {n}", "kv_producer", {"address": one}) for n, one in enumerate(addresses, 1)]
        self.decode = [start(f"decode {n + 1}", "kv_consumer", {"peers": addresses}) for n in range(shape.num_decode)]
        self.all = [*self.prefill, *self.decode]
        os.close(life_fd)

    async def wait_until_ready(self) -> None:
        """Raises EngineDeadError for one that ends instead."""
        await wait_until_ready(self.all)

    async def watch(self) -> None:
        """Name every server that ends. Raises EngineDeadError when none is left that could answer."""
        running = list(self.all)
        while True:
            for child in [one for one in running if one.has_ended]:
                running.remove(child)
                logger.error(child.ending)
                if not any(one in running for one in self.decode):
                    raise EngineDeadError(f"No decode server is left. {child.ending}")
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End all that run."""
        os.close(self._life)
        end_all(self.all, self._drain_timeout + KILL_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)


async def wait_until_ready(children: Sequence[Child]) -> None:
    """Raises EngineDeadError for one that ends instead."""
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        for child in children:
            while not await _is_ready(client, child):
                for one in children:
                    if one.has_ended:
                        raise EngineDeadError(one.ending)
                await asyncio.sleep(POLL_SECONDS)
            logger.info("The %s server is ready at %s.", child.name, child.url)


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
            child.process.kill()
            child.process.wait()
        child.close()


async def _is_ready(client: httpx.AsyncClient, child: Child) -> bool:
    try:
        return (await client.get(f"{child.url}/ready")).is_success
    except httpx.HTTPError:
        return False


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
