"""Block tables and prefix hits, against a brute-force list of every prefix that was computed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.errors import ConfigError
from minivllm.kv_cache.blocks.free_queue import KVCacheBlock
from minivllm.kv_cache.coordinator import KVCacheCoordinator
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import EngineRequest
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams

pytestmark = pytest.mark.smoke


def make_request(request_id: str, token_ids: list[int], salt: str | None = None, **params: object) -> Request:
    return Request(
        EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=SamplingParams(**params),
            max_tokens=16,
            seed=0,
            arrival_time=0.0,
            cache_salt=salt,
        )
    )


def admit(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> int:
    """Admit and compute a whole prompt, or its first ``num_tokens`` uncached tokens;
    returns the hit's length."""
    hits, num_hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit if num_tokens is None else num_tokens
    assert manager.allocate_slots(request, num_new, num_hit, hits) is not None
    request.num_computed_tokens = num_hit + num_new
    return num_hit


def snapshot(manager: KVCacheManager) -> tuple:
    """Everything that allocate_slots could change."""
    return (
        [(block.ref_count, block.block_hash) for block in manager.pools[0].blocks],
        [block.block_id for block in manager.pools[0].free_queue],
        {request_id: manager.get_block_ids(request_id) for request_id in manager._groups[0].tables},
        manager.prefix_cache_queried_tokens,
        manager.prefix_cache_hit_tokens,
    )


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14)


@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    st.lists(
        st.tuples(prompts, st.sampled_from([None, None, "tenant"]), st.booleans()), min_size=1, max_size=12
    ),
    st.integers(1, 4),
)
def test_a_hit_is_the_longest_prefix_of_whole_blocks_that_was_computed(
    arrivals: list[tuple[list[int], str | None, bool]], block_size: int
) -> None:
    manager = KVCacheManager([FullAttentionManager(500, block_size)], 100)  # nothing is evicted
    computed: dict[tuple, bool] = {}
    live = []
    for index, (tokens, salt, stays) in enumerate(arrivals):
        request = make_request(f"r{index}", tokens, salt)
        longest = 0
        for length in range(block_size, len(tokens), block_size):
            if (salt, *tokens[:length]) not in computed:
                break
            longest = length
        assert admit(manager, request) == longest
        for length in range(len(tokens) + 1):
            computed[(salt, *tokens[:length])] = True
        if stays:
            live.append(request)
        else:
            manager.free(request)
        manager.check_integrity(live)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(
    st.lists(st.tuples(prompts, st.booleans()), min_size=1, max_size=14),
    st.integers(1, 3),
    st.integers(2, 12),
)
def test_hits_in_a_tiny_pool_hold_what_they_promise_and_failures_change_nothing(
    arrivals: list[tuple[list[int], bool]], block_size: int, num_blocks: int
) -> None:
    manager = KVCacheManager([FullAttentionManager(num_blocks, block_size)], 100)
    contents: dict[int, tuple[int, ...]] = {}  # block id -> all tokens up to its end
    live: list[Request] = []
    for index, (tokens, stays) in enumerate(arrivals):
        request = make_request(f"r{index}", tokens)
        hits, num_hit = manager.get_computed_blocks(request)
        for place, block in enumerate(hits[0], 1):
            assert contents[block.block_id] == tuple(tokens[: place * block_size])
        before = snapshot(manager)
        idle_hits = sum(block.ref_count == 0 for block in hits[0])
        needed = -(-len(tokens) // block_size) - len(hits[0]) + idle_hits
        fits = needed <= manager.pools[0].num_free_blocks
        new = manager.allocate_slots(request, len(tokens) - num_hit, num_hit, hits)
        assert (new is not None) == fits
        if new is None:
            assert snapshot(manager) == before
            continue
        request.num_computed_tokens = len(tokens)
        table = manager.get_block_ids(request.request_id)[0]
        assert table == [block.block_id for block in hits[0]] + new[0] and len(set(table)) == len(table)
        for place, block_id in enumerate(table[len(hits[0]) :], len(hits[0]) + 1):
            assert all(block_id not in manager.get_block_ids(other.request_id)[0] for other in live)
            contents[block_id] = tuple(tokens[: place * block_size])
        if stays:
            live.append(request)
        else:
            manager.free(request)
        manager.check_integrity(live)
    for request in live:
        manager.free(request)
    manager.check_integrity([])
    assert manager.usage == 0.0 and manager.reset_prefix_cache()


def test_at_least_one_token_is_left_to_compute() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 4)], 100)
    assert admit(manager, make_request("a", list(range(8)))) == 0
    assert admit(manager, make_request("b", list(range(8)))) == 4
    assert admit(manager, make_request("c", list(range(9)))) == 8
    assert (manager.prefix_cache_queried_tokens, manager.prefix_cache_hit_tokens) == (25, 12)


def test_a_request_with_prompt_logprobs_reads_nothing_from_the_cache_but_fills_it() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 4)], 100)
    assert admit(manager, make_request("a", list(range(8)), prompt_logprobs=0)) == 0
    assert admit(manager, make_request("b", list(range(8)), prompt_logprobs=0)) == 0
    assert admit(manager, make_request("c", list(range(8)))) == 4
    assert (manager.prefix_cache_queried_tokens, manager.prefix_cache_hit_tokens) == (8, 4)


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 4)], 100, enable_prefix_caching=False)
    first, second = make_request("a", list(range(8))), make_request("b", list(range(8)))
    assert admit(manager, first) == 0 and admit(manager, second) == 0
    assert first.block_hashes == [] and manager.pools[0].num_cached_hashes == 0


