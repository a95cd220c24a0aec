"""Reuse to the token, in steps:
how many tokens are computed, which blocks are copied, and who waits a step for it."""

from __future__ import annotations

from collections import deque

import pytest

from minivllm.kv_cache.blocks.continuations import Continuations
from minivllm.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.request import Request
from tests.scheduler.simulated_worker import make_engine_request, reference_generation
from tests.scheduler.test_scheduler import Engine, distinct

pytestmark = pytest.mark.smoke

LONGEST = 4096


def engine(num_blocks: int = 400, **limits: object) -> Engine:
    return Engine(
        num_blocks,
        64,
        **{"max_num_seqs": 16, "max_num_batched_tokens": 2048, "max_model_len": LONGEST, **limits},
    )


def computed(engine: Engine, prompts: list[list[int]], max_tokens: int = 1) -> int:
    """Tokens computed for these requests, which arrive together."""
    before, first = engine.scheduler.stats().num_computed_tokens, len(engine.worker.finished)
    for number, prompt in enumerate(prompts, first):
        engine.add(f"R{number}", prompt, max_tokens)
    engine.finish()
    return engine.scheduler.stats().num_computed_tokens - before


@pytest.mark.parametrize(("length", "num_copies"), [(100, 7), (128, 7)])
def test_eight_completions_compute_their_prompt_once_and_a_token_each(length: int, num_copies: int) -> None:
    under_test = engine()
    assert computed(under_test, [distinct(length)] * 8) == length + 7 * 1
    assert under_test.worker.num_copies == num_copies
    assert under_test.worker.num_steps == 3, (
        "they wait one step for the first one; the last step ends requests"
    )


def test_the_same_prompt_again_computes_its_last_token() -> None:
    under_test = engine()
    assert computed(under_test, [distinct(128)]) == 128
    assert computed(under_test, [distinct(128)]) == 1


def test_a_second_turn_computes_what_is_new_and_the_last_token_of_the_answer() -> None:
    under_test = engine()
    given = make_engine_request("turn", distinct(300), 50)
    assert computed(under_test, [distinct(300)], max_tokens=50) == 349
    answer, _, _ = reference_generation(given, LONGEST)
    assert computed(under_test, [[*distinct(300), *answer, *distinct(20, 1000)]]) == 21


def test_with_nothing_in_common_nothing_is_copied_and_no_request_waits() -> None:
    under_test = engine()
    for number in range(8):
        under_test.add(f"R{number}", distinct(100, 1000 * number))
    step, _ = under_test.step()
    assert list(step.num_scheduled_tokens.values()) == [100] * 8
    under_test.finish()
    assert under_test.worker.num_copies == 0 and under_test.scheduler.stats().prefix_cache_hit_tokens == 0


