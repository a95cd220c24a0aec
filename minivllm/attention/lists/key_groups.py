"""Which blocks are copied before prompt chunks attend to them, in which order.

Blocks are copied in groups of neighbours, each of which attention reads as one larger block: the softmax over
its keys then costs less for each of them. What a chunk masks lies in order in the copy, so that the position
of a key follows from its place there; what it sees whole may lie anywhere, and is copied once for all rows
that share it.

Two requests with 8 blocks of 4 tokens, in groups of two, share their first group through the prefix cache.
Both compute 8 positions, from position 16 and from position 10:

>>> table = np.array([[5, 2, 7, 1, 8, 9], [5, 2, 4, 3, 6, 0]], dtype=np.int32)
>>> begins, ends = np.array([16, 10]), np.array([24, 18])
>>> groups = group_keys(table, begins, ends, np.array([0, 0]), np.array([2, 1]), 2, 4)
>>> groups.blocks.tolist()
[[5, 2], [7, 1], [8, 9], [4, 3], [6, 0]]
>>> groups.group_of.tolist()
[[0, 1, 2], [0, 3, 4]]
>>> # The third group begins at position 16 and in slot 16; the group of blocks 4 and 3 at 8 and 24.
>>> groups.shift.tolist()
[0, -16]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minivllm.attention.lists.bounds import first_seen
from minivllm.specs.attention import Reach

MIN_GROUPS = 2
"""Compiled code wants two of everything that varies."""


class KeyGroups(NamedTuple):
    """Groups of blocks, and which of them each row reads."""

    blocks: np.ndarray
    """int32 [n, size]: physical blocks of each group; 0 past the end of a request."""
    group_of: np.ndarray
    """int32 [rows, groups of a request]: which of them holds a row's group; 0 for those it does not read."""
    shift: np.ndarray
    """int64 [rows]: the position of a key less its slot in the copy, in the groups that the row has to
    itself."""
    own: np.ndarray
    """int64 [rows]: the first group that the row has to itself."""
    end: np.ndarray
    """int64 [rows]: the number of groups up to the row's last key."""

    def joined(self, bundles: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """``group_of`` with a further row for each bundle of rows that share all groups but their own: what
        they share, and then the groups of each; and the number of these, int64 [bundles]."""
        listed = []
        for rows in bundles:
            shared = self.group_of[rows[0], : self.own[rows[0]]]
            own = [self.group_of[row, self.own[row] : self.end[row]] for row in rows]
            listed.append(np.concatenate([shared, *own]))
        ends = np.array([len(groups) for groups in listed])
        num_rows, width = self.group_of.shape
        table = np.zeros((num_rows + len(listed), max(width, int(ends.max()))), dtype=np.int32)
        table[:num_rows, :width] = self.group_of
        for row, groups in enumerate(listed, num_rows):
            table[row, : len(groups)] = groups
        return table, ends


def group_keys(
    table: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    first: np.ndarray,
    own: np.ndarray,
    size: int,
    block_size: int,
    *,
    has_null: bool = False,
) -> KeyGroups:
    """Groups of ``size`` blocks for rows that compute positions from ``starts`` up to ``ends``, int64 [rows].

    table int32 [rows, blocks]: those of each row. first, own int64 [rows]: the first group that a row reads,
    and the first that it has to itself. has_null: the first group is the null block alone.
    """
    num_blocks = (ends - 1) // block_size + 1
    end = (num_blocks - 1) // size + 1
    group = np.arange(int(end.max()))
    group_of = np.zeros((len(starts), len(group)), dtype=np.int32)
    index = np.arange(len(group) * size)
    known = np.where(index < num_blocks[:, None], table[:, np.minimum(index, table.shape[1] - 1)], 0)
    blocks = known.reshape(len(starts), -1, size)
    is_shared, is_own = (
        (group >= low[:, None]) & (group < high[:, None]) for low, high in ((first, own), (own, end))
    )
    copied = [np.zeros((int(has_null), size), dtype=np.int32)]
    shared = blocks[is_shared]
    if len(shared):
        found, which = np.unique(shared, axis=0, return_inverse=True)
        group_of[is_shared] = len(copied[0]) + which.reshape(-1)
        copied.append(found)
    count = sum(map(len, copied))
    group_of[is_own] = count + np.arange(int(is_own.sum()))
    begin = count + np.cumsum(end - own) - (end - own)
    shift = (own - begin) * size * block_size
    return KeyGroups(np.concatenate([*copied, blocks[is_own]]), group_of, shift, own, end)


def bundles_of(groups: KeyGroups, counts: np.ndarray, size: int) -> np.ndarray | None:
    """Which rows of ``counts`` int64 [rows] tokens share a tile of ``size`` queries: those with equal
    numbers, int64 [rows]; None if no two do.

    Rows that share all groups but those that each has to itself are laid into one tile as long as they fit
    there whole, so that the tile reads what they share once for all of them.
    """
    short = np.flatnonzero((counts < size) & (groups.own > 0))
    if len(short) < 2:
        return None
    own = groups.own[short]
    read = np.where(np.arange(own.max()) < own[:, None], groups.group_of[short, : own.max()], -1)
    _, kinds = np.unique(read, axis=0, return_inverse=True)
    bundles = np.arange(len(counts))
    open_ones: dict[int, tuple[int, int]] = {}  # rows of one kind -> the last bundle of them, and its room
    for row, kind, count in zip(short.tolist(), kinds.reshape(-1).tolist(), counts[short].tolist()):
        bundle, room = open_ones.get(kind, (row, size))
        if count > room:
            bundle, room = row, size
        bundles[row] = bundle
        open_ones[kind] = bundle, room - count
    return None if np.array_equal(bundles, np.arange(len(counts))) else bundles


def groups_of_step(
    table: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
    reaches: Sequence[Reach],
    size: int,
    block_size: int,
    *,
    by_position: bool,
) -> KeyGroups:
    """``group_keys`` for rows of which some layers see so far. by_position: positions of keys matter even
    where they are seen whole, so all of a row lies in order."""
    keys = size * block_size
    first = np.min([first_seen(starts, reach) // keys for reach in reaches], axis=0)
    shares = not by_position and not any(reach.is_limited for reach in reaches)
    has_null = any(reach.has_sinks for reach in reaches)
    own = starts // keys if shares else first
    groups = group_keys(table, starts, ends, first, own, size, block_size, has_null=has_null)
    missing = np.zeros((max(0, MIN_GROUPS - len(groups.blocks)), size), dtype=np.int32)
    return groups._replace(blocks=np.concatenate([groups.blocks, missing]))
