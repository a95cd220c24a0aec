"""Time of schedule() and update_from_output() (run with --benchmark-only).

With nothing shared, reuse to the token should cost at most 1.02 × in every group: a step in which all
requests decode, and a run of requests that come, decode and end, so that blocks become full, are noted, and
are given up.
"""

from itertools import count
from typing import Any

import pytest

from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import made_up_output
from tests.scheduler.simulated_worker import make_engine_request


@pytest.mark.parametrize("num_running", [64, 256])
@pytest.mark.parametrize("caching", [True, False])
def test_bench_one_step_of_decoding_requests(benchmark: Any, num_running: int, caching: bool) -> None:
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=2**20, max_model_len=2**20)
    manager = KVCacheManager(
        [FullAttentionManager(2**17, 64)], config.max_model_len, enable_prefix_caching=caching
    )
    scheduler = Scheduler(config, manager)
    for number in range(num_running):
        prompt = [number] * (100 + number)
        scheduler.add_request(Request(make_engine_request(f"r{number}", prompt, 2**19, eos_token_ids=[2])))
    results = ModelRunnerOutput(sampled_token_ids={f"r{number}": [7] for number in range(num_running)})

    def step() -> SchedulerOutput:
        planned = scheduler.schedule()
        scheduler.update_from_output(planned, results)
        return planned

    step()
    planned = benchmark.pedantic(step, rounds=300, warmup_rounds=100)
    assert len(planned.num_scheduled_tokens) == num_running


@pytest.mark.benchmark(group="nothing shared, decoding")
@pytest.mark.parametrize("min_copied_tokens", [8, None], ids=["to the token", "whole blocks"])
def test_bench_one_step_with_and_without_reuse_to_the_token(
    benchmark: Any, min_copied_tokens: int | None
) -> None:
    num_running = 64
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=2**20, max_model_len=2**20)
    groups = [FullAttentionManager(2**17, 64)]
    manager = KVCacheManager(groups, config.max_model_len, min_copied_tokens=min_copied_tokens)
    scheduler = Scheduler(config, manager)
    for number in range(num_running):
        scheduler.add_request(Request(make_engine_request(f"r{number}", [number] * (100 + number), 2**19)))
    results = ModelRunnerOutput(sampled_token_ids={f"r{number}": [7] for number in range(num_running)})

    def step() -> None:
        scheduler.update_from_output(scheduler.schedule(), results)

    step()
    benchmark.pedantic(step, rounds=640, warmup_rounds=128)  # every request fills ten blocks
    assert manager.prefix_cache_copied_tokens == 0


@pytest.mark.benchmark(group="nothing shared, requests come and go")
@pytest.mark.parametrize("min_copied_tokens", [8, None], ids=["to the token", "whole blocks"])
def test_bench_requests_that_share_nothing_come_and_go(benchmark: Any, min_copied_tokens: int | None) -> None:
    """A round: 32 requests with prompts of 200 tokens and answers of 100."""
    config = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=2**14, max_model_len=1024)
    manager = KVCacheManager(
        [FullAttentionManager(512, 64)], config.max_model_len, min_copied_tokens=min_copied_tokens
    )
    scheduler, numbers = Scheduler(config, manager), count()

    def serve() -> None:
        for _ in range(32):
            number = next(numbers)
            prompt = [number % 50_000 + 1, number % 49_999 + 1] * 100
            scheduler.add_request(Request(make_engine_request(f"r{number}", prompt, 100)))
        while scheduler.has_unfinished_requests():
            step = scheduler.schedule()
            scheduler.update_from_output(step, made_up_output(scheduler, step))

    benchmark.pedantic(serve, rounds=20, warmup_rounds=3)
    assert manager.prefix_cache_copied_tokens == 0


@pytest.mark.benchmark(group="128 requests wait")
@pytest.mark.parametrize("policy", ["fcfs", "response-ratio"])
def test_bench_one_step_while_requests_wait_for_memory(benchmark: Any, policy: str) -> None:
    """The cache is full, so every step compares all that wait, and admits none."""
    config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2**14, max_model_len=8192, policy=policy)
    manager = KVCacheManager([FullAttentionManager(400, 64)], config.max_model_len)
    scheduler = Scheduler(config, manager)
    for number in range(40 + 128):
        prompt = [1] * 2048 + [number + 2] * 300 if number >= 40 else [number + 2] * 500
        scheduler.add_request(Request(make_engine_request(f"r{number}", prompt, 4096)))
    step = scheduler.schedule()
    scheduler.update_from_output(step, made_up_output(scheduler, step))

    def one_step() -> None:
        planned = scheduler.schedule()
        scheduler.update_from_output(planned, made_up_output(scheduler, planned))

    benchmark.pedantic(one_step, rounds=48, warmup_rounds=8)
    assert len(scheduler.waiting) >= 100