def test_blocks_are_taken_only_when_the_last_one_is_full() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 4)], 100)
    request = make_request("a", [1, 2, 3])
    admit(manager, request)
    request.append_output_token(4)
    assert manager.allocate_slots(request, 1) is manager.no_block_ids
    request.num_computed_tokens = 4
    request.append_output_token(5)
    new = manager.allocate_slots(request, 1)
    assert new is not None and len(new[0]) == 1


def test_drafts_are_never_hashed() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 2)], 100)
    request = make_request("a", [1, 2, 3])
    admit(manager, request)
    request.append_output_token(4)
    request.draft_token_ids = [5, 6]
    manager.allocate_slots(request, 3)
    assert len(request.block_hashes) == 2 and manager.pools[0].num_cached_hashes == 2


def test_what_was_planned_but_never_computed_is_withdrawn_and_the_rest_stays() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 2)], 100)
    request = make_request("a", list(range(8)))
    admit(manager, request, num_tokens=4)
    assert manager.allocate_slots(request, 4) is not None
    assert manager.pools[0].num_cached_hashes == 4
    manager.free(request)  # the step with the second half was never sent
    manager.check_integrity([])
    assert manager.pools[0].num_cached_hashes == 2
    assert admit(manager, make_request("b", list(range(8)))) == 4


def test_a_withdrawal_leaves_the_twin_of_another_request_alone() -> None:
    manager = KVCacheManager([FullAttentionManager(12, 2)], 100, enable_prefix_caching=True)
    first, second = make_request("a", list(range(4)), prompt_logprobs=0), make_request("b", list(range(4)))
    admit(manager, first)
    hits = manager.no_block_ids
    assert manager.allocate_slots(second, 4, 0, tuple([] for _ in hits)) is not None
    manager.free(second)
    manager.check_integrity([first])
    assert manager.pools[0].num_cached_hashes == 2


def test_delayed_contents_are_found_only_once_they_are_announced() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 2)], 100)
    request = make_request("a", list(range(4)))
    hits, num_hit = manager.get_computed_blocks(request)
    manager.allocate_slots(request, 4, num_hit, hits, delay_caching=True)
    request.num_computed_tokens = 4
    assert manager.get_computed_blocks(make_request("b", list(range(5))))[1] == 0
    manager.cache_blocks(request, 4)
    assert manager.get_computed_blocks(make_request("b", list(range(5))))[1] == 4


def test_lookahead_reserves_room_up_to_the_longest_request() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 2)], max_model_len=6)
    request = make_request("a", [1, 2])
    new = manager.allocate_slots(request, 2, 0, ([],), num_lookahead_tokens=3)
    assert new is not None and len(new[0]) == 3
    other = make_request("b", [1, 2])
    new = manager.allocate_slots(other, 2, 0, ([],), num_lookahead_tokens=90)
    assert new is not None and len(new[0]) == 3


def test_the_cache_is_reset_only_when_nobody_uses_it() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 2)], 100)
    request = make_request("a", list(range(4)))
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert admit(manager, make_request("b", list(range(4)))) == 0


def test_the_integrity_check_finds_a_leaked_request() -> None:
    manager = KVCacheManager([FullAttentionManager(10, 2)], 100)
    request = make_request("a", list(range(4)))
    admit(manager, request)
    with pytest.raises(RuntimeError, match="block tables and running requests differ in"):
        manager.check_integrity([])


def test_groups_have_their_own_blocks_and_hit_together() -> None:
    manager = KVCacheManager([FullAttentionManager(20, 2), FullAttentionManager(20, 2)], 100)
    request = make_request("a", list(range(6)))
    admit(manager, request)
    first, second = manager.get_block_ids("a")
    assert len(first) == len(second) == 3
    manager.pools[1].forget(manager.pools[1].blocks[second[1]])  # the second group lost the middle block
    assert admit(manager, make_request("b", list(range(6)))) == 2
    manager.free(request)
    assert manager.usage > 0


class EvenHits(FullAttentionManager):
    """A kind that can only reuse an even number of blocks."""

    def find_longest_cache_hit(self, block_hashes: list[bytes], max_num_blocks: int) -> list[KVCacheBlock]:
        hits = super().find_longest_cache_hit(block_hashes, max_num_blocks)
        return hits[: len(hits) // 2 * 2]


class TripleHits(FullAttentionManager):
    """A kind that can only reuse a multiple of three blocks."""

    def find_longest_cache_hit(self, block_hashes: list[bytes], max_num_blocks: int) -> list[KVCacheBlock]:
        hits = super().find_longest_cache_hit(block_hashes, max_num_blocks)
        return hits[: len(hits) // 3 * 3]


@pytest.mark.parametrize("kinds", [(EvenHits, TripleHits), (TripleHits, EvenHits)])
def test_hits_of_different_kinds_are_intersected_to_a_fixed_point(kinds: tuple) -> None:
    for num_tokens, expected in ((11, 6), (9, 6), (6, 0), (14, 12)):
        manager = KVCacheManager([*(kind(80, 1) for kind in kinds)], 100)
        admit(manager, make_request("a", list(range(num_tokens))))
        assert manager.get_computed_blocks(make_request("b", list(range(num_tokens))))[1] == expected
    assert isinstance(manager._coordinator, KVCacheCoordinator)


def test_a_block_size_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="block_size is 0"):
        KVCacheManager([FullAttentionManager(10, 0)], 100)
