"""Tiles of prompt chunks whose scores are computed whole.

A chunk is cut into tiles of as many queries as let the scores of a tile stay in the caches of the processor, if that
are not too few. Short chunks of several requests, one tile each, are computed by one call if padding them to one size
wastes little.
"""

from __future__ import annotations

from typing import NamedTuple

MAX_QUERIES, GOOD_QUERIES = 128, 64
"""Of a tile; and what it is not cut below to stay in the caches. On two CPU cores tiles of 16 and 32 took 1.0 to 2.3
times as long as those of 64, and larger ones 0.85 to 2 times, depending on heads and keys."""
CACHED_SCORES, MAX_SCORES = 2**22, 2**26
"""Of a call: 8 MB of bfloat16, which a third-level cache can hold; and 128 MB, which are held a few times over. The
first chose well between the sizes that were tried, the second is a bound only."""


class Tile(NamedTuple):
    """Queries of one request: its batch slot, the position of the first query, and how many there are."""

    slot: int
    start: int
    size: int


def cut_chunks(chunks: list[Tile], query_heads: int) -> list[list[Tile]]:
    """Chunks of prompts, in order -> the tiles of each call, in order.

    >>> chunks = [Tile(0, 0, 300), Tile(1, 100, 20), Tile(2, 90, 18), Tile(3, 7000, 150)]
    >>> for tiles in cut_chunks(chunks, query_heads=9):
    ...     print([tuple(tile) for tile in tiles])
    [(0, 0, 128)]
    [(0, 128, 128)]
    [(0, 256, 44), (1, 100, 20)]
    [(2, 90, 18)]
    [(3, 7000, 64)]
    [(3, 7064, 64)]
    [(3, 7128, 22)]
    """
    calls: list[list[Tile]] = []
    needed = 0  # scores of the last call without padding
    for slot, start, count in chunks:
        done = 0
        while done < count:
            size = min(count - done, MAX_QUERIES)
            for most, least in ((CACHED_SCORES, GOOD_QUERIES), (MAX_SCORES, 1)):
                while size > least and size * (start + done + size) * query_heads > most:
                    size = max(least, size // 2)
            tile = Tile(slot, start + done, size)
            own = size * (start + done + size)
            together = [*calls[-1], tile] if calls else []
            most = max((one.size for one in together), default=0)
            padded = len(together) * most * max((one.start + one.size for one in together), default=0)
            is_short = most <= GOOD_QUERIES and padded * query_heads <= CACHED_SCORES
            if together and is_short and padded <= 2 * (needed + own):
                calls[-1].append(tile)
                needed += own
            else:
                calls.append([tile])
                needed = own
            done += size
    return calls
