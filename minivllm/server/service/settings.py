"""Settings of a server by its operator, checked once."""

import ipaddress
import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

from minivllm.errors import ConfigError
from minivllm.messages import LoRARequest
from minivllm.server.parsers.choose import check_parsers

_LIMITS = (
    ("port", 0, 65535),
    ("max_queued_requests", 0, math.inf),
    ("max_queued_prompt_tokens", 1, math.inf),
    ("max_body_bytes", 1024, math.inf),
    ("drain_timeout", 0, math.inf),
    ("stats_interval", 0, math.inf),
)


_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server. Raises ConfigError naming the setting and what it may be.

    host, port: where it listens; port 0 takes a free one. api_keys: bearer keys, one of which every request
    must carry; without keys every client may use the server. served_model_names: names clients may ask for;
    the first one is reported. max_queued_requests: completions that may wait for one of the engine's
    max_num_seqs places. max_queued_prompt_tokens: prompt tokens of requests without a first token yet.
    request_timeout: seconds a request may take, queue included (None: no limit). max_body_bytes: size of a
    request's body. cors_origins: web pages that may call the server from a browser. allowed_hosts: names that
    clients know the server by, besides those of this machine (see known_hosts). log_json: log one JSON object
    per line. drain_timeout: seconds that running
    requests get to finish after SIGTERM. stats_interval: seconds between console status lines, 0 for none.
    lora_adapters: adapters served from the start, by their names. lora_directory: clients may load adapters
    that lie in this directory, and unload any (None: they may not). otlp_endpoint: collector that gets a
    trace of every request (None: what OpenTelemetry's own environment variables say, if anything).
    tool_call_parser, reasoning_parser: "auto" goes by the chat template, "none" switches it off. strict:
    refuse every unknown field of a body, those of other servers' clients that have no effect too.
    trust_request_chat_template: requests may bring a chat template, which is a program, though one in a
    sandbox. show_cached_texts: the page shows the beginnings of cached prompts and answers to all clients,
    those with a cache salt or an adapter excepted.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    max_queued_requests: int = 256
    max_queued_prompt_tokens: int = 262_144
    request_timeout: float | None = 600.0
    max_body_bytes: int = 4 * 2**20
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    log_json: bool = False
    drain_timeout: float = 30.0
    stats_interval: float = 10.0
    lora_adapters: tuple[LoRARequest, ...] = ()
    lora_directory: Path | None = None
    otlp_endpoint: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    strict: bool = False
    trust_request_chat_template: bool = False
    show_cached_texts: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field.name} is {value}, but must be a finite number.")
        for name, low, high in _LIMITS:
            value = getattr(self, name)
            if not low <= value <= high:
                allowed = f"at least {low}" if high == math.inf else f"from {low} to {high}"
                raise ConfigError(f"{name} is {value}, but must be {allowed}.")
        if not self.host.strip():
            raise ConfigError(
                f"host is {self.host!r}, but must be an address, such as 127.0.0.1, or 0.0.0.0 for every one "
                "this "
                "machine has."
            )
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ConfigError(
                f"request_timeout is {self.request_timeout:g}, but must be above 0, in seconds."
            )
        check_parsers(self.tool_call_parser, self.reasoning_parser)
        for name in self.served_model_names:
            if not name.strip():
                raise ConfigError("A served_model_name is empty, but clients must have something to ask for.")
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    "An API key is empty or has characters other than printable ASCII; choose another."
                )
        for origin in self.cors_origins:
            if origin != "*" and not origin.startswith(("http://", "https://")):
                raise ConfigError(f"cors_origin is {origin!r}, but must be like https://example.org, or *.")

        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"allowed_host is {host!r}, but must be a name or an address without a port, such as "
                    "models.example.org or [2001:db8::1]."
                )
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint is {self.otlp_endpoint!r}, but must be like http://127.0.0.1:4318."
            )
        if self.lora_directory is not None and not self.lora_directory.is_dir():
            raise ConfigError(f"lora_directory is {str(self.lora_directory)!r}, but must be a directory.")

    @property
    def known_hosts(self) -> frozenset[str] | None:
        """Names with a dot that the Host header may have; None for anything.

        A server that asks for no key and listens on this machine alone is only as safe as this:
        see limits/hosts.py.
        """
        if not self.allowed_hosts and (self.api_keys or self.is_public):
            return None
        return frozenset(host.lower().removesuffix(".") for host in (self.host, *self.allowed_hosts))

    @property
    def is_public(self) -> bool:
        """True if other machines can reach the server."""
        if self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True


def with_images(max_body_bytes: int) -> int:
    """The largest body where a model sees: 32 MiB, unless the operator has chosen another limit."""
    return 32 * 2**20 if max_body_bytes == ServerSettings.max_body_bytes else max_body_bytes
