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
    """blocks int32 [n, size]: physical blocks of each group; 0 behind the end of a request.
    group_of int32 [rows, groups of a request]: which of them holds a row's group;
    0 for those it does not read.
    shift int64 [rows]: the position of a key less its slot in the copy,
    in the groups that the row has to itself."""

    blocks: np.ndarray
    group_of: np.ndarray
    shift: np.ndarray


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
    return KeyGroups(np.concatenate([*copied, blocks[is_own]]), group_of, (own - begin) * size * block_size)


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
