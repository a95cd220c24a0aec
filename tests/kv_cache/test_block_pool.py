"""The pool and its free queue, against a list and a dictionary as references."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from minivllm.errors import ConfigError
from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID, BlockPool
from minivllm.kv_cache.blocks.free_queue import FreeBlockQueue, KVCacheBlock

pytestmark = pytest.mark.smoke


@given(
    st.lists(
        st.tuples(st.sampled_from(["popleft", "append", "prepend", "remove"]), st.integers(0, 7)), max_size=60
    )
)
def test_the_free_queue_behaves_like_a_list(operations: list[tuple[str, int]]) -> None:
    blocks = [KVCacheBlock(index) for index in range(8)]
    queue, reference = FreeBlockQueue(blocks[:4]), blocks[:4]
    for name, index in operations:
        block = blocks[index]
        if name == "popleft" and reference:
            assert queue.popleft() is reference.pop(0)
        elif name == "remove" and block in reference:
            queue.remove(block)
            reference.remove(block)
        elif name in ("append", "prepend") and block not in reference:
            getattr(queue, name)(block)
            reference.insert(0 if name == "prepend" else len(reference), block)
        assert list(queue) == reference and len(queue) == len(reference)


def test_taking_from_an_empty_queue_or_twice_is_an_error() -> None:
    block = KVCacheBlock(1)
    queue = FreeBlockQueue([block])
    assert queue.popleft() is block
    with pytest.raises(IndexError):
        queue.popleft()
    with pytest.raises(ValueError, match="Block 1 is not in the queue"):
        queue.remove(block)


def test_a_pool_without_room_beside_the_null_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        BlockPool(1)


def test_asking_for_too_many_blocks_takes_none() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="4 blocks were asked for, but only 3 are free"):
        pool.get_new_blocks(4)
    assert pool.num_free_blocks == 3


def test_never_hashed_blocks_are_reused_before_hashed_ones() -> None:
    pool = BlockPool(5)
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(blocks[:3], [b"a", b"b", b"c"])
    pool.free_blocks(reversed(blocks))
    assert [block.block_id for block in pool.get_new_blocks(4)] == [
        blocks[3].block_id,
        blocks[2].block_id,
        blocks[1].block_id,
        blocks[0].block_id,
    ]


class PoolMachine(RuleBasedStateMachine):
    """Random users of a small pool.
    Reference: users per block, and the contents each block was last given."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.held: list[list[KVCacheBlock]] = []
        self.contents: dict[int, bytes] = {}
        self.next_name = 0

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count > self.pool.num_free_blocks:
            return
        free = list(self.pool.free_queue)
        blocks = self.pool.get_new_blocks(count)
        assert blocks == free[:count]
        for block in blocks:
            self.contents.pop(block.block_id, None)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hash_full_blocks(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        unhashed = [block for block in blocks if block.block_hash is None]
        names = [data.draw(st.sampled_from([b"x", b"y", b"z"])) for _ in unhashed]
        self.pool.cache_full_blocks(unhashed, names)
        self.contents.update((block.block_id, name) for block, name in zip(unhashed, names))

    @rule(name=st.sampled_from([b"x", b"y", b"z"]))
    def find(self, name: bytes) -> None:
        block = self.pool.get_cached_block(name)
        assert (block is not None) == (name in self.contents.values())
        if block is not None:
            assert self.contents[block.block_id] == name
            self.pool.touch([block])
            self.held.append([block])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free_blocks(reversed(blocks))
        released = [block for block in reversed(blocks) if block.ref_count == 0]
        queue = list(self.pool.free_queue)
        unhashed = [block for block in released if block.block_hash is None]
        hashed = [block for block in released if block.block_hash is not None]
        assert queue[: len(unhashed)] == unhashed
        assert queue[len(queue) - len(hashed) :] == hashed

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.held))))
        self.pool.forget(block)
        self.contents.pop(block.block_id, None)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.held)
        if not self.held:
            self.contents.clear()

    @invariant()
    def pool_agrees_with_its_users(self) -> None:
        users = Counter(block.block_id for blocks in self.held for block in blocks)
        self.pool.check_integrity(users)
        assert self.pool.num_free_blocks == 8 - len(users)
        assert self.pool.usage == pytest.approx(len(users) / 8)
        assert NULL_BLOCK_ID not in users
        assert self.pool.num_cached_hashes == len(set(self.contents.values()))

    def teardown(self) -> None:
        for blocks in self.held:
            self.pool.free_blocks(reversed(blocks))
        self.pool.check_integrity({})
        assert self.pool.num_free_blocks == 8 and self.pool.reset_prefix_cache()


class LongPoolMachine(PoolMachine):
    """The same, for thousands of steps."""


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
TestPoolLong = pytest.mark.slow(LongPoolMachine.TestCase)
TestPoolLong.settings = settings(
    max_examples=300, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
