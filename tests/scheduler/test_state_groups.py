"""Layers that keep a state: random lives in which every step must find the state of exactly the tokens before
it.

A slot holds, in place of a state, the tokens it was computed from. So a state that was never zeroed, was
restored from another text, or was overwritten while it was still needed, is found by the step that reads it.
"""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager, SlidingWindowManager, StateManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_transfer.connector import KVConnectorScheduler
from minivllm.messages import EngineRequest, ModelRunnerOutput, SchedulerOutput
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from tests.scheduler.simulated_worker import VOCAB_SIZE, make_engine_request, next_token, reference_generation

MAX_MODEL_LEN = 48
POISON = (-1,)


class Slots:
    """A worker for which a state is the tokens that it was computed from. group: which one keeps states.

    Drafts are no part of a state. Those that were accepted get into it with the next step.
    """

    def __init__(self, num_slots: int, group: int) -> None:
        self.contents: list[tuple[int, ...]] = [(), *[POISON] * (num_slots - 1)]
        self.group = group
        self.places: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}
        self.num_in_state: dict[str, int] = {}
        self.num_replayed = 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in [*step.finished_request_ids, *step.preempted_request_ids]:
            self.places.pop(request_id, None)
        for new in step.new_requests:
            self.tokens[new.request.request_id] = list(new.request.prompt_token_ids)
            self._enter(new.request.request_id, new.block_ids[self.group], new.num_computed_tokens)
        for difference in step.cached_requests:
            if difference.resumed:
                self._enter(
                    difference.request_id,
                    difference.new_block_ids[self.group],
                    difference.num_computed_tokens,
                )
            else:
                self.places[difference.request_id][1:] = (
                    difference.new_block_ids[self.group] or self.places[difference.request_id][1:]
                )
        states = {}
        for request_id, count in step.num_scheduled_tokens.items():
            start, held = self.num_computed[request_id], self.num_in_state[request_id]
            known, drafts = self.tokens[request_id], step.draft_token_ids.get(request_id, [])
            read, _ = self.places[request_id]
            assert self.contents[read] == tuple(known[:held]), f"{request_id} reads the state of another text"
            assert not drafts or start + count == len(known) + len(drafts)
            states[request_id] = tuple(known[: start + count - len(drafts)])
            self.num_replayed += start - held
        written = [self.places[request_id][1] for request_id in states]
        read = [self.places[request_id][0] for request_id in states]
        assert len(set(written)) == len(written) and 0 not in written
        for request_id in states:
            own_read, own_write = self.places[request_id]
            assert own_write == own_read or own_write not in read, (
                "a slot is written while another request reads it"
            )
        output = ModelRunnerOutput()
        for request_id, state in states.items():
            self.contents[self.places[request_id][1]] = state
            self.places[request_id][0] = self.places[request_id][1]
            self.num_computed[request_id] = self.num_in_state[request_id] = len(state)
            known = self.tokens[request_id]
            if len(state) == len(known):
                sampled = [next_token(known)]
                for draft in step.draft_token_ids.get(request_id, []):
                    if draft != sampled[-1]:
                        break
                    sampled.append(next_token(known + sampled))
                known += sampled
                self.num_computed[request_id] = len(known) - 1
                output.sampled_token_ids[request_id] = sampled
        return output

    def _enter(self, request_id: str, slots: list[int], num_computed: int) -> None:
        assert len(slots) == 2 and (num_computed > 0) == (slots[0] != 0), (
            "only a request without a past reads zeros"
        )
        self.places[request_id] = list(slots)
        self.num_computed[request_id] = self.num_in_state[request_id] = num_computed


