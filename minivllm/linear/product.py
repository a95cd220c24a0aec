"""The product of a linear layer as a value: all of the layer but its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernels_triton_free.lora import RowAdapters, add_low_rank
from minivllm.linear.methods.method import LinearMethod, LinearTensors

NUM_ADAPTER_TENSORS = 3
"""a, b and columns of ``add_low_rank``."""


@dataclass(frozen=True)
class Product:
    """Multiplies by the weights of any linear layer of one kind, which are ``Linear.arguments``."""

    method: LinearMethod
    sizes: tuple[int, ...]
    """Outputs of each stacked matrix (q, k, v)."""

    def __call__(
        self,
        x: Tensor,
        arguments: LinearTensors,
        adapters: RowAdapters | None = None,
        largest: Tensor | None = None,
    ) -> Tensor:
        """x [tokens, in] -> [tokens, out].

        adapters: that of each token, for layers with adapters, whose tensors are the last of the arguments;
        None for layers without. largest: see LinearMethod.apply_part; None where x is whole.
        """
        tensors = arguments if adapters is None else arguments[:-NUM_ADAPTER_TENSORS]
        out = (
            self.method.apply(x, tensors) if largest is None else self.method.apply_part(x, tensors, largest)
        )
        if adapters is None:
            return out
        a, b, columns = arguments[-NUM_ADAPTER_TENSORS:]
        return add_low_rank(out, x, a, b, columns, adapters, self.sizes)

    def halves(
        self, x: Tensor, arguments: LinearTensors, adapters: RowAdapters | None
    ) -> tuple[Tensor, Tensor]:
        """The first half of the outputs, and the second: gate and up of an MLP."""
        if adapters is None:
            return self.method.apply_halves(x, arguments)
        first, second = self(x, arguments, adapters).chunk(2, dim=-1)
        return first, second
