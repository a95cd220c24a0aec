"""Reuse to the token: which block is copied for which text,
against brute force over all that was computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.kv_cache.blocks.continuations import MAX_COMPARED, Continuations
from minivllm.kv_cache.group_manager import FullAttentionManager, SlidingWindowManager, StateManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import BlockCopy
from minivllm.request import Request
from tests.kv_cache.test_kv_cache_manager import make_request

pytestmark = pytest.mark.smoke


def put(
    index: Continuations, block_id: int, tokens: list[int], parent: bytes = b"", **state: bool
) -> list[int]:
    return index.put(parent, block_id, tokens, **{"is_tail": False, "is_planned": False, **state})


def index_of(min_tokens: int = 1, most_tails: int = 100) -> Continuations:
    index = Continuations(most_tails)
    index.min_tokens = min_tokens
    return index


pieces = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=MAX_COMPARED)


@settings(deadline=None, derandomize=True)
@given(pieces, st.lists(st.integers(0, 1), max_size=6), st.integers(1, 3))
def test_the_best_piece_has_the_longest_common_beginning(
    known: list[list[int]], text: list[int], min_tokens: int
) -> None:
    def common(piece: list[int]) -> int:
        return next(
            (place for place, pair in enumerate(zip(piece, text)) if pair[0] != pair[1]),
            min(map(len, (piece, text))),
        )

    index = index_of(min_tokens)
    for block_id, tokens in enumerate(known):
        put(index, block_id, tokens)
        assert not index.contradiction()
    found, longest = index.best(b"", text), max(map(common, known))
    if longest < min_tokens:
        assert found is None
    else:
        assert found is not None and found[1] == longest == common(known[found[0]])
    assert index.best(b"another beginning", text) is None


def test_what_the_planned_step_computes_may_be_copied_by_the_next_one() -> None:
    index = index_of()
    put(index, 1, [5, 6], is_tail=True)
    put(index, 1, [5, 6, 7, 8], is_planned=True)
    assert index.best(b"", [5, 6, 7, 8]) == (1, 2)
    assert index.best(b"", [5, 6, 7, 8], with_planned=True) == (1, 4)
    index.settle()
    assert index.best(b"", [5, 6, 7, 8]) == (1, 4)


def test_a_block_that_adds_nothing_has_no_piece() -> None:
    index = index_of()
    put(index, 1, [1, 2, 3])
    assert put(index, 2, [1, 2]) == [] and 2 not in index
    assert put(index, 3, [1, 2, 3, 4]) == [1], "its tokens are in the newer block too"
    assert index.usable() == [(b"", 3, [1, 2, 3, 4])]


def test_the_newest_tails_after_a_beginning_are_kept_and_what_is_read_counts_as_new() -> None:
    index = index_of()
    for block_id in range(MAX_COMPARED):
        assert put(index, block_id, [block_id], is_tail=True) == []
    assert index.best(b"", [0]) == (0, 1)
    assert put(index, 50, [50], is_tail=True) == [1]
    assert 0 in index and len(index) == MAX_COMPARED


def test_older_full_blocks_keep_their_piece_but_are_not_compared() -> None:
    index = index_of()
    for block_id in range(MAX_COMPARED + 2):
        assert put(index, block_id, [block_id]) == []
    assert len(index) == MAX_COMPARED + 2 and not index.contradiction()
    assert index.best(b"", [1]) is None and index.best(b"", [2]) == (2, 1)
    index.forget(9)
    assert index.best(b"", [1]) == (1, 1)
    assert sorted(index.after(b"")) == [(n, [n]) for n in range(MAX_COMPARED + 1)]


@settings(deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "tail", "grow", "read", "forget"]), st.integers(0, 30)), max_size=80
    )
)
def test_a_tail_that_is_not_compared_is_forgotten(operations: list[tuple[str, int]]) -> None:
    index = index_of(most_tails=6)
    for name, number in operations:
        if name == "forget":
            index.forget(number)
        elif name == "read":
            index.best(b"", [number])
        elif name != "grow" or number in index:
            put(index, number, [number] * (1 if name == "tail" else 4), is_tail=name == "tail")
        assert not index.contradiction()


def test_the_oldest_tails_make_room_and_full_blocks_do_not_count() -> None:
    index = index_of(most_tails=2)
    for block_id in range(2):
        assert put(index, block_id, [block_id], bytes([block_id]), is_tail=True) == []
    assert put(index, 5, [5], b"f") == []
    assert put(index, 2, [2], bytes([2]), is_tail=True) == [0]
    put(index, 1, [1, 1], bytes([1]))  # full now
    assert put(index, 3, [3], bytes([3]), is_tail=True) == []
    assert put(index_of(most_tails=0), 1, [1], is_tail=True) == [1]


def test_too_short_a_beginning_is_computed_again() -> None:
    index = Continuations(9)
    put(index, 1, list(range(9)))
    assert index.best(b"", [*range(7), 99]) is None
    assert index.best(b"", [*range(8), 99]) == (1, 8)


# -- in the KV cache manager -----------------------------------------------------------------------


def admit(
    manager: KVCacheManager, request: Request, num_tokens: int | None = None
) -> tuple[int, list[BlockCopy]]:
    """Admit and compute a whole prompt, or its first ``num_tokens`` tokens that are not cached;
    (reused tokens, copies)."""
    hits, num_hit = manager.get_computed_blocks(request)
    prefix = manager.continue_prefix(request, hits, num_hit)
    num_new = request.num_tokens - prefix.num_tokens if num_tokens is None else num_tokens
    assert (
        manager.allocate_slots(request, num_new, prefix.num_tokens, prefix.blocks, sources=prefix.sources)
        is not None
    )
    manager.settle()
    request.num_computed_tokens = prefix.num_tokens + num_new
    return prefix.num_tokens, manager.block_copies(request, prefix)


def full(num_blocks: int, block_size: int, min_copied: int | None = 8) -> KVCacheManager:
    return KVCacheManager([FullAttentionManager(num_blocks, block_size)], 1000, min_copied_tokens=min_copied)


texts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(deadline=None, max_examples=300, derandomize=True)
@given(
    st.lists(
        st.tuples(texts, st.sampled_from([None, None, "tenant"]), st.booleans()),
        min_size=1,
        max_size=MAX_COMPARED,
    ),
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3),
    st.integers(1, 3),
)
def test_all_tokens_that_two_texts_have_in_common_are_computed_once(
    arrivals: list[tuple[list[int], str | None, bool]], sizes: list[int], min_copied: int
) -> None:
    """Of any number of groups with blocks of any sizes;
    up to one token less than the text, or too few for a copy."""
    groups = [FullAttentionManager(500, size) for size in sizes]
    manager = KVCacheManager(groups, 100, min_copied_tokens=min_copied)
    alignment = manager._coordinator.alignment
    computed: list[tuple[str | None, list[int]]] = []
    live = []
    for number, (tokens, salt, stays) in enumerate(arrivals):
        request = make_request(f"r{number}", tokens, salt)
        common = [
            length
            for owner, text in computed
            for length in range(len(text) + 1)
            if owner == salt and tokens[:length] == text[:length]
        ]
        longest = min(max(common, default=0), len(tokens) - 1)
        reused, copies = admit(manager, request)
        assert longest - longest % alignment <= reused <= longest
        assert reused == longest or any(longest % size < min_copied for size in sizes), "too few for a copy"
        assert all(copy.source != copy.target for copy in copies)
        computed.append((salt, tokens))
        if stays:
            live.append(request)
        else:
            manager.free(request)
        manager.check_integrity(live)
    for request in live:
        manager.free(request)
    manager.check_integrity([])
    assert manager.usage == 0.0 and manager.reset_prefix_cache()
    assert all(len(pool.continuations) == 0 for pool in manager.pools)


def test_texts_that_part_inside_a_block_share_it_up_to_there() -> None:
    manager = full(40, 16)
    first = make_request("a", list(range(30)))
    assert admit(manager, first) == (0, [])
    second = make_request("b", [*range(27), 99, 98])
    reused, [copy] = admit(manager, second)
    (a,), (b,) = manager.get_block_ids("a"), manager.get_block_ids("b")
    assert reused == 27 and a[0] == b[0] and copy == BlockCopy(group=0, source=a[1], target=b[1])
    third = make_request("c", [*range(12), 50])
    assert admit(manager, third)[0] == 12, "the first block parts too"
    stats = manager.prefix_cache_hit_tokens, manager.prefix_cache_copied_tokens
    assert stats == (27 + 12, 11 + 12)


def test_tenants_and_adapters_never_share_a_piece() -> None:
    manager = full(40, 16)
    tokens = list(range(44))
    adapted = make_request("adapted", tokens)
    adapted.lora_digest = "one"
    other = make_request("other", tokens)
    other.lora_digest = "two"
    for request in (make_request("plain", tokens), make_request("salted", tokens, "tenant"), adapted, other):
        assert admit(manager, request)[0] == 0
    again = make_request("again", tokens)
    again.lora_digest = "two"
    assert admit(manager, again)[0] == 43 and admit(manager, make_request("b", tokens, "tenant"))[0] == 43


@pytest.mark.parametrize("num_spare", [0, 1])
def test_a_copy_is_made_only_if_there_is_a_block_for_it_besides_the_one_that_is_copied(
    num_spare: int,
) -> None:
    """128 tokens in two whole blocks and 40 in a third one, none in use; 300 tokens take 3 blocks more."""
    manager = full(100, 64)
    first = make_request("a", list(range(168)))
    admit(manager, first)
    manager.free(first)
    manager.pools[0].get_new_blocks(manager.pools[0].num_free_blocks - 5 - num_spare)
    request = make_request("b", [*range(168), *range(500, 632)])
    hits, num_hit = manager.get_computed_blocks(request)
    prefix = manager.continue_prefix(request, hits, num_hit)
    assert (num_hit, prefix.num_tokens) == (128, 168)
    new = manager.allocate_slots(request, 20, 168, prefix.blocks, sources=prefix.sources)
    assert (new is not None) == (num_spare == 1)
    if new is None:
        assert manager.get_block_ids("b") == ([],)
        assert manager.allocate_slots(request, 172, 128, hits) is not None, (
            "the blocks are enough without a copy"
        )
    else:
        [copy] = manager.block_copies(request, prefix)
        assert copy.target == new[0][0] and manager._groups[0].tables["b"].num_cached == 2
        free = [block.block_id for block in manager.pools[0].free_queue]
        assert len(free) == 3 and free[-1] == copy.source, "what was copied is free again, and reused last"


def test_what_was_planned_but_never_computed_is_not_copied_and_the_rest_is() -> None:
    manager = full(40, 16)
    request = make_request("a", list(range(64)))
    admit(manager, request, num_tokens=26)
    assert manager.allocate_slots(request, 38) is not None
    manager.free(request)  # the step with the last 38 tokens was never sent
    manager.check_integrity([])
    assert admit(manager, make_request("b", list(range(64))))[0] == 26


def test_an_answer_is_continued_from_its_last_computed_token() -> None:
    manager = full(40, 64)
    request = make_request("a", list(range(300)))
    admit(manager, request)
    for token in range(1000, 1050):
        request.append_output_token(token)
        if request.num_output_tokens < 50:
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
    manager.free(request)
    turn = make_request("b", [*request.all_token_ids, *range(20)])
    assert admit(manager, turn)[0] == 349


def test_rejected_drafts_and_tokens_of_unknown_value_are_in_no_piece() -> None:
    manager = full(40, 64)
    request = make_request("a", list(range(10)))
    admit(manager, request)
    request.append_output_token(10)
    request.draft_token_ids = [11, 12]
    manager.allocate_slots(request, 3)
    request.num_computed_tokens = 13  # with both drafts, whose results have not come
    manager.free(request)
    assert admit(manager, make_request("b", [*range(11), 11, 12, 13]))[0] == 11


def test_whole_blocks_are_found_where_nothing_is_copied() -> None:
    tokens = list(range(31))
    states = KVCacheManager([FullAttentionManager(40, 16), StateManager(9, 16)], 100)
    for manager in (full(40, 16, min_copied=None), states):
        first = make_request("a", tokens)
        hits, _ = manager.get_computed_blocks(first)
        manager.allocate_slots(first, 16, 0, hits)
        first.num_computed_tokens = 16
        manager.allocate_slots(first, 15)
        first.num_computed_tokens = 31
        manager.settle()
        again = make_request("b", tokens)
        hits, num_hit = manager.get_computed_blocks(again)
        assert manager.continue_prefix(again, hits, num_hit).num_tokens == num_hit == 16
        assert not any(len(pool.continuations) for pool in manager.pools)


def test_groups_with_smaller_blocks_share_whole_ones_first() -> None:
    manager = KVCacheManager([FullAttentionManager(80, 64), SlidingWindowManager(80, 16, 40, 200)], 1000)
    admit(manager, make_request("a", list(range(120))))
    reused, copies = admit(manager, make_request("b", [*range(110), 7]))
    assert reused == 110 and [copy.group for copy in copies] == [0, 1]
    wide, narrow = manager.get_block_ids("b"), manager.get_block_ids("a")
    assert wide[1][6] != narrow[1][6] and wide[1][4:6] == narrow[1][4:6], (
        "64 to 96 are two whole blocks of 16"
    )
    assert admit(manager, make_request("c", [*range(96), 7]))[1] == [
        BlockCopy(group=0, source=wide[0][1], target=manager.get_block_ids("c")[0][1])
    ], "in the group of the window, 96 tokens end with a block"


def test_a_whole_block_of_the_planned_step_is_shared_but_not_copied() -> None:
    """The first group has 3 tokens in common since an earlier step, the second one 4 in this one."""
    manager = KVCacheManager(
        [FullAttentionManager(80, 6), FullAttentionManager(80, 4)], 100, min_copied_tokens=1
    )
    admit(manager, make_request("a", [1, 2, 3]))
    second = make_request("b", [1, 2, 3, 4, 5])
    manager.pools[1].forget(manager.pools[1].blocks[manager.get_block_ids("a")[1][0]])
    hits, _ = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 5, 0, hits) is not None
    third = make_request("c", [1, 2, 3, 4, 9])
    hits, _ = manager.get_computed_blocks(third)
    assert manager.continue_prefix(third, hits, 0).num_tokens == 0
    manager.settle()
    assert manager.continue_prefix(third, hits, 0).num_tokens == 4


def test_one_of_eight_blocks_holds_the_end_of_a_text_and_what_is_forgotten_is_reused_first() -> None:
    manager = full(1 + 16, 16)
    pool = manager.pools[0]
    for number in range(3):
        request = make_request(f"r{number}", [number] * 12)
        admit(manager, request)
        [block_id] = manager.get_block_ids(request.request_id)[0]
        manager.free(request)
        assert [block.block_id for block in pool.free_queue][-1] == block_id
    assert len(pool.continuations) == 2
    assert next(iter(pool.free_queue)).block_id == 1, "that of the oldest text"
    assert admit(manager, make_request("again", [2] * 12))[0] == 11
    assert admit(manager, make_request("oldest", [0] * 12))[0] == 0
