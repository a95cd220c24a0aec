"""What the halves of a layer are built with: linear layers that are all made in the same way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from minivllm.linear.layer import ChooseMethod, Linear, Rows, Shard, never_quantized
from minivllm.linear.methods.method import LinearTensors


class LinearFactory:
    """Makes the linear layers of a model, all on one device, in one dtype, of one shard. experts: which part
    of a layer's experts are here, each of them whole; None: a part of every one, as of all else."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        choose: ChooseMethod = never_quantized,
        shard: Shard | None = None,
        experts: Shard | None = None,
    ) -> None:
        self.experts = experts
        self.dtype = dtype
        self.device = device
        self.choose = choose
        self.shard = shard or Shard()

    def make(
        self,
        parts: dict[str, int],
        in_features: int,
        bias: bool,
        split: Literal["column", "row"],
        own: Mapping[str, Rows] | None = None,
    ) -> Linear:
        """See ``Linear``."""
        return Linear(
            parts,
            in_features,
            bias=bias,
            split=split,
            shard=self.shard,
            dtype=self.dtype,
            device=self.device,
            choose=self.choose,
            own=own,
        )


class Stored(Protocol):
    """What keeps weights that may be moved or replaced, all together:
    a ``Linear``, or the experts of a layer."""

    tensors: LinearTensors

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to the memory of each."""
