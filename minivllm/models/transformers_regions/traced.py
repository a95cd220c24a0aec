"""The regions of a traced model: compiled where pieces say the same, called in turn with attention in between."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.paged_cache import write_kv
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, specs_of
from minivllm.linear.layer import Linear, LinearTensors
from minivllm.models.model import ROWS, TOKENS, Attend, Hidden, LayerCache, TokenInputs
from minivllm.models.transformers_regions.cut import Piece, cut
from minivllm.models.transformers_regions.operators import LayerAttention
from minivllm.models.transformers_regions.trace import EXAMPLE_TOKENS, OwnTensors, Trace
from minivllm.profiling.spans import span, spanned

logger = logging.getLogger(__name__)

Values = tuple[Tensor, ...]
Weights = tuple[Values, tuple[LinearTensors, ...], tuple[LinearTensors, ...]]
"""What a piece reads of the model: own tensors, arguments of linear layers, tensors of experts."""


class TracedModel:
    """A model cut into regions.

    Between two regions live what the later ones read: attention's output, the residual stream, rotary tables that the
    first region has computed, and whatever else a family hands on from layer to layer.
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
        hidden_size: int,
        dtype: torch.dtype,
        attention_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """body: (token ids, positions) int32 [tokens] -> hidden states [tokens, hidden]. head: (some of these, ids
        int32) -> logits [rows, vocab]. Both speak of attention and products by the operators. Raises CannotTrace."""
        self._layers, self._own, self._products, self._experts = layers, own, products, experts
        self._dtype, self._attention_dtype, self._device = dtype, attention_dtype, device
        ids = torch.zeros(EXAMPLE_TOKENS, dtype=torch.int32, device=device)
        self._body_trace = Trace(body, (ids, ids), own)
        hidden = torch.zeros(EXAMPLE_TOKENS, hidden_size, dtype=dtype, device=device)
        self._head_trace = Trace(head, (hidden, ids), own)
        self._pieces = cut(self._body_trace, products, experts)
        [self._head] = cut(self._head_trace, products, experts)
        self._num_values = sum(len(piece.gives) for piece in self._pieces)
        self._token_dims = [spec.shape.index(TOKENS) if TOKENS in spec.shape else None for spec in self._last.specs]
        self._runs: list[Callable] = []
        self._logits: Callable
        self.refresh()

    @property
    def _last(self) -> Piece:
        return self._pieces[-1]

    def refresh(self) -> None:
        """Take the weights that the model has now."""
        own = self._body_trace.constants(self._own.tensors)
        self._weights = [self._weights_of(piece, own) for piece in self._pieces]
        self._head_weights = self._weights_of(self._head, self._head_trace.constants(self._own.tensors))
        self._sinks = [None if piece.sinks is None else own[piece.sinks].float() for piece in self._pieces]

    def _weights_of(self, piece: Piece, own: Values) -> Weights:
        products = tuple(self._products[index].arguments for index in piece.products)
        experts = tuple(tuple(self._experts[index].tensors) for index in piece.experts)
        return tuple(own[place] for place in piece.own), products, experts

    def build_regions(self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]) -> None:
        """Compile the pieces; see ``Model.build_regions``."""
        regions: dict[Any, Callable] = {}
        self._runs = []
        for index, piece in enumerate(self._pieces[:-1]):
            layer = self._layers[index]
            function = self._first_or_between(index, piece, layer)
            inputs = {
                "entry": self._entry(index),
                "tokens": tokens,
                "values": piece.specs,
                "weights": specs_of(self._weights[index]),
                "cache": caches[index],
            }
            key = self._constants(piece, index), tuple(inputs.values())
            if key not in regions:
                name = "between" if index else "first"
                regions[key] = compile_region(Region(name, function, inputs, self._constants(piece, index)))
            self._runs.append(regions[key])
        inputs = {
            "entry": self._entry(len(self._layers)),
            "positions": tokens.positions,
            "adapters": tokens.adapters,
            "values": self._last.specs,
            "rows": TensorSpec((ROWS,), torch.int32, self._device),
            "weights": specs_of(self._weights[-1]),
            "head": specs_of(self._head_weights),
        }
        constants = self._constants(self._last, len(self._layers)), self._constants(self._head, len(self._layers))
        self._logits = compile_region(Region("last", self._last_region, inputs, constants))
        logger.info("%d layers share %d regions.", len(self._layers), len(regions) + 1)

    def _entry(self, index: int) -> TensorSpec:
        """Spec of what a piece starts from: token ids, or what the attention in front of it gives."""
        if index == 0:
            return TensorSpec((TOKENS,), torch.int32, self._device)
        return TensorSpec((TOKENS, *self._layers[index - 1].query_shape), self._attention_dtype, self._device)

    def _constants(self, piece: Piece, index: int) -> tuple[object, ...]:
        """What a region depends on besides its tensors."""
        shapes = [
            (layer.kv_heads, layer.head_dim, layer.value_dim, layer.spec.query_group)
            for layer in self._layers[max(0, index - 1) : index + 1]
        ]
        methods = [(self._products[each].method, tuple(self._products[each].sizes)) for each in piece.products]
        experts = [self._experts[each].method for each in piece.experts]
        return piece.text, repr(shapes), repr(methods), repr(experts), piece.dtype, self._attention_dtype

    def _first_or_between(self, index: int, piece: Piece, layer: LayerAttention) -> Callable:
        before = self._layers[index - 1] if index else None
        dtype, attention_dtype, module = piece.dtype, self._attention_dtype, piece.module

        def region(entry: Tensor, tokens: TokenInputs, values: Values, weights: Weights, cache: LayerCache) -> Values:
            if before is not None:
                assert dtype is not None
                entry = before.output(entry, dtype)
            own, products, experts = weights
            q, k, v, *given = module(entry, *tokens, *values, *own, *products, *experts)
            write_kv(cache.k, cache.v, *layer.keys_and_values(k, v), cache.slots)
            return (layer.queries(q, attention_dtype), *(value.contiguous() for value in given))

        return region

    def forward(self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend) -> Hidden:
        """Run all layers up to the last attention. Returns (its output [tokens, kv_heads, G, D], the values that are
        read behind it)."""
        values: list[Any] = [None] * self._num_values
        entry, name = token_ids, "first"
        for index, run in enumerate(self._runs):
            piece = self._pieces[index]
            with span(name):
                taken = tuple([values[number] for number in piece.takes])
                out = run(entry, tokens, taken, self._weights[index], caches[index])
            q, *given = out if isinstance(out, list | tuple) else (out,)
            for number, value in zip(piece.gives, given):
                values[number] = value
            entry, name = attend(index, q, self._sinks[index]), "between"
        return (entry, *(values[number] for number in self._last.takes))

    @spanned("last")
    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab] of the picked rows (int32)."""
        entry, *values = hidden
        return self._logits(
            entry, tokens.positions, tokens.adapters, tuple(values), rows, self._weights[-1], self._head_weights
        )

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden] of the picked rows (int32). Not compiled, as in ``Decoder``."""
        entry, *values = hidden
        return self._final_hidden(entry, tokens, tuple(values), rows, self._weights[-1])[0]

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
        hidden, positions, adapters = self._final_hidden(entry, TokenInputs(positions, adapters), values, rows, weights)
        own, products, experts = head
        [logits] = self._head.module(hidden, positions, adapters, *own, *products, *experts)
        return logits

    def _final_hidden(
        self, entry: Tensor, tokens: TokenInputs, values: Values, rows: Tensor, weights: Weights
    ) -> tuple[Tensor, Tensor, Any]:
        """(hidden states, positions, adapters) of some rows: only they are computed behind the last attention."""
        adapters = None if tokens.adapters is None else tokens.adapters.of(rows)
        picked = [
            value if dim is None else value.index_select(dim, rows) for value, dim in zip(values, self._token_dims)
        ]
        own, products, experts = weights
        assert self._last.dtype is not None
        x = self._layers[-1].output(entry[rows], self._last.dtype)
        positions = tokens.positions[rows]
        [hidden] = self._last.module(x, positions, adapters, *picked, *own, *products, *experts)
        return hidden, positions, adapters
