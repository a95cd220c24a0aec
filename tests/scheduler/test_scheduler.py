"""What the scheduler decides, case by case."""

from __future__ import annotations

import pytest

from minivllm.config import SchedulerConfig
from minivllm.errors import RequestError
from minivllm.kv_cache.group_manager import FullAttentionManager
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
from minivllm.scheduler.scheduler import NUM_RECENT_STEPS, Scheduler
from tests.scheduler.simulated_worker import (
    SimulatedWorker,
    make_engine_request,
    next_token,
    reference_generation,
)

pytestmark = pytest.mark.smoke


class Engine:
    """A scheduler and the simulated worker, stepped together."""

    def __init__(self, num_blocks: int = 100, block_size: int = 4, **limits: object) -> None:
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **limits}
        self.config = SchedulerConfig(**options)
        self.manager = KVCacheManager(
            [FullAttentionManager(num_blocks, block_size)], self.config.max_model_len
        )
        self.scheduler = Scheduler(self.config, self.manager)
        self.worker = SimulatedWorker(block_size, self.config.max_num_seqs)

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 4, **options: object
    ) -> EngineRequest:
        given = make_engine_request(request_id, prompt, max_tokens, **options)
        self.scheduler.add_request(Request(given))
        return given

    def step(self) -> tuple[SchedulerOutput, dict[str, EngineOutput]]:
        planned = self.scheduler.schedule()
        outputs = self.scheduler.update_from_output(planned, self.worker.execute(planned))
        self.scheduler.check_integrity()
        return planned, {output.request_id: output for output in outputs}

    def finish(self) -> dict[str, list[EngineOutput]]:
        received: dict[str, list[EngineOutput]] = {}
        while self.scheduler.has_requests():
            for request_id, output in self.step()[1].items():
                received.setdefault(request_id, []).append(output)
        return received


def distinct(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def test_decodes_come_before_prefills_and_a_long_prompt_is_cut_to_the_budget() -> None:
    engine = Engine(max_num_batched_tokens=10)
    for request_id, length in (("R1", 3), ("R2", 5), ("R3", 12)):
        engine.add(request_id, distinct(length, 100 * length), max_tokens=3)
    assert engine.step()[0].num_scheduled_tokens == {"R1": 3, "R2": 5, "R3": 2}
    assert engine.step()[0].num_scheduled_tokens == {"R1": 1, "R2": 1, "R3": 8}
    assert engine.step()[0].num_scheduled_tokens == {"R1": 1, "R2": 1, "R3": 2}
    assert engine.step()[0].num_scheduled_tokens == {"R3": 1}


def test_the_threshold_leaves_budget_for_others() -> None:
    engine = Engine(max_num_batched_tokens=10, long_prefill_token_threshold=6)
    engine.add("R1", distinct(20))
    engine.add("R2", distinct(20, 50))
    assert engine.step()[0].num_scheduled_tokens == {"R1": 6, "R2": 4}


def test_no_more_than_max_num_seqs_run() -> None:
    engine = Engine(max_num_seqs=2)
    for number in range(3):
        engine.add(f"R{number}", distinct(3, 10 * number), max_tokens=2)
    assert list(engine.step()[0].num_scheduled_tokens) == ["R0", "R1"]
    assert engine.scheduler.stats().num_waiting == 1
    engine.step()
    assert list(engine.step()[0].num_scheduled_tokens) == ["R2"]


def test_a_cached_prefix_is_not_computed_again() -> None:
    engine = Engine()
    engine.add("R1", distinct(10), max_tokens=2)
    engine.finish()
    engine.add("R2", distinct(10), max_tokens=2)
    planned, outputs = engine.step()
    assert planned.num_scheduled_tokens == {"R2": 2}
    assert planned.new_requests[0].num_computed_tokens == 8
    assert outputs["R2"].num_cached_tokens == 8
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queried_tokens, stats.prefix_cache_hit_tokens) == (20, 8)
    assert stats.num_computed_tokens == 10 + 1 + 2


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    engine = Engine()
    for number in range(3):
        engine.add(f"R{number}", distinct(9))
    assert engine.step()[0].num_scheduled_tokens == {"R0": 9, "R1": 1, "R2": 1}


