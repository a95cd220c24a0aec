"""The executor of an engine whose nodes Ray chooses:
that of several processes, and hosts, once they are reserved."""

from __future__ import annotations

import os
import secrets
import subprocess
import weakref
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from minivllm.config import EngineArgs, EngineConfig, NodesConfig
from minivllm.engine_process.ray.messages import FromPlacer, Launch, Left, NodeStart, Place, Placed
from minivllm.errors import EngineDeadError
from minivllm.executor.local_workers import environment_of_children, python_module, start_process
from minivllm.executor.multiproc import MultiprocExecutor
from minivllm.executor.nodes.head import HeadNode
from minivllm.executor.nodes.messages import settings_of
from minivllm.executor.protocol import ExecutorContext
from minivllm.executor.records.child_reports import Log, describe_exit
from minivllm.executor.records.records import Died
from minivllm.specs.facts import ModelFacts

PLACER_COMMAND = python_module("minivllm.engine_process.ray.placer")
PLACEMENT_SECONDS = 600.0
"""How long to wait until nodes have room."""
EXIT_SECONDS = 3.0
_PLACER = "process that talks to Ray"


class Placement:
    """Nodes that are reserved for one engine until it is closed, and a ``NodeStarter`` for them.

    config: of the first node. Raises ConfigError if there are none,
    EngineDeadError if Ray cannot be talked to.
    """

    def __init__(
        self, args: EngineArgs, config: EngineConfig, command: Sequence[str] = PLACER_COMMAND
    ) -> None:
        self._args = args
        self._secret = secrets.token_bytes(32)
        self._process, self._channel = start_process(command, FromPlacer, environment_of_children())
        try:
            self._channel.send(
                Place(
                    config.num_workers,
                    nnodes=args.nnodes if args.nnodes > 1 else None,
                    resource="GPU" if config.device == "cuda" else "CPU",
                    seconds=PLACEMENT_SECONDS,
                )
            )
            while (placed := self._hear()) is None:
                pass
        except BaseException:
            self.close()
            raise
        nodes = NodesConfig(
            nnodes=placed.nnodes, node_rank=0, master_addr=placed.address, master_port=0, key_file=""
        )
        self.config = config if placed.nnodes == 1 else replace(config, nodes=nodes)

    def head(self) -> HeadNode | None:
        """Start the other nodes, and wait for them. Raises what keeps one from taking part."""
        if self.config.nodes is None:
            return None
        return HeadNode(self.config, settings_of(self.config), self._secret, self)

    def _hear(self) -> Placed | None:
        """Take in what is said. Raises what has gone wrong."""
        try:
            messages = self._channel.receive()
        except msgspec.MsgspecError as error:
            raise EngineDeadError(f"The {_PLACER} said something else than a message: {error}") from None
        if messages is None:
            raise EngineDeadError(describe_exit(_PLACER, self._process.wait()))
        placed = None
        for message in messages:
            if isinstance(message, Log):
                message.handle()
            elif isinstance(message, Died):
                raise message.error.exception(_PLACER)
            elif isinstance(message, Left):
                if message.error is None:
                    raise EngineDeadError(f"The process of {message.node} has ended.")
                named = f"{message.node[0].upper()}{message.node[1:]}: {message.error.message}"
                raise msgspec.structs.replace(message.error, message=named).exception(
                    f"process of {message.node}"
                )
            else:
                placed = message
        return placed

    # -- as a NodeStarter --------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._channel.fileno()

    def start(self, port: int) -> None:
        """See NodeStarter."""
        first = self.config.nodes
        assert first is not None
        nodes = [replace(first, node_rank=rank, master_port=port) for rank in range(1, first.nnodes)]
        threads = os.environ.get("OMP_NUM_THREADS")
        starts = [NodeStart(self._args, node, self._secret, os.getcwd(), threads) for node in nodes]
        self._channel.send(Launch(list(map(msgspec.msgpack.encode, starts))))

    def take_news(self) -> None:
        """See NodeStarter."""
        self._hear()

    def close(self) -> None:
        """Give the nodes back. The last call."""
        self._channel.close()
        try:
            self._process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RayExecutor(MultiprocExecutor):
    """Has the nodes of its cluster run the workers. args: importable in other processes."""

    def __init__(self, args: EngineArgs, config: EngineConfig, facts: ModelFacts) -> None:
        placement = Placement(args, config)
        self._leave = weakref.finalize(self, placement.close)
        try:
            super().__init__(placement.config, facts, nodes=placement.head())
        except BaseException:
            self._leave()
            raise

    @classmethod
    def start(cls, context: ExecutorContext) -> RayExecutor:
        """See EXECUTORS."""
        return cls(context.args, context.config, context.facts)

    def shutdown(self) -> None:
        super().shutdown()
        self._leave()
