"""Custom logits processors as stages of the sampler:
rows of a step on one side, a batch with updates on the other.

The sampler asks for the rows it has, of any slots. A processor knows a batch: request i has row i, and the
processor is told of every change. So the rows that are asked for come first in the processor's batch, and the
other requests after them.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from minivllm.device.buffers import to_device
from minivllm.messages import EngineRequest
from minivllm.sampling.logits_processors import AddedRequest, BatchUpdate, LogitsProcessor


class ProcessorStage:
    """One processor. Implements LogitsStage; the slots of a call must differ, as they do where rows depend on
    output (``verify`` asks for their positions one by one)."""

    def __init__(self, processor: LogitsProcessor, num_slots: int) -> None:
        self._processor = processor
        self._is_active = np.zeros(num_slots, dtype=np.bool_)
        self._outputs: dict[int, list[int]] = {}
        self._slots: list[int | None] = []  # the processor's batch: slot of every row
        self._removed: list[int] = []
        self._added: dict[int, EngineRequest] = {}

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """A request enters a free slot with these outputs."""
        if self._processor.concerns(request.sampling_params):
            self._is_active[slot] = True
            self._outputs[slot] = list(output_token_ids)
            self._added[slot] = request

    def remove(self, slot: int) -> None:
        """The request of the slot has left; a slot without one is ignored."""
        if not self._is_active[slot]:
            return
        self._is_active[slot] = False
        del self._outputs[slot]
        if self._added.pop(slot, None) is None:  # otherwise the processor has not heard of it
            row = self._slots.index(slot)
            self._slots[row] = None
            self._removed.append(row)

    def append(self, slot: int, token_id: int) -> None:
        """Record a generated token."""
        if self._is_active[slot]:
            self._outputs[slot].append(token_id)

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return self._is_active[slots]

    def apply(self, logits: Tensor, slots: np.ndarray) -> None:
        rows = np.flatnonzero(self._is_active[slots])
        update = self._update([int(slot) for slot in slots[rows]])
        if update is not None:
            self._processor.update_state(update)
        index = to_device(rows, logits.device)
        chosen = logits if len(rows) == len(slots) else logits[index]
        shape = chosen.shape
        processed = self._processor.apply(chosen)
        if not isinstance(processed, Tensor) or processed.shape != shape:
            given = tuple(processed.shape) if isinstance(processed, Tensor) else type(processed).__name__
            raise RuntimeError(
                f"{type(self._processor).__name__}.apply returned {given}, but must return the logits, "
                f"{tuple(shape)}."
            )
        if processed is not logits:
            logits[index] = processed.to(logits)

    def _update(self, wanted: list[int]) -> BatchUpdate | None:
        """Changes since the last call, and moves that put the wanted slots into the first rows,
        in this order."""
        slots, removed = self._slots, sorted(self._removed)
        empty = list(removed)
        added = []
        for slot, request in self._added.items():
            row = empty.pop(0) if empty else len(slots)
            slots[row : row + 1] = [slot]
            added.append(
                AddedRequest(row, request.sampling_params, request.prompt_token_ids, self._outputs[slot])
            )
        self._removed = []
        self._added = {}
        moved = []
        for hole in empty:
            while slots and slots[-1] is None:
                slots.pop()
            if hole < len(slots):
                slots[hole] = slots.pop()
                moved.append((len(slots), hole))
        for row, slot in enumerate(wanted):
            if slots[row] != slot:
                other = slots.index(slot)
                slots[row], slots[other] = slots[other], slots[row]
                moved.append((other, row))
        if not (removed or added or moved):
            return None
        return BatchUpdate(len(slots), removed, added, moved)
