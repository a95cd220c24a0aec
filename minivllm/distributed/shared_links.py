"""What the worker processes of one host share, opened before they start: within stages, and between them."""

from __future__ import annotations

import os

from minivllm.distributed.link import StageLinks, open_link
from minivllm.distributed.segment import Segment, open_segment, segment_descriptors


class SharedLinks:
    """A segment for the ranks of each stage, and for each of these ranks links to those that have the same
    part of other stages. size: workers of a stage. by_file: these find one another in a file, in place of a
    segment.
    ranks: those of this host, if not all; stages and pairs of ranks that are not all here share nothing."""

    def __init__(self, size: int, num_stages: int, by_file: bool = False, ranks: range | None = None) -> None:
        self._size = size
        self._last = size * (num_stages - 1)
        self._ranks = range(size * num_stages) if ranks is None else ranks
        stages = [
            stage
            for stage in range(num_stages if size > 1 else 0)
            if size * stage in self._ranks and size * (stage + 1) - 1 in self._ranks
        ]
        self._segments = {} if by_file else {stage: open_segment(size) for stage in stages}
        self._files = {stage: os.memfd_create("minivllm-ranks") for stage in stages} if by_file else {}
        # Both from a rank whose stage is not the last one: to the next stage, and from the last one.
        self._streams = {rank: open_link() for rank in self._ranks if rank + size in self._ranks}
        self._tokens = {
            rank: open_link()
            for rank in self._ranks
            if rank < self._last and self._last + rank % size in self._ranks
        }

    def segment(self, rank: int) -> Segment | None:
        """The one of a worker, if there are some."""
        return self._segments.get(rank // self._size)

    def rendezvous(self, rank: int) -> int | None:
        """The descriptor of its file, if there are some."""
        return self._files.get(rank // self._size)

    def links(self, rank: int) -> StageLinks:
        """Those of a worker."""
        ends = range(rank % self._size, self._last, self._size) if rank >= self._last else [rank]
        return StageLinks(
            source=self._streams.get(rank - self._size),
            sink=self._streams.get(rank),
            tokens=tuple(self._tokens[end] for end in ends if end in self._tokens),
        )

    def descriptors(self, rank: int) -> list[int]:
        """All that a worker inherits of them."""
        segment, file, links = self.segment(rank), self.rendezvous(rank), self.links(rank)
        within = [] if segment is None else segment_descriptors(segment)
        between = [link for link in (links.source, links.sink, *links.tokens) if link is not None]
        return [
            *within,
            *([] if file is None else [file]),
            *(descriptor for link in between for descriptor in link),
        ]

    def close(self) -> None:
        """Close all descriptors here; the workers have theirs."""
        for descriptor in {descriptor for rank in self._ranks for descriptor in self.descriptors(rank)}:
            os.close(descriptor)
