"""Which part of a transformers model is a worker's,
by the plan for tensor parallelism that the model comes with.

A plan (``base_model_tp_plan``) names linear layers and says how each is divided. "colwise": by outputs, which
stay with their workers. "rowwise": by inputs, and the products are added up. "colwise_gather_output" and
"rowwise_split_input" do so for layers between which every worker needs the whole. "packed_colwise": two
layers in one, each by its outputs. What transformers divides in equal parts is dealt out here as in
minivllm's own decoder: in whole heads, or units of 32 values, and not always evenly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from minivllm.distributed.shard import Rows, Shard, count_rows
from minivllm.errors import ConfigError
from minivllm.models.shards import (
    MLP_UNIT,
    VOCABULARY_UNIT,
    OwnHeads,
    obstacle_to_heads,
    own_heads,
    own_inner,
    times,
)
from minivllm.transformers_models.trace.operators import LayerAttention, Ranks

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
_ROWS = ("rowwise", *_SPLIT_INPUT)
_LINEAR_STYLES = ("colwise", "packed_colwise", *_GATHERED, *_ROWS)
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params")
"""Styles of what every worker has: they differ only while a model is trained."""
_EXPERTS = "moe_tp_experts"


class LinearPart(NamedTuple):
    """A worker's part of a linear layer. own: its outputs (split "column") or inputs ("row").

    widths: outputs of every worker, if they are put side by side. takes_whole: its inputs may come undivided.
    """

    split: Literal["column", "row"]
    own: Rows
    widths: tuple[int, ...] | None = None
    takes_whole: bool = False


class Division:
    """The parts of one worker. Raises ConfigError for a model without a plan,
    and for what it cannot divide."""

    def __init__(
        self, model: Any, body: Any, layers: Sequence[LayerAttention], ranks: Ranks, input_unit: int = 1
    ) -> None:
        """model: whole, as transformers builds it. body: the module of it that a plan is about. layers: what
        attention does in it. input_unit: inputs of a linear layer that stay together, since they share a
        scale."""
        self.ranks = ranks
        self.shard = ranks.shard
        self._layers = layers
        self._input_unit = input_unit
        self._name = type(model).__name__
        names = {module: name for name, module in model.named_modules()}
        plan = getattr(body.config, "base_model_tp_plan", None) or {}
        self._plan: dict[str, str] = {f"{names[body]}.{name}": style for name, style in plan.items()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
            self._refuse("its embedding or its head is of a kind of its own")
        self._embedding = f"{names[embedding]}.weight"
        self._vocabulary = self._ranges("the vocabulary", embedding.num_embeddings, VOCABULARY_UNIT)[
            self.shard.rank
        ]
        self._divided = {names[embedding], self._embedding}
        if not self._plan:
            self._refuse("transformers has no plan for dividing it")
        self._divides_heads = {
            layer.module
            for name in names.values()
            if (layer := self._layer(name)) is not None and self._style(name) in _ROWS
        }
        """Attention modules whose outputs are multiplied in parts;
        every worker has all heads of the others."""
        for layer in layers:
            if layer.module not in self._divides_heads:
                continue
            reason = obstacle_to_heads(self.num_heads(layer), layer.kv_heads, self.shard.size)
            if reason is not None:
                self._refuse(f"{layer.module} {reason}")

    @staticmethod
    def num_heads(layer: LayerAttention) -> int:
        """Query heads of a layer."""
        return layer.kv_heads * layer.spec.query_group

    def heads(self, layer: LayerAttention) -> OwnHeads:
        """This worker's of a layer of the whole model."""
        if layer.module not in self._divides_heads:
            return OwnHeads(slice(0, self.num_heads(layer)), slice(0, layer.kv_heads))
        return own_heads(layer, self.shard)

    def head(self, num_tokens: int) -> LinearPart:
        """This worker's part of the layer that makes logits."""
        ranges = self._ranges("the vocabulary", num_tokens, VOCABULARY_UNIT)
        return LinearPart("column", ranges[self.shard.rank], tuple(map(count_rows, ranges)))

    def linear(self, name: str, out_features: int, in_features: int) -> LinearPart | None:
        """This worker's part of a linear layer of the body; None if every worker has the whole layer."""
        style = self._style(name)
        if style not in _LINEAR_STYLES:  # what is no style at all, ``divide_parameters`` refuses
            return None
        self._divided.add(name)
        layer = self._layer(name)
        if style in _GATHERED:
            return self._gathered(out_features, MLP_UNIT if layer is None else layer.head_dim)
        if style == "packed_colwise":
            half = out_features // 2
            own = self._inner(name, half)
            first = torch.arange(own.start, own.stop)
            return LinearPart("column", torch.cat([first, first + half]))
        count = out_features if style == "colwise" else in_features
        own = self._inner(name, count) if layer is None else self._of_heads(name, layer, count)
        if style in _ROWS and (own.start % self._input_unit or own.stop % self._input_unit):
            self._refuse(
                f"the inputs of {name} would be divided where {self._input_unit} share a scale: use int8"
            )
        return LinearPart("column" if style == "colwise" else "row", own, takes_whole=style in _SPLIT_INPUT)

    def experts(self, name: str, inner: int) -> slice | None:
        """This worker's inner features of each expert of a module; None if every worker has all of them."""
        if self._style(name) != _EXPERTS:
            return None
        tensors = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        self._divided |= {name, *(f"{name}.{tensor}" for tensor in tensors)}
        return self._inner(name, inner)

    def parameter(self, name: str, value: Tensor) -> Tensor:
        """This worker's part of a parameter outside linear layers:
        rows of the embedding, or sinks of attention."""
        if name == self._embedding:
            return value[self._vocabulary]
        layer = self._layer(name)
        if self._style(name) != "colwise" or layer is None or len(value) != self.num_heads(layer):
            return value
        return value[self.heads(layer).heads]

    def divide_parameters(self, model: nn.Module) -> None:
        """Leave of parameters what is this worker's, and have the embedding look up its own tokens. model:
        with its linear layers and experts replaced, and no contents.

        Raises ConfigError if the plan divides a parameter that was not asked for,
        or divides it in another way.
        """
        divided = {name: self.parameter(name, value) for name, value in model.named_parameters()}
        for name in [*dict(model.named_modules()), *divided]:
            style, value = self._style(name), divided.get(name)
            if style is None or style in _WHOLE or name in self._divided:
                continue
            if value is None or value is model.get_parameter(name):
                self._refuse(f"its plan divides {name} ({style!r}), which the engine cannot")
        if len(self._divided) == 2:
            self._refuse("transformers' plan for dividing it names no layer")
        for name, value in divided.items():
            module, _, own = name.rpartition(".")
            model.get_submodule(module)._parameters[own] = nn.Parameter(value, requires_grad=False)
        embedding = model.get_submodule(self._embedding.rpartition(".")[0])
        _look_up_own(embedding, self._vocabulary, self.ranks)

    def _style(self, name: str) -> str | None:
        return self._plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))

    def _layer(self, name: str) -> LayerAttention | None:
        """The one in whose attention something lies."""
        return next((layer for layer in self._layers if name.startswith(f"{layer.module}.")), None)

    def _of_heads(self, name: str, layer: LayerAttention, count: int) -> slice:
        """Of so many inputs or outputs of a layer inside of attention, those of this worker's heads."""
        heads, kv_heads, own = self.num_heads(layer), layer.kv_heads, self.heads(layer)
        if heads != kv_heads and count in (kv_heads * layer.head_dim, kv_heads * layer.value_dim):
            return times(own.kv_heads, count // kv_heads)
        if count % heads:
            self._refuse(f"the {count} values of {name} are no multiple of its {heads} heads")
        return times(own.heads, count // heads)

    def _inner(self, name: str, count: int) -> slice:
        self._ranges(name, count, MLP_UNIT)
        return own_inner(count, self.shard)

    def _gathered(self, count: int, unit: int) -> LinearPart | None:
        """What is put together again may be cut anywhere, or not at all where there is too little of it."""
        ranges = [Shard(rank, self.shard.size).own(count, unit) for rank in range(self.shard.size)]
        widths = tuple(map(count_rows, ranges))
        return LinearPart("column", ranges[self.shard.rank], widths) if min(widths) else None

    def _ranges(self, what: str, count: int, unit: int) -> list[slice]:
        """Those of all workers. Raises ConfigError if one would have none."""
        units, size = -(-count // unit), self.shard.size
        if units < size:
            self._refuse(f"{what} has {count} values, in units of {unit}: use {units} or less")
        return [Shard(rank, size).own(count, unit) for rank in range(size)]

    def _refuse(self, why: str) -> NoReturn:
        raise ConfigError(
            f"tensor_parallel_size is {self.shard.size}, but {self._name} cannot be divided so: {why}."
        )


def _look_up_own(embedding: Any, own: slice, ranks: Ranks) -> None:
    """Have an embedding look up this worker's tokens, and add up what all workers find:
    zeros but for one of them."""
    look_up, size = embedding.forward, own.stop - own.start
    embedding.padding_idx = None  # it matters only while a model is trained, and may be another worker's

    def forward(ids: Tensor) -> Tensor:
        places = ids - own.start
        is_own = (places >= 0) & (places < size)
        return ranks.add(torch.where(is_own[..., None], look_up(places.clamp(0, size - 1)), 0.0))

    embedding.forward = forward
