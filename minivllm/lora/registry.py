"""The engine core's view of adapters:
which ones are known, which are in memory, and who may run with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from minivllm.config import LoRAConfig
from minivllm.errors import RequestError
from minivllm.messages import LoRARequest
from minivllm.request import Request

PATIENCE = 16
"""Requests that may overtake one that waits for an adapter slot before the slots are emptied for it."""


@dataclass
class _Known:
    """digest: of the contents, None while the adapter is not in the workers' memory."""

    request: LoRARequest
    digest: str | None = None


class AdapterRegistry:
    """Adapters by name, with an LRU over the host memory of the workers.

    collective: runs a method of every worker and returns the results (Executor.collective). At most
    ``max_cpu_loras`` adapters are kept in memory, more only while unfinished requests use more; an adapter
    that had to go stays known and is read again when it is asked for.
    """

    def __init__(self, config: LoRAConfig, collective: Callable[..., list[Any]]) -> None:
        self._max_cpu_loras = config.max_cpu_loras
        self._collective = collective
        # Least recently used first.
        self._known: dict[str, _Known] = {}

    def add(self, request: LoRARequest, in_use: Iterable[str]) -> str:
        """Have an adapter in memory; the digest of its contents, which names them in the prefix cache.

        in_use: names of the adapters of unfinished requests.
        Raises RequestError if the adapter cannot be served; then nothing has changed.
        """
        known = self._known.get(request.name, _Known(request))
        if known.request.path != request.path:
            raise RequestError(
                f"The name {request.name!r} is taken by the adapter in {known.request.path}, not "
                f"{request.path}: "
                "remove that one first, or choose another name."
            )
        if known.digest is None:
            known.digest = self._load(request)
        self._known.pop(request.name, None)
        self._known[request.name] = known
        self._evict({*in_use, request.name})
        return known.digest

    def _load(self, request: LoRARequest) -> str:
        """Have all workers read an adapter. Returns its digest.
        Raises RequestError, and then no worker has it."""
        try:
            digests = self._collective("load_adapter", request)
            others = [str(rank) for rank, digest in enumerate(digests) if digest != digests[0]]
            if others:
                raise RequestError(
                    f"The adapter {request.name!r} is not the same on all nodes: {request.path} holds "
                    "something else "
                    f"for the workers of rank {', '.join(others)} than for that of rank 0. Copy one of them "
                    "to all."
                )
        except RequestError:
            self._collective("unload_adapter", request.name)
            raise
        digest: str = digests[0]
        return digest

    def remove(self, name: str, in_use: Iterable[str]) -> bool:
        """Forget an adapter; False if it is not known.
        Raises RequestError while unfinished requests use it."""
        if name in in_use:
            raise RequestError(
                f"The adapter {name!r} is in use by unfinished requests: let them end, or abort them."
            )
        known = self._known.pop(name, None)
        if known is not None and known.digest is not None:
            self._collective("unload_adapter", name)
        return known is not None

    def requests(self) -> list[LoRARequest]:
        """All known adapters, least recently used first."""
        return [known.request for known in self._known.values()]

    def names_in_memory(self) -> list[str]:
        """Adapters in the host memory of the workers, least recently used first."""
        return [name for name, known in self._known.items() if known.digest is not None]

    def _evict(self, in_use: set[str]) -> None:
        in_memory = self.names_in_memory()
        num_too_many = len(in_memory) - self._max_cpu_loras
        for name in [name for name in in_memory if name not in in_use][: max(0, num_too_many)]:
            self._collective("unload_adapter", name)
            self._known[name].digest = None


class AdapterAdmission:
    """AdmissionPolicy: the requests that run use at most ``max_loras`` adapters.

    A request whose adapter finds no slot waits, and others overtake it, so that the batch stays full; after
    ``PATIENCE`` of them no adapter is taken up any more before its turn has come, whatever arrives.
    """

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._num_overtaken: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self._ahead: list[Request] = []

    def begin_step(self) -> None:
        """Forget the requests that were set aside in the previous step."""
        self._ahead.clear()

    def may_run(self, request: Request, running: Sequence[Request]) -> bool:
        """False while the slots are taken by other adapters,
        or kept for those who have waited long enough."""
        lora = request.engine_request.lora
        if lora is None:
            return True
        used = {other.engine_request.lora for other in running} - {None}
        fits = lora in used or len(used) < self._max_loras
        if not fits or any(self._num_overtaken.get(other, 0) >= PATIENCE for other in self._ahead):
            self._ahead.append(request)
            return False
        for other in self._ahead:
            self._num_overtaken[other] = self._num_overtaken.get(other, 0) + 1
        return True
