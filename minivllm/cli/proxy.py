"""``minivllm proxy``, and ``minivllm serve --disaggregated``, which also starts its servers."""

from __future__ import annotations

import asyncio
import importlib.util
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.cli.engine.openai_server import server_root
from minivllm.cli.engine.options import engine_flags, with_options
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError

if TYPE_CHECKING:
    import socket

    from minivllm.server.proxy.children import Children
    from minivllm.server.proxy.relay import RelaySettings
    from minivllm.server.service.settings import ServerSettings


def _option(help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, **settings)


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Where the proxy listens, and how it chooses."""

    prefill: Annotated[
        list[str] | None,
        _option("Address of a server with kv_role kv_producer (may be repeated).", metavar="URL"),
    ] = None
    decode: Annotated[
        list[str] | None,
        _option("Address of a server with kv_role kv_consumer (may be repeated).", metavar="URL"),
    ] = None
    host: Annotated[str, _option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option("Port to listen on; 0 takes a free one.")] = 8000
    api_keys: Annotated[
        list[str] | None,
        _option(
            "Key that clients must send as a bearer token, which the servers get as well (may be repeated).",
            "--api-key",
            envvar="MINIVLLM_API_KEY",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _option(
            "Host name with a dot that clients may use besides --host (may be repeated); localhost, "
            "addresses and "
            "names without a dot always do. Without it, any name will do where keys are asked for or other "
            "machines "
            "can reach the proxy.",
            "--allowed-host",
        ),
    ] = None
    min_prefill_tokens: Annotated[
        int,
        _option("Shorter prompts, about (four characters count as a token), go to a decode server alone."),
    ] = 256
    prefill_timeout: Annotated[
        float, _option("Seconds after which a decode server computes the prompt instead.", min=0.1)
    ] = 60.0
    timeout: Annotated[float, _option("Seconds that a server may be silent.", min=0.1)] = 600.0
    max_body_bytes: Annotated[int, _option("Largest body of a request.")] = 4 * 2**20
    drain_timeout: Annotated[float, _option("Seconds that running requests get after SIGTERM.")] = 30.0
    log_json: Annotated[bool, _option("Log one JSON object per line.", "--log-json")] = False


@with_options
def proxy(options: ProxyOptions) -> None:
    """Give servers that share keys and values one address:
    one computes a prompt, another one writes the answer.

    Each prompt goes to a prefill server, which is asked for one token, and then to a decode server, which
    takes the keys and values from it and streams the answer. If prefill fails in any way, the decode server
    computes the prompt. Clients see one OpenAI server: /v1/chat/completions, /v1/completions, /v1/responses,
    /v1/models, /health, /ready, /metrics; requests that need no prefill go to a decode server.

    Example: minivllm proxy --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

    minivllm serve --disaggregated 1P1D starts all three on one host.
    """
    from minivllm.server.service.settings import ServerSettings

    check_packages()
    if not options.decode or not options.prefill:
        raise ConfigError("proxy needs at least one --prefill and one --decode server.")
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        api_keys=tuple(options.api_keys or ()),
        allowed_hosts=tuple(options.allowed_hosts or ()),
        max_body_bytes=options.max_body_bytes,
        drain_timeout=options.drain_timeout,
        log_json=options.log_json,
    )
    from minivllm.server.proxy.relay import RelaySettings
    from minivllm.server.run import listen, start_logging, warn_if_open

    relay = RelaySettings(
        prefill=[server_root(url, "--prefill") for url in options.prefill],
        decode=[server_root(url, "--decode") for url in options.decode],
        min_prefill_tokens=options.min_prefill_tokens,
        prefill_timeout=options.prefill_timeout,
        timeout=options.timeout,
    )
    start_logging(as_json=settings.log_json)
    listener = listen(settings)
    warn_if_open(settings)
    try:
        asyncio.run(_run(relay, settings, listener))
    finally:
        listener.close()


async def _run(
    relay: RelaySettings, settings: ServerSettings, listener: socket.socket, children: Children | None = None
) -> bool:
    from minivllm.server.proxy.proxy_run import never, run_proxy

    return await run_proxy(
        relay,
        listener,
        api_keys=settings.api_keys,
        max_body_bytes=settings.max_body_bytes,
        known_hosts=settings.known_hosts,
        drain_timeout=settings.drain_timeout,
        until=never if children is None else children.watch,
    )


def check_packages() -> None:
    """Raises ConfigError if something that the proxy needs is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "httpx")):
        raise ConfigError("A proxy needs fastapi, uvicorn and httpx: pip install 'minivllm[server]'.")


def serve_disaggregated(
    text: str,
    args: EngineArgs,
    settings: ServerSettings,
    listener: socket.socket,
    server_flags: Sequence[str],
    choices: Mapping[str, Any],
) -> None:
    """Start the servers that ``text`` asks for, and a proxy for them. server_flags: of each server. choices:
    settings of the relay.

    Raises EngineDeadError, with the name of the server, when one ends before it is ready,
    or the last that can answer.
    """
    check_packages()
    from minivllm.cli.engine.engine_start import fetch_model
    from minivllm.server.proxy.children import Children, Shape
    from minivllm.server.proxy.relay import RelaySettings

    shape = Shape.parse(text)
    fetch_model(args)  # here, so that the servers do not all do it
    command = ["serve", args.model, *engine_flags(args), "--host=127.0.0.1", *server_flags]
    children = Children(shape, command, settings.api_keys, settings.drain_timeout, args.num_workers)
    relay = RelaySettings(
        prefill=[one.url for one in children.prefill],
        decode=[one.url for one in children.decode],
        timeout=settings.request_timeout or 86400.0,
        **choices,
    )

    async def life() -> None:
        await children.wait_until_ready()
        if await _run(relay, settings, listener, children):
            children.kill()

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # before the proxy runs, which drains
    try:
        asyncio.run(life())
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: children.kill())
        children.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(
                number, signal.SIG_IGN
            )  # the interpreter, when it ends, would let a handler's signal kill it
