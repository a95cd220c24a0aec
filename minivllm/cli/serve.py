"""``minivllm serve``: an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.cli.engine.options import with_options
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError
from minivllm.messages import LoRARequest

if TYPE_CHECKING:
    import socket

    from minivllm.frontend.async_llm import AsyncLLM
    from minivllm.server.service.settings import ServerSettings


def _option(help_text: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, help=help_text, **settings)


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The flags that set ``ServerSettings``."""

    host: Annotated[str, _option("Address to listen on; 0.0.0.0 is every one this machine has.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, _option("Port to listen on; 0 takes a free one.")] = 8000
    api_keys: Annotated[
        list[str] | None,
        _option(
            "Key that clients must send as a bearer token (may be repeated; in the environment, separated by "
            "spaces).",
            "--api-key",
            envvar="MINIVLLM_API_KEY",
        ),
    ] = None
    served_model_names: Annotated[
        list[str] | None,
        _option("Name that clients ask for, instead of MODEL (may be repeated).", "--served-model-name"),
    ] = None
    max_queued_requests: Annotated[
        int, _option("Completions that may wait for a place among --max-num-seqs; more get 429.")
    ] = 256
    max_queued_prompt_tokens: Annotated[int, _option("Prompt tokens that may wait; more get 429.")] = 262_144
    request_timeout: Annotated[
        float, _option("Seconds a request may take, waiting included; 0 is no limit.")
    ] = 600.0
    max_body_bytes: Annotated[int, _option("Largest body of a request.")] = 4 * 2**20
    cors_origins: Annotated[
        list[str] | None,
        _option(
            "Web page whose scripts may call the server (may be repeated); none by default.", "--cors-origin"
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        _option(
            "Host name with a dot that clients may use besides --host (may be repeated); localhost, "
            "addresses and "
            "names without a dot always do. Without it, any name will do where keys are asked for or other "
            "machines "
            "can reach the server.",
            "--allowed-host",
        ),
    ] = None
    log_json: Annotated[bool, _option("Log one JSON object per line.", "--log-json")] = False
    drain_timeout: Annotated[float, _option("Seconds that running requests get after SIGTERM.")] = 30.0
    stats_interval: Annotated[
        float, _option("Seconds between status lines, when there is news; 0 for none.")
    ] = 10.0
    lora_adapters: Annotated[
        list[str] | None,
        _option(
            "Adapter to serve as a separate model, NAME=PATH in PEFT's format (may be repeated).", "--lora"
        ),
    ] = None
    lora_directory: Annotated[
        Path | None,
        _option("Let clients load adapters that lie in this directory, and unload them, while serving."),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        _option(
            "OTLP collector (HTTP) that gets a trace of every request. [default: what OTEL_* variables say]"
        ),
    ] = None
    tool_call_parser: Annotated[
        str, _option("How the model writes tool calls: auto (by its chat template), hermes, llama or none.")
    ] = "auto"
    reasoning_parser: Annotated[
        str, _option("How the model marks its reasoning: auto (by its chat template), think or none.")
    ] = "auto"
    trust_request_chat_template: Annotated[
        bool,
        _option(
            "Let requests bring a chat template, a program in a sandbox.", "--trust-request-chat-template"
        ),
    ] = False
    show_cached_texts: Annotated[
        bool,
        _option(
            "Show the beginnings of cached prompts and answers in the page, to every client.",
            "--show-cached-texts",
        ),
    ] = False
    strict: Annotated[
        bool,
        _option(
            "Refuse unknown fields of requests, also those that only label a request for other servers.",
            "--strict",
        ),
    ] = False

    def settings(self) -> ServerSettings:
        """Raises ConfigError naming the setting and what it may be."""
        from minivllm.server.service.settings import ServerSettings

        several = ("api_keys", "served_model_names", "cors_origins", "allowed_hosts", "lora_adapters")
        values = vars(self) | {name: tuple(getattr(self, name) or ()) for name in several}
        values["lora_adapters"] = tuple(map(_adapter, values["lora_adapters"]))
        values["request_timeout"] = self.request_timeout or None
        return ServerSettings(**values)


def _adapter(text: str) -> LoRARequest:
    """ "NAME=PATH" -> the adapter. Raises ConfigError."""
    name, _, path = text.partition("=")
    if not name or not path:
        raise ConfigError(f"--lora is {text!r}, but must be NAME=PATH, such as french=adapters/french.")
    directory = Path(path).expanduser().resolve()
    if not (directory / "adapter_config.json").is_file():
        raise ConfigError(
            f"--lora is {text!r}, but {directory} must be a directory with an adapter_config.json."
        )
    return LoRARequest(name, lora_path=str(directory))


@dataclass(frozen=True, kw_only=True)
class DisaggregatedOptions:
    """Several servers in place of one."""

    disaggregated: Annotated[
        str | None,
        _option(
            "Start so many prefill and decode servers on this host, and a proxy for them: 1P1D, 2P1D.",
            metavar="xPyD",
        ),
    ] = None
    min_prefill_tokens: Annotated[
        int | None,
        _option(
            "With --disaggregated: shorter prompts, about, go to a decode server alone.", show_default="256"
        ),
    ] = None
    prefill_timeout: Annotated[
        float | None,
        _option(
            "With --disaggregated: seconds after which a decode server computes the prompt instead.",
            min=0.1,
            show_default="60",
        ),
    ] = None

    def check(self, server: ServerSettings, args: EngineArgs) -> None:
        """Raises ConfigError for what does not go with several servers, or needs them."""
        if self.disaggregated is None:
            for name in ("min_prefill_tokens", "prefill_timeout"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name.replace('_', '-')} needs --disaggregated.")
            return
        if args.kv_transfer_config is not None:
            raise ConfigError("--disaggregated chooses the connector itself: leave --kv-transfer-config out.")
        if args.data_parallel_size > 1:
            raise ConfigError(
                "--disaggregated counts the servers of each kind itself: leave --data-parallel-size out."
            )
        if args.nnodes > 1 or args.executor == "ray":
            raise ConfigError("--disaggregated starts servers on one host: leave --nnodes and Ray out.")
        if server.lora_directory is not None or server.cors_origins:
            raise ConfigError("--disaggregated goes with neither --lora-directory nor --cors-origin.")


_OF_EACH_SERVER = (
    "max_queued_requests",
    "max_queued_prompt_tokens",
    "request_timeout",
    "max_body_bytes",
    "drain_timeout",
    "stats_interval",
    "otlp_endpoint",
    "tool_call_parser",
    "reasoning_parser",
)


def _server_flags(server: ServerOptions) -> list[str]:
    """The flags of each server of a proxy."""
    values = {name: getattr(server, name) for name in _OF_EACH_SERVER}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]
    flags += [f"--served-model-name={name}" for name in server.served_model_names or ()]
    flags += [f"--lora={adapter}" for adapter in server.lora_adapters or ()]
    return (
        flags
        + ["--log-json"] * server.log_json
        + ["--strict"] * server.strict
        + (["--trust-request-chat-template"] * server.trust_request_chat_template)
        + (["--show-cached-texts"] * server.show_cached_texts)
    )


@with_options
def serve(server: ServerOptions, several: DisaggregatedOptions, args: EngineArgs) -> None:
    """Serve a model to OpenAI clients: chat and text completions, streams, tool calls, metrics.

    /openapi.json describes all endpoints; a browser that opens / gets a page to chat and to watch the engine.
    SIGTERM lets running requests finish; a second one does not. The exit code is 0 after either, and 1 if the
    engine died.

    --nnodes 2 --node-rank 1 --master-addr HOST runs workers only, for the server on HOST, until that ends.
    --disaggregated 1P1D starts two servers and a proxy: one computes prompts, the other one writes answers.

    Example: minivllm serve smollm2 --port 8000 --api-key secret

    Then in Python: openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="secret")
    """
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise ConfigError("serve needs fastapi and uvicorn: pip install 'minivllm[server]'.")
    settings = server.settings()
    if settings.lora_adapters or settings.lora_directory is not None:
        args = replace(args, enable_lora=True)
    several.check(settings, args)
    from minivllm.cli.engine.engine_start import fetch_model
    from minivllm.metrics.tracing import check_packages
    from minivllm.server.run import listen, start_logging, warn_if_open

    start_logging(as_json=settings.log_json)
    if args.node_rank > 0:
        from minivllm.engine_process.client import run_node

        fetch_model(args)
        raise typer.Exit(run_node(args))
    check_packages(settings.otlp_endpoint)
    listener = listen(settings)
    warn_if_open(settings)
    try:
        if several.disaggregated is not None:
            from minivllm.cli.proxy import serve_disaggregated

            names = ("min_prefill_tokens", "prefill_timeout")
            choices = {name: getattr(several, name) for name in names if getattr(several, name) is not None}
            serve_disaggregated(
                several.disaggregated, args, settings, listener, _server_flags(server), choices
            )
            return
        fetch_model(args)
        from minivllm.frontend.async_llm import AsyncLLM

        # Outside the event loop, which would keep Ctrl-C from ending a start before the model is there.
        code = asyncio.run(_serve(AsyncLLM.from_args(args), settings, listener))
    finally:
        listener.close()
    if code:
        raise typer.Exit(code)


async def _serve(engine: AsyncLLM, settings: ServerSettings, listener: socket.socket) -> int:
    from minivllm.server.run import serve as serve_engine

    return await serve_engine(engine, settings, listener)
