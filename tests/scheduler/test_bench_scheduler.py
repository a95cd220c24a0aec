"""Time of one schedule() and update_from_output() with every request decoding (run with --benchmark-only)."""

from typing import Any

import pytest

from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from tests.scheduler.simulated_worker import make_engine_request


@pytest.mark.parametrize("num_running", [64, 256])
@pytest.mark.parametrize("caching", [True, False])
def test_bench_one_step_of_decoding_requests(benchmark: Any, num_running: int, caching: bool) -> None:
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=2**20, max_model_len=2**20)
    manager = KVCacheManager([FullAttentionManager(2**17, 64)], config.max_model_len, enable_prefix_caching=caching)
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