class Life:
    """One engine without a model. travels: blocks of all groups have the same size, and can be found."""

    travels = False

    def __init__(self, random: Random) -> None:
        self.random, self.block_size = random, random.choice([1, 2, 4, 8])
        smallest = 1 + MAX_MODEL_LEN // self.block_size
        blocks, num_slots = random.choice([smallest, random.randint(smallest, 60)]), random.randint(3, 12)
        self.states = StateManager(num_slots, self.block_size)
        attending = [FullAttentionManager(blocks, self.block_size)]
        if random.random() < 0.3:
            size = self.block_size * random.choice([1, 1 if self.travels else 2])
            window = SlidingWindowManager(blocks, size, 5, 14)
            if random.random() < 0.5:  # room for one request alone
                window = SlidingWindowManager(1 + window.max_blocks(MAX_MODEL_LEN), size, 5, 14)
            attending.append(window)
        self.caching = random.random() < 0.8 or self.travels
        self.manager = KVCacheManager(
            [*attending, self.states], MAX_MODEL_LEN, enable_prefix_caching=self.caching
        )
        is_async, max_num_seqs = random.random() < 0.5, random.randint(1, 4)
        self.depth = random.choice([1, 2]) if is_async else 1
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=random.randint(max_num_seqs, 14),
            max_model_len=MAX_MODEL_LEN,
            long_prefill_token_threshold=random.choice([0, 0, 3]),
            policy=random.choice(["fcfs", "priority"]),
        )
        self.scheduler = Scheduler(
            config, self.manager, async_scheduling=is_async, connector=self.make_connector()
        )
        self.worker = Slots(num_slots, len(attending))
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.given: dict[str, EngineRequest] = {}
        self.requests: list[Request] = []
        self.answers: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.texts: list[list[int]] = [[]]
        self.named: dict[bytes, tuple[int, ...]] = {}
        self.num_hit_tokens = 0
        self.error_rate = None if is_async else random.choice([None, 0.0, 0.3, 1.0])

    def make_connector(self) -> KVConnectorScheduler | None:
        """None: nothing travels."""

    @property
    def is_held_up(self) -> bool:
        """Whether requests may wait although nothing runs."""
        return self.scheduler.loads.num_transfers > 0

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = self.worker.execute(step)
        if self.error_rate is not None:
            for request_id in output.sampled_token_ids:
                output.draft_token_ids[request_id] = self.guess(self.worker.tokens[request_id])
        return output

    def guess(self, known: list[int]) -> list[int]:
        """Up to five tokens that may follow, each of them wrong with a probability."""
        text = list(known)
        for _ in range(self.random.randint(0, 5)):
            is_wrong = self.random.random() < (self.error_rate or 0.0)
            text.append((next_token(text) + is_wrong) % VOCAB_SIZE)
        return text[len(known) :]

    def happen(self, settles: bool) -> None:
        """What happens beside the steps. settles: nothing new comes."""

    def arrive(self) -> None:
        """A text that begins as an earlier one did: a second turn, or another branch."""
        begin = self.random.choice(self.texts)
        begin = begin[: self.random.choice([len(begin), self.random.randint(0, len(begin))])]
        prompt = (begin + [self.random.randint(0, 1) for _ in range(self.random.randint(1, 9))])[
            : MAX_MODEL_LEN - 12
        ]
        given = make_engine_request(
            f"r{len(self.given)}", prompt, self.random.randint(1, 12), priority=self.random.randint(0, 2)
        )
        self.given[given.request_id], self.answers[given.request_id] = given, []
        self.requests.append(Request(given))
        self.scheduler.add_request(self.requests[-1])

    def schedule(self) -> None:
        for request in self.scheduler.waiting:
            self.check_longest_hit(request)
        is_idle = not self.in_flight and self.scheduler.has_unfinished_requests()
        step = self.scheduler.schedule()
        if is_idle and not self.is_held_up:
            assert step.num_scheduled_tokens, (
                "nothing runs, and the head of the queue is neither admitted nor refused"
            )
        self.num_hit_tokens += sum(new.num_computed_tokens for new in step.new_requests)
        self.in_flight.append((step, self.execute(step)))
        self.check()

    def check_longest_hit(self, request: Request) -> None:
        """By definition: the longest whole number of blocks of which everything that is read is cached."""
        hit = self.manager.get_computed_blocks(request)[1]  # which hashes the request, too
        if not self.caching:
            assert hit == 0
        elif len(self.manager.pools) == 2:  # windows are judged by their own tests
            size, keys, found = self.block_size, self.manager.pools[0], 0
            for blocks in range(1, (request.num_tokens - 1) // size + 1):
                names = request.block_hashes[:blocks]
                if all(keys.get_cached_block(name) for name in names) and self.states.pool.get_cached_block(
                    names[-1]
                ):
                    found = blocks * size
            assert hit == found

    def deliver(self) -> None:
        step, output = self.in_flight.popleft()
        for result in self.scheduler.update_from_output(step, output):
            self.answers[result.request_id] += result.new_token_ids
            if result.finish_reason is not None and result.request_id not in self.aborted:
                given = self.given[result.request_id]
                assert self.answers[result.request_id] == reference_generation(given, MAX_MODEL_LEN)[0]
                self.texts.append(given.prompt_token_ids + self.answers[result.request_id])
        self.check()

    def abort(self) -> None:
        if self.scheduler.requests:
            request_id = self.random.choice(sorted(self.scheduler.requests))
            self.aborted.add(request_id)
            self.scheduler.abort_requests([request_id])

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert self.worker.contents[0] == ()
        for request in self.requests:
            for index, name in enumerate(request.block_hashes):
                end = (index + 1) * self.manager.hash_block_size
                self.named[name] = tuple(request.all_token_ids[:end])
        for name, slots in self.states.pool._cached.items():
            for slot in slots:
                assert self.worker.contents[slot] == self.named[name], (
                    "a snapshot holds the state of its text"
                )

    def run_and_check(self, num_actions: int) -> Life:
        for _ in range(num_actions):
            self.happen(settles=False)
            action = self.random.random()
            if action < 0.15 and len(self.scheduler.waiting) < 5:
                self.arrive()
            elif action < 0.17:
                self.abort()
            elif action < 0.18 and not self.scheduler.running:
                self.scheduler.reset_prefix_cache()
            elif len(self.in_flight) < self.depth:
                self.schedule()
            else:
                self.deliver()
        while self.scheduler.has_requests() or self.in_flight:
            self.happen(settles=True)
            more = self.scheduler.has_requests() and len(self.in_flight) < self.depth
            self.schedule() if more else self.deliver()
        assert self.states.pool.num_free_blocks == self.states.pool.num_blocks - 1
        return self


@pytest.mark.parametrize("seed", range(25))
def test_every_step_reads_the_state_of_the_tokens_before_it(seed: int) -> None:
    Life(Random(seed)).run_and_check(250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 250))
