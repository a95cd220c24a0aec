"""A traced model in segments: what lies in front of the first attention, between two, and behind the last.

A segment is a graph, whose inputs are attention's output, positions, adapters, the values that earlier
segments left, and the weights it reads. Segments that say the same are one region: only weights tell layers
apart.
Where several workers divide the model, segments also end where these exchange a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from kernels_triton_free.lora import RowAdapters
from minivllm.compilation.regions import Size, TensorSpec
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearTensors
from minivllm.specs.caches import TOKENS
from minivllm.transformers_models.trace.trace import CannotTrace, Trace, is_size

_ATTEND = torch.ops.minivllm.attend.default
_ADD = torch.ops.minivllm.add_ranks.default
_GATHER = torch.ops.minivllm.gather_ranks.default
_PRODUCT = torch.ops.minivllm.product.default
_EXPERTS = torch.ops.minivllm.experts.default


class ProductModule(nn.Module):
    """A linear layer as a function of its tensors, in the places of a graph."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.product = linear.product
        self.has_adapters = bool(linear.adapters)

    def forward(self, x: Tensor, arguments: LinearTensors, adapters: RowAdapters | None) -> Tensor:
        """x [..., in] -> [..., out]."""
        out = self.product(x.reshape(-1, x.shape[-1]), arguments, adapters if self.has_adapters else None)
        return out.reshape(*x.shape[:-1], out.shape[-1])


class ExpertSum(nn.Module):
    """The experts of a layer as a function of their tensors. method: an ExpertsMethod."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, tensors: LinearTensors) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        out: Tensor = self.method.apply(x, ids, weights, tensors)
        return out


@dataclass(frozen=True)
class Exchange:
    """What workers do with the tensor that a segment ends with.
    widths: of each one's, if they go side by side; None where they are added."""

    widths: tuple[int, ...] | None


@dataclass
class Segment:
    """What is computed between two attentions, or exchanges.

    module: called with (entry, positions, adapters, *values, *own, *products, *experts). takes, gives: values
    that it reads of earlier segments and leaves for later ones, by number. own, products, experts: what it
    reads of the model, by place. attends: whether the first three outputs are q, k and v. sinks: the place of
    the layer's own tensor. dtype: of attention's output in front of it. specs: of the values it takes.
    exchange: what is done with the first output, [tokens, width], if workers exchange it. entry: of what is
    in front of it if that was exchanged. keeps: the number under which later segments read that again.
    """

    module: fx.GraphModule
    takes: list[int]
    gives: list[int]
    own: list[int]
    products: list[int]
    experts: list[int]
    attends: bool
    sinks: int | None
    dtype: torch.dtype | None
    specs: tuple[TensorSpec, ...]
    exchange: Exchange | None = None
    entry: TensorSpec | None = None
    keeps: int | None = None

    @property
    def text(self) -> str:
        """All that the segment does."""
        return str(self.module.graph)


@dataclass
class _Plan:
    """Which nodes of the trace a segment computes, and what it reads from outside,
    in the order of its first use."""

    nodes: list[fx.Node] = field(default_factory=list)
    takes: list[fx.Node] = field(default_factory=list)
    own: list[fx.Node] = field(default_factory=list)
    products: list[int] = field(default_factory=list)
    experts: list[int] = field(default_factory=list)
    end: fx.Node | None = None
    """The attention or the exchange behind it."""


def cut(trace: Trace, products: Sequence[Linear], experts: Sequence[Any]) -> list[Segment]:
    """The segments of a trace in their order.
    products, experts: what the operators of the trace mean by their numbers.

    Raises CannotTrace.
    """
    plans, home = [_Plan()], {}
    for node in trace.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_size(node):
            continue
        if node.target in (_ATTEND, _ADD, _GATHER):
            plans[-1].end = node
            plans.append(_Plan())
        else:
            plans[-1].nodes.append(node)
        home[node] = len(plans) - 1
    output = next(node for node in trace.graph.nodes if node.op == "output")
    if len(output.all_input_nodes) != 1:
        raise CannotTrace("its result is not one tensor")
    crossing: dict[fx.Node, int] = {}
    for index, plan in enumerate(plans):
        for node in (*plan.nodes, plan.end or output):
            for read in _read(node, trace):
                if read in trace.own:
                    _note(plan.own, read)
                elif read in trace.inputs:
                    if index and read is not trace.inputs[-1]:
                        raise CannotTrace("token ids are looked at behind the first attention")
                elif home[read] != index:
                    crossing.setdefault(read, 0)
                    _note(plan.takes, read)
            if node.target is _PRODUCT:
                _note(plan.products, int(node.args[1]))  # type: ignore[arg-type]
            elif node.target is _EXPERTS:
                _note(plan.experts, int(node.args[3]))  # type: ignore[arg-type]
    for number, node in enumerate(crossing):
        crossing[node] = number
    modules: dict[str, Callable[[int], nn.Module]] = {
        "product": lambda index: ProductModule(products[index]),
        "experts": lambda index: ExpertSum(experts[index].method),
    }
    segments = []
    for index, plan in enumerate(plans):
        before = plans[index - 1].end if index else None
        gives = [node for node in crossing if home[node] == index]
        kept = before if before in gives and before.target is not _ATTEND else None
        if kept is not None:
            gives.remove(kept)
        gives.sort(key=lambda node: -1 if node is before else plan.nodes.index(node))
        builder = _Builder(trace, plan, before, modules)
        segments.append(builder.build(gives, output, crossing))
        segments[-1].keeps = None if kept is None else crossing[kept]
    return segments


