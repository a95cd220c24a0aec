"""What the worker processes of one model share, opened before they start: within stages, and between them."""

from __future__ import annotations

import os

from minivllm.distributed.link import StageLinks, open_link
from minivllm.distributed.shared_memory import Segment, open_segment, segment_descriptors


class SharedLinks:
    """A segment for the ranks of each stage, and for each of these ranks links to those that have the same part of
    other stages. size: workers of a stage. uses_gloo: a file where they find one another, in place of a segment."""

    def __init__(self, size: int, num_stages: int, uses_gloo: bool = False) -> None:
        self._size = size
        stages = range(num_stages if size > 1 else 0)
        self._segments = [] if uses_gloo else [open_segment(size) for _ in stages]
        self._files = [os.memfd_create("minivllm-ranks") for _ in stages] if uses_gloo else []
        # Both from a stage that is not the last one, [stage][rank in the stage].
        self._streams, self._tokens = (
            [[open_link() for _ in range(size)] for _ in range(num_stages - 1)] for _ in range(2)
        )

    def segment(self, rank: int) -> Segment | None:
        """The one of a worker, if there are some."""
        return self._segments[rank // self._size] if self._segments else None

    def rendezvous(self, rank: int) -> int | None:
        """The descriptor of its file, if there are some."""
        return self._files[rank // self._size] if self._files else None

    def links(self, rank: int) -> StageLinks:
        """Those of a worker."""
        stage, place = divmod(rank, self._size)
        is_last = stage == len(self._streams)
        return StageLinks(
            source=self._streams[stage - 1][place] if stage else None,
            sink=None if is_last else self._streams[stage][place],
            tokens=tuple(links[place] for links in (self._tokens if is_last else [self._tokens[stage]])),
        )

    def descriptors(self, rank: int) -> list[int]:
        """All that a worker inherits of them."""
        segment, file, links = self.segment(rank), self.rendezvous(rank), self.links(rank)
        within = [] if segment is None else segment_descriptors(segment)
        between = [link for link in (links.source, links.sink, *links.tokens) if link is not None]
        return [*within, *([] if file is None else [file]), *(descriptor for link in between for descriptor in link)]

    def close(self) -> None:
        """Close all descriptors here; the workers have theirs."""
        num_ranks = self._size * (1 + len(self._streams))
        for descriptor in {descriptor for rank in range(num_ranks) for descriptor in self.descriptors(rank)}:
            os.close(descriptor)
