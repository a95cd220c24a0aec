"""A traced model as a program: its segments are pieces,
with attention and what ranks exchange as seams between them.

Between two regions live what the later ones read: attention's output, the residual stream, rotary tables that
the first region has computed, and whatever else a family hands on from layer to layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.paged_cache import write_kv
from minivllm.compilation.regions import CompileRegion, TensorSpec
from minivllm.distributed.communicator import Communicator
from minivllm.linear.experts.methods import ExpertsMethod
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearTensors
from minivllm.linear.product import Product
from minivllm.models.bound_program import BoundProgram, no_attention, program_inputs
from minivllm.models.model import Attend, Hidden, TokenInputs
from minivllm.program import seams
from minivllm.program.fuse import fuse
from minivllm.program.program import Name, Piece, Program, Seam, World
from minivllm.specs.caches import TOKENS, LayerCache
from minivllm.transformers_models.trace.cut import Segment, cut
from minivllm.transformers_models.trace.operators import LayerAttention
from minivllm.transformers_models.trace.trace import EXAMPLE_TOKENS, CannotTrace, OwnTensors, Trace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TracedCode:
    """A segment of a traced model. Its text is what it does,
    so the graph itself takes no part in comparisons."""

    text: str
    products: tuple[Product, ...]
    experts: tuple[ExpertsMethod, ...]
    before: LayerAttention | None
    """The shapes of the layer whose attention comes before; None if there is none."""
    attends: LayerAttention | None
    """The shapes of the layer that attends next; None if ranks exchange a tensor there, or the model ends."""
    dtype: torch.dtype | None
    """Of attention's output, in the model."""
    attention_dtype: torch.dtype
    shapes: tuple[TensorSpec | None, ...]
    """Shapes in the model, of the entry and of each value,
    of tensors that ranks exchange as [tokens, width]."""
    is_exchanged: bool
    graph: fx.GraphModule = field(repr=False, compare=False)

    def __call__(
        self, entry: Tensor, positions: Tensor, adapters: RowAdapters | None, *more: Any
    ) -> tuple[Tensor, ...]:
        """entry: token ids, attention's output, or what was exchanged. more: [the layer's cache], values of
        earlier segments, own tensors, arguments of linear layers, tensors of experts. Returns queries, a
        tensor to exchange or the result, then the values that later segments read."""
        *values, own, products, experts = more
        cache: Any = values.pop(0) if self.attends is not None else None
        shape, *shapes = self.shapes
        if shape is not None:
            entry = _as_traced(entry, shape)
        elif self.before is not None:
            assert self.dtype is not None
            entry = self.before.output(entry, self.dtype)
        values = [value if spec is None else _as_traced(value, spec) for value, spec in zip(values, shapes)]
        out = self.graph(entry, positions, adapters, *values, *own, *products, *experts)
        if self.attends is None:
            x, *given = out
            x = (x.reshape(-1, x.shape[-1]) if self.is_exchanged else x).contiguous()
        else:
            q, k, v, *given = out
            write_kv(cache.k, cache.v, *self.attends.keys_and_values(k, v), cache.slots)
            x = self.attends.queries(q, self.attention_dtype)
        return (x, *(value.contiguous() for value in given)) if given else x