def test_a_step_that_decodes_inside_known_blocks_sends_only_token_counts() -> None:
    engine = Engine(block_size=4)
    engine.add("R1", distinct(2), max_tokens=6)
    engine.step()
    for _ in range(2):
        planned, _ = engine.step()
        assert planned == SchedulerOutput(num_scheduled_tokens={"R1": 1})
    planned, _ = engine.step()
    assert [entry.num_computed_tokens for entry in planned.cached_requests] == [4]
    assert len(planned.cached_requests[0].new_block_ids[0]) == 1 and not planned.cached_requests[0].resumed


def test_fcfs_preempts_the_last_one_which_comes_back_first() -> None:
    engine = Engine(num_blocks=5, block_size=2)
    given = [engine.add(f"R{number}", distinct(4, 10 * number), max_tokens=4) for number in range(2)]
    waiting = engine.add("R2", distinct(2, 50), max_tokens=1)
    engine.step()
    planned, _ = engine.step()
    assert planned.num_scheduled_tokens == {"R0": 1} and planned.preempted_request_ids == ["R1"]
    assert [request.request_id for request in engine.scheduler.waiting] == ["R1", "R2"]
    received = engine.finish()
    for request in (*given, waiting):
        tokens = [token for output in received[request.request_id] for token in output.new_token_ids]
        expected = reference_generation(request, 64)[0]
        assert tokens == expected[len(expected) - len(tokens) :]
    assert engine.scheduler.stats().num_preemptions == 1
    events = [event.type for output in received["R1"] for event in output.events]
    assert events == [EventType.PREEMPTED, EventType.SCHEDULED, EventType.FINISHED]


def test_recent_steps_are_the_decisions_as_they_were_sent_and_not_more_than_a_fixed_number() -> None:
    engine = Engine(num_blocks=5, block_size=2, max_num_batched_tokens=6)
    for number in range(2):
        engine.add(f"R{number}", distinct(4, 10 * number), max_tokens=4)
    sent = []
    while engine.scheduler.has_requests():
        planned, outputs = engine.step()
        if planned.num_scheduled_tokens:
            sampled = {request_id for request_id, output in outputs.items() if output.new_token_ids}
            unfinished = set(planned.num_scheduled_tokens) - sampled
            sent.append((planned.num_scheduled_tokens, unfinished, planned.preempted_request_ids))
    steps = engine.scheduler.recent_steps(after=0)
    assert [(step.num_scheduled_tokens, step.unfinished_prompts, step.preempted) for step in steps] == sent
    assert [step.step for step in steps] == list(range(1, len(sent) + 1))
    assert any(step.unfinished_prompts for step in steps) and any(step.preempted for step in steps)
    assert engine.scheduler.recent_steps(after=3) == steps[3:]
    while (num_steps := engine.scheduler.stats().num_steps) < 2 * NUM_RECENT_STEPS:
        engine.add(f"after step {num_steps}", distinct(2), max_tokens=4)
        engine.finish()
    assert len(engine.scheduler.recent_steps(after=0)) == NUM_RECENT_STEPS


def engine_about_to_preempt() -> tuple[Engine, Request]:
    """Running are Low, High, Mid in this order;
    the next chunk of Low takes the last blocks, then High needs one."""
    engine = Engine(
        num_blocks=10,
        block_size=2,
        max_num_batched_tokens=12,
        long_prefill_token_threshold=4,
        policy="priority",
    )
    engine.add("Low", distinct(12), max_tokens=1, priority=5)
    engine.step()
    low = engine.scheduler.requests["Low"]
    engine.add("High", distinct(4, 50), max_tokens=4, priority=-5)
    engine.add("Mid", distinct(1, 90), max_tokens=4)
    assert engine.step()[0].num_scheduled_tokens == {"Low": 4, "High": 4, "Mid": 1}
    return engine, low


