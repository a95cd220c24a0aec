"""The sampler's first stage: tokens that a grammar or a budget does not allow get a logit of -inf."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kernels_triton_free.sampling.token_bitmask import apply_token_bitmask_
from minivllm.batch.persistent_batch import WorkerRequest
from minivllm.device.buffers import to_device
from minivllm.messages import TokenMasks


class TokenMaskStage:
    """Holds the masks of the current step, of every position that is sampled or verified."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self.is_empty = True
        """No row of the current step has a mask."""
        self._has_mask = np.zeros(num_slots, dtype=np.bool_)
        self._row_of_position_0 = np.zeros(num_slots, dtype=np.int64)
        self._bits = torch.empty(0, -(-vocab_size // 32), dtype=torch.int32)

    def load(self, masks: TokenMasks | None, requests: Mapping[str, WorkerRequest]) -> None:
        """Replace the masks of the last step.
        requests: by id, as they are before the step's tokens are sampled."""
        self._has_mask.fill(False)
        self.is_empty = masks is None
        if masks is None:
            return
        for request_id, row in masks.first_rows.items():
            request = requests[request_id]
            self._has_mask[request.slot] = True
            self._row_of_position_0[request.slot] = row - request.num_tokens
        bits = np.frombuffer(masks.bits, dtype="<i4").astype(np.int32).reshape(-1, masks.words)
        self._bits = to_device(bits, self._device)

    def touches(self, slots: np.ndarray) -> np.ndarray:
        """slots [R] int -> bool [R]: which rows have a mask."""
        return self._has_mask[slots]

    def apply(self, logits: Tensor, slots: np.ndarray, positions: Tensor | np.ndarray) -> None:
        """Edit logits [R, V] in place; slots [R] int; positions [R] int: tokens before the sampled one."""
        rows = np.flatnonzero(self._has_mask[slots])
        first = self._row_of_position_0[slots[rows]]
        if isinstance(positions, Tensor):
            index, bases = to_device(np.stack([rows, first]), self._device)
            places = bases + positions[index]
        else:
            places = to_device(first + positions[rows], self._device)
        bits = self._bits[places]
        if len(rows) == len(slots):
            apply_token_bitmask_(logits, bits)
            return
        index = to_device(rows, self._device)
        logits[index] = apply_token_bitmask_(logits[index], bits)
