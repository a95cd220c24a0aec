"""The prefix cache as a tree, against brute force over all pieces that the index of continuations has."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager, StateManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_cache.tree.prefix_tree import MOST_BLOCKS, MOST_TOKEN_IDS, prefix_tree
from minivllm.messages import PrefixNode, PrefixTree
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import made_up_output
from tests.scheduler.simulated_worker import make_engine_request

SIZE, BLOCK_BYTES = 4, 100


def engine(num_blocks: int = 60, seats: int = 4, budget: int = 64) -> tuple[Scheduler, KVCacheManager]:
    manager = KVCacheManager(
        [FullAttentionManager(num_blocks, SIZE)], max_model_len=10_000, min_copied_tokens=2
    )
    config = SchedulerConfig(max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=10_000)
    return Scheduler(config, manager), manager


def step(scheduler: Scheduler) -> None:
    planned = scheduler.schedule()
    scheduler.update_from_output(
        planned, made_up_output(scheduler, planned, lambda request: request.num_tokens % 3)
    )


def serve(scheduler: Scheduler, *prompts: list[int], max_tokens: int = 1, salt: str | None = None) -> None:
    for prompt in prompts:
        number = scheduler.stats().num_steps
        scheduler.add_request(Request(make_engine_request(f"r{number}", prompt, max_tokens, cache_salt=salt)))
        while scheduler.has_unfinished_requests():
            step(scheduler)


def tree_of(manager: KVCacheManager, limit: int = 1000) -> PrefixTree:
    return prefix_tree(manager, [BLOCK_BYTES], limit)


def texts_of(tree: PrefixTree) -> list[tuple[int, ...]]:
    """The tokens from the root to the end of each node."""
    texts: list[tuple[int, ...]] = []
    open_texts: list[tuple[int, ...]] = [()]
    for node in tree.nodes:
        assert node.num_tokens == len(node.token_ids)
        del open_texts[node.depth + 1 :]
        open_texts.append((*open_texts[-1], *node.token_ids))
        assert len(open_texts) == node.depth + 2, "a node is at most one level below the one before"
        texts.append(open_texts[-1])
    return texts


def beginnings(texts: list[tuple[int, ...]]) -> set[tuple[int, ...]]:
    return {text[:length] for text in texts for length in range(1, len(text) + 1)}


def by_brute_force(manager: KVCacheManager) -> list[tuple[int, ...]]:
    """The whole text up to the end of each piece."""
    [pool] = manager.pools
    pieces = {
        block_id: (parent, tokens) for parent, block_id, tokens in pool.continuations.usable() if tokens
    }
    by_hash = {pool.blocks[block_id].block_hash: block_id for block_id in pieces}

    def text(block_id: int) -> tuple[int, ...]:
        parent, tokens = pieces[block_id]
        return (*(text(by_hash[parent]) if parent else ()), *tokens)

    return [text(block_id) for block_id in pieces]


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([24, 40, 400]))
def test_the_tree_has_exactly_the_texts_of_the_index(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    scheduler, manager = engine(num_blocks)
    [pool] = manager.pools
    for number in range(60):
        if rng.random() < 0.4 and len(scheduler.requests) < 8:
            prompt = [rng.randrange(2)] * rng.randint(1, 9) + [
                rng.randrange(3) for _ in range(rng.randint(1, 9))
            ]
            scheduler.add_request(Request(make_engine_request(f"r{number}", prompt, rng.randint(1, 9))))
        step(scheduler)
        tree = tree_of(manager)
        texts = texts_of(tree)
        assert beginnings(texts) == beginnings(by_brute_force(manager))
        assert len(set(texts)) == len(texts) and tree.num_blocks_left_out == 0
        in_index = [block for block in pool.blocks if block.block_id in pool.continuations]
        equal = {twin.block_id for block in in_index for twin in pool.blocks_under(block.block_hash)}
        assert sum(node.num_blocks for node in tree.nodes) == len(
            equal | {block.block_id for block in in_index}
        )
        assert all(node.num_bytes == node.num_blocks * BLOCK_BYTES for node in tree.nodes)
        for place, node in enumerate(tree.nodes):
            children = children_of(tree, place)
            assert len(children) != 1 or children[0].users != node.users, "a run is one node"
            assert len({child.token_ids[0] for child in children}) == len(children)
            assert node.users <= len(scheduler.running) and (node.age == 0 or node.users == 0)


def children_of(tree: PrefixTree, place: int) -> list[PrefixNode]:
    depth, children = tree.nodes[place].depth, []
    for node in tree.nodes[place + 1 :]:
        if node.depth <= depth:
            break
        if node.depth == depth + 1:
            children.append(node)
    return children


def test_users_are_the_requests_that_hold_a_prefix() -> None:
    scheduler, manager = engine()
    shared = [7] * 8
    serve(scheduler, [*shared, 1])
    for number in range(3):
        scheduler.add_request(
            Request(make_engine_request(f"user {number}", [*shared, *[10 + number] * 4], 5))
        )
    step(scheduler)
    step(scheduler)
    tree = tree_of(manager)
    assert [(node.depth, node.num_tokens, node.users) for node in tree.nodes] == [(0, 8, 3), *[(1, 4, 1)] * 3]
    assert tree.nodes[0].token_ids == shared and tree.nodes[0].num_bytes == 2 * BLOCK_BYTES


def test_the_age_runs_from_the_last_user_on() -> None:
    scheduler, manager = engine()
    now = 100.0
    manager.pools[0].clock = lambda: now
    serve(scheduler, [7] * 8)
    now = 107.5
    [node] = tree_of(manager).nodes
    assert (node.age, node.users) == (7.5, 0)
    serve(scheduler, [7] * 8)
    assert tree_of(manager).nodes[0].age == 0.0


def test_texts_of_tenants_with_a_salt_do_not_leave_the_engine() -> None:
    scheduler, manager = engine()
    serve(scheduler, [7] * 9, salt="secret")
    serve(scheduler, [8] * 9)
    nodes = {node.is_plain: node for node in tree_of(manager).nodes}
    assert nodes[True].token_ids == [8] * 8
    assert nodes[False].token_ids == [] and nodes[False].num_tokens == 8


@pytest.mark.parametrize("limit", [1, 3, 7])
def test_a_limit_keeps_what_is_near_the_roots_and_counts_the_rest(limit: int) -> None:
    scheduler, manager = engine(200)
    prompts = [[family] * 8 + [10 + branch] * 4 + [99] for family in range(4) for branch in range(2)]
    serve(scheduler, *prompts)
    whole, tree = tree_of(manager), tree_of(manager, limit)
    assert len(tree.nodes) == limit
    assert sum(node.depth == 0 for node in tree.nodes) == min(4, limit)
    missing = sum(node.num_blocks for node in whole.nodes) - sum(node.num_blocks for node in tree.nodes)
    assert tree.num_blocks_left_out == missing > 0


def test_very_long_and_very_many_texts_are_cut() -> None:
    scheduler, manager = engine(8 * MOST_BLOCKS, budget=10_000)
    serve(scheduler, [7] * 9_000)
    [node] = tree_of(manager).nodes
    assert (node.num_tokens, len(node.token_ids)) == (9_000, MOST_TOKEN_IDS)
    serve(scheduler, *([100 + text] * 9_000 for text in range(6)))
    tree = tree_of(manager)
    assert sum(node.num_blocks for node in tree.nodes) <= MOST_BLOCKS + 8
    assert tree.num_blocks_left_out == 7 * 9_000 // SIZE - sum(node.num_blocks for node in tree.nodes)


def test_without_copies_there_is_no_tree() -> None:
    for manager in (
        KVCacheManager([FullAttentionManager(20, SIZE)], max_model_len=64, min_copied_tokens=None),
        KVCacheManager([FullAttentionManager(20, SIZE), StateManager(8, SIZE)], max_model_len=64),
    ):
        assert prefix_tree(manager, [1, 1], 10) == PrefixTree(nodes=[], num_blocks_left_out=0)