def test_a_prompt_waits_until_the_cache_has_room_for_all_of_it() -> None:
    engine = Engine(num_blocks=11, block_size=2, max_num_batched_tokens=4)
    engine.add("R1", distinct(3), max_tokens=9)
    engine.add("R2", distinct(16, 50), max_tokens=1)
    steps = []
    while engine.scheduler.has_requests():
        steps.append(engine.step()[0])
    assert steps[0].num_scheduled_tokens == {"R1": 3, "R2": 1}, "8 blocks of 10 are enough beside 2"
    engine = Engine(num_blocks=10, block_size=2, max_num_batched_tokens=4)
    engine.add("R1", distinct(3), max_tokens=9)
    engine.add("R2", distinct(16, 50), max_tokens=1)
    assert engine.step()[0].num_scheduled_tokens == {"R1": 3}, "7 blocks are free, the prompt takes 8"
    while "R1" in engine.scheduler.requests:
        assert "R2" not in engine.step()[0].num_scheduled_tokens
    engine.finish()
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_prompt_under_way_keeps_the_blocks_for_its_rest() -> None:
    engine = Engine(num_blocks=11, block_size=2, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    engine.add("R1", distinct(12), max_tokens=1)
    engine.add("R2", distinct(10, 50), max_tokens=1)
    assert engine.step()[0].num_scheduled_tokens == {"R1": 4}, (
        "R1 takes 6 blocks of 10 in the end, R2 would take 5"
    )
    engine.add("R3", distinct(8, 90), max_tokens=1)
    engine.scheduler.abort_requests(["R2"])
    assert engine.step()[0].num_scheduled_tokens == {"R1": 4, "R3": 4}


def test_a_resumed_request_needs_room_for_its_answer_so_far_as_well() -> None:
    engine = Engine(num_blocks=6, block_size=2)
    engine.add("R1", distinct(4), max_tokens=6)
    engine.add("R2", distinct(4, 50), max_tokens=2)
    planned, _ = engine.step()
    assert planned.num_scheduled_tokens == {"R1": 4, "R2": 4}
    while not planned.preempted_request_ids:
        planned, _ = engine.step()
    assert planned.preempted_request_ids == ["R2"], "R1 grows into the last block"
    while "R1" in engine.scheduler.requests:
        assert "R2" not in engine.step()[0].num_scheduled_tokens, (
            "3 blocks for 5 known tokens, of which 2 are free"
        )
    engine.finish()


def test_priority_preempts_the_worst_even_if_it_was_already_scheduled_in_this_step() -> None:
    engine, _ = engine_about_to_preempt()
    planned, _ = engine.step()
    assert planned.preempted_request_ids == ["Low"]
    assert planned.num_scheduled_tokens == {"High": 1, "Mid": 1}
    assert [entry.request_id for entry in planned.cached_requests] == ["High"]
    engine.finish()


def test_what_was_planned_for_a_victim_of_the_same_step_is_not_found_later() -> None:
    engine, low = engine_about_to_preempt()
    engine.step()
    assert engine.manager.get_computed_blocks(low)[1] == 8, (
        "two chunks of 4 were computed, the third was taken back"
    )
    engine.finish()


def test_a_request_that_waits_for_something_is_passed_and_keeps_its_place() -> None:
    engine = Engine(max_num_seqs=1)
    for number in range(3):
        engine.add(f"R{number}", distinct(3, 10 * number), max_tokens=1)
    engine.scheduler.requests["R0"].status = RequestStatus.BLOCKED
    assert list(engine.step()[0].num_scheduled_tokens) == ["R1"]
    assert [request.request_id for request in engine.scheduler.waiting] == ["R0", "R2"]
    engine.scheduler.unblock_request("R0")
    assert list(engine.step()[0].num_scheduled_tokens) == ["R0"]


def test_drafts_are_scheduled_with_the_known_token_and_rejected_ones_are_rolled_back() -> None:
    engine = Engine(block_size=4)
    given = engine.add("R1", distinct(3), max_tokens=8)
    engine.step()
    request = engine.scheduler.requests["R1"]
    right = next_token(request.all_token_ids)
    engine.scheduler.set_draft_token_ids({"R1": [right, -1, -1], "unknown": [1]})
    planned, outputs = engine.step()
    assert planned.num_scheduled_tokens == {"R1": 4} and planned.draft_token_ids == {"R1": [right, -1, -1]}
    assert len(outputs["R1"].new_token_ids) == 2
    assert request.num_computed_tokens == request.num_tokens - 1 == 5
    planned, _ = engine.step()
    assert planned.cached_requests[0].num_computed_tokens == 5 and planned.num_scheduled_tokens == {"R1": 1}
    assert request.all_token_ids[3:] == reference_generation(given, 64)[0][: len(request.all_token_ids) - 3]


def test_drafts_are_cut_to_the_budget_and_to_the_length_of_the_sequence() -> None:
    engine = Engine(max_num_batched_tokens=3)
    engine.add("R1", distinct(3), max_tokens=8)
    engine.step()
    engine.scheduler.set_draft_token_ids({"R1": [1] * 9})
    planned, _ = engine.step()
    assert planned.num_scheduled_tokens == {"R1": 3} and planned.draft_token_ids == {"R1": [1, 1]}
    engine = Engine()
    engine.add("R1", distinct(3), max_tokens=3)
    engine.step()
    engine.scheduler.set_draft_token_ids({"R1": [1] * 9})
    assert engine.step()[0].num_scheduled_tokens == {"R1": 2}


@pytest.mark.parametrize(
    ("options", "tokens", "kept", "reason", "stop_reason"),
    [
        ({"eos_token_ids": [1]}, [7, 1, 7], [7, 1], FinishReason.STOP, None),
        ({"eos_token_ids": [1, 2]}, [2], [2], FinishReason.STOP, None),
        (
            {"eos_token_ids": [1], "ignore_eos": True},
            [1, 1, 1, 1, 1],
            [1, 1, 1, 1],
            FinishReason.LENGTH,
            None,
        ),
        ({"eos_token_ids": [1], "min_tokens": 2}, [1, 1], [1, 1], FinishReason.STOP, None),
        ({"stop_token_ids": [3]}, [7, 3], [7, 3], FinishReason.STOP, 3),
        ({"stop_token_ids": [3], "min_tokens": 3}, [3, 3, 3], [3, 3, 3], FinishReason.STOP, 3),
        ({"eos_token_ids": [3], "stop_token_ids": [3]}, [3], [3], FinishReason.STOP, None),
        ({"eos_token_ids": [3], "stop_token_ids": [3], "ignore_eos": True}, [3], [3], FinishReason.STOP, 3),
        ({"stop_token_ids": [9]}, [7, 7, 7, 9], [7, 7, 7, 9], FinishReason.STOP, 9),
        ({}, [7, 7, 7, 7], [7, 7, 7, 7], FinishReason.LENGTH, None),
    ],
)
def test_ends_are_checked_as_min_tokens_eos_stop_ids_length(
    options: dict, tokens: list[int], kept: list[int], reason: FinishReason, stop_reason: int | None
) -> None:
    engine = Engine()
    engine.add("R1", distinct(3), max_tokens=4, **options)
    received: list[EngineOutput] = []
    for token_id in tokens:
        if not engine.scheduler.requests:
            break
        planned = engine.scheduler.schedule()
        received += engine.scheduler.update_from_output(
            planned, ModelRunnerOutput(sampled_token_ids={"R1": [token_id]})
        )
    assert [token for output in received for token in output.new_token_ids] == kept
    assert (received[-1].finish_reason, received[-1].stop_reason) == (reason, stop_reason)
    assert all(output.finish_reason is None for output in received[:-1])


def test_a_sequence_never_outgrows_max_model_len() -> None:
    engine = Engine(max_model_len=8)
    engine.add("R1", distinct(6), max_tokens=100)
    outputs = engine.finish()["R1"]
    assert sum(len(output.new_token_ids) for output in outputs) == 2
    assert outputs[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("length", "max_tokens", "said"),
    [
        (64, 1, "The prompt has 64 tokens, but max_model_len is 64"),
        (30, 12, "may grow to 42 tokens, but the KV cache has room for 41"),
        (0, 1, "The prompt is empty"),
    ],
)
def test_a_request_that_can_never_fit_ends_with_a_sentence_and_harms_nobody(
    length: int, max_tokens: int, said: str
) -> None:
    engine = Engine(num_blocks=11, block_size=4)
    engine.add("good", distinct(3, 100), max_tokens=1)
    engine.add("bad", distinct(length), max_tokens)
    _, outputs = engine.step()
    assert outputs["bad"].finish_reason is FinishReason.ERROR and said in (outputs["bad"].error or "")
    assert outputs["good"].finish_reason is FinishReason.LENGTH


def test_a_refused_request_is_reported_even_when_nothing_else_runs() -> None:
    engine = Engine()
    engine.add("bad", distinct(64))
    assert engine.scheduler.has_unfinished_requests()
    assert engine.step()[1]["bad"].finish_reason is FinishReason.ERROR
    assert not engine.scheduler.has_requests()


def test_a_request_that_just_fits_runs() -> None:
    engine = Engine(num_blocks=11, block_size=4)
    engine.add("R1", distinct(30), max_tokens=11)
    assert engine.finish()["R1"][-1].finish_reason is FinishReason.LENGTH


def test_an_abort_in_flight_is_harmless_and_silent() -> None:
    engine = Engine()
    engine.add("R1", distinct(5))
    engine.add("R2", distinct(5, 20))
    planned = engine.scheduler.schedule()
    results = engine.worker.execute(planned)
    engine.scheduler.abort_requests(["R1", "R1", "unknown"])
    outputs = engine.scheduler.update_from_output(planned, results)
    assert [output.request_id for output in outputs] == ["R2"]
    assert engine.scheduler.schedule().finished_request_ids == ["R1"]


def test_an_id_can_be_used_again_after_an_abort_even_in_flight() -> None:
    engine = Engine()
    engine.add("R1", distinct(5))
    planned = engine.scheduler.schedule()
    engine.scheduler.abort_requests(["R1"])
    engine.add("R1", distinct(3, 30))
    results = ModelRunnerOutput(sampled_token_ids={"R1": [1]})
    assert engine.scheduler.update_from_output(planned, results) == []
    planned = engine.scheduler.schedule()
    assert planned.finished_request_ids == ["R1"] and planned.new_requests[
        0
    ].request.prompt_token_ids == distinct(3, 30)


def test_two_unfinished_requests_cannot_share_an_id() -> None:
    engine = Engine()
    engine.add("R1", distinct(5))
    with pytest.raises(RequestError, match="'R1' is in use"):
        engine.add("R1", distinct(5))


def test_finished_ids_are_sent_once_also_when_nobody_is_left() -> None:
    engine = Engine()
    engine.add("R1", distinct(5), max_tokens=1)
    engine.step()
    assert not engine.scheduler.has_unfinished_requests() and engine.scheduler.has_requests()
    assert engine.step()[0] == SchedulerOutput(finished_request_ids=["R1"])
    assert not engine.scheduler.has_requests()


def test_results_out_of_order_or_missing_are_an_error() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.add("R1", distinct(8))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    with pytest.raises(RuntimeError, match="in the order of their schedules"):
        engine.scheduler.update_from_output(second, ModelRunnerOutput())
    engine = Engine(max_num_batched_tokens=4)
    engine.add("R1", distinct(8))
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    assert engine.scheduler.update_from_output(first, ModelRunnerOutput()) == []
    with pytest.raises(RuntimeError, match="no token for R1"):
        engine.scheduler.update_from_output(second, ModelRunnerOutput())


def test_a_request_whose_token_is_in_flight_waits_unless_scheduling_is_async() -> None:
    for is_async, expected in ((False, {}), (True, {"R1": 1})):
        engine = Engine()
        engine.scheduler = Scheduler(engine.config, engine.manager, async_scheduling=is_async)
        engine.add("R1", distinct(8), max_tokens=2)
        engine.scheduler.schedule()
        assert engine.scheduler.schedule().num_scheduled_tokens == expected
        assert engine.scheduler.schedule().num_scheduled_tokens == {}  # the second token is the last one


def test_the_scheduler_and_the_cache_do_not_import_torch() -> None:
    import subprocess
    import sys

    program = "import sys, minivllm.scheduler.scheduler; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
