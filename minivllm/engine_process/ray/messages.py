"""What an engine and the process that talks to Ray for it tell one another,
and what Ray brings to the other nodes."""

from __future__ import annotations

import msgspec

from minivllm.config import EngineArgs, NodesConfig
from minivllm.executor.records.child_reports import ErrorInfo, Log
from minivllm.executor.records.records import Died


class Place(msgspec.Struct, frozen=True, tag="place"):
    """Reserve nodes. resource: what a worker takes one of, "CPU" or "GPU". nnodes: None for as few as have
    room. seconds: how long to wait for them."""

    num_workers: int
    nnodes: int | None
    resource: str
    seconds: float


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """Start the agents of nodes 1, 2, …. starts: a ``NodeStart`` for each, encoded."""

    starts: list[bytes]


ToPlacer = Place | Launch


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """So many nodes are reserved. address: of this one, where the others find it."""

    nnodes: int
    address: str


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The agent of a node has ended. node: its name. error: why, if not with the first node."""

    node: str
    error: ErrorInfo | None


FromPlacer = Placed | Left | Log | Died


class NodeStart(msgspec.Struct, frozen=True):
    """What an agent is started with.
    directory, threads: the caller's working directory and OMP_NUM_THREADS."""

    args: EngineArgs
    node: NodesConfig
    secret: bytes
    directory: str
    threads: str | None
