"""The engine core: schedule, execute, update. Everything else is where the parts live and how they are reached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from minivllm.config import EngineConfig
from minivllm.engine.batch_queue import BatchQueue
from minivllm.errors import ModelError, RequestError
from minivllm.executor.remote_calls import WORKER_METHODS
from minivllm.kv_cache.hashing import extend_block_hashes
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.lora.registry import AdapterAdmission, AdapterRegistry
from minivllm.messages import (
    EngineOutput,
    EngineRequest,
    LoRARequest,
    ModelRunnerOutput,
    RecentStep,
    SchedulerStats,
)
from minivllm.profiling import TraceRecorder
from minivllm.request import Request
from minivllm.scheduler.repetition import RepetitionDetector
from minivllm.scheduler.scheduler import Scheduler
from minivllm.structured_output.manager import StructuredOutputManager

if TYPE_CHECKING:
    from minivllm.executor.uniproc import Executor


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
        self.adapters = None if config.lora is None else AdapterRegistry(config.lora, executor.collective)
        admission = None if config.lora is None else AdapterAdmission(config.lora.max_loras)
        self.scheduler = Scheduler(
            config.scheduler, kv_cache, async_scheduling=config.async_scheduling, admission=admission
        )
        self._in_flight = BatchQueue(depth=2 if config.async_scheduling else 1)
        self._is_sleeping = False
        self._trace = None if config.profile is None else TraceRecorder(config.profile, self)
        self.structured_output = StructuredOutputManager(config, executor.vocab_size)

    def step(self) -> list[EngineOutput]:
        """Decide who computes how many tokens, have them computed, and take note of the results.

        With async scheduling the results are those of the step before, while the workers run the one decided on now.
        """
        outputs: list[EngineOutput] = []
        self._release_blocked_requests()
        while self._in_flight.has_room and self.scheduler.has_requests():
            step = self.scheduler.schedule()
            if step.is_empty:  # everybody waits: for a token in flight, for a grammar
                outputs += self.scheduler.update_from_output(step, ModelRunnerOutput())
                break
            token_masks = self.structured_output.start_masks(step, self.scheduler.requests)
            self._in_flight.put(step, self.executor.execute_model(step, token_masks))
        if self._in_flight:
            outputs += self.scheduler.update_from_output(*self._in_flight.take())
        self.scheduler.set_draft_token_ids(self.structured_output.jump_ahead(self.scheduler.running))
        return outputs

    def _release_blocked_requests(self) -> None:
        may_wait = not self.scheduler.running and not self._in_flight
        for request, error in self.structured_output.poll(may_wait):
            if error is None:
                self.scheduler.unblock_request(request.request_id)
            else:
                self.scheduler.fail_request(request.request_id, error)

    def add_request(self, request: EngineRequest) -> None:
        """Raises RequestError if the request cannot be taken."""
        self.admit_request(self.make_request(request))

    def make_request(self, engine_request: EngineRequest) -> Request:
        """The scheduler's state of a request, its prompt hashed. Touches nothing else: any thread may call it."""
        request = Request(engine_request)
        detection = request.sampling_params.repetition_detection
        if detection is not None:
            request.stop_conditions.append(RepetitionDetector(detection, request.sampling_params.min_tokens))
        # What an adapter holds is part of the hashes, and known once it is loaded.
        if self.config.cache.enable_prefix_caching and not request.skips_prefix_cache and request.lora is None:
            extend_block_hashes(request, self.config.cache.block_size)
        return request

    def admit_request(self, request: Request) -> None:
        """Queue what make_request returned, its adapter loaded. Raises RequestError."""
        if self._is_sleeping:
            raise RequestError("The engine is asleep: wake it up before sending requests.")
        if request.lora is not None:
            request.lora_digest = self._load_adapter(request.lora)
        self.scheduler.add_request(request)
        self.structured_output.prepare(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests; ids that are unknown or finished are ignored."""
        self.scheduler.abort_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def has_work(self) -> bool:
        """True while step() has something to do: also for steps in flight whose results nobody wants any more."""
        return self.scheduler.has_requests() or bool(self._in_flight)

    def stats(self) -> SchedulerStats:
        return self.scheduler.stats()

    def recent_steps(self, after: int) -> list[RecentStep]:
        """What the scheduler decided in the last steps, those with numbers above ``after``."""
        return self.scheduler.recent_steps(after)

    def num_recompilations(self) -> int:
        return self.executor.num_recompilations()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes. Returns False, and changes nothing, while requests hold blocks.

        Steps in flight need not be waited for: what they write for requests that have ended is never found again.
        """
        return self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Check requests, block tables and pool against each other. Raises RuntimeError that says what is wrong."""
        self.scheduler.check_integrity()

    def add_lora(self, name: str, path: str) -> None:
        """Have a LoRA adapter in memory before it is needed. Raises RequestError if it cannot be served."""
        self._load_adapter(LoRARequest(name, path))

    def remove_lora(self, name: str) -> bool:
        """Forget an adapter; False if it is not known. Raises RequestError while unfinished requests use it."""
        return self.adapters is not None and self.adapters.remove(name, self._adapters_in_use())

    def list_loras(self) -> list[tuple[str, str]]:
        """Name and path of all known adapters, least recently used first."""
        requests = [] if self.adapters is None else self.adapters.requests()
        return [(request.name, request.path) for request in requests]

    def _load_adapter(self, request: LoRARequest) -> str:
        if self.adapters is None:
            raise RequestError(f"The adapter {request.name!r} needs an engine that is started with enable_lora=True.")
        return self.adapters.add(request, self._adapters_in_use())

    def _adapters_in_use(self) -> set[str]:
        requests = self.scheduler.requests.values()
        return {request.lora.name for request in requests if request.lora is not None}

    # -- the model as a whole ------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the model: level 1 keeps the weights in host memory, level 2 drops them, to be read again.

        The KV cache and its prefixes are gone in both. Raises RequestError while requests are unfinished.
        """
        if level not in (1, 2):
            raise RequestError(f"The sleep level is {level!r}, but must be 1 (weights to the host) or 2 (drop them).")
        self._require_idle("sleep")
        self.executor.collective("sleep", level)
        self._is_sleeping = True

    def wake_up(self) -> None:
        """Undo sleep; an engine that is awake stays so. Raises ModelError, and goes on sleeping, if the weights cannot
        be read again."""
        if self._is_sleeping:
            self.executor.collective("wake_up")
            self._is_sleeping = False

    def is_sleeping(self) -> bool:
        return self._is_sleeping

    def update_weights(self, directory: str) -> None:
        """Replace the weights by those of a directory of safetensors files, and forget all cached prefixes.

        Raises RequestError while requests are unfinished, and ModelError for weights that are not those of this
        architecture; both change nothing.
        """
        self._require_idle("update_weights")
        self.executor.collective("take_weights_from", directory)
        # Old and new weights may not fit beside each other.
        self.sleep(level=2)
        try:
            self.wake_up()
        except ModelError:
            self.executor.collective("take_weights_from", None)
            self.wake_up()
            raise

    def start_profile(self, directory: str) -> None:
        """Let the workers record what PyTorch runs. Raises RequestError."""
        self.executor.collective("start_profile", directory)

    def stop_profile(self) -> list[str]:
        """Paths of the traces, one per worker. Raises RequestError if none is being recorded."""
        return self.executor.collective("stop_profile")

    def collective_rpc(self, method: str, args: list[Any]) -> list[Any]:
        """Call one of WORKER_METHODS on every worker; their results in order of rank. Raises RequestError."""
        if method not in WORKER_METHODS:
            known = ", ".join(sorted(WORKER_METHODS))
            raise RequestError(f"{method!r} cannot be called on the workers; known are: {known}.")
        return self.executor.collective(method, *args)

    def _require_idle(self, what: str) -> None:
        if self._is_sleeping:
            raise RequestError(f"{what} needs an engine that is awake: wake it up first.")
        if self.has_unfinished_requests():
            stats = self.stats()
            raise RequestError(
                f"{what} needs an idle engine, but {stats.num_running + stats.num_waiting} requests are unfinished: "
                "wait for them, or abort them."
            )
        while self.has_work():  # steps in flight, and the workers have not heard yet of everybody who finished
            self.step()
        self.reset_prefix_cache()

    def shutdown(self) -> None:
        if self._trace is not None:
            self._trace.stop()
        self.structured_output.shutdown()
        self.executor.shutdown()
