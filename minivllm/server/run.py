"""A server's life: listen, drain when told to stop, end with the engine.

SIGTERM or SIGINT: no new requests, running ones get ``drain_timeout`` seconds, the rest an error; a second
signal exits at once, at any moment until the process has ended. The exit code is 0 then. When the engine
dies, running requests get an error, ``/health`` says 503 for a moment, and the exit code is 1.
"""

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Generator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from minivllm.errors import ConfigError
from minivllm.frontend.async_llm import AsyncLLM
from minivllm.metrics.prometheus import StatusLine
from minivllm.server.app import build_app
from minivllm.server.limits.connections import BoundedConnection, ConnectionLimits
from minivllm.server.service.service import Service
from minivllm.server.service.settings import ServerSettings

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
DEATH_NOTICE_SECONDS = 3.0
"""How long /health says 503 before a server without an engine exits."""
LAST_WORDS_SECONDS = 2.0
"""How long clients get to read their error before the connections are closed."""
KEEP_ALIVE_SECONDS = 30
KILL_SECONDS = 0.7
"""After a second signal, how long connections,
threads and the engine get before the process ends without them."""
BACKLOG = 2048
"""Connections that may wait to be accepted: a burst of them meets a busy event loop."""


class Uvicorn(uvicorn.Server):
    """uvicorn with bounded connections, and without its own signal handlers:
    draining comes before closing them.

    last_words: how long answers may go on when it is told to stop [seconds].
    """

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, last_words: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(BoundedConnection, limits=limits),  # type: ignore[arg-type]
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                lifespan="off",
                ws="none",
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=int(last_words),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def exit_now(self) -> None:
        """Close all connections, without waiting for anybody to read, and return from ``serve``."""
        self.should_exit = self.force_exit = True
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class ServerRun:
    """One run of a server from start to exit code. handle_signals: only possible in the main thread."""

    def __init__(self, engine: AsyncLLM, settings: ServerSettings, *, handle_signals: bool = True) -> None:
        self.service = Service(engine, settings)
        self._engine = engine
        self._settings = settings
        self._stopping = asyncio.Event()
        self._is_killed = False
        self._signals = (signal.SIGTERM, signal.SIGINT) if handle_signals else ()
        limits = ConnectionLimits()
        if settings.request_timeout is not None:
            limits.write_seconds = min(limits.write_seconds, settings.request_timeout)
        self._server = Uvicorn(build_app(self.service), limits, LAST_WORDS_SECONDS)

    @property
    def has_started(self) -> bool:
        """True once it accepts connections."""
        return self._server.started

    async def run(self, listener: socket.socket) -> int:
        """Serve on ``listener`` until told to stop; the exit code, 0 unless the engine died.

        Raises RequestError, before anything is served, for an adapter of the settings that cannot be.
        """
        self._engine.start()
        await self.service.models.load_configured()
        host, port = listener.getsockname()[:2]
        names = ", ".join(model.name for model in self.service.models.all)
        logger.info("Serving %s on http://%s:%d", names, f"[{host}]" if ":" in host else host, port)
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._on_signal, number)
        tasks = [asyncio.create_task(self._watch_engine()), asyncio.create_task(self._stop_when_asked())]
        if self._settings.stats_interval > 0:
            tasks.append(asyncio.create_task(self._report()))
        try:
            await self._server.serve([listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.service.close()
        return 1 if self._engine.is_dead and not self._is_killed else 0

    def ignore_signals(self) -> None:
        """The process is about to end by itself."""
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            logger.warning("A second signal: exiting at once.")
            self._is_killed = True
            self._engine.kill()
            self.exit_now()
            # A thread in the middle of a long text cannot be stopped, and Python would wait for it.
            end = threading.Timer(KILL_SECONDS, os._exit, (0,))
            end.daemon = True
            end.start()
            return
        logger.info(
            "%s: finishing what runs, for at most %g s; once more exits at once.",
            signal.Signals(number).name,
            self._settings.drain_timeout,
        )
        self.begin_drain()

    def begin_drain(self) -> None:
        """Take in nothing more, let running requests finish, then return from ``run``."""
        self.service.admission.is_draining = True
        self._stopping.set()

    async def _stop_when_asked(self) -> None:
        await self._stopping.wait()
        admission = self.service.admission
        if not await self._until_idle(self._settings.drain_timeout):
            logger.warning("%d requests did not finish in time and are aborted.", len(admission.tickets))
            await self.service.abort_all()
            await self._until_idle(LAST_WORDS_SECONDS)
        self._server.should_exit = True

    async def _until_idle(self, seconds: float) -> bool:
        """Wait until no request is left; False if that takes longer."""
        end = asyncio.get_running_loop().time() + seconds
        while self.service.admission.tickets:
            if asyncio.get_running_loop().time() >= end:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def _watch_engine(self) -> None:
        while not self._engine.is_dead:
            await asyncio.sleep(POLL_SECONDS)
        if self._is_killed:
            return
        logger.error("The engine has died, and the server stops: %s", self._engine.dead_error)
        self.service.admission.is_draining = True
        await self.service.refresh_stats()
        await asyncio.sleep(DEATH_NOTICE_SECONDS)
        self._server.should_exit = True

    async def _report(self) -> None:
        """A line on the console every few seconds, when something happened."""
        line = StatusLine()
        while True:
            await asyncio.sleep(self._settings.stats_interval)
            await self.service.refresh_stats()
            text = line.next(self.service.metrics, self._settings.stats_interval)
            if text is not None:
                logger.info(text)

    def exit_now(self) -> None:
        """Close all connections, without waiting for anybody to read, and return from ``run``."""
        self._server.exit_now()


def listen(settings: ServerSettings) -> socket.socket:
    """The socket, which listens before a model is loaded for nothing: one that is only bound would leave the
    port to a second server. Connections that are made meanwhile wait. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # The event loop sends small frames at once (TCP_NODELAY) only on sockets that say they are TCP; without
    # that, every token of a stream may wait 40 ms for the acknowledgement of the one before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # a name with an empty or overlong part cannot even be looked up
        listener.close()
        reason = (isinstance(error, OSError) and error.strerror) or "this is no name of a host"
        raise ConfigError(
            f"The server cannot listen on {settings.host} port {settings.port}: {reason}. Choose another "
            "--host or "
            "--port."
        ) from None
    return listener


def warn_if_open(settings: ServerSettings) -> None:
    """A server that others can reach and that asks for no key is said loudly."""
    if settings.is_public and not settings.api_keys:
        logger.warning(
            "The server listens on %s, where other machines can reach it, and asks for no key. Everybody who "
            "can reach it can use it. Give it one with --api-key, or leave --host at 127.0.0.1.",
            settings.host,
        )


async def serve(engine: AsyncLLM, settings: ServerSettings, listener: socket.socket) -> int:
    """Run a server for ``engine`` until it is told to stop, then close the engine. Returns the exit code."""
    run: ServerRun | None = None
    try:
        run = ServerRun(engine, settings)
        # What is there before the first request stays:
        # the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        return await run.run(listener)
    finally:
        await engine.close()
        if run is not None:
            run.ignore_signals()


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", …}``; the access log adds its fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def start_logging(*, as_json: bool) -> None:
    """Send the package's log, and uvicorn's warnings, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    for name, level in (("minivllm", logging.INFO), ("uvicorn", logging.WARNING)):
        package = logging.getLogger(name)
        package.handlers = [handler]
        package.setLevel(level)
        package.propagate = False
