"""Random lives of many requests whose keys and values travel:
no foreign block, no leaked block, every answer right.

The transport delays, repeats, loses and breaks what it carries, and dies.
The rest is the machine of the scheduler.
"""

from __future__ import annotations

from itertools import combinations, product
from random import Random
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.taken_blocks import read_after_load, take_for_load
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from tests.kv_transfer.simulated_connector import MultiTransport, SimulatedMulti, SimulatedStore, Transport
from tests.scheduler.simulated_worker import Layers, make_engine_request
from tests.scheduler.test_scheduler_properties import MAX_MODEL_LEN, SchedulerMachine


def smallest_pool(layers: Layers, longest_chunk: int) -> int:
    """Blocks, the null block included, with which a request of MAX_MODEL_LEN can be served alone."""
    return 1 + layers.manager(2, longest_chunk).max_blocks(MAX_MODEL_LEN)


class ConnectorMachine(SchedulerMachine):
    """The scheduler's machine with a connector.
    is_alone: with one worker, and no other connector beside it."""

    store: SimulatedStore | SimulatedMulti
    transport: Transport | MultiTransport
    make_store: type[SimulatedStore] = SimulatedStore
    make_transport: type[Transport] = Transport
    is_alone = False

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "response-ratio"]),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        block_size=st.integers(1, 3),
        kinds=st.lists(
            st.tuples(
                st.sampled_from(["full", "window", "chunk"]),
                st.integers(1, 9),
                st.just(0) | st.integers(4, 14),
            ),
            min_size=1,
            max_size=3,
        ),
        threshold=st.integers(0, 3),
        depth=st.integers(1, 3),
        is_async=st.booleans(),
        sends_every=st.integers(0, 3),
        num_ranks=st.integers(1, 3),
        are_several=st.booleans(),
    )
    def start(  # type: ignore[override]
        self,
        policy: str,
        budget: int,
        max_num_seqs: int,
        block_size: int,
        kinds: list[tuple[str, int, int]],
        threshold: int,
        depth: int,
        is_async: bool,
        sends_every: int,
        num_ranks: int,
        are_several: bool,
    ) -> None:
        """kinds: of each KV group its kind, reach and number of blocks; 0 for as many as one request of
        MAX_MODEL_LEN needs."""
        groups = [(Layers(block_size, kind, reach), num_blocks) for kind, reach, num_blocks in kinds]
        groups = [(layers, num_blocks or smallest_pool(layers, budget)) for layers, num_blocks in groups]
        num_ranks = 1 if self.is_alone else num_ranks
        if are_several and not self.is_alone:
            self.store = several = SimulatedMulti(block_size, sends_every, num_ranks=num_ranks)
            super().start(policy, budget, max_num_seqs, groups, threshold, True, depth, is_async)
            self.transport = MultiTransport(self.worker, several)
        else:
            self.store = store = self.make_store(block_size, sends_every, num_ranks=num_ranks)
            super().start(policy, budget, max_num_seqs, groups, threshold, True, depth, is_async)
            self.transport = self.make_transport(self.worker, store)

    def make_scheduler(self, is_async: bool) -> Scheduler:
        return Scheduler(self.config, self.manager, async_scheduling=is_async, connector=self.store)

    @property
    def is_held_up(self) -> bool:
        return self.scheduler.loads.num_transfers > 0 or self.store.is_shy

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        super().schedule()
        self.transport.follow(self.in_flight[-1][0])

    def report(self, output: KVConnectorOutput) -> None:
        self.scheduler.update_connector_output(output)

    @precondition(lambda self: self.transport.loads)
    @rule(choice=st.integers(0, 9), num_good=st.sampled_from([0, 1, 2, 99, 99, 99]))
    def carry(self, choice: int, num_good: int) -> None:
        """A load ends on one rank: whole, with a broken block, or after its deadline."""
        self.report(self.transport.carry(choice, num_good))

    @precondition(lambda self: self.transport.loads)
    @rule()
    def scribble(self) -> None:
        self.transport.scribble()

    @precondition(lambda self: self.scheduler.loads.waiting)
    @rule(choice=st.integers(0, 9))
    def abort_a_waiting_one(self, choice: int) -> None:
        """Its load goes on, and writes into blocks that must not be another request's meanwhile."""
        waiting = list(self.scheduler.loads.waiting)
        self.abort(int(waiting[choice % len(waiting)].removeprefix("r")))

    @precondition(lambda self: self.transport.sends or self.store.sent)
    @rule(choice=st.integers(0, 9))
    def end_send(self, choice: int) -> None:
        self.transport.start_sends()
        self.report(self.transport.end_send(choice))

    @precondition(lambda self: self.transport.reports)
    @rule(choice=st.integers(0, 99))
    def repeat(self, choice: int) -> None:
        """A report comes twice, or late; and one that no request ever waited for."""
        self.report(self.transport.reports[choice % len(self.transport.reports)])
        self.report(KVConnectorOutput(finished_recving={"unknown": 1}, finished_sending=["unknown"]))

    @rule(seed=st.integers(0, 9))
    def lose(self, seed: int) -> None:
        """Some of what is stored is gone, and the scheduler's side does not know."""
        self.transport.lose(seed)

    @rule()
    def die(self) -> None:
        """The other end is gone, with all that was on its way."""
        while self.transport.loads:
            self.report(self.transport.carry(0, 0))

    @rule(is_shy=st.booleans())
    def hesitate(self, is_shy: bool) -> None:
        """The connector does not know yet what it has."""
        self.store.is_shy = is_shy

    def settle(self) -> None:
        self.store.is_shy = False
        while self.transport.loads:
            self.report(self.transport.carry(0, 99))
        self.transport.start_sends()
        while self.transport.sends:
            self.report(self.transport.end_send(0))

    @rule(num_free=st.integers(0, 3))
    def forget(self, num_free: int) -> None:
        """The device's cache forgets what is not in use, so that more has to travel."""
        for pool in self.manager.pools:
            for block in list(pool.free_queue)[num_free:]:
                pool.forget(block)


