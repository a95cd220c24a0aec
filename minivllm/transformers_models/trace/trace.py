"""One run of a model on tensors without contents, whose number of tokens is left open:
a graph of all it computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from minivllm.compilation.regions import MAX_SIZE

EXAMPLE_TOKENS = 13
TRIED_SIZES = (2, 3, 63, 64, 65, 1000, 4096, MAX_SIZE)
"""Numbers of tokens for which everything that a trace took for granted must hold."""


class CannotTrace(Exception):
    """Why a model cannot be cut into regions: a phrase, for the log."""


class OwnTensors:
    """The parameters and buffers of a model that are no linear layer's, and can be exchanged for a while."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[dict[str, Any], str]] = [
            (owner, name)
            for part in model.modules()
            for owner in (part._parameters, part._buffers)
            for name, tensor in owner.items()
            if tensor is not None
        ]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(owner[name].data for owner, name in self._places)

    @contextmanager
    def given(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        before = [owner[name] for owner, name in self._places]
        for (owner, name), tensor in zip(self._places, tensors, strict=True):
            owner[name] = tensor
        try:
            yield
        finally:
            for (owner, name), old in zip(self._places, before):
                owner[name] = old


class Trace:
    """The graph of ``function(*inputs)`` and the tensors that it reads besides.

    own: placeholder or constant of the graph -> its place in ``constants(own tensors)``. inputs: placeholders
    of the inputs. tokens: the symbol of the number of tokens.
    """

    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor], own: OwnTensors) -> None:
        """inputs: the first dimension of each is that of tokens. Raises CannotTrace."""
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        environment = ShapeEnv()
        mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)
        fixed = [DimDynamic.STATIC] * max(tensor.dim() for tensor in inputs)

        def run(*tensors: Tensor) -> Tensor:
            with own.given(tensors[len(inputs) :]):
                return function(*tensors[: len(inputs)])

        with torch.inference_mode(False), torch.no_grad():
            fakes = []
            for place, tensor in enumerate(inputs):
                sizes: Any = StatelessSymbolicContext(
                    dynamic_sizes=[DimDynamic.DUCK, *fixed[1 : tensor.dim()]]
                )
                source = ConstantSource(f"input_{place}")
                own_copy = tensor.clone()  # one tensor given twice would be one input
                fakes.append(mode.from_tensor(own_copy, symbolic_context=sizes, source=source))
            symbol = fakes[0].shape[0].node.expr  # type: ignore[attr-defined]
            weights = [mode.from_tensor(tensor, static_shapes=True) for tensor in own.tensors]
            try:
                with mode:
                    module = make_fx(run, tracing_mode="real")(*fakes, *weights)
            except Exception as error:  # a model may do anything at all
                raise CannotTrace(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        self.graph = module.graph
        self.graph.eliminate_dead_code()
        self.tokens: Any = symbol
        self._check_sizes(environment)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.inputs = placeholders[: len(inputs)]
        self.own = {node: place for place, node in enumerate(placeholders[len(inputs) :])}
        self._constants: list[Tensor] = []
        for node in self.graph.nodes:
            if node.op == "get_attr":
                value = getattr(module, str(node.target))
                self.own[node] = len(weights) + len(self._constants)
                self._constants.append(value)

    @property
    def width(self) -> int:
        """The last dimension of the result."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        return int(output.all_input_nodes[0].meta["val"].shape[-1])

    def constants(self, own: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The own tensors of the model, and what else the graph reads that was made on the way."""
        return (*own, *self._constants)

    def _check_sizes(self, environment: Any) -> None:
        """Whether the graph serves every number of tokens."""
        if self.tokens in environment.replacements:
            raise CannotTrace(f"it computes something else for other numbers of tokens than {EXAMPLE_TOKENS}")
        for guard in environment.guards:
            if not all(guard.expr.xreplace({self.tokens: size}) for size in TRIED_SIZES):
                raise CannotTrace(f"what it computes depends on the number of tokens ({guard.expr})")


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that follows from the number of tokens."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool)
