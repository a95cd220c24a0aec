"""The regions of a traced model: compiled where pieces say the same, called in turn with attention in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.paged_cache import write_kv
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, specs_of
from minivllm.distributed.communicator import Communicator
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearTensors
from minivllm.models.model import ROWS, TOKENS, Attend, Hidden, LayerCache, TokenInputs
from minivllm.models.transformers_regions.cut import Piece, cut
from minivllm.models.transformers_regions.operators import LayerAttention
from minivllm.models.transformers_regions.trace import EXAMPLE_TOKENS, CannotTrace, OwnTensors, Trace
from minivllm.profiling.spans import span, spanned

logger = logging.getLogger(__name__)

Values = tuple[Tensor, ...]
Weights = tuple[Values, tuple[LinearTensors, ...], tuple[LinearTensors, ...]]
"""What a piece reads of the model: own tensors, arguments of linear layers, tensors of experts."""


class TracedModel:
    """A model cut into regions.

    Between two regions live what the later ones read: attention's output, the residual stream, rotary tables that the
    first region has computed, and whatever else a family hands on from layer to layer.

    Where workers divide the model, they exchange tensors between regions, so that a region stays a pure function.
    """

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
        """body: (token ids, positions) int32 [tokens] -> hidden states [tokens, hidden]. head: (some of these, ids
        int32) -> logits [rows, vocab]. Both speak of attention, products and exchanges by the operators. Raises
        CannotTrace."""
        self._layers, self._own, self._products, self._experts = layers, own, products, experts
        self._dtype, self._attention_dtype, self._device = dtype, attention_dtype, device
        self._communicator = communicator
        ids = torch.zeros(EXAMPLE_TOKENS, dtype=torch.int32, device=device)
        self._body_trace = Trace(body, (ids, ids), own)
        self._hidden_size = self._body_trace.width
        hidden = torch.zeros(EXAMPLE_TOKENS, self._hidden_size, dtype=dtype, device=device)
        self._head_trace = Trace(head, (hidden, ids), own)
        self._pieces = cut(self._body_trace, products, experts)
        self._heads = cut(self._head_trace, products, experts)
        self._num_values, self._num_head_values = (
            sum(len(piece.gives) + (piece.keeps is not None) for piece in pieces)
            for pieces in (self._pieces, self._heads)
        )
        # Of each piece, the layers whose attention is in front of it and behind it.
        self._around: list[tuple[LayerAttention | None, LayerAttention | None]] = []
        self._numbers: list[int] = []
        """Of the layer that attends behind a piece, or next."""
        number, before = 0, None
        for piece in self._pieces:
            behind = layers[number] if piece.attends else None
            self._around.append((before, behind))
            self._numbers.append(number)
            number, before = number + piece.attends, behind
        self._num_ahead = 1 + max(place for place, piece in enumerate(self._pieces) if piece.attends)
        # The values that are read behind the last attention, and which of their dimensions are tokens.
        specs = {
            number: spec
            for piece in self._pieces[self._num_ahead :]
            for number, spec in zip(piece.takes, piece.specs)
            if not any(number in (*later.gives, later.keeps) for later in self._pieces[self._num_ahead :])
        }
        self._kept = {
            number: spec.shape.index(TOKENS) if TOKENS in spec.shape else None for number, spec in specs.items()
        }
        self._runs: list[Callable] = [self._function(place) for place in range(len(self._pieces))]
        self._head_runs: list[Callable] = [self._head_function(piece) for piece in self._heads]
        self._logits: Callable | None = None
        self.refresh()

    def refresh(self) -> None:
        """Take the weights that the model has now."""
        own = self._body_trace.constants(self._own.tensors)
        self._weights = [self._weights_of(piece, own) for piece in self._pieces]
        of_head = self._head_trace.constants(self._own.tensors)
        self._head_weights = [self._weights_of(piece, of_head) for piece in self._heads]
        self._sinks = [None if piece.sinks is None else own[piece.sinks].float() for piece in self._pieces]

    def _weights_of(self, piece: Piece, own: Values) -> Weights:
        products = tuple(self._products[index].arguments for index in piece.products)
        experts = tuple(tuple(self._experts[index].tensors) for index in piece.experts)
        return tuple(own[place] for place in piece.own), products, experts

    def build_regions(self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]) -> None:
        """Compile the pieces; see ``Model.build_regions``."""
        regions: dict[Any, Callable] = {}

        def compiled(name: str, function: Callable, inputs: dict[str, Any], constants: object) -> Callable:
            key = constants, tuple(inputs.values())
            if key not in regions:
                regions[key] = compile_region(Region(name, function, inputs, constants))
            return regions[key]

        is_divided = len(self._pieces) > self._num_ahead + 1 or len(self._heads) > 1
        for place, piece in enumerate(self._pieces[: None if is_divided else -1]):
            inputs = {
                "entry": self._entry(place),
                "tokens": tokens,
                "values": piece.specs,
                "weights": specs_of(self._weights[place]),
            }
            if piece.attends:
                inputs["cache"] = caches[self._numbers[place]]
            constants = self._constants(piece, self._around[place])
            function = self._function(place)
            self._runs[place] = compiled("between" if place else "first", function, inputs, constants)
        around = self._layers[-1], None
        of_head = self._constants(self._heads[0], around)
        if is_divided:
            hidden = TensorSpec((TOKENS, self._hidden_size), self._dtype, self._device)
            weights = specs_of(self._head_weights[0])
            inputs = {"entry": hidden, "tokens": tokens, "values": (), "weights": weights}
            self._head_runs[0] = compiled("last", self._head_function(self._heads[0]), inputs, of_head)
        else:
            inputs = {
                "entry": self._entry(-1),
                "positions": tokens.positions,
                "adapters": tokens.adapters,
                "values": self._pieces[-1].specs,
                "rows": TensorSpec((ROWS,), torch.int32, self._device),
                "weights": specs_of(self._weights[-1]),
                "head": specs_of(self._head_weights[0]),
            }
            constants = self._constants(self._pieces[-1], around), of_head
            self._logits = compiled("last", self._last_region, inputs, constants)
        logger.info("%d layers share %d regions.", len(self._layers), len(regions))

    def _entry(self, place: int) -> TensorSpec:
        """Spec of what a piece starts from: token ids, what the attention in front of it gives, or what was exchanged
        there."""
        piece, (before, _) = self._pieces[place], self._around[place]
        if piece.entry is not None:
            return _rows_of(piece.entry)
        if before is None:
            return TensorSpec((TOKENS,), torch.int32, self._device)
        return TensorSpec((TOKENS, *before.query_shape), self._attention_dtype, self._device)

    def _constants(
        self, piece: Piece, around: tuple[LayerAttention | None, LayerAttention | None]
    ) -> tuple[object, ...]:
        """What a region depends on besides its tensors."""
        shapes = [
            (layer.kv_heads, layer.head_dim, layer.value_dim, layer.spec.query_group)
            for layer in around
            if layer is not None
        ]
        methods = [(self._products[each].method, tuple(self._products[each].sizes)) for each in piece.products]
        experts = [self._experts[each].method for each in piece.experts]
        return piece.text, repr(shapes), repr(methods), repr(experts), piece.dtype, self._attention_dtype

    def _function(self, place: int) -> Callable:
        """What a piece of the body computes: queries, what is exchanged or hidden states, and the values it gives."""
        piece, (before, behind) = self._pieces[place], self._around[place]
        dtype, attention_dtype, module = piece.dtype, self._attention_dtype, piece.module

        def entered(entry: Tensor) -> Tensor:
            if piece.entry is not None:
                return _as_traced(entry, piece.entry)
            if before is None:
                return entry
            assert dtype is not None
            return before.output(entry, dtype)

        def attending(
            entry: Tensor, tokens: TokenInputs, values: Values, weights: Weights, cache: LayerCache
        ) -> Values:
            assert behind is not None
            own, products, experts = weights
            q, k, v, *given = module(entered(entry), *tokens, *values, *own, *products, *experts)
            write_kv(cache.k, cache.v, *behind.keys_and_values(k, v), cache.slots)
            return (behind.queries(q, attention_dtype), *(value.contiguous() for value in given))

        def region(entry: Tensor, tokens: TokenInputs, values: Values, weights: Weights) -> Values:
            own, products, experts = weights
            x, *given = module(entered(entry), *tokens, *values, *own, *products, *experts)
            if piece.exchange is not None:
                x = x.reshape(-1, x.shape[-1])
            return (x.contiguous(), *(value.contiguous() for value in given))

        return attending if piece.attends else region

    def _head_function(self, piece: Piece) -> Callable:
        def region(entry: Tensor, tokens: TokenInputs, values: Values, weights: Weights) -> Values:
            own, products, experts = weights
            if piece.entry is not None:
                entry = _as_traced(entry, piece.entry)
            x, *given = piece.module(entry, *tokens, *values, *own, *products, *experts)
            if piece.exchange is not None:
                x = x.reshape(-1, x.shape[-1])
            return (x.contiguous(), *(value.contiguous() for value in given))

        return region

    def forward(self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend) -> Hidden:
        """Run all layers up to the last attention. Returns (its output [tokens, kv_heads, G, D], the values that are
        read behind it)."""
        values: list[Any] = [None] * self._num_values
        entry, name = token_ids, "first"
        for place, piece in enumerate(self._pieces[: self._num_ahead]):
            number = self._numbers[place]
            with span(name):
                cache = [caches[number]] if piece.attends else []
                entry = self._compute(piece, self._runs[place], entry, tokens, values, self._weights[place], *cache)
            if piece.attends:
                entry = attend(number, entry, self._sinks[place])
            name = "between"
        return (entry, *(values[number] for number in self._kept))

    def _compute(
        self,
        piece: Piece,
        run: Callable,
        entry: Tensor,
        tokens: TokenInputs,
        values: list[Any],
        weights: Weights,
        *cache: LayerCache,
    ) -> Tensor:
        """The first output of a piece, exchanged if it has to be; the others go to their places among the values."""
        out = run(entry, tokens, tuple([values[number] for number in piece.takes]), weights, *cache)
        first, *given = out if isinstance(out, list | tuple) else (out,)
        for number, value in zip(piece.gives, given):
            values[number] = value
        if piece.keeps is not None and piece.entry is not None:
            values[piece.keeps] = _as_traced(entry, piece.entry)
        if piece.exchange is None:
            return first
        assert self._communicator is not None
        return piece.exchange(self._communicator, first)

    @spanned("last")
    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab] of the picked rows (int32)."""
        entry, *kept = hidden
        if self._logits is not None:
            weights = self._weights[-1], self._head_weights[0]
            logits: Tensor = self._logits(entry, tokens.positions, tokens.adapters, tuple(kept), rows, *weights)
            return logits
        tokens, entry, values = self._picked(entry, tokens, kept, rows)
        for place in range(self._num_ahead, len(self._pieces)):
            piece = self._pieces[place]
            entry = self._compute(piece, self._runs[place], entry, tokens, values, self._weights[place])
        values = [None] * self._num_head_values
        for piece, run, weights_ in zip(self._heads, self._head_runs, self._head_weights):
            entry = self._compute(piece, run, entry, tokens, values, weights_)
        return entry

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden] of the picked rows (int32). Not compiled, as in ``Decoder``."""
        entry, *kept = hidden
        tokens, entry, values = self._picked(entry, tokens, kept, rows)
        return self._behind_attention(entry, tokens, values, self._weights[self._num_ahead :])

    def _behind_attention(
        self, entry: Tensor, tokens: TokenInputs, values: list[Any], weights: Sequence[Weights]
    ) -> Tensor:
        """Hidden states of rows that are picked, uncompiled."""
        for place, own in zip(range(self._num_ahead, len(self._pieces)), weights, strict=True):
            entry = self._compute(self._pieces[place], self._function(place), entry, tokens, values, own)
        return entry

    def _last_region(
        self,
        entry: Tensor,
        positions: Tensor,
        adapters: Any,
        values: Values,
        rows: Tensor,
        weights: Weights,
        head: Weights,
    ) -> Tensor:
        tokens, entry, picked = self._picked(entry, TokenInputs(positions, adapters), values, rows)
        entry = self._behind_attention(entry, tokens, picked, [weights])
        return self._compute(self._heads[0], self._head_function(self._heads[0]), entry, tokens, [], head)

    def _picked(
        self, entry: Tensor, tokens: TokenInputs, kept: Sequence[Tensor], rows: Tensor
    ) -> tuple[TokenInputs, Tensor, list[Any]]:
        """Some rows of attention's output and of all that is read behind it: only they are computed there."""
        values: list[Any] = [None] * self._num_values
        for (number, dim), value in zip(self._kept.items(), kept, strict=True):
            values[number] = value if dim is None else value.index_select(dim, rows)
        adapters = None if tokens.adapters is None else tokens.adapters.of(rows)
        return TokenInputs(tokens.positions[rows], adapters), entry[rows], values


def _rows_of(spec: TensorSpec) -> TensorSpec:
    """Of a tensor that was exchanged as [tokens, width]. Raises CannotTrace where it has more than these."""
    if TOKENS not in spec.shape[:-1] or any(size not in (1, TOKENS) for size in spec.shape[:-1]):
        raise CannotTrace(f"workers exchange a tensor of shape {spec.shape}")
    return TensorSpec((TOKENS, spec.shape[-1]), spec.dtype, spec.device)


def _as_traced(rows: Tensor, spec: TensorSpec) -> Tensor:
    """What was exchanged, in the shape that the model gives it."""
    return rows.reshape([-1 if size == TOKENS else 1 for size in spec.shape[:-1]] + [rows.shape[-1]])
