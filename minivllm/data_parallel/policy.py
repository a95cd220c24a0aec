"""Routing of requests to engines: the extension point, and two policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from minivllm.data_parallel.loads import EngineLoad
from minivllm.request import Request


class RoutingPolicy(ABC):
    """Chooses an engine for every request. Made once for a frontend, without arguments; called for each
    request in the order in which they come."""

    @abstractmethod
    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> EngineLoad:
        """One of the engines that are up, of which there is at least one, in the order of their numbers.

        request: its prompt is hashed (``block_hashes``), unless it may not use the prefix cache.
        """


class RoundRobin(RoutingPolicy):
    """Each engine in turn, whatever it holds and has to do."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> EngineLoad:
        chosen = next((engine for engine in engines if engine.index > self._last), engines[0])
        self._last = chosen.index
        return chosen


class PrefixAffinity(RoutingPolicy):
    """The engine that is done with the prompt first, by what it holds of it and by what it has to do besides.

    The score counts in prompt tokens: those to compute, of this request and of all that wait for their first
    token, and what the unfinished requests cost besides, since each of them, and every block it attends to,
    makes all steps a little longer. The lowest score wins; equal ones take turns. (The cost of NVIDIA
    Dynamo's router, in tokens.)
    """

    request_tokens = 64
    """Prompt tokens that take as long as one more request in the batch does: SmolLM2 on two cores needs 1.7
    ms for a prompt token, and 2.3 ms a step for one more request, of which some 50 steps are to come."""
    block_share = 0.25
    """Share of a block's tokens that count for attending to it.
    The cost grows with the context, but slowly."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, request: Request, engines: Sequence[EngineLoad]) -> EngineLoad:
        def score(engine: EngineLoad) -> float:
            to_compute = engine.num_prompt_tokens + engine.prompt_tokens_left(request)
            others = self.request_tokens * len(engine.requests)
            return to_compute + others + self.block_share * engine.block_size * engine.num_blocks

        in_turn = sorted(engines, key=lambda engine: engine.index <= self._last)
        chosen = min(in_turn, key=score)
        self._last = chosen.index
        return chosen
