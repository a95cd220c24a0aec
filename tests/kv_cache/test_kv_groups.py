"""Groups that forget: which prefixes may be hit, what is dropped, and how large the pools are,
against brute force."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.kv_cache.group_manager import (
    ChunkedAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
    make_group,
)
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_cache.sizing import RETENTION, PoolLimits, coarse, enough_blocks, fit_pools, size_pools
from minivllm.kv_cache.specs import GroupSpec, max_blocks, total_bytes
from minivllm.request import Request
from tests.kv_cache.test_kv_cache_manager import admit, make_request, prompts, snapshot
from tests.scheduler.simulated_worker import Layers

LONGEST_CHUNK = 20
groups = st.lists(
    st.builds(
        Layers,
        st.sampled_from([1, 2, 3, 4, 6]),
        st.sampled_from(["full", "window", "chunk"]),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=3,
)


class Contents:
    """What stands in every block, remembered from the outside: (group, block) -> tokens up to its end."""

    def __init__(self, manager: KVCacheManager, kinds: list[Layers]) -> None:
        self.manager, self.kinds = manager, kinds
        self.tokens: list[dict[int, tuple[int, ...]]] = [{} for _ in kinds]

    def note(self, request: Request, start: int, end: int) -> None:
        """These tokens of a request were computed."""
        for group, (layers, block_ids) in enumerate(
            zip(self.kinds, self.manager.get_block_ids(request.request_id))
        ):
            for position in range(start, end):
                block = block_ids[position // layers.block_size]
                assert block != NULL_BLOCK_ID
                self.tokens[group][block] = tuple(request.all_token_ids[: position + 1])

    def longest_hit(self, token_ids: list[int]) -> int:
        """By definition: whole blocks in all groups,
        and everything that the next token reads is in findable blocks."""
        return max(length for length in range(len(token_ids)) if self._can_be_hit(token_ids, length))

    def _can_be_hit(self, token_ids: list[int], length: int) -> bool:
        for group, layers in enumerate(self.kinds):
            if length % layers.block_size:
                return False
            findable = {
                self.tokens[group][block.block_id]
                for block in self.manager.pools[group].blocks
                if block.block_hash is not None
            }
            for position in range(layers.first_visible(length), length):
                end = (position // layers.block_size + 1) * layers.block_size
                if tuple(token_ids[:end]) not in findable:
                    return False
        return True


@settings(deadline=None, max_examples=250, derandomize=True)
@given(
    groups,
    st.lists(st.tuples(prompts, st.integers(1, 6), st.booleans()), min_size=1, max_size=12),
    st.lists(st.integers(8, 40), min_size=3, max_size=3),
)
def test_a_hit_is_the_longest_prefix_whose_end_is_all_there(
    kinds: list[Layers], arrivals: list[tuple[list[int], int, bool]], sizes: list[int]
) -> None:
    """Prompts in chunks, pools so small that blocks are evicted:
    exactly what a later token reads must be in blocks."""
    manager = KVCacheManager([layers.manager(size, LONGEST_CHUNK) for layers, size in zip(kinds, sizes)], 100)
    contents, live = Contents(manager, kinds), list[Request]()
    for index, (tokens, chunk, stays) in enumerate(arrivals):
        request = make_request(f"r{index}", tokens)
        hits, num_hit = manager.get_computed_blocks(request)
        assert num_hit == contents.longest_hit(tokens)
        for group, (layers, found) in enumerate(zip(kinds, hits)):
            assert len(found) * layers.block_size == num_hit
            for place, block in enumerate(found):
                end = (place + 1) * layers.block_size
                is_read = end > layers.first_visible(num_hit)
                expected = tuple(tokens[:end]) if is_read else None
                assert contents.tokens[group].get(block.block_id) == expected, (
                    "null blocks stand for what is not read"
                )
        before = full_snapshot(manager)
        first = min(chunk, len(tokens) - num_hit)
        if manager.allocate_slots(request, first, num_hit, hits) is None:
            assert full_snapshot(manager) == before
            continue
        contents.note(request, num_hit, num_hit + first)
        request.num_computed_tokens = num_hit + first
        while request.num_computed_tokens < len(tokens):
            start, count = request.num_computed_tokens, min(chunk, len(tokens) - request.num_computed_tokens)
            if manager.allocate_slots(request, count) is None:
                break
            check_tables(manager, kinds, request, start)
            contents.note(request, start, start + count)
            request.num_computed_tokens += count
        if stays:
            live.append(request)
        else:
            manager.free(request)
        manager.check_integrity(live)
    for request in live:
        manager.free(request)
    manager.check_integrity([])
    assert manager.usage == 0.0 and manager.reset_prefix_cache()


def full_snapshot(manager: KVCacheManager) -> tuple:
    pools = [
        (
            [(block.ref_count, block.block_hash) for block in pool.blocks],
            [block.block_id for block in pool.free_queue],
        )
        for pool in manager.pools
    ]
    return pools, snapshot(manager)[2:]


def check_tables(manager: KVCacheManager, kinds: list[Layers], request: Request, start: int) -> None:
    """Before a step that begins at ``start``: what it reads is held, and what it does not read is not."""
    for layers, block_ids in zip(kinds, manager.get_block_ids(request.request_id)):
        first_block = layers.first_visible(start) // layers.block_size
        assert block_ids[:first_block] == [NULL_BLOCK_ID] * first_block
        assert NULL_BLOCK_ID not in block_ids[first_block:]


@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
def test_max_blocks_is_the_most_that_any_step_needs(kind: str) -> None:
    random = Random(0)
    for _ in range(60):
        layers = Layers(random.randint(1, 6), kind, random.randint(1, 12))  # type: ignore[arg-type]
        chunk, length = random.randint(1, 8), random.randint(1, 60)
        held = max(
            (end - 1) // layers.block_size + 1 - layers.first_visible(start) // layers.block_size
            for start in range(length)
            for end in range(start + 1, min(length, start + chunk) + 1)
        )
        most = max_blocks(length, layers.block_size, None if kind == "full" else layers.reach, chunk)
        assert held <= most and layers.manager(2, chunk).max_blocks(length) == most
        if kind == "full" or (kind == "window" and length >= layers.reach + chunk + layers.block_size):
            assert held == most


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_decoding_in_a_window_holds_the_same_few_blocks_for_ever(window: int) -> None:
    manager = KVCacheManager([SlidingWindowManager(6, 4, window, longest_chunk=3)], 10_000)
    request = make_request("a", [1, 2, 3])
    admit(manager, request)
    for step in range(300):
        request.append_output_token(step)
        assert manager.allocate_slots(request, 1) is not None
        check_tables(manager, [Layers(4, "window", window)], request, request.num_computed_tokens)
        request.num_computed_tokens += 1
    assert manager.pools[0].num_blocks - 1 - manager.pools[0].num_free_blocks <= -(-window // 4) + 1
    assert manager.room == 10_000


def test_a_window_of_one_token_needs_no_block_for_a_hit() -> None:
    manager = KVCacheManager([FullAttentionManager(20, 2), SlidingWindowManager(20, 2, 1, 9)], 100)
    first = make_request("a", list(range(9)))
    admit(manager, first)
    manager.free(first)
    manager.pools[1].get_new_blocks(19)  # nothing is left of the window
    hits, num_hit = manager.get_computed_blocks(make_request("b", list(range(9))))
    assert num_hit == 8 and all(block.block_id == NULL_BLOCK_ID for block in hits[1])


def test_a_second_turn_hits_the_end_of_the_first_one() -> None:
    """Of a long conversation the window keeps only the end, and that is what the next turn needs."""
    manager = KVCacheManager([FullAttentionManager(60, 2), SlidingWindowManager(9, 2, 5, 8)], 200)
    request = make_request("a", list(range(8)))
    admit(manager, request)
    for token in range(8, 70):
        request.append_output_token(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    manager.free(request)
    assert manager.get_computed_blocks(make_request("b", list(range(75))))[1] == 70
    assert manager.get_computed_blocks(make_request("c", [*range(40), 0, 0, 0]))[1] == 0, "its middle is gone"


def test_drafts_that_are_rejected_never_drop_a_block_that_is_read_again() -> None:
    manager = KVCacheManager([SlidingWindowManager(20, 1, 3, 9)], 100)
    request = make_request("a", list(range(6)))
    admit(manager, request)
    request.append_output_token(6)
    request.draft_token_ids = [7, 8, 9]
    assert manager.allocate_slots(request, 4) is not None
    request.num_computed_tokens = 10  # as if all drafts were right, while the step is in flight
    manager.check_integrity([request])
    request.num_computed_tokens = 7  # all are rejected
    check_tables(manager, [Layers(1, "window", 3)], request, 6)
    manager.check_integrity([request])


def test_a_chunk_is_forgotten_when_the_next_one_begins() -> None:
    manager = KVCacheManager([ChunkedAttentionManager(20, 2, 4, 9)], 100)
    request = make_request("a", list(range(7)))
    admit(manager, request)
    request.append_output_token(7)
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("a")[0][:2] == [NULL_BLOCK_ID] * 2
    request.num_computed_tokens = 8
    request.append_output_token(8)
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("a")[0][:4] == [NULL_BLOCK_ID] * 4
    manager.check_integrity([request])


def test_a_request_is_refused_as_a_whole_if_one_pool_has_no_room() -> None:
    manager = KVCacheManager([FullAttentionManager(40, 2), SlidingWindowManager(6, 2, 5, 4)], 100)
    first, second = make_request("a", list(range(12))), make_request("b", list(range(20, 28)))
    assert admit(manager, first, 4) == 0
    before = full_snapshot(manager)
    assert manager.allocate_slots(second, 2, 0, manager.get_computed_blocks(second)[0]) is None
    assert full_snapshot(manager) == before and manager.pools[1].num_free_blocks == 3
    assert manager.num_missing_blocks(first) == [4, 3]


def test_the_integrity_check_finds_a_block_that_was_dropped_too_early() -> None:
    manager = KVCacheManager([SlidingWindowManager(20, 2, 4, 9)], 100)
    request = make_request("a", list(range(9)))
    admit(manager, request)
    manager._groups[0].drop_skipped_blocks("a", 11)
    with pytest.raises(
        RuntimeError, match="a has 9 computed tokens, but no block in a place that its next token reads"
    ):
        manager.check_integrity([request])


# -- how large the pools are -----------------------------------------------------------------------

specs = st.lists(
    st.tuples(st.sampled_from([None, 3, 64, 1000]), st.sampled_from([16, 32, 64]), st.integers(1, 5000)),
    min_size=1,
    max_size=3,
).map(
    lambda drawn: [
        GroupSpec(
            kind="full attention" if place == 0 and reach is None else "sliding window",
            reach=reach if place == 0 or reach is not None else 5,
            layers=(place,),
            block_size=block_size,
            block_bytes=block_bytes,
        )
        for place, (reach, block_size, block_bytes) in enumerate(drawn)
    ]
)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(specs, st.integers(0, 10**7), st.integers(1, 64), st.integers(2, 5000), st.integers(1, 600))
def test_pools_fit_into_memory_serve_the_longest_request_and_waste_nothing(
    drawn: list[GroupSpec], num_bytes: int, max_num_seqs: int, max_model_len: int, longest_chunk: int
) -> None:
    limits = PoolLimits(max_num_seqs=max_num_seqs, max_model_len=max_model_len, longest_chunk=longest_chunk)
    sized = fit_pools(drawn, num_bytes, limits)
    first, *others = sized
    alone = first.max_blocks(max_model_len, longest_chunk)
    if first.num_blocks < alone + 1:
        return  # refused with a sentence
    assert total_bytes(sized) <= num_bytes < total_bytes(size_pools(drawn, first.num_blocks + 1, limits))
    for spec in sized:
        assert make_group(spec, longest_chunk).max_tokens_alone(max_model_len) >= max_model_len
    for spec in others:
        assert spec.reach is not None
        most = RETENTION * max_num_seqs * max_blocks(10**9, spec.block_size, spec.reach, 1)
        step = -(-longest_chunk // spec.block_size) + 1
        assert spec.num_blocks - 1 <= max(most + step, spec.max_blocks(max_model_len, longest_chunk))
    assert enough_blocks(first, limits) >= alone + 1


def gemma_3_4b(num_groups: int) -> list[GroupSpec]:
    """34 layers, 5 of 6 with a window of 1,024, 4 KV heads of 256 dimensions, two bytes per value."""
    full = tuple(layer for layer in range(34) if layer % 6 == 5)
    windowed = tuple(layer for layer in range(34) if layer % 6 != 5)
    of_one_layer = 64 * 2 * 4 * 256 * 2
    if num_groups == 1:
        return [
            GroupSpec(
                kind="full attention", layers=tuple(range(34)), block_size=64, block_bytes=34 * of_one_layer
            )
        ]
    return [
        GroupSpec(kind="full attention", layers=full, block_size=64, block_bytes=len(full) * of_one_layer),
        GroupSpec(
            kind="sliding window",
            reach=1024,
            layers=windowed,
            block_size=64,
            block_bytes=len(windowed) * of_one_layer,
        ),
    ]


def requests_of_max_model_len(sized: list[GroupSpec], limits: PoolLimits) -> float:
    """How many can be kept at once:
    each with all its blocks of full attention, and those of its last window."""
    return min((spec.num_blocks - 1) / spec.max_blocks(limits.max_model_len, 1) for spec in sized)


@pytest.mark.parametrize("gib", [8, 16, 40])
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(64, 2048), (256, 2048), (256, 8192)])
def test_a_gemma_3_of_4b_keeps_more_than_four_times_as_many_tokens_of_long_texts(
    gib: int, max_num_seqs: int, budget: int
) -> None:
    limits = PoolLimits(max_num_seqs=max_num_seqs, max_model_len=32768, longest_chunk=budget)
    one, two = (fit_pools(gemma_3_4b(count), gib * 2**30, limits) for count in (1, 2))
    assert total_bytes(two) <= gib * 2**30
    gain = requests_of_max_model_len(two, limits) / requests_of_max_model_len(one, limits)
    assert gain >= 4.5, gain


@given(st.integers(0, 2**40))
def test_a_coarse_size_is_a_little_smaller_and_the_same_for_most_neighbours(count: int) -> None:
    size = coarse(count)
    assert size <= count and 16 * (count - size) <= count
    assert coarse(size) == size and coarse(count + 1) >= size
    assert len({coarse(other) for other in range(10_000, 10_400)}) <= 2
