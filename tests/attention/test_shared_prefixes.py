"""Shared blocks of rows, against a comparison of every row with every other one."""

from __future__ import annotations

from itertools import count

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minivllm.attention.lists.shared_prefixes import SharedBlocks, find_shared


def readers(tables: list[list[int]]) -> dict[tuple[int, ...], set[int]]:
    """Prefix in blocks -> the rows that begin with it, by the definition: at least two of them."""
    found: dict[tuple[int, ...], set[int]] = {}
    for row, blocks in enumerate(tables):
        for end in range(1, len(blocks) + 1):
            found.setdefault(tuple(blocks[:end]), set()).add(row)
    return {prefix: rows for prefix, rows in found.items() if len(rows) > 1}


def found_in(tables: list[list[int]]) -> SharedBlocks:
    """What is found where tables are longer than what counts of them, and hold other numbers there."""
    table = np.full((len(tables), max(map(len, tables)) + 2), 7, dtype=np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    return find_shared(table, np.array([len(blocks) for blocks in tables]))


def readers_found(tables: list[list[int]]) -> dict[tuple[int, ...], set[int]]:
    found = found_in(tables)
    rows = [
        set(found.rows[first : last + 1].tolist())
        for first, last in zip(found.first.tolist(), found.last.tolist())
    ]
    prefixes = [tuple(tables[min(own)][: place + 1]) for own, place in zip(rows, found.place.tolist())]
    assert [prefix[-1] for prefix in prefixes] == found.blocks.tolist()
    assert len(set(prefixes)) == len(prefixes), "each block is found once"
    return dict(zip(prefixes, rows))


@st.composite
def trees(draw: st.DrawFn) -> list[list[int]]:
    """Rows that continue any beginning of an earlier one, or begin anew; some of them end with it."""
    numbers = count(100)
    tables: list[list[int]] = [[next(numbers)]]
    for _ in range(draw(st.integers(0, 9))):
        other = draw(st.sampled_from(tables))
        prefix = other[: draw(st.integers(0, len(other)))]
        new = draw(st.integers(0 if prefix else 1, 3))
        tables.append([*prefix, *(next(numbers) for _ in range(new))])
    return draw(st.permutations(tables))


@given(trees())
def test_every_shared_block_is_found_with_its_rows(tables: list[list[int]]) -> None:
    expected = readers(tables)
    assert readers_found(tables) == expected
    num_shared = [sum(row in rows for rows in expected.values()) for row in range(len(tables))]
    assert found_in(tables).num_shared.tolist() == num_shared


def test_a_tree_of_three_levels_beside_another_group_and_a_row_that_shares_nothing() -> None:
    tables = [[1, 2, 3, 10], [20, 21, 11], [1, 2, 4, 12], [30, 31], [1, 5, 13], [1, 2, 3, 14], [20, 22, 15]]
    expected = {(1,): {0, 2, 4, 5}, (1, 2): {0, 2, 5}, (1, 2, 3): {0, 5}, (20,): {1, 6}}
    assert readers_found(tables) == expected
    assert found_in(tables).num_shared.tolist() == [3, 1, 2, 0, 1, 3, 1]


def test_a_row_that_leaves_from_the_middle_leaves_the_others_together() -> None:
    assert readers_found([[1, 2, 3], [1, 2, 4], [1, 2, 5]]) == {(1,): {0, 1, 2}, (1, 2): {0, 1, 2}}
    assert readers_found([[1, 2, 3], [1, 2, 5]]) == {(1,): {0, 1}, (1, 2): {0, 1}}
    assert readers_found([[1, 2, 3]]) == {}


def test_equal_blocks_after_different_ones_are_not_shared() -> None:
    assert readers_found([[1, 3], [2, 3], [2, 4]]) == {(2,): {1, 2}}


def test_rows_without_blocks_share_nothing() -> None:
    assert readers_found([[], [], [1]]) == {}
