"""A second, smaller model as a drafter (Leviathan et al. 2023), with a KV cache of its own over the same blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.batch.step_inputs import Row
from minivllm.spec_decode.paged_draft import CachedDraft


class DraftDecoder(CachedDraft):
    """Guesses with another model. Its attention reads everything before a token, so it computes from the first place
    on that is missing."""

    def _missing(self, row: Row) -> list[Row]:
        places = self._places(row.request.slot, np.arange(row.start))
        is_computed = self._computed[places] == self._texts(row.request, row.start)
        start = row.start if is_computed.all() else int(np.argmin(is_computed))
        return [Row(row.request, start, row.start - start)] if start < row.start else []

    def _compute(self, rows: list[Row]) -> Any:
        inputs = self._paged.build(rows)
        hidden = self._paged.forward(inputs)
        for row in rows:
            end = row.start + row.count
            places = self._places(row.request.slot, np.arange(row.start, end))
            self._computed[places] = self._texts(row.request, end)[row.start :]
        return inputs, hidden

    def _logits(self, rows: list[Row]) -> Tensor:
        inputs, hidden = self._compute(rows)
        index = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=self.model.device)
        return self.model.logits(hidden, index, inputs.tokens)