def _read(node: fx.Node, trace: Trace) -> list[fx.Node]:
    """The tensors that a node reads; sinks that are the layer's own are no matter of the segment."""
    read = [one for one in node.all_input_nodes if not is_size(one)]
    if node.target is _ATTEND and node.args[3] in trace.own:
        read.remove(node.args[3])  # type: ignore[arg-type]
    return read


def _note(seen: list[Any], item: Any) -> None:
    if item not in seen:
        seen.append(item)


class _Builder:
    """Writes the graph of one segment."""

    def __init__(
        self,
        trace: Trace,
        plan: _Plan,
        before: fx.Node | None,
        modules: dict[str, Callable[[int], nn.Module]],
    ) -> None:
        """before: the attention or the exchange in front of the segment."""
        self._trace = trace
        self._plan = plan
        self._before = before
        self._graph = fx.Graph()
        self._root = nn.Module()
        self._new: dict[fx.Node, fx.Node] = {}
        place = self._graph.placeholder
        entry, self._positions, self._adapters = place("entry"), place("positions"), place("adapters")
        self._new[trace.inputs[-1]] = self._positions
        self._new[trace.inputs[0] if before is None else before] = entry
        for number, node in enumerate(plan.takes):
            self._new[node] = place(f"value_{number}")
        for number, node in enumerate(plan.own):
            self._new[node] = place(f"own_{number}")
        self._arguments: dict[tuple[str, int], tuple[str, fx.Node]] = {}
        for kind, places in (("product", plan.products), ("experts", plan.experts)):
            for number, index in enumerate(places):
                name = f"{kind}_{number}"
                self._arguments[kind, index] = name, place(f"of_{name}")
                self._root.add_module(name, modules[kind](index))

    def build(self, gives: Sequence[fx.Node], output: fx.Node, crossing: dict[fx.Node, int]) -> Segment:
        plan, trace = self._plan, self._trace
        for node in plan.nodes:
            self._new[node] = self._copy(node)
        results, sinks, exchange = [output.all_input_nodes[0]], None, None
        attends = plan.end is not None and plan.end.target is _ATTEND
        if plan.end is not None and not attends:
            results, widths = [plan.end.args[0]], plan.end.args[1:]  # type: ignore[list-item]
            exchange = Exchange(tuple(widths[0]) if widths else None)  # type: ignore[arg-type]
        elif plan.end is not None:
            *results, given = plan.end.args[:4]  # type: ignore[assignment]
            if given in trace.own:
                sinks = trace.own[given]
            elif given is not None:
                raise CannotTrace("the sinks of its attention are computed")
        self._graph.output(tuple(self._mapped(node) for node in (*results, *gives)))
        before = self._before
        follows_exchange = before is not None and before.target is not _ATTEND
        return Segment(
            module=fx.GraphModule(self._root, self._graph),
            takes=[crossing[node] for node in plan.takes],
            gives=[crossing[node] for node in gives],
            own=[trace.own[node] for node in plan.own],
            products=plan.products,
            experts=plan.experts,
            attends=attends,
            sinks=sinks,
            dtype=None if before is None else before.meta["val"].dtype,
            specs=tuple(self._spec(node) for node in plan.takes),
            exchange=exchange,
            entry=self._spec(before) if before is not None and follows_exchange else None,
        )

    def _copy(self, node: fx.Node) -> fx.Node:
        if node.target is _PRODUCT:
            name, arguments = self._arguments["product", int(node.args[1])]  # type: ignore[arg-type]
            return self._graph.call_module(name, (self._mapped(node.args[0]), arguments, self._adapters))
        if node.target is _EXPERTS:
            name, arguments = self._arguments["experts", int(node.args[3])]  # type: ignore[arg-type]
            return self._graph.call_module(name, (*map(self._mapped, node.args[:3]), arguments))
        args: Any = fx.map_arg(node.args, self._mapped)
        kwargs: Any = fx.map_arg(node.kwargs, self._mapped)
        # Values may lie otherwise in memory than when they were traced.
        target = torch.ops.aten.reshape.default if node.target is torch.ops.aten.view.default else node.target
        return self._graph.create_node(node.op, target, args, kwargs)

    def _mapped(self, node: Any) -> fx.Node:
        if node not in self._new:
            self._new[node] = self._size(node)
        return self._new[node]

    def _size(self, node: fx.Node) -> fx.Node:
        """A number that follows from the number of tokens is computed anew in every segment."""
        if node.meta["val"].node.expr == self._trace.tokens:
            return self._graph.call_function(torch.ops.aten.sym_size.int, (self._positions, 0))
        if any(not is_size(one) for one in node.all_input_nodes):
            raise CannotTrace(f"it computes with a size of {node.meta['val']}")
        return self._copy(node)

    def _spec(self, node: fx.Node) -> TensorSpec:
        """Of a value that passes from segment to segment."""
        value = node.meta["val"]
        sizes: list[int | Size] = []
        for size in value.shape:
            if isinstance(size, int):
                sizes.append(size)
            elif size.node.expr == self._trace.tokens:
                sizes.append(TOKENS)
            else:
                raise CannotTrace(f"a value of size {size} passes from layer to layer")
        return TensorSpec(tuple(sizes), value.dtype, value.device)
