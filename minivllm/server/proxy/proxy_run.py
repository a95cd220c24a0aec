"""The proxy's life: listen, and when it is told to stop, let the answers under way end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Collection, Sequence

from minivllm.server.limits.connections import ConnectionLimits, max_connections
from minivllm.server.proxy.proxy_app import build_proxy_app
from minivllm.server.proxy.relay import Relay, RelaySettings
from minivllm.server.run import Uvicorn

logger = logging.getLogger(__name__)

FILES_PER_CONNECTION = 3
"""A client's connection, one to a prefill server and one to a decode server."""


async def never() -> None:
    await asyncio.Event().wait()


async def run_proxy(
    settings: RelaySettings,
    listener: socket.socket,
    *,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 4 * 2**20,
    known_hosts: Collection[str] | None = None,
    drain_timeout: float = 30.0,
    until: Callable[[], Awaitable[None]] = never,
) -> bool:
    """Serve until SIGTERM, SIGINT, or the end of ``until``, whose exception it raises. A second signal ends
    it at once, which makes the result True. Afterwards both signals are ignored: what is left to do is
    short."""
    relay = Relay(settings)
    limits = ConnectionLimits(max_connections=max_connections(FILES_PER_CONNECTION))
    server = Uvicorn(build_proxy_app(relay, api_keys, max_body_bytes, known_hosts), limits, drain_timeout)
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if server.should_exit:
            server.exit_now()
        server.should_exit = True

    async def watch() -> None:
        try:
            await until()
        finally:
            server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    host, port = listener.getsockname()[:2]
    logger.info(
        "The proxy of %d prefill and %d decode servers listens on http://%s:%d",
        len(settings.prefill),
        len(settings.decode),
        f"[{host}]" if ":" in host else host,
        port,
    )
    watcher = asyncio.create_task(watch())
    try:
        await server.serve([listener])
        if watcher.done():
            await watcher
    finally:
        watcher.cancel()
        await relay.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return server.force_exit
