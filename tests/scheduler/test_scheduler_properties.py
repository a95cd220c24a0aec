"""Random lives of many requests in tiny caches:
every invariant holds after every step, and every answer is right.

Each request must get exactly the tokens it would get alone, whatever was chunked, cached, preempted,
drafted or in flight meanwhile.
"""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.cli.trace.command import Workload, simulated_steps
from minivllm.config import SchedulerConfig
from minivllm.kv_cache.blocks.block_pool import NULL_BLOCK_ID
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import (
    EngineOutput,
    EngineRequest,
    EventType,
    FinishReason,
    ModelRunnerOutput,
    SchedulerOutput,
)
from minivllm.request import Request, RequestStatus
from minivllm.scheduler.scheduler import Scheduler
from tests.scheduler.simulated_worker import (
    VOCAB_SIZE,
    Layers,
    SimulatedWorker,
    make_engine_request,
    next_token,
    reference_generation,
)

MAX_MODEL_LEN = 16


KV_GROUPS = st.lists(
    st.tuples(
        st.builds(Layers, st.integers(1, 4), st.sampled_from(["full", "window", "chunk"]), st.integers(1, 9)),
        st.integers(4, 14),
    ),
    min_size=1,
    max_size=3,
)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, aborts, blocked requests, drafts, and up to three steps in flight."""

    num_guesses = 0

    @initialize(
        policy=st.sampled_from(["fcfs", "priority", "response-ratio"]),
        budget=st.integers(1, 12),
        max_num_seqs=st.integers(1, 5),
        groups=KV_GROUPS,
        threshold=st.integers(0, 3),
        caching=st.booleans(),
        depth=st.integers(1, 3),
        is_async=st.booleans(),
        min_copied=st.sampled_from([None, 1, 1, 2, 3]),
    )
    def start(
        self,
        policy: str,
        budget: int,
        max_num_seqs: int,
        groups: list[tuple[Layers, int]],
        threshold: int,
        caching: bool,
        depth: int,
        is_async: bool,
        min_copied: int | None = 1,
    ) -> None:
        """groups: with the number of blocks in the pool of each. min_copied: see KVCacheManager."""
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=threshold,
            policy=policy,
        )
        self.depth = depth
        longest_chunk = budget + self.num_unsure()
        managers = [layers.manager(num_blocks, longest_chunk) for layers, num_blocks in groups]
        self.manager = KVCacheManager(
            managers, MAX_MODEL_LEN, enable_prefix_caching=caching, min_copied_tokens=min_copied
        )
        for pool in self.manager.pools:  # few blocks, but many ends of texts
            pool.continuations.most_tails = pool.num_blocks // 3
        self.scheduler = self.make_scheduler(is_async)
        self.worker = SimulatedWorker(1, max_num_seqs, [layers for layers, _ in groups])
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.given: dict[str, EngineRequest] = {}
        self.received: dict[str, list[EngineOutput]] = {}
        self.aborted: set[str] = set()
        self.tables: dict[str, list[list[int]]] = {}
        self.contents: dict[bytes | tuple[bytes, ...], int] = {}

    def make_scheduler(self, is_async: bool) -> Scheduler:
        return Scheduler(self.config, self.manager, async_scheduling=is_async)

    @property
    def is_held_up(self) -> bool:
        """Whether requests may wait although nothing runs."""
        return False

    def num_unsure(self) -> int:
        """Drafts of a request in flight, at most, that the scheduler counts on."""
        return 0

    def settle(self) -> None:
        """Let everything arrive that is on its way beside the steps."""

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_MODEL_LEN + 1),
        max_tokens=st.integers(1, 9),
        eos=st.sampled_from([[], [0], [1, 2]]),
        stop=st.sampled_from([[], [3]]),
        ignore_eos=st.booleans(),
        min_tokens=st.integers(0, 4),
        priority=st.integers(-1, 1),
        arrival=st.integers(0, 3),
        salt=st.sampled_from([None, None, "tenant"]),
        logprobs=st.sampled_from([None, None, 0]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        prompt_logprobs_start=st.integers(0, 9),
        blocked=st.sampled_from([False, False, False, True]),
    )
    def arrive(
        self,
        prompt: list[int],
        max_tokens: int,
        eos: list[int],
        stop: list[int],
        ignore_eos: bool,
        min_tokens: int,
        priority: int,
        arrival: int,
        salt: str | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        blocked: bool,
        prompt_logprobs_start: int = 0,
    ) -> None:
        given = make_engine_request(
            f"r{len(self.given)}",
            prompt,
            max_tokens,
            eos_token_ids=eos,
            priority=priority,
            arrival_time=float(arrival),
            cache_salt=salt,
            stop_token_ids=stop,
            ignore_eos=ignore_eos,
            min_tokens=min(min_tokens, max_tokens) * (not self.num_guesses or priority > 0),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_logprobs_start=0 if prompt_logprobs is None else min(prompt_logprobs_start, len(prompt)),
        )
        self.given[given.request_id] = given
        self.received[given.request_id] = []
        request = Request(given)
        if blocked:
            request.status = RequestStatus.BLOCKED
        self.scheduler.add_request(request)

    @precondition(lambda self: self.given)
    @rule(choice=st.integers(0, 99))
    def abort(self, choice: int) -> None:
        request_id = f"r{choice % len(self.given)}"
        if request_id in self.scheduler.requests:
            self.aborted.add(request_id)
        self.scheduler.abort_requests([request_id, "unknown"])

    @rule()
    def unblock_all(self) -> None:
        for request_id in list(self.given):
            self.scheduler.unblock_request(request_id)

    @precondition(lambda self: len(self.in_flight) < self.depth)
    @rule()
    def schedule(self) -> None:
        idle = not self.in_flight
        ready = any(
            request.status is not RequestStatus.BLOCKED for request in self.scheduler.requests.values()
        )
        step = self.scheduler.schedule()
        if step.new_requests or any(entry.resumed for entry in step.cached_requests):
            missing = zip(*(self.manager.num_missing_blocks(request) for request in self.scheduler.running))
            for counts, pool in zip(missing, self.manager.pools):
                assert sum(counts) <= pool.num_free_blocks, "somebody was admitted whose prompt has no room"
        assert step.total_num_scheduled_tokens <= self.config.max_num_batched_tokens
        if idle and ready and not self.is_held_up:
            assert step.num_scheduled_tokens, (
                "nothing runs, and the head of the queue is neither admitted nor refused"
            )
        if self.config.long_prefill_token_threshold:
            assert all(
                count <= self.config.long_prefill_token_threshold
                for count in step.num_scheduled_tokens.values()
            )
        self.in_flight.append((step, self.worker.execute(step)))
        self._check_tables(step)
        self._check_cached_contents()

    @precondition(lambda self: self.in_flight)
    @rule()
    def deliver(self) -> None:
        step, results = self.in_flight.popleft()
        for output in self.scheduler.update_from_output(step, results):
            request_id = output.request_id
            assert request_id not in self.aborted, "an aborted request gives no further output"
            assert not self.received[request_id] or self.received[request_id][-1].finish_reason is None
            self.received[request_id].append(output)
            if output.finish_reason is not None:
                self._check_answer(request_id)

    @rule(seed=st.integers(0, 99))
    def draft(self, seed: int) -> None:
        """Guess tokens for running requests: the right ones, spoiled from a random place on."""
        random, drafts = Random(seed), {}
        for request in self.scheduler.running:
            tokens, guesses = list(request.all_token_ids), []
            right = random.randint(0, 4)
            for place in range(random.randint(0, 4)):
                token_id = next_token(tokens)
                guesses.append(token_id if place < right else (token_id + 1) % VOCAB_SIZE)
                tokens.append(guesses[-1])
            drafts[request.request_id] = guesses
        self.scheduler.set_draft_token_ids(drafts)

    @rule()
    def reset_prefix_cache(self) -> None:
        may_forget = not self.scheduler.running and not self.scheduler.loads.num_transfers
        assert self.scheduler.reset_prefix_cache() == may_forget

    @invariant()
    def requests_and_blocks_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            stats = self.scheduler.stats()
            assert stats.num_running <= self.config.max_num_seqs
            assert stats.num_running + stats.num_waiting == len(self.scheduler.requests)

    def _check_tables(self, step: SchedulerOutput) -> None:
        """The worker's tables are the manager's where something is read;
        they only grew, except for requests that resumed."""
        replaced = {entry.request_id for entry in step.cached_requests if entry.resumed}
        tables = {
            request_id: [list(table) for table in request.tables]
            for request_id, request in self.worker.requests.items()
            if request.tables is not None
        }
        assert tables.keys() == {request.request_id for request in self.scheduler.running}
        for request_id, own in tables.items():
            for group, (table, block_ids) in enumerate(
                zip(own, self.manager.get_block_ids(request_id), strict=True)
            ):
                assert len(table) == len(block_ids)
                assert all(theirs in (mine, NULL_BLOCK_ID) for mine, theirs in zip(table, block_ids))
                assert NULL_BLOCK_ID not in self.worker.visible_blocks(
                    self.worker.requests[request_id], group
                )
                if request_id in self.tables and request_id not in replaced:
                    before = self.tables[request_id][group]
                    assert table[: len(before)] == before
        self.tables = tables

    def _check_cached_contents(self) -> None:
        """What can be found was computed, and the same hash, or piece, always means the same tokens."""
        for layers, pool, slots in zip(self.worker.groups, self.manager.pools, self.worker.slots):
            for block in pool.blocks:
                if block.block_hash is not None:
                    content = slots[(block.block_id + 1) * layers.block_size - 1]
                    assert self.contents.setdefault(block.block_hash, content) == content
            for parent, block_id, token_ids in pool.continuations.usable():
                for offset in range(len(token_ids)):
                    name = (parent, bytes(token_ids[: offset + 1]))
                    content = slots[block_id * layers.block_size + offset]
                    assert self.contents.setdefault(name, content) == content, (
                        "a piece holds the tokens that it says"
                    )

    def _check_answer(self, request_id: str) -> None:
        given, outputs = self.given[request_id], self.received[request_id]
        last = outputs[-1]
        events = [event.type for output in outputs for event in output.events]
        times = [event.timestamp for output in outputs for event in output.events]
        assert times == sorted(times)
        assert events[0] is EventType.QUEUED and events[-1] is EventType.FINISHED
        length = min(len(given.prompt_token_ids) + given.max_tokens, MAX_MODEL_LEN)
        if length - 1 > self.manager.room or len(given.prompt_token_ids) >= MAX_MODEL_LEN:
            assert last.finish_reason is FinishReason.ERROR and last.error and len(outputs) == 1
            return
        expected = reference_generation(given, MAX_MODEL_LEN)
        tokens = [token_id for output in outputs for token_id in output.new_token_ids]
        assert (tokens, last.finish_reason, last.stop_reason) == expected
        assert events.count(EventType.SCHEDULED) >= 1
        assert 0 <= last.num_cached_tokens < len(given.prompt_token_ids)
        if given.sampling_params.logprobs is not None:
            entries = [entry.token_ids[0] for output in outputs for entry in output.logprobs or []]
            assert entries == tokens
        if given.sampling_params.prompt_logprobs is not None:
            places = [-entry.logprobs[0] for output in outputs for entry in output.prompt_logprobs or []]
            first = max(1, given.sampling_params.prompt_logprobs_start)
            assert places == list(range(first, len(given.prompt_token_ids))), "each position once, in order"

    def teardown(self) -> None:
        """Let everyone finish: nothing is left, every id reached the worker once,
        the pool is as at the start."""
        if not hasattr(self, "scheduler"):
            return
        self.unblock_all()
        steps_of_one = (
            2 * 2 * MAX_MODEL_LEN
        )  # one token each, scheduled and delivered, and once more if preempted
        for _ in range(3000 + steps_of_one * len(self.given)):
            self.settle()
            if not self.scheduler.has_requests() and not self.in_flight:
                break
            if len(self.in_flight) < self.depth:
                self.schedule()
            else:
                self.deliver()
        assert not self.scheduler.has_requests() and not self.scheduler.has_unfinished_requests()
        assert not self.worker.requests and not self.scheduler.loads.num_transfers
        refused = {
            request_id
            for request_id, outputs in self.received.items()
            if outputs and outputs[-1].finish_reason is FinishReason.ERROR
        }
        assert sorted(self.worker.finished) == sorted(self.given.keys() - refused)
        for request_id, outputs in self.received.items():
            assert request_id in self.aborted or outputs[-1].finish_reason is not None
        self.scheduler.check_integrity()
        assert self.manager.usage == 0.0 and self.manager.reset_prefix_cache()
        for pool in self.manager.pools:
            assert {block.block_id for block in pool.free_queue} == set(range(1, pool.num_blocks))


class GuessingMachine(SchedulerMachine):
    """The workers guess after every step, and the next ones count on all of the guesses. Requests with
    min_tokens, of which there are fewer here, wait for their tokens."""

    num_guesses = 3

    def make_scheduler(self, is_async: bool) -> Scheduler:
        return Scheduler(self.config, self.manager, async_scheduling=True, num_guesses=self.num_guesses)

    def num_unsure(self) -> int:
        return self.num_guesses * (self.depth - 1)

    def draft(self, seed: int) -> None:
        """Only the workers guess."""


class LongSchedulerMachine(SchedulerMachine):
    """The same, for thousands of steps."""


TestSchedulerLives = SchedulerMachine.TestCase
TestSchedulerLives.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestGuessingLives = GuessingMachine.TestCase
TestGuessingLives.settings = TestSchedulerLives.settings
TestSchedulerLivesLong = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestSchedulerLivesLong.settings = settings(
    max_examples=1000, stateful_step_count=120, deadline=None, suppress_health_check=list(HealthCheck)
)


def random_groups(random: Random) -> list[tuple[Layers, int]]:
    """One group of full attention, or several of any kind."""
    kinds = [Layers(random.randint(1, 3))]
    if random.random() < 0.7:
        kinds = [
            Layers(
                random.choice([1, 2, 3, 4, 6]),
                random.choice(["full", "window", "chunk"]),
                random.randint(1, 9),
            )
            for _ in range(random.randint(1, 3))
        ]
    return [(layers, random.randint(6, 14)) for layers in kinds]


def busy_life(
    seed: int, num_actions: int, kind: type[SchedulerMachine] = SchedulerMachine
) -> SchedulerMachine:
    """The same machine under load: short of blocks, many arrivals, so that preemptions are the rule."""
    random = Random(seed)
    life = kind()
    life.start(
        policy=random.choice(["fcfs", "priority", "priority"]),
        budget=random.randint(2, 12),
        max_num_seqs=random.randint(2, 5),
        groups=random_groups(random),
        threshold=random.choice([0, 0, 0, 3]),
        caching=random.random() < 0.8,
        depth=random.choice([1, 1, 2, 3]),
        is_async=random.random() < 0.5,
        min_copied=random.choice([None, 1, 1, 1, 2, 3]),
    )
    longest_prompt = random.choice([4, 7, 14])
    for _ in range(num_actions):
        action = random.random()
        if action < 0.12 and len(life.scheduler.waiting) < 8:
            max_tokens = random.randint(1, 9)
            life.arrive(
                prompt=[random.randint(0, 1) for _ in range(random.randint(1, longest_prompt))],
                max_tokens=max_tokens,
                eos=random.choice([[], [], [0]]),
                stop=random.choice([[], [], [3]]),
                ignore_eos=random.random() < 0.3,
                min_tokens=random.randint(0, max_tokens),
                priority=random.randint(-2, 2),
                arrival=random.randint(0, 3),
                salt=random.choice([None, None, "tenant"]),
                logprobs=random.choice([None, 0]),
                prompt_logprobs=random.choice([None, None, None, 0]),
                prompt_logprobs_start=random.choice([0, random.randint(0, 9)]),
                blocked=random.random() < 0.1,
            )
        elif action < 0.14 and life.given:
            life.abort(random.randrange(1000))
        elif action < 0.2:
            life.unblock_all()
        elif action < 0.3:
            life.draft(random.randrange(1000))
        elif len(life.in_flight) < life.depth and random.random() < 0.6:
            life.schedule()
        elif life.in_flight:
            life.deliver()
        life.requests_and_blocks_agree()
    life.teardown()
    return life


@pytest.mark.parametrize("seed", range(60))
def test_busy_lives_keep_every_invariant(seed: int) -> None:
    life = busy_life(seed, num_actions=600)
    assert not life.scheduler.has_requests() and not life.worker.requests


@pytest.mark.parametrize("seed", range(60))
def test_busy_lives_with_guesses_keep_every_invariant(seed: int) -> None:
    life = busy_life(seed, 600, GuessingMachine)
    assert not life.scheduler.has_requests() and not life.worker.requests


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1150))
def test_long_busy_lives_keep_every_invariant(seed: int) -> None:
    life = busy_life(seed, num_actions=2000)
    assert not life.scheduler.has_requests() and not life.worker.requests


@pytest.mark.slow
def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """In lives of many kinds, each of which ends with pools in which no block has a user; see teardown."""
    num_requests, num_copied, seed = 0, 0, 2000
    while num_requests < 10_000:
        life = busy_life(seed, num_actions=2000)
        num_requests += len(life.given)
        num_copied += life.scheduler.stats().prefix_cache_copied_tokens
        seed += 1
    assert num_copied > 1000


@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    arrivals=st.lists(st.integers(0, 12), min_size=12, max_size=12),
    budget=st.integers(1, 24),
    threshold=st.integers(0, 8),
    block_size=st.integers(1, 4),
    num_spare_blocks=st.integers(0, 30),
    policy=st.sampled_from(["fcfs", "priority", "response-ratio"]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_only_the_growth_of_answers_preempts(
    prompts: list[int],
    arrivals: list[int],
    budget: int,
    threshold: int,
    block_size: int,
    num_spare_blocks: int,
    policy: str,
) -> None:
    """Requests that want one token each have no answer that could grow:
    none is preempted, however small the cache."""
    steps = list(
        simulated_steps(
            Workload(
                budget=budget,
                prompt_lens=prompts,
                max_tokens=1,
                block_size=block_size,
                num_blocks=1 + -(-max(prompts) // block_size) + num_spare_blocks,
                policy=policy,
                priorities=[place % 3 for place in range(len(prompts))] if policy == "priority" else (),
                arrivals=arrivals[: len(prompts)],
                threshold=threshold,
            )
        )
    )
    assert not any(step.preempted for step in steps)
    assert sum(sum(step.num_scheduled_tokens.values()) for step in steps) == sum(prompts)


def test_busy_lives_do_meet_preemptions_and_prefix_hits() -> None:
    stats = [busy_life(seed, num_actions=600).scheduler.stats() for seed in range(20)]
    assert sum(entry.num_preemptions for entry in stats) > 100
    assert sum(entry.prefix_cache_hit_tokens for entry in stats) > 100
    assert sum(entry.prefix_cache_copied_tokens for entry in stats) > 50
