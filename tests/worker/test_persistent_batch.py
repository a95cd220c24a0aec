"""The persistent batch follows random streams of differences as a model that rebuilds everything each
step."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from minivllm.batch.persistent_batch import PersistentBatch
from minivllm.kv_cache.specs import one_group
from minivllm.messages import CachedRequestData, NewRequestData, SchedulerOutput
from tests.attention.random_batches import CPU, finish_all, new_request

pytestmark = pytest.mark.smoke

MAX_SEQS, MAX_LENGTH, PAGE_SIZE, NUM_PAGES = 4, 40, 4, 25


class NaiveRequest:
    """Everything the worker should know of one request, as plain lists."""

    def __init__(self, new: NewRequestData) -> None:
        self.tokens = list(new.request.prompt_token_ids)
        self.blocks: list[int] | None = list(new.block_ids[0])
        self.num_computed = new.num_computed_tokens


class NaiveScheduler:
    """Draws legal differences at random: pages are free, owned, or shared at one logical index."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.requests: dict[str, NaiveRequest] = {}
        self.counter = 0

    def free_pages(self) -> list[int]:
        used = {page for request in self.requests.values() for page in request.blocks or ()}
        return [page for page in range(1, NUM_PAGES) if page not in used]

    def running(self) -> dict[str, NaiveRequest]:
        return {name: request for name, request in self.requests.items() if request.blocks is not None}

    def step(self) -> SchedulerOutput:
        """The next step's differences, already applied to the naive requests."""
        rng = self.rng
        finished = [name for name in self.requests if rng.random() < 0.1]
        for name in finished:
            del self.requests[name]
        preempted = [name for name in self.running() if rng.random() < 0.15]
        for name in preempted:
            self.requests[name].blocks = None
        entering = not preempted
        new, cached = [], []
        for name, request in self.running().items():
            grow = min(rng.choice([0, 0, 1, 3]), MAX_LENGTH // PAGE_SIZE - len(request.blocks or ()))
            blocks = rng.sample(free := self.free_pages(), min(grow, len(free)))
            assert request.blocks is not None
            request.blocks += blocks
            request.num_computed = rng.randint(0, len(request.tokens))
            cached.append(
                CachedRequestData(
                    request_id=name, new_block_ids=(blocks,), num_computed_tokens=request.num_computed
                )
            )
        if entering:
            for name, request in self.requests.items():
                if request.blocks is None and len(self.running()) < MAX_SEQS and rng.random() < 0.5:
                    request.blocks = self.pages_for(len(request.tokens))
                    request.num_computed = 0
                    cached.append(
                        CachedRequestData(
                            request_id=name,
                            new_block_ids=(list(request.blocks),),
                            num_computed_tokens=0,
                            resumed=True,
                        )
                    )
            if len(self.running()) < MAX_SEQS and rng.random() < 0.6:
                self.counter += 1
                prompt = [rng.randrange(1, 1000) for _ in range(rng.randint(1, MAX_LENGTH - 5))]
                # Names return: an id may be used again once it has finished.
                name = f"r{self.counter % 7}"
                if name not in self.requests:
                    data = new_request(name, prompt, self.pages_for(len(prompt)), rng.randrange(len(prompt)))
                    self.requests[name] = NaiveRequest(data)
                    new.append(data)
        return SchedulerOutput(
            new_requests=new,
            cached_requests=cached,
            finished_request_ids=finished,
            preempted_request_ids=preempted,
        )

    def pages_for(self, num_tokens: int) -> list[int]:
        """Pages of a request that enters:
        a prefix shared with one that runs, then free ones, as many as there are."""
        needed = -(-num_tokens // PAGE_SIZE)
        shared: list[int] = []
        if self.running() and self.rng.random() < 0.5:
            blocks = self.rng.choice(list(self.running().values())).blocks or []
            shared = blocks[: self.rng.randint(0, min(needed, len(blocks)))]
        free = self.free_pages()
        return shared + self.rng.sample(free, min(needed - len(shared), len(free)))


def check(batch: PersistentBatch, requests: dict[str, NaiveRequest]) -> None:
    assert batch.requests.keys() == requests.keys()
    running = {name: request for name, request in requests.items() if request.blocks is not None}
    slots = [batch.requests[name].slot for name in running]
    assert len(slots) == len(set(slots)) and all(0 <= slot < MAX_SEQS for slot in slots), (
        "slots are never shared"
    )
    assert all(batch.requests[name].slot == -1 for name in requests.keys() - running.keys())
    for name, naive in requests.items():
        own = batch.requests[name]
        assert own.num_tokens == len(naive.tokens)
        if naive.blocks is None:
            continue
        assert own.num_computed_tokens == naive.num_computed
        assert batch.token_ids.host[own.slot, : len(naive.tokens)].tolist() == naive.tokens
        assert batch.groups[0].num_held[own.slot] == len(naive.blocks)
        assert batch.groups[0].block_table.host[own.slot, : len(naive.blocks)].tolist() == naive.blocks
        for index, page in enumerate(naive.blocks):
            expected = list(range(index * PAGE_SIZE, (index + 1) * PAGE_SIZE))
            assert batch.groups[0].kv_position.host[page].tolist() == expected, (
                "each slot knows the position it holds"
            )


@pytest.mark.parametrize("seed", range(12))
def test_random_differences_leave_what_a_naive_model_says(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = NaiveScheduler(rng)
    batch = PersistentBatch(MAX_SEQS, MAX_LENGTH, [one_group(1, PAGE_SIZE, num_blocks=NUM_PAGES)], CPU)
    held: dict[str, int] = {}
    for _ in range(120):
        step = scheduler.step()
        freed, entered = batch.apply(step)
        left = step.finished_request_ids + step.preempted_request_ids
        assert sorted(freed) == sorted(held.pop(name) for name in left if name in held)
        resumed = [data.request_id for data in step.cached_requests if data.resumed]
        names = [new.request.request_id for new in step.new_requests] + resumed
        assert [request.data.request_id for request in entered] == names
        for request in entered:
            held[request.data.request_id] = request.slot
        assert all(batch.requests[name].slot == slot for name, slot in held.items()), "a slot is stable"
        check(batch, scheduler.requests)
        for name, naive in scheduler.running().items():
            if len(naive.tokens) < MAX_LENGTH and rng.random() < 0.5:
                naive.tokens.append(rng.randrange(1000))
                batch.append_tokens(batch.requests[name], [naive.tokens[-1]])
        check(batch, scheduler.requests)


def test_after_all_requests_left_every_slot_is_free_again() -> None:
    batch = PersistentBatch(3, MAX_LENGTH, [one_group(1, PAGE_SIZE, num_blocks=NUM_PAGES)], CPU)
    for _ in range(3):
        batch.apply(
            SchedulerOutput(new_requests=[new_request(f"r{i}", [1, 2], [i + 1], 0) for i in range(3)])
        )
        assert sorted(request.slot for request in batch.requests.values()) == [0, 1, 2]
        finish_all(batch)
        assert batch.requests == {}


def test_a_finished_id_that_was_never_here_or_is_preempted_frees_no_slot() -> None:
    batch = PersistentBatch(2, MAX_LENGTH, [one_group(1, PAGE_SIZE, num_blocks=NUM_PAGES)], CPU)
    assert batch.apply(SchedulerOutput(finished_request_ids=["unknown"])) == ([], [])
    batch.apply(SchedulerOutput(new_requests=[new_request("a", [1], [1], 0)]))
    assert batch.apply(SchedulerOutput(preempted_request_ids=["a"]))[0] == [0]
    assert batch.apply(SchedulerOutput(finished_request_ids=["a"])) == ([], [])
    assert batch.requests == {}


def test_a_page_knows_its_position_again_when_it_is_reused_at_another_place_of_a_sequence() -> None:
    batch = PersistentBatch(2, MAX_LENGTH, [one_group(1, PAGE_SIZE, num_blocks=NUM_PAGES)], CPU)
    for blocks in ([7], [3, 7], [3, 5, 7], [7, 3]):
        batch.apply(SchedulerOutput(new_requests=[new_request("a", [1] * 10, blocks, 0)]))
        for index, page in enumerate(blocks):
            assert batch.groups[0].kv_position.host[page].tolist() == [
                index * PAGE_SIZE + i for i in range(PAGE_SIZE)
            ]
        finish_all(batch)


def test_a_token_that_comes_after_its_request_left_is_remembered_and_written_over_nobody() -> None:
    batch = PersistentBatch(1, MAX_LENGTH, [one_group(1, PAGE_SIZE, num_blocks=NUM_PAGES)], CPU)
    batch.apply(SchedulerOutput(new_requests=[new_request("a", [1, 2], [1], 0)]))
    request = batch.requests["a"]
    places = np.array([request.slot]), np.array([request.num_tokens])
    batch.append_pending([request], *places, torch.tensor([5]))
    assert (request.num_tokens, request.output_token_ids) == (3, [])
    assert batch.token_ids.device[0, :3].tolist() == [1, 2, 5]
    new = new_request("b", [7, 8, 9, 10], [2], 0)
    batch.apply(SchedulerOutput(preempted_request_ids=["a"], new_requests=[new]))
    assert batch.learn_pending([request], *places, [5]).tolist() == [False]
    assert (request.num_tokens, request.output_token_ids) == (3, [5])
    assert batch.token_ids.host[0, :4].tolist() == [7, 8, 9, 10]
    batch.apply(SchedulerOutput(finished_request_ids=["b"]))
    resumed = CachedRequestData(request_id="a", new_block_ids=([3],), num_computed_tokens=0, resumed=True)
    batch.apply(SchedulerOutput(cached_requests=[resumed]))
    assert batch.token_ids.host[0, :3].tolist() == [1, 2, 5]
