"""The layers of a transformers model, compiled: one region for all layers that compute the same.

A region is a whole layer as a function of tensors: what it is called with, its weights, the arguments of its linear
layers. Attention in it is one operator, behind which keys and values are stored and the engine attends: compiled code
calls out for it, so a captured graph may still be cut there. Which layer attends is said before the call, never read in
it, so that layers share code. A layer takes the region of an earlier one if that one, given its weights, computes the
same numbers: so nothing has to be known of how a family tells its layers apart.

Layers that choose experts in a loop, or hand values on beside their result, cannot be traced and run as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, specs_of
from minivllm.models.model import TOKENS, LayerCache, TokenInputs
from minivllm.models.transformers_model.attention import PagedLayer, Step, StepHolder
from minivllm.models.transformers_model.linears import LinearModule

logger = logging.getLogger(__name__)

EXAMPLE_TOKENS = 13, 11
"""Of two trial steps: what differs between them in shape is the number of tokens."""


@dataclass
class Call:
    """How a layer is called: tensors, and everything else as a tree with gaps in their places."""

    tensors: list[Tensor]
    rest: list[Any]
    tree: Any

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        leaves, tree = pytree.tree_flatten((args, kwargs))
        rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [isinstance(leaf, Tensor) for leaf in leaves]
        return cls([leaf for leaf in leaves if isinstance(leaf, Tensor)], [*zip(places, rest)], tree)

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As the layer wants them, with other tensors."""
        given = iter(tensors)
        leaves = [next(given) if is_tensor else value for is_tensor, value in self.rest]
        arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(leaves, self.tree)
        return arguments

    @property
    def is_pure(self) -> bool:
        """Whether all but tensors are plain values, which a layer can read but not hand something on in."""
        return all(is_tensor or isinstance(value, int | float | str | None) for is_tensor, value in self.rest)


