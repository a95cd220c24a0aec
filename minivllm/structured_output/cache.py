"""Compiled grammars by what they were compiled from, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from minivllm.sampling_params import StructuredOutputs
from minivllm.structured_output.grammar import Grammar

FIXED_BYTES = 64 * 1024
BYTES_PER_SOURCE_BYTE = 16
"""Measured over schemas of 2 to 90 kB: a compiled one takes up to 15 times its text."""


class GrammarCache:
    """A grammar at its start, or the sentence that says why there is none: refusing again then costs nothing.

    Least recently used entries go first. Sizes are estimates by the length of the source [bytes]."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Hashable, tuple[Grammar | str, int]] = OrderedDict()
        self.num_bytes = 0
        self.num_hits = 0

    def get(self, structured: StructuredOutputs) -> Grammar | str | None:
        entry = self._entries.get(structured.key)
        if entry is None:
            return None
        self._entries.move_to_end(structured.key)
        self.num_hits += 1
        return entry[0]

    def put(self, structured: StructuredOutputs, compiled: Grammar | str) -> None:
        """Replaces an entry of the same key; one that is larger than the whole cache is not kept."""
        replaced = self._entries.pop(structured.key, None)
        self.num_bytes -= 0 if replaced is None else replaced[1]
        size = FIXED_BYTES + BYTES_PER_SOURCE_BYTE * len(structured.source.encode())
        self._entries[structured.key] = (compiled, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._entries.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._entries)
