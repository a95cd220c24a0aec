"""What operators ask of an engine core between two steps:
adapters, sleep, new weights, profiles, a look inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from minivllm.device.freed_memory import resident_bytes
from minivllm.errors import ModelError, RequestError
from minivllm.executor.protocol import WORKER_METHODS, check_arguments
from minivllm.kv_cache.tree.prefix_tree import prefix_tree
from minivllm.kv_transfer.connector import load_connector
from minivllm.kv_transfer.fingerprint import fingerprint
from minivllm.messages import LoRARequest, PrefixTree, RecentStep, SchedulerStats

if TYPE_CHECKING:
    from minivllm.engine.core import EngineCore


MOST_NODES = 1000
"""Of the prefix tree that are told at once."""


class Administration:
    """Every public method but ``call`` can be called by name, also from another process.

    Arguments and results are plain values that msgpack can write.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._weights_path = core.config.model_path
        self._sleep_level = 0

    def call(self, method: str, args: Sequence[Any]) -> Any:
        """Call a method by name. Raises RequestError for a name that is not known and arguments that do not
        fit."""
        if method.startswith("_") or method == "call" or method not in vars(Administration):
            known = ", ".join(
                sorted(name for name in vars(Administration) if name[0] != "_" and name != "call")
            )
            raise RequestError(f"{method!r} cannot be called on the engine; known are: {known}.")
        function = getattr(self, method)
        return function(*check_arguments(function, args))

    # -- a look inside -----------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        memory = list(map(resident_bytes, self._core.executor.pids))
        return structs.replace(self._core.scheduler.stats(), worker_resident_bytes=memory)

    def recent_steps(self, after: int) -> list[RecentStep]:
        """What the scheduler decided in the last steps, those with numbers above ``after``."""
        return self._core.scheduler.recent_steps(after)

    def prefix_tree(self, limit: int) -> PrefixTree:
        """The prefix cache as a tree, at most ``limit`` nodes, those near the roots first.

        Raises RequestError for a limit that is not from 1 to MOST_NODES.
        """
        if not 1 <= limit <= MOST_NODES:
            raise RequestError(f"The limit is {limit}, but must be from 1 to {MOST_NODES} nodes.")
        return prefix_tree(self._core.scheduler.kv_cache_manager, self._core.executor.block_bytes, limit)

    def num_recompilations(self) -> int:
        return self._core.executor.num_recompilations()

    def check_integrity(self) -> None:
        """Check requests, block tables and pool against each other.
        Raises RuntimeError that says what is wrong."""
        self._core.scheduler.check_integrity()

    def start_profile(self, directory: str) -> None:
        """Let the workers record what PyTorch runs. Raises RequestError."""
        self._core.executor.collective("start_profile", directory)

    def stop_profile(self) -> list[str]:
        """Paths of the traces, one per worker. Raises RequestError if none is being recorded."""
        return self._core.executor.collective("stop_profile")

    def collective_rpc(self, method: str, args: list[Any]) -> list[Any]:
        """Call one of WORKER_METHODS on every worker; their results in order of rank. Raises RequestError."""
        if method not in WORKER_METHODS:
            known = ", ".join(sorted(WORKER_METHODS))
            raise RequestError(f"{method!r} cannot be called on the workers; known are: {known}.")
        return self._core.executor.collective(method, *args)

    # -- adapters ----------------------------------------------------------------------------------

    def add_lora(self, name: str, path: str) -> None:
        """Have a LoRA adapter in memory before it is needed. Raises RequestError if it cannot be served."""
        self._core.load_adapter(LoRARequest(name, lora_path=path))

    def remove_lora(self, name: str) -> bool:
        """Forget an adapter; False if it is not known.
        Raises RequestError while unfinished requests use it."""
        adapters = self._core.adapters
        return adapters is not None and adapters.remove(name, self._core.adapters_in_use())

    def list_loras(self) -> list[tuple[str, str]]:
        """Name and path of all known adapters, least recently used first."""
        requests = [] if self._core.adapters is None else self._core.adapters.requests()
        return [(request.name, request.path) for request in requests]

    # -- the model as a whole ----------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes, also those that a connector keeps in this process; files stay. Returns
        False, and changes nothing, while requests hold blocks.

        Steps in flight need not be waited for:
        what they write for requests that have ended is never found again.
        """
        if not self._core.has_unfinished_requests():
            self._core.drain_transfers()
        return self._core.scheduler.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the model:
        level 1 keeps the weights in host memory, level 2 drops them, to be read again.

        The KV cache and its prefixes are gone in both. Raises RequestError while requests are unfinished.
        """
        if level not in (1, 2):
            raise RequestError(
                f"The sleep level is {level!r}, but must be 1 (weights to the host) or 2 (drop them)."
            )
        self._require_idle("sleep")
        self._core.executor.collective("sleep", level)
        if self._core.encodings is not None:
            self._core.encodings.clear()
        self._core.is_asleep, self._sleep_level = True, level

    def wake_up(self) -> None:
        """Undo sleep; an engine that is awake stays so. Raises ModelError, and goes on sleeping, if the
        weights cannot be read again, and RequestError if they have changed meanwhile and a connector cannot
        follow."""
        if not self._core.is_asleep:
            return
        digest = self._new_fingerprint() if self._sleep_level == 2 else None
        self._core.executor.collective("wake_up")
        self._core.is_asleep = False
        if digest is not None:
            self._core.use_fingerprint(digest)

    def _new_fingerprint(self) -> str | None:
        """Of the weights that are about to be read; None if no connector asks for it. Raises ModelError, or
        RequestError."""
        transfer = self._core.config.kv_transfer
        if transfer is None or not transfer.fingerprint:
            return None
        digest = fingerprint(transfer.settings, self._weights_path, self._core.config.eye_path)
        if digest != transfer.fingerprint:
            load_connector(transfer).check_new_weights(transfer)
        return digest

    def is_sleeping(self) -> bool:
        return self._core.is_asleep

    def update_weights(self, directory: str) -> None:
        """Replace the weights by those of a directory of safetensors files, and forget all cached prefixes,
        those that connectors keep as well; files stay, for engines that have the old weights.

        Raises RequestError while requests are unfinished or with a connector that cannot follow, and
        ModelError for weights that are not those of this architecture; both change nothing.
        """
        transfer = self._core.config.kv_transfer
        if transfer is not None:
            load_connector(transfer).check_new_weights(transfer)
        self._require_idle("update_weights")
        self._core.executor.collective("take_weights_from", directory)
        before, self._weights_path = self._weights_path, directory
        # Old and new weights may not fit beside each other.
        self.sleep(level=2)
        try:
            self.wake_up()
        except ModelError:
            self._core.executor.collective("take_weights_from", None)
            self._weights_path = before
            self.wake_up()
            raise

    def _require_idle(self, what: str) -> None:
        core = self._core
        if core.is_asleep:
            raise RequestError(f"{what} needs an engine that is awake: wake it up first.")
        if core.has_unfinished_requests():
            stats = self.stats()
            raise RequestError(
                f"{what} needs an idle engine, but {stats.num_running + stats.num_waiting} requests are "
                "unfinished: "
                "wait for them, or abort them."
            )
        while core.has_work():  # steps in flight, and the workers have not heard yet of all who finished
            core.step()
        core.settle()
        self.reset_prefix_cache()