class TracedModel:
    """A model of transformers whose regions are compiled."""

    def __init__(
        self,
        body: Callable[[Tensor, Tensor], Tensor],
        head: Callable[[Tensor, Tensor], Tensor],
        layers: Sequence[LayerAttention],
        own: OwnTensors,
        products: Sequence[Linear],
        experts: Sequence[Any],
        *,
        dtype: torch.dtype,
        attention_dtype: torch.dtype,
        device: torch.device,
        communicator: Communicator | None = None,
    ) -> None:
        """body: (token ids, positions) int32 [tokens] -> hidden states [tokens, hidden]. head: (some of
        these, ids int32) -> logits [rows, vocab]. Both speak of attention, products and exchanges by the
        operators. Raises CannotTrace."""
        self._layers = layers
        self._own = own
        self._products = products
        self._experts = experts
        self._dtype = dtype
        self._attention_dtype = attention_dtype
        self._device = device
        self._communicator = communicator
        ids = torch.zeros(EXAMPLE_TOKENS, dtype=torch.int32, device=device)
        self._body_trace = Trace(body, (ids, ids), own)
        self._hidden_size = self._body_trace.width
        hidden = torch.zeros(EXAMPLE_TOKENS, self._hidden_size, dtype=dtype, device=device)
        self._head_trace = Trace(head, (hidden, ids), own)
        self._segments = cut(self._body_trace, products, experts)
        self._head_segments = cut(self._head_trace, products, experts)
        self._programs: list[BoundProgram] = []
        self._read_constants()

    def _read_constants(self) -> None:
        self._of_body = self._body_trace.constants(self._own.tensors)
        self._of_head = self._head_trace.constants(self._own.tensors)

    def refresh(self) -> None:
        """Take the weights that the model has now."""
        self._read_constants()
        for program in self._programs:
            program.rebind()

    def build_regions(
        self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        """Compile the pieces; see ``Model.build_regions``."""
        inputs, ranks = (
            program_inputs(tokens, caches),
            1 if self._communicator is None else self._communicator.size,
        )
        program = self._program()
        self._step = BoundProgram(fuse(program, inputs, ranks=ranks), compile_region)
        # Uncompiled, as in ``Decoder``.
        self._final = BoundProgram(
            fuse(program, inputs, ranks=ranks, results=("h",)), lambda region: region.function
        )
        self._programs = [self._step, self._final]

    def _program(self) -> Program:
        items = self._items(self._segments, "token_ids", "h", "")
        cut_at = max(place for place, item in enumerate(items) if isinstance(item, seams.Attend))
        items.insert(cut_at + 1, seams.Pick())
        return [*items, *self._items(self._head_segments, "h", "logits", "head.")]

    def _items(
        self, segments: Sequence[Segment], entry: Name, result: Name, prefix: str
    ) -> list[Piece | Seam]:
        """Pieces and seams of the body, or of the head. entry, result: the first register that is read, and
        the last one that is given. prefix: of the names of registers."""
        items: list[Piece | Seam] = []
        specs = {number: spec for segment in segments for number, spec in zip(segment.takes, segment.specs)}
        names = {number: f"{prefix}value.{number}" for number in specs}
        exchanged: dict[int, TensorSpec] = {}
        """Values that are what ranks have exchanged, and their shapes in the model."""
        for place, segment in enumerate(
            segments
        ):  # a later segment may read again what an earlier one began with
            if segment.keeps is not None and segment.entry is not None:
                names[segment.keeps] = f"{prefix}exchanged.{place - 1}"
                exchanged[segment.keeps] = segment.entry
        number, before = 0, None
        for place, segment in enumerate(segments):
            attends = self._layers[number] if segment.attends else None
            following = segments[place + 1].entry if place + 1 < len(segments) else None
            first = "q" if segment.attends else result if following is None else f"{prefix}exchanged.{place}"
            gives = {first: self._spec(attends, following)}
            gives |= {names[value]: specs[value] for value in segment.gives}
            cache = (f"cache.{number}",) if segment.attends else ()
            reads = (entry, "positions", "adapters", *cache, *(names[value] for value in segment.takes))
            code = self._code(segment, before, attends, exchanged)
            items.append(Piece(code, reads, gives, self._weights_of(segment, is_head=bool(prefix))))
            if attends is not None:
                o = TensorSpec((TOKENS, *attends.query_shape), self._attention_dtype, self._device)
                items.append(seams.Attend(number, o, self._sinks_of(segment), reads_stream=False))
                entry, number = "o", number + 1
            elif following is not None:
                assert segment.exchange is not None
                spec, widths = _rows_of(following), segment.exchange.widths
                items.append(seams.Sum(first, spec) if widths is None else seams.Gather(first, spec, widths))
                entry = first
            before = attends
        return items

    def _spec(self, attends: LayerAttention | None, following: TensorSpec | None) -> TensorSpec:
        """Shape and dtype of the first output of a segment."""
        if attends is not None:
            return TensorSpec((TOKENS, *attends.query_shape), self._attention_dtype, self._device)
        if following is not None:
            return _rows_of(following)
        return TensorSpec((TOKENS, self._hidden_size), self._dtype, self._device)

    def _code(
        self,
        segment: Segment,
        before: LayerAttention | None,
        attends: LayerAttention | None,
        exchanged: dict[int, TensorSpec],
    ) -> TracedCode:
        return TracedCode(
            segment.text,
            tuple(self._products[index].product for index in segment.products),
            tuple(self._experts[index].method for index in segment.experts),
            None if before is None else before.shapes,
            None if attends is None else attends.shapes,
            segment.dtype,
            self._attention_dtype,
            (segment.entry, *(exchanged.get(value) for value in segment.takes)),
            segment.exchange is not None,
            segment.module,
        )

    def _weights_of(self, segment: Segment, is_head: bool) -> Callable[[], tuple[Any, ...]]:
        def weights() -> tuple[Any, ...]:
            own = self._of_head if is_head else self._of_body
            products: tuple[LinearTensors, ...] = tuple(
                self._products[index].arguments for index in segment.products
            )
            experts = tuple(tuple(self._experts[index].tensors) for index in segment.experts)
            return tuple(own[place] for place in segment.own), products, experts

        return weights

    def _sinks_of(self, segment: Segment) -> Callable[[], Tensor | None]:
        return lambda: None if segment.sinks is None else self._of_body[segment.sinks].float()

    def forward(
        self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend
    ) -> Hidden:
        """Run all layers up to the last attention."""
        return self._step.body(token_ids, tokens, caches, World(attend, self._communicator))

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab] of the picked rows (int32)."""
        return self._step.tail(hidden, rows, tokens, World(no_attention, self._communicator))[0]

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden] of the picked rows (int32)."""
        return self._final.tail(hidden, rows, tokens, World(no_attention, self._communicator))[0]


def _rows_of(spec: TensorSpec) -> TensorSpec:
    """Of a tensor that was exchanged as [tokens, width]. Raises CannotTrace where it has more than these."""
    if TOKENS not in spec.shape[:-1] or any(size not in (1, TOKENS) for size in spec.shape[:-1]):
        raise CannotTrace(f"workers exchange a tensor of shape {spec.shape}")
    return TensorSpec((TOKENS, spec.shape[-1]), spec.dtype, spec.device)


def _as_traced(rows: Tensor, spec: TensorSpec) -> Tensor:
    """What was exchanged, in the shape that the model gives it."""
    return rows.reshape([-1 if size == TOKENS else 1 for size in spec.shape[:-1]] + [rows.shape[-1]])