def test_a_request_that_shares_nothing_is_noted_once_for_each_of_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps in which no block becomes full do nothing for reuse."""
    notes: list[int] = []
    original = Continuations.put

    def put(
        self: Continuations, parent: bytes, block_id: int, token_ids: list[int], **state: bool
    ) -> list[int]:
        notes.append(len(token_ids))
        return original(self, parent, block_id, token_ids, **state)

    monkeypatch.setattr(Continuations, "put", put)
    under_test = engine()
    assert computed(under_test, [distinct(100)], max_tokens=101) == 200
    assert notes == [64, 36, 64, 64, 8], (
        "the prompt's block and its end, two more blocks, and the end of the answer"
    )


def test_choices_of_three_tokens_behind_a_long_prompt_compute_four_tokens_each() -> None:
    """Of their log-probabilities: the last token of the prompt, and the choice."""
    under_test = engine()
    assert computed(under_test, [distinct(1000)]) == 1000
    before = under_test.scheduler.stats().num_computed_tokens
    for number in range(4):
        choice = [*distinct(1000), *distinct(3, 2000 + 10 * number)]
        under_test.add(f"choice{number}", choice, 1, prompt_logprobs=0, prompt_logprobs_start=1000)
    outputs = under_test.finish()
    assert under_test.scheduler.stats().num_computed_tokens - before == 4 * 4
    for given in outputs.values():
        entries = [entry for output in given for entry in output.prompt_logprobs or []]
        assert [-entry.logprobs[0] for entry in entries] == [1000, 1001, 1002]


def test_usage_and_counters_include_copied_tokens() -> None:
    under_test = engine()
    computed(under_test, [distinct(100)])
    under_test.add("again", distinct(100), 1)
    outputs = under_test.finish()
    assert outputs["again"][-1].num_cached_tokens == 99
    stats = under_test.scheduler.stats()
    assert (stats.prefix_cache_hit_tokens, stats.prefix_cache_copied_tokens) == (99, 35)


def test_a_prompt_that_ends_in_a_later_chunk_of_its_block_can_be_copied() -> None:
    under_test = engine(max_num_batched_tokens=40)
    under_test.add("R0", distinct(90), 20)
    for count in (40, 40, 10, 1):
        assert under_test.step()[0].num_scheduled_tokens == {"R0": count}
    under_test.add("R1", distinct(90), 20)
    assert under_test.step()[0].num_scheduled_tokens == {"R0": 1, "R1": 1}


def test_siblings_wait_for_at_least_32_tokens_and_once() -> None:
    under_test = engine()
    for number, length in enumerate((32, 32)):
        under_test.add(f"short{number}", distinct(length, 7000))
    assert under_test.step()[0].num_scheduled_tokens == {"short0": 32, "short1": 32}, (
        "31 are too few to wait for"
    )
    under_test = engine(long_prefill_token_threshold=64)
    for number in range(3):
        under_test.add(f"R{number}", distinct(640), 1)
    assert under_test.step()[0].num_scheduled_tokens == {"R0": 64, "R1": 64, "R2": 64}
    under_test = engine()
    under_test.add("R0", distinct(100))
    under_test.add("R1", distinct(100))
    under_test.add("other", distinct(50, 500))
    step, _ = under_test.step()
    assert step.num_scheduled_tokens == {"R0": 100, "other": 50}, "those after it go on"
    under_test.scheduler.abort_requests(["R0"])
    step, _ = under_test.step()
    assert step.num_scheduled_tokens == {"R1": 1, "other": 1}, (
        "what the first one has left is used all the same"
    )


def test_a_request_waits_only_once() -> None:
    under_test = engine(policy="priority")
    under_test.add("R0", distinct(100), priority=1)
    under_test.add("waits", distinct(200), priority=1)
    assert under_test.step()[0].num_scheduled_tokens == {"R0": 100}
    under_test.add("first", distinct(190), priority=0)
    step, _ = under_test.step()
    assert step.num_scheduled_tokens == {"R0": 1, "first": 190 - 100, "waits": 200 - 128}


def test_without_a_block_to_spare_a_request_is_admitted_without_a_copy_and_waits_for_nothing() -> None:
    """300 tokens in a cache of 5 blocks, of which it needs all: the copied block is one of them."""
    under_test = engine(num_blocks=1 + 8)
    assert computed(under_test, [distinct(168)]) == 168
    held = under_test.manager.pools[0].get_new_blocks(3)
    under_test.add("tight", [*distinct(168), *distinct(132, 500)], 1)
    step = under_test.scheduler.schedule()
    assert step.num_scheduled_tokens == {"tight": 172} and not step.block_copies
    under_test.scheduler.update_from_output(step, under_test.worker.execute(step))
    under_test.manager.pools[0].free_blocks(held)
    under_test.finish()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_preempted_requests_and_steps_in_flight_copy_what_was_computed_and_nothing_else(depth: int) -> None:
    """The worker finds every block that holds something else than its reader expects."""
    under_test = engine(num_blocks=1 + 16)
    scheduler = under_test.scheduler
    scheduler._async_scheduling = depth > 1
    prompts = [[*distinct(140), *distinct(60, 1000 * number)] for number in range(8)]
    given = {
        f"R{number}": make_engine_request(f"R{number}", prompt, 150) for number, prompt in enumerate(prompts)
    }
    for request in given.values():
        scheduler.add_request(Request(request))
    received: dict[str, list[int]] = {request_id: [] for request_id in given}
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    while scheduler.has_requests() or in_flight:
        if len(in_flight) < depth and scheduler.has_requests():
            step = scheduler.schedule()
            in_flight.append((step, under_test.worker.execute(step)))
        else:
            for output in scheduler.update_from_output(*in_flight.popleft()):
                received[output.request_id] += output.new_token_ids
        scheduler.check_integrity()
    for request_id, tokens in received.items():
        assert tokens == reference_generation(given[request_id], LONGEST)[0]
    assert scheduler.stats().num_preemptions > 0 and under_test.worker.num_copies > 0
    assert under_test.manager.usage == 0.0