class LongConnectorMachine(ConnectorMachine):
    """The same, for thousands of steps."""


TestLivesWithAConnector = ConnectorMachine.TestCase
TestLivesWithAConnector.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLivesWithAConnectorLong = pytest.mark.slow(LongConnectorMachine.TestCase)
TestLivesWithAConnectorLong.settings = settings(
    max_examples=1000, stateful_step_count=120, deadline=None, suppress_health_check=list(HealthCheck)
)


def busy_life(
    seed: int, num_actions: int, make_machine: type[ConnectorMachine] = ConnectorMachine
) -> ConnectorMachine:
    """The same machine under load: few blocks, few different prompts, so that much of it travels."""
    random = Random(seed)
    life = make_machine()
    full = ("full", 1, random.choice([0, random.randint(7, 18)]))
    local = (
        random.choice(["window", "chunk"]),
        random.randint(1, 9),
        random.choice([0, random.randint(6, 14)]),
    )
    kinds = random.choice([[full], [full, local], [local]])
    life.start(
        policy=random.choice(["fcfs", "priority"]),
        budget=random.choice([2, random.randint(2, 12)]),
        max_num_seqs=random.randint(1, 5),
        block_size=random.choice([1, random.randint(1, 3)]),
        kinds=kinds,
        threshold=random.choice([0, 0, 3]),
        depth=random.choice([1, 1, 2, 3]),
        is_async=random.random() < 0.5,
        sends_every=random.choice([0, 0, 1, 3]),
        num_ranks=random.choice([1, 1, 2]),
        are_several=random.random() < 0.6,
    )
    longest_tail, longest_answer = random.choice([3, 6, 9]), random.choice([2, 9])
    for _ in range(num_actions):
        action = random.random()
        if action < 0.12 and len(life.scheduler.waiting) < 8:
            life.arrive(
                prompt=[random.randint(0, 1)] * random.randint(1, 6) + [1] * random.randint(0, longest_tail),
                max_tokens=random.randint(1, longest_answer),
                eos=[],
                stop=[],
                ignore_eos=True,
                min_tokens=0,
                priority=random.randint(-2, 2),
                arrival=random.randint(0, 3),
                salt=random.choice([None, None, "tenant"]),
                logprobs=None,
                prompt_logprobs=random.choice([None, None, None, 0]),
                blocked=random.random() < 0.05,
            )
        elif action < 0.15 and life.given:
            life.abort(random.randrange(1000))
        elif action < 0.18:
            life.unblock_all()
        elif action < 0.24:
            life.draft(random.randrange(1000))
        elif action < 0.30:
            life.forget(random.randint(0, 3))
        elif action < 0.31:
            random.choice([lambda: life.lose(1), life.die, lambda: life.hesitate(random.random() < 0.5)])()
        elif action < 0.33 and life.scheduler.loads.waiting:
            life.abort_a_waiting_one(random.randrange(10))
        elif action < 0.38 and life.transport.loads:
            life.scribble()
        elif action < 0.45 and life.transport.loads:
            life.carry(random.randrange(10), random.choice([0, 1, 2, 99, 99, 99, 99]))
        elif action < 0.48 and (life.transport.sends or life.store.sent):
            life.end_send(random.randrange(10))
        elif action < 0.5 and life.transport.reports:
            life.repeat(random.randrange(100))
        elif len(life.in_flight) < life.depth and random.random() < 0.6:
            life.schedule()
        elif life.in_flight:
            life.deliver()
        life.requests_and_blocks_agree()
    life.teardown()
    return life


