"""The engine core: schedule, execute, update.

Everything else is where the parts live and how they are reached;
what operators ask of it is in administration.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from minivllm.config import EngineConfig
from minivllm.distributed.lockstep import Lockstep
from minivllm.engine.background_builds import BackgroundBuilds
from minivllm.errors import RequestError
from minivllm.kv_cache.blocks.continuations import MIN_COPIED_TOKENS
from minivllm.kv_cache.blocks.hashing import extend_block_hashes
from minivllm.kv_cache.group_manager import make_group
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_transfer.connector import make_scheduler_side
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.lora.registry import AdapterAdmission, AdapterRegistry
from minivllm.messages import (
    EngineOutput,
    EngineRequest,
    LoRARequest,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from minivllm.multimodal.encodings import ANSWER_SECONDS, Encodings
from minivllm.multimodal.items import PixelTensors
from minivllm.profiling.spans import span, spanned
from minivllm.profiling.trace_recorder import TraceRecorder
from minivllm.request import Request
from minivllm.scheduler.scheduler import Scheduler
from minivllm.stop_conditions.repetition import RepetitionDetector
from minivllm.structured_output.manager import StructuredOutputManager

if TYPE_CHECKING:
    from minivllm.executor.protocol import Executor, PendingOutput


class EngineCore:
    """Owns the scheduler and the executor. One thread drives it.

    lockstep: with the engines that it shares experts with. is_asleep: the workers have no memory for requests
    (see Administration.sleep). adapters: None without LoRA.

    The steps in flight are handed to the workers, their results not consumed yet: one for each stage of a
    pipeline, and one more with async scheduling. (The batch queue of vLLM V1.) Blocks are safe to reuse for
    two reasons: results are consumed in the order of their schedules, and workers run their steps in order. A
    request may end while a later step still computes it. Its blocks are free at once. The next owner of such
    a block gets it in a step after that one, and writes its own keys and values over those that the late step
    left there. Blocks that a step copies are read before anything in it, or later, writes into them.
    """

    def __init__(self, config: EngineConfig, executor: Executor, lockstep: Lockstep | None = None) -> None:
        self.config = config
        self.executor = executor
        self._lockstep = lockstep
        # Drafts in flight may be rejected: until then a window begins where it would without them.
        longest_chunk = config.scheduler.longest_chunk + config.num_guesses
        kv_cache = KVCacheManager(
            [make_group(group, longest_chunk) for group in executor.kv_groups],
            max_model_len=config.scheduler.max_model_len,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            min_copied_tokens=MIN_COPIED_TOKENS if config.cache.reuse_partial_blocks else None,
        )
        self.adapters = None if config.lora is None else AdapterRegistry(config.lora, executor.collective)
        admission = None if config.lora is None else AdapterAdmission(config.lora.max_loras)
        self.encodings = None if config.images is None else Encodings(config.images)
        transfer = config.kv_transfer
        self._connector = make_scheduler_side(
            transfer, executor.kv_groups, executor.block_bytes, config.num_workers
        )
        self.scheduler = Scheduler(
            config.scheduler,
            kv_cache,
            async_scheduling=config.async_scheduling,
            num_guesses=config.num_guesses,
            connector=self._connector,
            load_failure_policy="recompute" if transfer is None else transfer.kv_load_failure_policy,
            admission=[policy for policy in (admission, self.encodings) if policy is not None],
            encodings=self.encodings,
        )
        self._connector.wake_with(lambda: executor.transfers.put(KVConnectorOutput()))
        self._is_stalled = False
        self._in_flight: deque[tuple[SchedulerOutput, PendingOutput]] = deque()
        self._max_in_flight = config.max_in_flight
        self.is_asleep = False
        collective = executor.collective if config.executor == "mp" else None
        self._trace = None
        if config.profile is not None:
            self._trace = TraceRecorder(config.profile, self, collective, config.worker_names)
        self.structured_output = StructuredOutputManager(config, executor.vocab_size)
        self._builds = BackgroundBuilds(executor.collective) if config.compile_in_background else None

    @spanned("step")
    def step(self, may_schedule: bool = True) -> list[EngineOutput]:
        """Decide who computes how many tokens, have them computed, and take note of the results.

        With async scheduling the results are those of the step before, while the workers run the one decided
        on now. may_schedule: False for a step of other engines only, see Lockstep.
        """
        outputs: list[EngineOutput] = []
        self.take_transfers()
        self.end_unanswered()
        if self.structured_output.blocked:
            self._release_blocked_requests()
        self.poll_builds()
        while may_schedule and len(self._in_flight) < self._max_in_flight and self.scheduler.has_requests():
            with span("schedule"):
                step = self.scheduler.schedule()
            # All requests wait: for a token in flight, a grammar, keys and values, or pixels.
            if not step.num_scheduled_tokens and step.is_empty:
                outputs += self._update(step, ModelRunnerOutput())
                is_loading = self.scheduler.loads.num_transfers > 0 or self._connector.is_asking
                is_loading = is_loading or (self.encodings is not None and self.encodings.is_missing)
                self._is_stalled = is_loading and not self._in_flight and not self.structured_output.blocked
                break
            is_guided = bool(self.structured_output.guided)
            self._dispatch(step, self.structured_output.start_masks(step) if is_guided else None)
        if self.is_behind and len(self._in_flight) < self._max_in_flight:
            self._dispatch(SchedulerOutput())
        if self._in_flight:
            with span("wait"):
                step, pending = self._in_flight.popleft()
                output = pending.result()
            outputs += self._update(step, output)
        if self.structured_output.guided:
            self.scheduler.set_draft_token_ids(self.structured_output.jump_ahead())
        return outputs

    @property
    def is_building(self) -> bool:
        """Whether code is being compiled in the background, which ``poll_builds`` has to look at."""
        return self._builds is not None and not self._builds.are_done and not self.is_asleep

    def poll_builds(self) -> None:
        """Change over to compiled code once it is there; between two steps."""
        if self._builds is not None and not self.is_asleep:
            self._builds.poll()

    def _dispatch(self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None) -> None:
        if self._lockstep is not None:
            self._lockstep.begin()
        with span("dispatch", step):
            self._in_flight.append((step, self.executor.execute_model(step, token_masks)))

    @property
    def is_behind(self) -> bool:
        """Whether engines that share experts with this one have begun a step in which it must take part."""
        return self._lockstep is not None and not self.is_asleep and self._lockstep.is_behind

    def settle(self, for_good: bool = False) -> None:
        """Wait until no engine that shares experts with this one has a step in flight; see Lockstep."""
        if self._lockstep is not None:
            self._lockstep.settle(lambda: self.step(may_schedule=False), for_good)

    @spanned("output")
    def _update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> list[EngineOutput]:
        return self.scheduler.update_from_output(step, output)

    def listen(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, from any thread, when others make a step necessary:
        keys and values, or engines."""
        if self.config.kv_transfer is not None:
            self.executor.transfers.wake = wake
        if self._lockstep is not None:
            self._lockstep.listen(wake)

    def take_transfers(self, may_wait: bool = False) -> None:
        """Take in what connectors report.
        may_wait: there is nothing to do before the next report, so wait for it."""
        if self._connector.is_connected:
            has_reason = self._is_stalled or self.scheduler.loads.num_transfers > 0
            for report in self.executor.transfers.take(may_wait and has_reason):
                self.scheduler.update_connector_output(report)
                self._is_stalled = False

    def drain_transfers(self) -> None:
        """Wait until nothing is under way.
        Connectors end every transfer, by a deadline of their own if need be."""
        while self.scheduler.loads.num_transfers:
            self.take_transfers(may_wait=True)

    def _release_blocked_requests(self) -> None:
        may_wait = not self.scheduler.running and not self._in_flight and not self.is_behind
        for request, error in self.structured_output.poll(may_wait):
            if error is None:
                self.scheduler.unblock_request(request.request_id)
            else:
                self.scheduler.fail_request(request.request_id, error)

    def add_request(self, request: EngineRequest) -> None:
        """Raises RequestError if the request cannot be taken."""
        self.admit_request(self.make_request(request))

    def make_request(self, engine_request: EngineRequest) -> Request:
        """The scheduler's state of a request, its prompt hashed.
        Touches nothing else: any thread may call it."""
        request = Request(engine_request)
        detection = request.sampling_params.repetition_detection
        if detection is not None:
            request.stop_conditions.append(RepetitionDetector(detection, request.sampling_params.min_tokens))
        # What an adapter holds is part of the hashes, and known once it is loaded.
        if (
            self.config.cache.enable_prefix_caching
            and not request.skips_prefix_cache
            and engine_request.lora is None
        ):
            extend_block_hashes(request, self.scheduler.kv_cache_manager.hash_block_size)
        return request

    def admit_request(self, request: Request) -> None:
        """Queue what make_request returned, its adapter loaded. Raises RequestError."""
        if self.is_asleep:
            raise RequestError("The engine is asleep: wake it up before sending requests.")
        if request.engine_request.lora is not None:
            request.lora_digest = self.load_adapter(request.engine_request.lora)
        if request.images and self.encodings is None:
            raise RequestError(f"The request has images. {self.config.no_images}")
        self._is_stalled = False
        self.scheduler.add_request(request)
        self.structured_output.prepare(request)
        if self.encodings is not None and request.images and not request.is_finished:
            num_at_hand = self.scheduler.num_tokens_at_hand(request)
            if num_at_hand is not None:  # else the scheduler asks when it cannot go on without an image
                self.encodings.want(request, num_at_hand)

    def ask_for_pixels(self, ask: Callable[[list[bytes]], None]) -> None:
        """Have ``ask`` called with the digests of images whose pixels are missing;
        ``take_pixels`` gets the answers."""
        if self.encodings is not None:
            self.encodings.ask = ask

    def take_pixels(self, pixels: PixelTensors) -> None:
        """The pixels of an image, or why there are none, which ends the requests with it."""
        if self.encodings is None:
            return
        self._is_stalled = False
        error = self.encodings.take_pixels(pixels)
        if error is not None:
            self._end_those_without(pixels.digest, error)

    @property
    def pixel_seconds_left(self) -> float | None:
        """After which ``end_unanswered`` has something to do; None if no pixels are asked for."""
        return None if self.encodings is None else self.encodings.seconds_left

    def end_unanswered(self) -> None:
        """End the requests whose pixels the frontend did not send in time."""
        if self.encodings is None:
            return
        for digest in self.encodings.take_unanswered():
            self._is_stalled = False
            self._end_those_without(
                digest, f"The pixels of an image did not arrive within {ANSWER_SECONDS:g} s: send it again."
            )

    def _end_those_without(self, digest: bytes, error: str) -> None:
        """Requests that have computed an image, find it in the prefix cache or can load it, need no pixels of
        it; one of which that is not known yet will ask once more."""

        def needs(request: Request) -> bool:
            end = max([image.end for image in request.images if image.digest == digest], default=0)
            at_hand = request.num_computed_tokens or (end and self.scheduler.num_tokens_at_hand(request))
            return at_hand is not None and end > at_hand

        self.scheduler.give_up(list(filter(needs, self.scheduler.requests.values())), error)

    def abort_requests(self, request_ids: list[str]) -> None:
        """Abort requests; ids that are unknown or finished are ignored."""
        self._is_stalled = False
        self.scheduler.abort_requests(request_ids)

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished_requests()

    def has_work(self) -> bool:
        """True while step() has something to do, also if only steps in flight of aborted requests are left.

        False while all requests wait for keys and values: ``executor.transfers`` wakes the engine when they
        arrive.
        """
        return (
            (self.scheduler.has_requests() and not self._is_stalled)
            or bool(self._in_flight)
            or self.is_behind
        )

    def load_adapter(self, adapter: LoRARequest) -> str:
        """Have an adapter in memory; the digest of what it holds.
        Raises RequestError if it cannot be served."""
        if self.adapters is None:
            raise RequestError(
                f"The adapter {adapter.name!r} needs an engine that is started with enable_lora=True."
            )
        return self.adapters.add(adapter, self.adapters_in_use())

    def adapters_in_use(self) -> set[str]:
        """Names of the adapters of unfinished requests."""
        loras = (request.engine_request.lora for request in self.scheduler.requests.values())
        return {lora.name for lora in loras if lora is not None}

    def use_fingerprint(self, fingerprint: str) -> None:
        """The model has other weights: from now on connectors keep their blocks apart from those of the old
        ones."""
        transfer = self.config.kv_transfer
        if transfer is not None and transfer.fingerprint != fingerprint:
            self.config = replace(self.config, kv_transfer=replace(transfer, fingerprint=fingerprint))
            self._connector.new_weights(fingerprint)
            self.executor.collective("new_weights", fingerprint)

    def shutdown(self) -> None:
        if self._trace is not None:
            self._trace.stop()
        self.structured_output.shutdown()
        self._connector.shutdown()
        self.executor.shutdown()
