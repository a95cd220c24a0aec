"""The engine client that engine arguments ask for: of one engine, or of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from minivllm.config import EngineArgs
from minivllm.engine_process import client as single
from minivllm.engine_process.protocol.clients import AsyncEngineClient, EngineClient
from minivllm.plugins.points import ROUTING

if TYPE_CHECKING:
    from minivllm.distributed.lockstep import EngineSeat

Client = TypeVar("Client")


def make_client(args: EngineArgs) -> EngineClient:
    """Load the model and start the engine cores: one in this process, or in another with args.multiprocess,
    or several in others. Raises ConfigError or ModelError."""
    if args.data_parallel_size == 1:
        return single.make_client(args)
    from minivllm.data_parallel.clients import DataParallelClient

    return _start(args, DataParallelClient)


def make_async_client(args: EngineArgs) -> AsyncEngineClient:
    """Start the engine processes for an event loop, and wait until they are ready.
    Raises ConfigError or ModelError."""
    if args.data_parallel_size == 1:
        return single.make_async_client(args)
    from minivllm.data_parallel.clients import AsyncDataParallelClient

    return _start(args, AsyncDataParallelClient)


def _start(args: EngineArgs, make: Callable[..., Client]) -> Client:
    from minivllm.data_parallel.replicas import start_engines, start_together
    from minivllm.device.cores import share_of_cores
    from minivllm.engine_process.connection import EngineConnection

    policy = ROUTING.load(args.data_parallel_policy)()
    environment = share_of_cores(args.data_parallel_size * args.num_workers)

    def connect(number: int, seat: EngineSeat | None = None) -> EngineConnection:
        return EngineConnection(args, environment=environment, number=number, seat=seat, wait=False)

    if args.shares_experts:
        return make(start_together(connect, args), connect, policy)
    return make(start_engines(connect, args.data_parallel_size), connect, policy)
