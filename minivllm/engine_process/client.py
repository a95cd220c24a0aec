"""How a frontend reaches an engine core:
in its process, where a debugger steps from one to the other, or in another.

Nothing here imports torch before a core is loaded into this very process.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from minivllm.config import EngineArgs
from minivllm.device.gpus import take_gpus
from minivllm.distributed.lockstep import EngineSeat, Lockstep
from minivllm.engine.administration import Administration
from minivllm.engine_process.protocol.clients import EngineClient
from minivllm.engine_process.protocol.pixels import NO_PIXELS, PixelAnswers
from minivllm.errors import ConfigError
from minivllm.messages import EngineOutput, EngineRequest, SchedulerStats
from minivllm.plugins.plugin import import_object
from minivllm.plugins.points import CLIENTS, EXECUTORS, NODE_AGENT
from minivllm.startup.garbage import without_collections
from minivllm.startup.openmp import choose_wait_policy

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from minivllm.engine.core import EngineCore
    from minivllm.engine_process.process_clients import AsyncProcessClient
    from minivllm.specs.facts import ModelFacts


class InProcessClient:
    """Runs one step of the core per ``get_outputs``."""

    def __init__(self, core: EngineCore, model_vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.config = core.config
        self.core = core
        self.administration = Administration(core)
        self.model_vocab_size = model_vocab_size
        self.eos_token_ids = eos_token_ids
        self._answers = NO_PIXELS
        self._questions: list[bytes] = []
        core.ask_for_pixels(self._questions.extend)

    def serve_pixels(self, answers: PixelAnswers) -> None:
        self._answers = answers

    def add_request(self, request: EngineRequest) -> None:
        self.core.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort_requests(request_ids)

    def get_outputs(self) -> list[EngineOutput]:
        """One step. An empty list means that nothing came out, not that nothing is left to do."""
        while self._questions:
            self.core.take_pixels(self._answers.source(self._questions.pop(0)))
        if not self.core.has_work():
            self.core.take_transfers(may_wait=True)
        return self.core.step()

    def has_unfinished_requests(self) -> bool:
        return self.core.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        return self.administration.stats()

    def reset_prefix_cache(self) -> bool:
        return self.administration.reset_prefix_cache()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of Administration. Raises RequestError if it refuses."""
        return self.administration.call(method, args)

    def close(self) -> None:
        self.core.shutdown()


def load_core(
    args: EngineArgs, seat: EngineSeat | None = None, number: int = 0
) -> tuple[EngineCore, ModelFacts]:
    """Load the model into this process. seat: among engines that share experts. number: among several engines
    of this machine. Raises ConfigError or ModelError."""
    if args.node_rank > 0:
        raise ConfigError(
            f"node_rank is {args.node_rank}, but only the first node has an engine: `minivllm serve` runs "
            "the others."
        )
    if args.executor in CLIENTS:
        raise ConfigError(
            f"distributed_executor_backend is {args.executor!r}, which is for LLM and generate in the "
            "processes that torchrun started: here the engine has a process of its own."
        )
    choose_wait_policy()
    logger.info("Importing torch …")
    with without_collections():
        from minivllm.engine.core import EngineCore
        from minivllm.engine.resolve import resolve
        from minivllm.executor.protocol import ExecutorContext

        start = _load(
            args, EXECUTORS["nodes" if args.executor == "mp" and args.nnodes > 1 else args.executor]
        )
    if args.data_parallel_size > 1 and args.device != "cpu" and not args.shares_experts:
        take_gpus(number, args.data_parallel_size, args.num_workers, args.sizes_cache)
    args = args if args.executor == "uni" else args.for_another_process()
    lockstep = None if seat is None else Lockstep(seat)
    with without_collections():
        config, facts = resolve(args)
        executor = start(ExecutorContext(args, config, facts, seat))
        return EngineCore(executor.config, executor, lockstep), facts


def _load(args: EngineArgs, path: str) -> Any:
    return import_object(f"distributed_executor_backend {args.executor!r}", path)


def run_node(args: EngineArgs) -> int:
    """Run the workers of a node that is not the first, until that ends; the exit status. Raises ConfigError,
    ModelError or EngineDeadError."""
    choose_wait_policy()
    with without_collections():
        from minivllm.engine.resolve import resolve

        run = _load(args, NODE_AGENT)
    config, _ = resolve(args.for_another_process())
    status: int = run(config)
    return status


def make_client(args: EngineArgs) -> EngineClient:
    """Load the model and start an engine core, in this process or, with args.multiprocess, in another.

    Raises ConfigError or ModelError.
    """
    if args.multiprocess:
        from minivllm.engine_process.connection import EngineConnection
        from minivllm.engine_process.process_clients import ProcessClient

        return ProcessClient(EngineConnection(args))
    if args.executor in CLIENTS:
        choose_wait_policy()
        with without_collections():
            connect = _load(args, CLIENTS[args.executor])
        client: EngineClient = connect(args)
        return client
    core, facts = load_core(args)
    return InProcessClient(core, facts.vocab_size, facts.eos_token_ids)


def make_async_client(args: EngineArgs) -> AsyncProcessClient:
    """Start an engine process for an event loop, and wait until it is ready.
    Raises ConfigError or ModelError."""
    from minivllm.engine_process.connection import EngineConnection
    from minivllm.engine_process.process_clients import AsyncProcessClient

    return AsyncProcessClient(EngineConnection(args))