def test_every_step_reads_the_state_of_the_tokens_before_it_for_long(seed: int) -> None:
    Life(Random(seed)).run_and_check(2000)


def test_such_lives_meet_hits_and_preemptions() -> None:
    lives = [Life(Random(seed)).run_and_check(250) for seed in range(24)]
    assert sum(life.num_hit_tokens for life in lives) > 100
    assert sum(life.scheduler.stats().num_preemptions for life in lives) > 5
    accepted = [life.scheduler.stats().num_accepted_tokens for life in lives if life.error_rate != 1.0]
    assert sum(accepted) > 50 and sum(life.worker.num_replayed for life in lives) > 50


def new_engine(num_slots: int, budget: int = 64) -> tuple[Scheduler, Slots]:
    manager = KVCacheManager([FullAttentionManager(64, 4), StateManager(num_slots, 4)], MAX_MODEL_LEN)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=MAX_MODEL_LEN)
    return Scheduler(config, manager), Slots(num_slots, 1)


def complete(engine: tuple[Scheduler, Slots], request: EngineRequest) -> tuple[list[int], int, list[int]]:
    """(answer, cached tokens, tokens of every step)."""
    scheduler, worker = engine
    scheduler.add_request(Request(request))
    answer: list[int] = []
    num_cached, counts = 0, []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        counts.append(step.total_num_scheduled_tokens)
        for output in scheduler.update_from_output(step, worker.execute(step)):
            answer += output.new_token_ids
            num_cached = output.num_cached_tokens
    return answer, num_cached, counts


