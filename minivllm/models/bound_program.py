"""A model's program with its regions compiled, called with what a step gives a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minivllm.compilation.regions import CompileRegion, TensorSpec, flatten
from minivllm.models.model import AttendWeights, Hidden, TokenInputs
from minivllm.program.fuse import Plan
from minivllm.program.program import Name, Tree, World
from minivllm.program.runner import Runner
from minivllm.specs.caches import ROWS, TOKENS, LayerCache


def program_inputs(tokens: TokenInputs, caches: Sequence[LayerCache | None]) -> Mapping[Name, Tree]:
    """The registers at the beginning of a step, and "rows": the picked ones. All are given as specs; None in
    place of the cache of a layer that keeps a state."""
    positions: TensorSpec = tokens.positions  # type: ignore[assignment]
    return {
        "token_ids": TensorSpec((TOKENS,), torch.int32, positions.device),
        "positions": positions,
        "adapters": tokens.adapters,
        **{f"cache.{number}": cache for number, cache in enumerate(caches)},
        "rows": TensorSpec((ROWS,), torch.int32, positions.device),
    }


class BoundProgram:
    """The two parts of a plan whose inputs are ``program_inputs``, and others after them."""

    def __init__(self, plan: Plan, compile_region: CompileRegion) -> None:
        self._body = Runner(plan.body, compile_region)
        self._tail = None if plan.tail is None else Runner(plan.tail, compile_region)
        # The tail is given the results of the body, then those inputs of the body that it reads as well,
        # then the rows.
        again = () if plan.tail is None else plan.tail.inputs[len(plan.body.results) : -1]
        assert set(again) <= {"positions", "adapters"}, again
        self._reads_positions = "positions" in again
        self._reads_adapters = "adapters" in again
        caches = [name for name in plan.body.inputs if name.startswith("cache.")]
        self._has_cache = [plan.body.trees[name] is not None for name in caches]

    def rebind(self) -> None:
        """The weights moved or were replaced."""
        self._body.rebind()
        if self._tail is not None:
            self._tail.rebind()

    def body(
        self,
        token_ids: Tensor,
        tokens: TokenInputs,
        caches: Sequence[LayerCache],
        world: World,
        *more: Tensor,
    ) -> Hidden:
        """Everything up to the choice of rows. more: the inputs after those of ``program_inputs``. Returns
        what follows reads of it; nothing, if the program ends without a result."""
        inputs: list[Tensor] = [token_ids, tokens.positions]
        if tokens.adapters is not None:
            flatten(tokens.adapters, inputs)
        for has_cache, cache in zip(self._has_cache, caches):
            if has_cache:
                inputs += cache
        inputs += more
        return self._body(inputs, world)

    def tail(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs, world: World) -> tuple[Tensor, ...]:
        """The results for the picked rows (int32) of what ``body`` returned for these tokens."""
        assert self._tail is not None, "this stage has no results"
        inputs = [*hidden]
        if self._reads_positions:
            inputs.append(tokens.positions)
        if self._reads_adapters and tokens.adapters is not None:
            flatten(tokens.adapters, inputs)
        inputs.append(rows)
        return self._tail(inputs, world)

    def join(self, nothing: Tensor, world: World) -> None:
        """See ``Runner.join``."""
        self._body.join(nothing, world)


def no_attention(layer: int, q: Tensor, weights: AttendWeights = None) -> Tensor:
    """In a world where nothing attends."""
    raise AssertionError("nothing attends here")
