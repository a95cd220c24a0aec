"""What the first node and the others tell one another,
and the settings that must be the same on all of them."""

from __future__ import annotations

import socket
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import msgspec

from minivllm import __version__
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.executor.records.child_reports import ErrorInfo
from minivllm.kv_transfer.fingerprint import fingerprint


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a node. versions, settings: what must be the same everywhere, by name."""

    node_rank: int
    versions: dict[str, str]
    settings: dict[str, str]


class FromWorker(msgspec.Struct, frozen=True, tag="from"):
    """A message of a worker to the executor, as it is."""

    rank: int
    message: msgspec.Raw


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The process of a worker has ended. status: as subprocess has it."""

    rank: int
    status: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The node cannot go on."""

    error: ErrorInfo


FromNode = Hello | FromWorker | Ended | Failed


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The node cannot take part; a sentence."""

    reason: str


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """All nodes are there: start the workers, with this configuration but for what is the node's own."""

    config: EngineConfig


class Record(msgspec.Struct, frozen=True, tag="record"):
    """What is to be written into the ring."""

    data: bytes


class ToWorker(msgspec.Struct, frozen=True, tag="to"):
    """A message of the executor to a worker, as it is."""

    rank: int
    message: msgspec.Raw


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End a worker at once."""

    rank: int


ToNode = Refused | Begin | Record | ToWorker | Kill

_OF_ONE_NODE = {"model", "model_path", "eye_path", "tokenizer", "nodes"}
_OF_THE_FIRST = {"profile", "compile_in_background", "scheduler.max_num_batched_tokens"}
"""What depends on who asks for the engine there:
a server wants short steps, a chat does not wait for the compiler."""


def versions() -> dict[str, str]:
    """Versions of the packages that must be equal on all nodes."""
    return {"minivllm": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def settings_of(config: EngineConfig) -> dict[str, str]:
    """All that decides what workers compute, by name: the model's files, wherever they lie, and every
    setting. Raises ModelError if the files cannot be read."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    values = {name: value for name, value in plain.items() if name not in _OF_ONE_NODE}
    if config.nodes is not None:
        values["nnodes"] = config.nodes.nnodes
    speculative = config.speculative
    if speculative is not None and speculative.model_path is not None:
        files = fingerprint("", speculative.model_path)
        values["speculative"] = {**plain["speculative"], "model": files, "model_path": None}
    flat: dict[str, Any] = {"the model's files": fingerprint("", config.model_path, config.eye_path)}
    for name, value in values.items():
        flat |= (
            {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        )
    shared = {name: value for name, value in flat.items() if name not in _OF_THE_FIRST}
    return {name: msgspec.json.encode(value, order="sorted").decode() for name, value in shared.items()}


def on_this_node(first: EngineConfig, own: EngineConfig) -> EngineConfig:
    """The first node's configuration, with a node's own place and files."""
    speculative = first.speculative
    if speculative is not None and own.speculative is not None:
        files = own.speculative
        speculative = replace(speculative, model=files.model, model_path=files.model_path)
    return replace(first, speculative=speculative, **{name: getattr(own, name) for name in _OF_ONE_NODE})


def difference(hello: Hello, own_versions: dict[str, str], own_settings: dict[str, str]) -> str | None:
    """What differs between a node and the first one, as a sentence."""
    for theirs, own, advice in (
        (hello.versions, own_versions, "install the same on all nodes"),
        (
            hello.settings,
            own_settings,
            "give the same flags on all nodes, and name what was left to the engine",
        ),
    ):
        for name in sorted(theirs.keys() | own.keys()):
            there, here = theirs.get(name, "nothing"), own.get(name, "nothing")
            if there != here:
                if name == "the model's files":
                    return f"Node {hello.node_rank} has other files of the model than node 0: copy them."
                return f"Node {hello.node_rank} has {name} {there}, but node 0 has {here}: {advice}."
    return None


def find_host(name: str) -> str:
    """The IP address of the first node. Raises ConfigError."""
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"master_addr is {name!r}, which cannot be found ({error.strerror}).") from None
    if address in ("0.0.0.0", "::"):
        raise ConfigError(
            f"master_addr is {name!r}, but must be the address by which other nodes reach the first one."
        )
    return address
