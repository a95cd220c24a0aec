"""How many tokens of each request there are, where only the device knows which drafts in flight are accepted.

The host counts as if they were (``WorkerRequest.num_tokens``), so its counts are never too small. What it
prepares for a step is moved back on the device by the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from minivllm.device.buffers import to_device
from minivllm.messages import EngineRequest

if TYPE_CHECKING:
    from minivllm.batch.persistent_batch import PersistentBatch


class TrueLengths:
    """lengths int64 [batch slots]: tokens of the prompt and of the answer, after all steps that are launched.

    It is a SlotState of the model runner.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """A request enters the slot."""
        self.lengths[slot] = len(request.prompt_token_ids) + len(output_token_ids)

    def remove(self, slot: int) -> None:
        """The next request brings its length."""

    def append(
        self, batch: PersistentBatch, slots: np.ndarray, offsets: Tensor, token_ids: Tensor, counts: Tensor
    ) -> Tensor:
        """Put new tokens behind those of the slots int64 [R]: token_ids int64 [R, n], the first ``counts``
        int64 [R] of which count, each ``offsets`` int64 [R, n] places further than the first. Returns
        [R, 1 + n]: counts and tokens, to be read back."""
        index = to_device(slots, token_ids.device)
        batch.token_ids.put_at(index[:, None], self.lengths[index][:, None] + offsets, token_ids)
        self.lengths.index_add_(0, index, counts)
        return torch.cat([counts[:, None], token_ids], 1)

    def behind(self, slots: np.ndarray, assumed: np.ndarray) -> Tensor:
        """int64 [n] on the device: how many tokens fewer there are than the host assumes, both int64 [n]."""
        index, counts = to_device(np.stack([slots, assumed]), self.lengths.device)
        return counts - self.lengths[index]
