"""One vector per prompt instead of tokens: the final hidden states of its tokens, pooled.

The mean is gathered chunk by chunk, so a prompt may be computed in as many steps as the scheduler likes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.batch.step_inputs import StepInputs
from minivllm.messages import EngineRequest
from minivllm.models.model import Hidden, Model

POOLED_ROWS = 256
"""Tokens whose final hidden states are computed at once, which bounds the memory that a long chunk takes."""


class Pooler:
    """Pools the rows of requests with PoolingParams.
    Keeps the sums of unfinished means by slot (a SlotState)."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._sums: dict[int, Tensor] = {}
        self.slots: set[int] = set()
        """Whose requests want a vector."""

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """A request enters the slot; one that comes back from preemption starts over."""
        if request.pooling is not None:
            self.slots.add(slot)

    def remove(self, slot: int) -> None:
        """The request of the slot has left."""
        self._sums.pop(slot, None)
        self.slots.discard(slot)

    def pool(self, inputs: StepInputs, hidden: Hidden) -> dict[str, list[float]]:
        """Vectors [hidden] of the requests whose last token was computed in this step, by request id."""
        finished: dict[str, list[float]] = {}
        token = 0
        for row in inputs.rows:
            begin, token = token, token + row.count
            request = row.request
            params = request.data.pooling
            if params is None:
                continue
            is_done = row.start + row.count == request.num_tokens
            is_mean = params.pooling == "mean"
            if not is_done and not is_mean:
                continue
            vector = self._sum(inputs, hidden, begin if is_mean else token - 1, token)
            if is_mean and request.slot in self._sums:
                vector += self._sums.pop(request.slot)
            if not is_done:
                self._sums[request.slot] = vector
            else:
                if is_mean:
                    vector /= request.num_tokens
                if params.normalize:
                    vector = torch.nn.functional.normalize(vector, dim=0)
                finished[request.data.request_id] = vector.tolist()
        return finished

    def _sum(self, inputs: StepInputs, hidden: Hidden, begin: int, end: int) -> Tensor:
        """Sum of the final hidden states of some tokens of the step, float32 [hidden]."""
        device = inputs.token_ids.device
        total = torch.zeros((), device=device)
        for start in range(begin, end, POOLED_ROWS):
            rows = torch.arange(start, min(start + POOLED_ROWS, end), dtype=torch.int32, device=device)
            total = total + self._model.hidden_states(hidden, rows, inputs.tokens).float().sum(0)
        return total
