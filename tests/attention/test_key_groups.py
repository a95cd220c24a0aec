"""Groups of blocks that are copied for prompt chunks, against the table of blocks that they are made of."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from minivllm.attention.lists.key_groups import group_keys


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[list[int]], list[int], list[int]]:
    """Blocks of some requests, of which later ones may begin like earlier ones;
    where each chunk starts and ends."""
    tables: list[list[int]] = []
    numbers = iter(range(1, 1000))
    for _ in range(draw(st.integers(1, 4))):
        other = draw(st.sampled_from(tables)) if tables and draw(st.booleans()) else []
        prefix = other[: draw(st.integers(0, len(other)))]
        tables.append([*prefix, *(next(numbers) for _ in range(draw(st.integers(1, 6))))])
    ends = [draw(st.integers(1, 4 * len(table))) for table in tables]
    return tables, [draw(st.integers(0, end - 1)) for end in ends], ends


@given(requests(), st.integers(1, 3), st.booleans(), st.booleans())
def test_each_group_is_where_it_is_said_to_be_and_positions_follow_from_slots(
    case: tuple[list[list[int]], list[int], list[int]], size: int, shares: bool, has_null: bool
) -> None:
    tables, starts, ends = case
    block_size, keys = 4, 4 * size
    table = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, blocks in enumerate(tables):
        table[row, : len(blocks)] = blocks
    first = np.zeros(len(tables), dtype=np.int64) if shares else np.array(starts) // keys
    own = np.array(starts) // keys
    found = group_keys(
        table, np.array(starts), np.array(ends), first, own, size, block_size, has_null=has_null
    )
    own_places, shared_places, shared_groups = [], [], set()
    for row, (blocks, start, end) in enumerate(zip(tables, starts, ends)):
        used = blocks[: -(-end // block_size)]
        for group in range(int(first[row]), -(-end // keys)):
            expected = used[group * size : (group + 1) * size]
            expected += [0] * (size - len(expected))
            place = int(found.group_of[row, group])
            assert found.blocks[place].tolist() == expected
            if group < start // keys:
                shared_places.append(place)
                shared_groups.add(tuple(expected))
            else:
                own_places.append(place)
                for position in range(group * keys, min((group + 1) * keys, end)):
                    slot = place * keys + position % keys
                    assert slot + found.shift[row] == position
    assert len(set(own_places)) == len(own_places) and not set(own_places) & set(shared_places)
    assert len(set(shared_places)) == len(shared_groups), "what rows share is copied once"
    assert len(found.blocks) == len(own_places) + len(shared_groups) + has_null
    assert not has_null or not found.blocks[0].any()