def test_a_second_turn_computes_what_is_new_behind_the_last_full_block() -> None:
    engine = new_engine(8)
    prompt = [0, 1] * 7
    answer, _, counts = complete(engine, make_engine_request("first", prompt, 9))
    assert counts == [12, 2, *[1] * 8], "a chunk ends with the last full block of the prompt"
    text = prompt + answer
    second = [*text, 1, 1, 0]
    _, num_cached, counts = complete(engine, make_engine_request("second", second, 1))
    assert num_cached == (len(text) - 1) // 4 * 4, "the last token of an answer is not computed"
    assert sum(counts) == len(second) - num_cached


def test_where_two_texts_part_a_third_one_finds_the_state() -> None:
    engine = new_engine(8)
    common = [0, 1, 1, 0] * 4
    complete(engine, make_engine_request("a", [*common, 0, 0, 0, 0, 1, 0, 0], 1))
    _, num_cached, counts = complete(engine, make_engine_request("b", [*common, 1, 1, 1, 1, 1, 1, 1], 1))
    assert num_cached == 0 and counts[0] == len(common), "the second text stops where it leaves the first one"
    assert complete(engine, make_engine_request("c", [*common, 1, 0, 1, 1, 1, 1, 1], 1))[1] == len(common)


def test_an_answer_keeps_one_snapshot_of_its_own() -> None:
    engine = new_engine(12)
    complete(engine, make_engine_request("long", [0, 1, 1, 0, 1], 40))
    states = engine[0].kv_cache_manager.pools[1]
    assert states.num_cached_hashes == 2, "that of the prompt, and the last one"


def test_in_the_smallest_pool_a_request_overwrites_its_only_state() -> None:
    engine = new_engine(3)
    request = make_engine_request("alone", [0, 1] * 6, 20)
    assert complete(engine, request)[0] == reference_generation(request, MAX_MODEL_LEN)[0]


def complete_with_drafts(engine: tuple[Scheduler, Slots], request: EngineRequest, length: int) -> list[int]:
    """The number of drafts in each step, of a drafter that guesses so many tokens, all of them right."""
    scheduler, worker = engine
    scheduler.add_request(Request(request))
    counts = []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        counts.append(sum(map(len, step.draft_token_ids.values())))
        output = worker.execute(step)
        for request_id in output.sampled_token_ids:
            text = list(worker.tokens[request_id])
            for _ in range(length):
                text.append(next_token(text))
            output.draft_token_ids[request_id] = text[-length:]
        scheduler.update_from_output(step, output)
        scheduler.check_integrity()
    return counts


def test_no_draft_carries_a_request_over_the_end_of_a_block() -> None:
    """5 known tokens after the prompt; then 5 + 1 + 2 = 8, 8 + 1 + 3 = 12, … : each end of a block of 4 is hit."""
    engine = new_engine(8)
    request = make_engine_request("first", [0, 1, 0, 1], 20)
    assert complete_with_drafts(engine, request, 9) == [0, 2, 3, 3, 3, 3]
    text = engine[1].tokens["first"]
    assert complete(engine, make_engine_request("second", [*text, 1, 1, 0], 1))[1] == (len(text) - 1) // 4 * 4


def test_without_a_prefix_cache_drafts_are_as_long_as_they_come() -> None:
    manager = KVCacheManager(
        [FullAttentionManager(64, 4), StateManager(8, 4)], MAX_MODEL_LEN, enable_prefix_caching=False
    )
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN)
    engine = Scheduler(config, manager), Slots(8, 1)
    assert complete_with_drafts(engine, make_engine_request("r", [0, 1, 0, 1], 21), 9) == [0, 9, 9]
