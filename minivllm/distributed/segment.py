"""The shared memory in which workers exchange tensors, as it is opened and inherited. Made without torch."""

from __future__ import annotations

import os

Segment = tuple[int, list[list[int]]]
"""Descriptors that workers inherit:
of the memory, and the eventfds by which rank i tells rank j, -1 for i = j."""
PLACE_BYTES = 2**20
"""Of one rank; there are two of them. Larger tensors cross in pieces."""


def open_segment(size: int) -> Segment:
    """One for ``size`` workers."""
    memory = os.memfd_create("minivllm-tensors", os.MFD_CLOEXEC)
    os.ftruncate(memory, 2 * size * PLACE_BYTES)
    flags = os.EFD_CLOEXEC | os.EFD_SEMAPHORE
    return memory, [[os.eventfd(0, flags) if i != j else -1 for j in range(size)] for i in range(size)]


def segment_descriptors(segment: Segment) -> list[int]:
    """All descriptors of a segment."""
    memory, events = segment
    return [memory, *(event for row in events for event in row if event >= 0)]
