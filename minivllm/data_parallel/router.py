"""Which engine has which request. Knows no sockets and no processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minivllm.data_parallel.loads import EngineLoad
from minivllm.data_parallel.policy import RoutingPolicy
from minivllm.kv_cache.blocks.hashing import extend_block_hashes
from minivllm.messages import EngineOutput, EngineRequest
from minivllm.request import Request


class Router:
    """The loads of all engines, and the owner of every unfinished request.

    num_tokens: what the KV cache of one engine holds.
    hashes_blocks: False where the engines have no prefix cache.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        num_engines: int,
        block_size: int,
        num_tokens: int,
        hashes_blocks: bool = True,
    ) -> None:
        self._policy = policy
        self._block_size = block_size
        self._hashes_blocks = hashes_blocks
        self.engines = [
            EngineLoad(index, block_size, num_tokens // block_size) for index in range(num_engines)
        ]
        self._owners: dict[str, EngineLoad] = {}

    @property
    def up(self) -> list[EngineLoad]:
        """The engines that take requests."""
        return [engine for engine in self.engines if engine.is_up]

    @property
    def num_unfinished(self) -> int:
        return len(self._owners)

    def adapters_in_use(self) -> set[str]:
        """Names of the adapters of unfinished requests."""
        loras = (one.engine_request.lora for engine in self.engines for one in engine.requests.values())
        return {lora.name for lora in loras if lora is not None}

    def add(self, engine_request: EngineRequest) -> int:
        """The number of the engine that gets the request. At least one must be up."""
        request = Request(engine_request)
        if engine_request.lora is not None:
            # The engines put a digest of its contents into their hashes.
            # Here it must only tell adapters apart.
            request.lora_digest = f"{engine_request.lora.name}\0{engine_request.lora.path}"
        if self._hashes_blocks and not request.skips_prefix_cache:
            extend_block_hashes(request, self._block_size)
        engine = self._policy.choose(request, self.up)
        engine.add(request)
        self._owners[request.request_id] = engine
        return engine.index

    def take_in(self, outputs: Sequence[EngineOutput]) -> None:
        """Take in the outputs of an engine; those of requests that have ended here are ignored."""
        for output in outputs:
            engine = self._owners.get(output.request_id)
            if engine is not None:
                engine.take_in(output)
                if output.finish_reason is not None:
                    self._end(output.request_id)

    def remove(self, request_ids: Iterable[str]) -> dict[int, list[str]]:
        """End requests early: by engine, the ids that were unfinished."""
        owned: dict[int, list[str]] = {}
        for request_id in request_ids:
            if request_id in self._owners:
                owned.setdefault(self._owners[request_id].index, []).append(request_id)
                self._end(request_id)
        return owned

    def lose(self, index: int) -> list[str]:
        """An engine has died, with what it held:
        the ids of its unfinished requests, which are unfinished no more."""
        engine = self.engines[index]
        engine.is_up = False
        lost = list(engine.requests)
        for request_id in lost:
            self._end(request_id)
        engine.cached.clear()
        return lost

    def forget_prefixes(self) -> None:
        """The prefix caches are empty, or hold what is of no more use."""
        for engine in self.engines:
            engine.cached.clear()

    def _end(self, request_id: str) -> None:
        engine = self._owners.pop(request_id)
        request = engine.remove(request_id)
        if self._hashes_blocks and not request.skips_prefix_cache:
            extend_block_hashes(request, self._block_size)
            # The last known token has not been computed.
            engine.cached.add(request.block_hashes[: (request.num_tokens - 1) // self._block_size])