class Layer:
    """One layer of the model: its module, and the attention in it."""

    def __init__(self, module: nn.Module, paged: PagedLayer, holder: StepHolder) -> None:
        self.module, self.paged, self._holder = module, paged, holder
        self.compute = module.forward
        self.linears = [part for part in module.modules() if isinstance(part, LinearModule)]
        self._own: list[tuple[dict[str, Any], str]] = [
            (owner, name)
            for part in module.modules()
            for owner in (part._parameters, part._buffers)
            for name, tensor in owner.items()
            if tensor is not None
        ]

    @property
    def weights(self) -> tuple[tuple[Tensor, ...], tuple[tuple[Tensor, ...], ...]]:
        """Own parameters and constants, and the arguments of every linear layer."""
        own = tuple(owner[name].data for owner, name in self._own)
        return own, tuple(module.linear.arguments for module in self.linears)

    def run(self, call: Call, positions: Tensor, tensors: Any, weights: Any, adapters: Any) -> Any:
        """The layer as a function of tensors, with the weights of any layer of its kind."""
        args, kwargs = call.arguments(tensors)
        step = Step(TokenInputs(positions, adapters), (), None)
        with self._holder.running(step), self._given(*weights):
            out = self.compute(*args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    @contextmanager
    def _given(self, own: Sequence[Tensor], arguments: Sequence[tuple[Tensor, ...]]) -> Iterator[None]:
        before = [owner[name] for owner, name in self._own]
        linears = [module.linear for module in self.linears]
        stored = [(linear.tensors, linear.adapters) for linear in linears]
        for (owner, name), tensor in zip(self._own, own):
            owner[name] = tensor
        for linear, given in zip(linears, arguments):
            count = len(linear.tensors)
            linear.tensors, linear.adapters = given[:count], given[count:]
        try:
            yield
        finally:
            for (owner, name), old in zip(self._own, before):
                owner[name] = old
            for linear, (tensors, adapters) in zip(linears, stored):
                linear.tensors, linear.adapters = tensors, adapters


def find_layers(body: nn.Module, count: int, holder: StepHolder) -> list[Layer]:
    """The layers of the body: what lies in a list of modules and holds one attention each. Empty if there is no such
    list."""
    for part in body.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            held = [[one for one in layer.modules() if hasattr(one, "paged_layer")] for layer in part]
            if all(len(attention) == 1 for attention in held):
                return [Layer(layer, own[0].paged_layer, holder) for layer, own in zip(part, held)]  # type: ignore[arg-type]
    return []


def compile_layers(
    layers: Sequence[Layer],
    run_step: Callable[[int], None],
    compile_region: CompileRegion,
    tokens: TokenInputs,
    constants: object,
    holder: StepHolder,
) -> None:
    """Put compiled code in the place of every layer that can be traced.

    run_step: runs the body on so many tokens, without a cache. constants: what tells models apart, with a repr.
    """
    for layer in layers:
        layer.module.forward = layer.compute
    calls = [_trial(layers, run_step, count) for count in EXAMPLE_TOKENS]
    kinds: list[tuple[Layer, Call, Any, Callable]] = []
    num_plain = 0
    for index, layer in enumerate(layers):
        call, _ = calls[0][index]
        if not call.is_pure or not _can_be_traced(layer, call, holder):
            num_plain += 1
            continue
        declared = _declare(call, calls[1][index][0])
        run = next((run for one, its, spec, run in kinds if _is_like(one, its, spec, layer, call, declared)), None)
        if run is None:
            inputs = {
                "positions": tokens.positions,
                "tensors": declared,
                "weights": specs_of(layer.weights),
                "adapters": tokens.adapters,
            }
            methods = [module.linear.method for module in layer.linears]
            known = (constants, layer.paged.layer, call.rest, methods, len(kinds))

            def function(positions: Any, tensors: Any, weights: Any, adapters: Any, layer=layer, call=call) -> Any:  # type: ignore[no-untyped-def]
                return layer.run(call, positions, tensors, weights, adapters)

            run = compile_region(Region("layer", function, inputs, known))
            kinds.append((layer, call, declared, run))
        layer.module.forward = Compiled(layer, run, calls[0][index][1], holder)
    logger.info("%d layers share %d regions; %d cannot be traced.", len(layers) - num_plain, len(kinds), num_plain)


class Compiled:
    """Called in place of a layer's forward."""

    def __init__(self, layer: Layer, run: Callable, is_tuple: bool, holder: StepHolder) -> None:
        self._layer, self._run, self._is_tuple, self._holder = layer, run, is_tuple, holder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._holder.step
        assert step is not None
        step.attending = self._layer.paged
        tensors = tuple(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        out = self._run(step.tokens.positions, tensors, self._layer.weights, step.tokens.adapters)
        return (out, None) if self._is_tuple else out


def _trial(layers: Sequence[Layer], run_step: Callable[[int], None], count: int) -> list[tuple[Call, bool]]:
    """How every layer is called in a step of so many tokens, and whether it returns a tuple."""
    seen: list[tuple[Call, bool]] = []

    def note(compute: Callable) -> Callable:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call = Call.of(args, kwargs)
            out = compute(*args, **kwargs)
            seen.append((call, isinstance(out, tuple)))
            return out

        return forward

    for layer in layers:
        layer.module.forward = note(layer.compute)
    try:
        run_step(count)
    finally:
        for layer in layers:
            layer.module.forward = layer.compute
    return seen


def _declare(call: Call, other: Call) -> tuple[TensorSpec, ...]:
    """Specs of the tensors a layer is called with; sizes that differ between two steps are the tokens."""
    specs = []
    for one, two in zip(call.tensors, other.tensors, strict=True):
        shape = tuple(a if a == b else TOKENS for a, b in zip(one.shape, two.shape, strict=True))
        specs.append(TensorSpec(shape, one.dtype, one.device))
    return tuple(specs)


def _can_be_traced(layer: Layer, call: Call, holder: StepHolder) -> bool:
    """Whether the layer runs on tensors without contents: nothing in it depends on values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        tensors = [mode.from_tensor(tensor) for tensor in call.tensors]
        try:
            layer.run(call, torch.zeros(EXAMPLE_TOKENS[0], dtype=torch.int32), tensors, layer.weights, None)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return False
    return True


def _is_like(one: Layer, its: Call, spec: Any, layer: Layer, call: Call, declared: Any) -> bool:
    """Whether one layer, given the weights of another, computes what that one does."""
    same = (
        spec == declared
        and its.rest == call.rest
        and replace(one.paged.layer, module="") == replace(layer.paged.layer, module="")
        and [part.linear.method for part in one.linears] == [part.linear.method for part in layer.linears]
        and specs_of(one.weights) == specs_of(layer.weights)
    )
    if not same:
        return False
    positions = torch.zeros(EXAMPLE_TOKENS[0], dtype=torch.int32, device=call.tensors[0].device)
    first = one.run(call, positions, call.tensors, layer.weights, None)
    second = layer.run(call, positions, call.tensors, layer.weights, None)
    return torch.equal(first, second)


def dummy_caches(layers: Sequence[PagedLayer], dtype: torch.dtype, device: torch.device) -> list[LayerCache]:
    """Caches of one block for all layers, in which nothing is kept."""
    shapes = [(2, 1, 8, one.layer.kv_heads, one.layer.cache_dim) for one in layers]
    return [LayerCache(*torch.zeros(shape, dtype=dtype, device=device)) for shape in shapes]