@pytest.mark.parametrize("seed", range(24))
def test_busy_lives_keep_every_invariant(seed: int) -> None:
    assert not busy_life(seed, num_actions=400).scheduler.has_requests()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_long_busy_lives_keep_every_invariant(seed: int) -> None:
    assert not busy_life(seed, num_actions=2000).scheduler.has_requests()


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(5000, 7000, 250))
def test_many_busy_lives_keep_every_invariant(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 250):
        assert not busy_life(seed, num_actions=400).scheduler.has_requests()


@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
def test_a_load_always_finds_room_in_a_free_pool_that_fits_its_request(
    kind: Literal["full", "window", "chunk"],
) -> None:
    """Every reach, chunk, block size, hit and load:
    with nothing else in the pool, no request waits for ever."""
    num_cases = 0
    for reach, longest_chunk, size in product(range(1, 10), (1, 4), (1, 2)):
        layers = Layers(size, kind, reach)
        for hit, end in combinations(range(0, MAX_MODEL_LEN, size), 2):
            groups = [layers.manager(smallest_pool(layers, longest_chunk), longest_chunk)]
            manager, request = (
                KVCacheManager(groups, MAX_MODEL_LEN),
                Request(make_engine_request("r", [1] * 16)),
            )
            pool, first = manager.pools[0], groups[0].first_read(hit) // size
            blocks = pool.get_new_blocks(hit // size - first)
            pool.free_blocks(blocks)
            hits = read_after_load(manager, ([pool.null_block] * first + blocks,), end)
            taken = take_for_load(manager, request, hits, hit, end - hit, reserved=[0])
            assert taken is not None, f"{layers}, {hit} tokens cached, {end - hit} to load"
            table = [block.block_id for block in hits[0] + taken[0]]
            assert NULL_BLOCK_ID not in table[layers.first_visible(end) // size :], (
                "the next token reads these"
            )
            num_cases += 1
    assert num_cases > 2000


def test_busy_lives_do_meet_hits_failures_and_preempted_requests_that_come_back() -> None:
    lives = [busy_life(seed, num_actions=400) for seed in range(100, 116)]
    stats = [life.scheduler.stats() for life in lives]
    transfers = [tier for entry in stats for tier in entry.kv_transfer]
    assert sum(entry.num_loaded_blocks for entry in transfers) > 50
    assert sum(entry.num_failed_blocks for entry in transfers) > 20
    assert sum(entry.num_preemptions for entry in stats) > 8
    assert sum(entry.prefix_cache_copied_tokens for entry in stats) > 8
    assert sum(life.transport.num_whole for life in lives) > 20
    several = [life.transport for life in lives if isinstance(life.transport, MultiTransport)]
    assert sum(transport.num_composed for transport in several) > 5
