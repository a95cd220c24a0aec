"""What the engine core asks of its workers, wherever they are, and what frontends may ask of them by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from minivllm.config import EngineArgs, EngineConfig
from minivllm.distributed.lockstep import EngineSeat
from minivllm.errors import MinivllmError, RequestError
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.inbox import TransferInbox
from minivllm.messages import ModelRunnerOutput, SchedulerOutput, TokenMasks

if TYPE_CHECKING:
    from minivllm.specs.facts import ModelFacts


@dataclass(frozen=True)
class ExecutorContext:
    """What an executor starts from."""

    args: EngineArgs
    """As given; with several workers, importable in other processes."""
    config: EngineConfig
    """As resolved from them."""
    facts: ModelFacts
    seat: EngineSeat | None = None
    """Of the engine, among those that share experts."""


class PendingOutput(Protocol):
    """Results of a step that may still be running."""

    def result(self) -> ModelRunnerOutput:
        """Wait for them. Raises what the workers raised."""


class FinishedStep(NamedTuple):
    """A ``PendingOutput`` that is there."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


class Executor(Protocol):
    """What the engine core asks of its workers, wherever they are."""

    config: EngineConfig
    """Of the engine: as resolved, and with the nodes that the executor chose."""
    kv_groups: Sequence[GroupSpec]
    """With the sizes of their pools."""
    block_bytes: Sequence[int]
    """Of one block of each KV group, over all layers and workers."""
    vocab_size: int
    """Width of the logits."""
    transfers: TransferInbox
    """What a connector's worker side reports."""
    pids: Sequence[int]
    """Processes that the workers live in, by rank."""

    def execute_model(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingOutput:
        """Run one step on all workers; the output is that of the last one. Steps run in the order of these
        calls, also if the next one comes before the last one's result was asked for.

        token_masks: waits for the masks of the step, which are computed while the model runs;
        called before sampling.
        """

    def collective(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker, after the steps that were given to them; the results in order of
        rank. Raises RequestError if args do not fit."""

    def num_recompilations(self) -> int:
        """Regions that were compiled after warm-up."""

    def when_dead(self, tell: Callable[[MinivllmError], None]) -> None:
        """Call ``tell``, from any thread, when a worker dies, also while no call waits for a result."""

    def shutdown(self) -> None:
        """Release the workers and their memory."""


WORKER_METHODS = frozenset({"adapter_shapes", "memory_bytes", "weight_checksums"})
"""Methods of a Worker that ``collective_rpc`` of a frontend may call: they only look."""
ENGINE_METHODS = WORKER_METHODS | {
    "build_progress",
    "change_over",
    "clock",
    "initialize_pools",
    "is_compiled",
    "load_adapter",
    "load_model",
    "new_weights",
    "num_recompilations",
    "serve_uncompiled",
    "size_cache",
    "sleep",
    "start_profile",
    "stop_profile",
    "take_weights_from",
    "unload_adapter",
    "wake_up",
}
"""Methods of a Worker that ``Executor.collective`` may call, by name."""


def call_method(worker: Any, method: str, args: Sequence[Any]) -> Any:
    """The result of a method of the worker, or the value of a property. Raises RequestError if ENGINE_METHODS
    does not name it or the arguments do not fit."""
    if method not in ENGINE_METHODS:
        raise RequestError(f"{method!r} is no method of a worker that may be called.")
    found = getattr(worker, method)
    return found(*check_arguments(found, args)) if callable(found) else found


def start_workers(collective: Callable[..., list[Any]]) -> tuple[list[GroupSpec], list[int]]:
    """Load, size and warm up all workers; all get the smallest cache of any. The KV groups of the first one,
    and ``Executor.block_bytes``. collective: the executor's. Raises what a worker raises."""
    collective("load_model")
    sized: list[list[GroupSpec]] = collective("size_cache")
    counts = [min(group.num_blocks for group in groups) for groups in zip(*sized)]
    block_bytes = [sum(group.block_bytes for group in groups) for groups in zip(*sized)]
    collective("initialize_pools", counts, block_bytes)
    return [replace(group, num_blocks=count) for group, count in zip(sized[0], counts)], block_bytes


def check_arguments(function: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The arguments, plain values turned into the annotated types.
    Raises RequestError that says what does not fit."""
    name, signature = function.__name__, inspect.signature(function, eval_str=True)
    try:
        bound = signature.bind(*args)
        return [
            msgspec.convert(value, signature.parameters[key].annotation)
            for key, value in bound.arguments.items()
        ]
    except (TypeError, msgspec.ValidationError) as error:
        parameters = signature.replace(return_annotation=inspect.Signature.empty)
        raise RequestError(f"{name} cannot be called so: {error}. Its parameters are {parameters}.") from None
