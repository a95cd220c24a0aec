"""What models see of the other workers: sums and pieces of tensors, always in order of rank.

Every communicator adds what it exchanged here, in the same order and with one rounding at the end, so that
they all give the very same bits, and all ranks go on with the same tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.profiling.spans import span

MOST_TEXT = 2048


class Communicator(ABC):
    """One of ``size`` workers that call the same methods with tensors of the same shapes,
    in the same order."""

    rank: int
    size: int
    num_exchanges = 0
    """Exchanges that this rank has reached. The others wait for the rank with the fewest."""

    @abstractmethod
    def exchange(self, x: Tensor) -> list[Tensor]:
        """The tensors that all ranks gave, in order of rank. They are read before the next call."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, computed in float32 at least, in order of rank."""
        with span("exchange"):
            parts = self.exchange(x.contiguous())
        return add_up(parts)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """The largest over all ranks, value by value."""
        with span("exchange"):
            parts = self.exchange(x.contiguous())
        return torch.stack(parts).amax(0)

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x [rows, widths[rank]] -> [rows, sum(widths)], side by side in order of rank."""
        with span("exchange"):
            parts = self.exchange(F.pad(x, (0, max(widths) - x.shape[1])).contiguous())
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of what the ranks give, value by value: one decision everywhere."""
        parts = self.exchange(torch.tensor(values, dtype=torch.float64))
        return torch.stack(parts).amax(0).tolist()

    def first_text(self, text: str) -> str:
        """The text of the first rank that gives one; "" if none does. Cut to MOST_TEXT bytes."""
        given = bytearray(text.encode()[:MOST_TEXT].ljust(MOST_TEXT, b"\0"))
        parts = [bytes(part.tolist()) for part in self.exchange(torch.frombuffer(given, dtype=torch.uint8))]
        texts = (part.rstrip(b"\0").decode(errors="replace") for part in parts)
        return next(filter(None, texts), "")

    def close(self) -> None:
        """Release what the communicator holds. The last call."""
        return


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, computed in float32 at least, in their order, and rounded to their dtype at the end."""
    first, *others = parts
    total = first if first.dtype == torch.float64 else first.float()
    for other in others:
        total = total + other
    return total.to(first.dtype)


class Absent(Communicator):
    """A rank of a layout that is only looked at: it exchanges nothing."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def exchange(self, x: Tensor) -> list[Tensor]:
        raise RuntimeError("This layout is not running.")
