"""Arithmetic that many layers have in common, as codes of pieces (see ``minivllm.program``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from minivllm.linear.methods.method import LinearTensors, largest_inputs
from minivllm.linear.product import Product


@dataclass(frozen=True)
class Add:
    """The sum of two registers."""

    def __call__(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second


@dataclass(frozen=True)
class Scale:
    """Two registers times a number [1] that is a weight."""

    def __call__(self, first: Tensor, second: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        return first * factor, second * factor


@dataclass(frozen=True)
class Project:
    """The product of a linear layer."""

    product: Product

    def __call__(self, x: Tensor, adapters: RowAdapters | None, arguments: LinearTensors) -> Tensor:
        return self.product(x, arguments, adapters)


@dataclass(frozen=True)
class ProjectCast:
    """``Project``, in the dtype that attention computes in."""

    product: Product
    dtype: torch.dtype

    def __call__(self, x: Tensor, adapters: RowAdapters | None, arguments: LinearTensors) -> Tensor:
        return self.product(x, arguments, adapters).to(self.dtype)


@dataclass(frozen=True)
class ProjectPart:
    """``Project`` of some of the inputs. largest: of all of them, see LinearMethod.apply_part."""

    product: Product

    def __call__(
        self, x: Tensor, adapters: RowAdapters | None, largest: Tensor, arguments: LinearTensors
    ) -> Tensor:
        return self.product(x, arguments, adapters, largest)


@dataclass(frozen=True)
class Cast:
    """A register in the dtype of the model."""

    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


@dataclass(frozen=True)
class Flatten:
    """Attention's output [tokens, kv_heads, G, D] as the input of a product:
    [tokens, width] in the model's dtype."""

    dtype: torch.dtype

    def __call__(self, o: Tensor) -> Tensor:
        return o.to(self.dtype).flatten(1)


@dataclass(frozen=True)
class Largest:
    """The largest input of each token: float32 [tokens, 1]. dtype: of the model, if x has another one."""

    dtype: torch.dtype | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return largest_inputs(x if self.dtype is None else x.to(self.dtype).flatten(1))
