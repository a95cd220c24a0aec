"""Tiles of prompt chunks whose scores are computed whole.

A chunk is cut into tiles of as many queries as let the scores of a tile stay in the caches of the processor. Short
chunks of several requests, one tile each, are computed by one call if padding them to one size wastes little.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_SCORES = 2**21
"""Scores of a call, beyond the smallest tile: 4 MB of bfloat16."""
MIN_QUERIES, MAX_QUERIES = 16, 256
"""Of a tile that is not the last one of its chunk."""


class Tile(NamedTuple):
    """Queries of one request: its batch slot, the position of the first query, and how many there are."""

    slot: int
    start: int
    size: int


def cut_chunks(chunks: list[Tile], query_heads: int) -> list[list[Tile]]:
    """Chunks of prompts, in order -> the tiles of each call, in order.

    >>> for tiles in cut_chunks([Tile(0, 0, 300), Tile(1, 100, 20), Tile(2, 90, 18), Tile(3, 0, 900)], query_heads=9):
    ...     print([tuple(tile) for tile in tiles])
    [(0, 0, 256)]
    [(0, 256, 44), (1, 100, 20)]
    [(2, 90, 18)]
    [(3, 0, 256)]
    [(3, 256, 256)]
    [(3, 512, 256)]
    [(3, 768, 132)]
    """
    calls: list[list[Tile]] = []
    needed = 0  # scores of the last call without padding
    for slot, start, count in chunks:
        done = 0
        while done < count:
            size = min(count - done, MAX_QUERIES)
            while size > MIN_QUERIES and size * (start + done + size) * query_heads > MAX_SCORES:
                size = -(-size // 2)
            tile = Tile(slot, start + done, size)
            own = size * (start + done + size)
            together = [*calls[-1], tile] if calls else []
            most = max((one.size for one in together), default=0)
            padded = len(together) * most * max((one.start + one.size for one in together), default=0)
            is_short = most <= MAX_QUERIES // 4 and padded * query_heads <= MAX_SCORES
            if together and is_short and padded <= 2 * (needed + own):
                calls[-1].append(tile)
                needed += own
            else:
                calls.append([tile])
                needed = own
            done += size
    return calls
