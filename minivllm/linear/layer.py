"""Linear layers that know which shard of a checkpoint's weights is theirs,
and how their product is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from minivllm.distributed.shard import Rows, Shard, count_rows
from minivllm.linear.methods.exact import choose_linear_method
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.linear.product import Product
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight, stack

ChooseMethod = Callable[[str, StoredWeight], LinearMethod | None]
"""(name of the layer, its weight) -> the quantised method to use;
None: restore the weight and multiply that."""


def never_quantized(name: str, weight: StoredWeight) -> LinearMethod | None:
    """ChooseMethod of a model without quantisation."""
    return None


class Linear:
    """One product of the decoder, possibly of several checkpoint matrices stacked along the output (q, k, v).

    parts: output features of each stacked matrix, whole model. split: "column" divides the outputs of every
    part among the shards, "row" divides the inputs (the sum over shards is the product). own: this shard's
    range of the outputs of each part, or their indices; of the inputs under the name of the only part. Left
    out, they are even. choose: picks the method once the whole weight is there; until then ``method`` is that
    of unquantised weights. is_stacked: somebody else keeps the tensors, in a stack.
    """

    def __init__(
        self,
        parts: dict[str, int],
        in_features: int,
        *,
        bias: bool,
        split: Literal["column", "row"],
        shard: Shard,
        dtype: torch.dtype,
        device: torch.device,
        choose: ChooseMethod = never_quantized,
        own: Mapping[str, Rows] | None = None,
        is_stacked: bool = False,
    ) -> None:
        self.split = split
        self.shard = shard
        self.device = device
        counts = {name: in_features if split == "row" else size for name, size in parts.items()}
        divided: Mapping[str, Any] = own or {name: shard.own(count) for name, count in counts.items()}
        whole = {name: slice(0, size) for name, size in parts.items()}
        self.outputs: Mapping[str, Rows] = divided if split == "column" else whole
        self.inputs: slice = divided[next(iter(parts))] if split == "row" else slice(0, in_features)
        self.sizes = {name: count_rows(self.outputs[name]) for name in parts}
        self.in_features = count_rows(self.inputs)
        self.out_features = sum(self.sizes.values())
        self.method = choose_linear_method(self.out_features, self.in_features, dtype, device)
        self.tensors: LinearTensors = ()
        self.adapters: LinearTensors = ()
        self._whole = parts
        self._whole_inputs = in_features
        self._dtype = dtype
        self._has_bias = bias
        self._choose = choose
        self._is_stacked = is_stacked
        self._weights: dict[str, StoredWeight] = {}
        self._biases: dict[str, Tensor] = {}

    def whole_shape(self, part: str) -> tuple[int, int]:
        """[out, in] of a part in the whole model."""
        return self._whole[part], self._whole_inputs

    @property
    def arguments(self) -> LinearTensors:
        """Everything that ``product`` reads of this layer;
        layers of one kind share the region that reads it."""
        return (*self.tensors, *self.adapters)

    @property
    def product(self) -> Product:
        """How it is multiplied, once its weights are there. Equal for layers of one kind."""
        return Product(self.method, tuple(self.sizes.values()))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to the memory of each tensor but those of adapters."""
        if self.tensors:
            self.tensors = self.method.mapped(self.tensors, change)

    def load(self, part: str, kind: str, tensor: StoredWeight) -> None:
        """Take this worker's shard of a checkpoint tensor:
        kind "weight" [out, in] or "bias" [out] of one part."""
        rows, columns = self.outputs[part], self.inputs
        if kind == "weight":
            # Scales of whole rows are found before the inputs are divided: see ``_finish``.
            is_plain = isinstance(tensor, Tensor)
            self._weights[part] = _part(tensor, rows, slice(0, self._whole_inputs) if is_plain else columns)
        else:
            assert isinstance(tensor, Tensor)
            # A row-split product is summed over shards, so only one of them may add the bias.
            self._biases[part] = (
                torch.zeros_like(tensor) if self.split == "row" and self.shard.rank > 0 else tensor[rows]
            )
        if len(self._weights) == len(self.sizes) and len(self._biases) == (
            len(self.sizes) if self._has_bias else 0
        ):
            self._finish()

    def _finish(self) -> None:
        """All parts are there: choose the method and prepare its tensors."""
        weight = stack({name: self._weights.pop(name) for name in self.sizes}, self._dtype)
        bias = torch.cat([self._biases.pop(name) for name in self.sizes]) if self._has_bias else None
        method = self._choose("+".join(self.sizes), weight)
        if isinstance(weight, Tensor) and self.in_features < self._whole_inputs:
            weight = _part(
                weight if method is None else method.rounded(weight), slice(0, len(weight)), self.inputs
            )
        if method is None:
            if isinstance(weight, QuantizedWeight):
                weight = weight.restore(self._dtype)
            weight = weight.to(self.device, self._dtype)
        else:
            self.method = method
        bias = None if bias is None else bias.to(self.device, self._dtype)
        prepared = tuple(tensor.to(self.device) for tensor in self.method.prepare(weight, bias))
        self.tensors = prepared if self._is_stacked else self.method.kept(prepared)


def _part(weight: StoredWeight, rows: Rows, columns: slice) -> StoredWeight:
    return weight.part(rows, columns) if isinstance(weight, QuantizedWeight) else weight[rows, columns]
