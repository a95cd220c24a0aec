"""The engine core: schedule, execute, update. Everything else is where the parts live and how they are reached."""

from __future__ import annotations

from minivllm.config import EngineConfig
from minivllm.executor.uniproc import Executor
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import EngineOutput, EngineRequest, SchedulerStats
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler


class EngineCore:
    """Owns the scheduler and the executor. One thread drives it."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self.config = config
        self.executor = executor
        kv_cache = KVCacheManager(
            num_blocks=executor.num_blocks,
            block_size=config.cache.block_size,
            max_model_len=config.scheduler.max_model_len,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self.scheduler = Scheduler(config.scheduler, kv_cache)

    def step(self) -> list[EngineOutput]:
        """Decide who computes how many tokens, compute them, and take note of the results."""
        if not self.scheduler.has_requests():
            return []
        step = self.scheduler.schedule()
        output = self.executor.execute_model(step)
        return self.scheduler.update_from_output(step, output)

    def add_request(self, request: EngineRequest) -> None:
        self.scheduler.add_request(Request(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests; ids that are unknown or finished are ignored."""
        self.scheduler.abort_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def num_recompilations(self) -> int:
        return self.executor.num_recompilations()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. Returns False, and changes nothing, while requests hold blocks."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        self.executor.shutdown()
