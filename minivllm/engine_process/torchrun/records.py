"""What rank 0 tells the other ranks, through gloo, and what torchrun tells all of them."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from minivllm.config import EngineArgs
from minivllm.errors import ConfigError
from minivllm.executor.records.child_reports import ErrorInfo
from minivllm.executor.records.records import Call, Masks, Step
from minivllm.messages import EngineOutput, EngineRequest


class Added(msgspec.Struct, frozen=True, tag="added"):
    """Rank 0 was given this request, and has taken it unless there is an error."""

    request: EngineRequest
    error: ErrorInfo | None = None


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """A step of the engine is over, on all ranks."""

    outputs: list[EngineOutput]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Anything else is over: its name, and what came of it."""

    name: str
    value: Any = None
    error: ErrorInfo | None = None


FromFirst = Step | Masks | Call | Added | Stepped | Done


def place_of(args: EngineArgs) -> tuple[int, int]:
    """Rank of this process, and how many there are.
    Raises ConfigError if torchrun did not start so many here."""
    found = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if not all(value.isdecimal() for value in found.values()):
        raise ConfigError(
            "distributed_executor_backend is 'external_launcher', but torchrun did not start this process: "
            "use "
            f"torchrun --nproc-per-node {args.tensor_parallel_size} SCRIPT."
        )
    rank, size, local_size = (int(value) for value in found.values())
    if size != args.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size is {args.tensor_parallel_size}, but torchrun started {size} processes: "
            "use "
            f"--nproc-per-node {args.tensor_parallel_size}."
        )
    if local_size != size:
        raise ConfigError(
            f"torchrun started {size} processes, but only {local_size} of them on this host. Between hosts "
            "gloo would "
            "send in plain text: use minivllm's own nnodes there."
        )
    return rank, size
