"""The scheduler: decides in each step how many tokens are computed for each request.

It does not distinguish prefill from decode. Each step computes tokens that are known (the prompt and the
answer so far) but not yet in the KV cache, and drafts that follow them. A new token is sampled for each
request whose known tokens are then all computed. (vLLM V1's unified scheduler, with the chunked prefill of
Sarathi-Serve.)

A request is admitted only if the cache has free blocks for all its known tokens, and for what the prompts in
progress still need. Otherwise a long prompt could start over again and again: it fills the cache chunk by
chunk, is preempted as the newest request, and at once finds room for its first chunk. With this rule, memory
runs out only because answers grow. vLLM checks the whole prompt too (``scheduler_reserve_full_isl``, on by
default), but not what the other prompts in progress need. That matters if long_prefill_token_threshold lets
several prompts run side by side.

The stages of a pipeline compute different requests at the same time. With several stages, each step samples
for at most its share of the running requests, and spends at most its share of the budget on prompts.
Otherwise one step would take all requests, and all stages but one would be idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from minivllm.config import KVLoadFailurePolicy, SchedulerConfig
from minivllm.errors import RequestError
from minivllm.kv_cache.coordinator import Prefix
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_transfer.connector import KVConnectorScheduler
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.remote_loads import RemoteLoads
from minivllm.messages import (
    UNKNOWN,
    BlockIds,
    CachedRequestData,
    EngineOutput,
    EventType,
    ModelRunnerOutput,
    NewRequestData,
    PositionLogprobs,
    RecentStep,
    SchedulerOutput,
    SchedulerStats,
)
from minivllm.multimodal.encodings import Encodings
from minivllm.request import Request, RequestStatus
from minivllm.scheduler.admission import AdmissionPolicy, reason_to_refuse
from minivllm.scheduler.drafting_stats import DraftingStats
from minivllm.scheduler.policy import SchedulingPolicy, make_policy
from minivllm.scheduler.steps.stage_share import stage_share
from minivllm.scheduler.steps.step_plan import InFlightStep, StepPlan, StepTurns
from minivllm.stop_conditions.stopping import append_until_stop

NUM_RECENT_STEPS = 256
"""Steps that are kept for the page and for ``/live``."""


class Scheduler:
    """Owns every request between its arrival and its last output.

    ``schedule`` and ``update_from_output`` take turns. With several steps in flight, ``schedule`` may be
    called again before the results are there; results must come back in the order of the schedules.

    async_scheduling: schedule the next token of a request while its last one is still unknown; the workers
    read that one from device memory.
    num_guesses: with async_scheduling, drafts of each request that the workers guess after every step and
    keep. The next step is scheduled as if all of them were accepted. Requests whose next token depends on the
    last ones in other ways than through the model wait for these, and get no drafts. 0: drafts come with
    results.
    connector: by default no keys and values are transferred.
    load_failure_policy: see KVTransferConfig.
    admission: asked about each waiting request, in this order.
    policy: by default the one that ``config.policy`` names.
    encodings: the encoder cache, for a model that reads images.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache_manager: KVCacheManager,
        *,
        async_scheduling: bool = False,
        num_guesses: int = 0,
        connector: KVConnectorScheduler | None = None,
        load_failure_policy: KVLoadFailurePolicy = "recompute",
        admission: Sequence[AdmissionPolicy] = (),
        policy: SchedulingPolicy | None = None,
        encodings: Encodings | None = None,
    ) -> None:
        self.config = config
        self.kv_cache_manager = kv_cache_manager
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.policy = policy or make_policy(config.policy)
        self.waiting = self.policy.make_queue()
        self._async_scheduling = async_scheduling
        self._num_guesses = num_guesses
        self._connector = connector or KVConnectorScheduler()
        self._load_failure_policy = load_failure_policy
        self.loads = RemoteLoads(kv_cache_manager, self._connector)
        if self._connector.is_connected:
            kv_cache_manager.watch_full_blocks()
        self._admission = admission
        self._encodings = encodings
        self._in_flight: deque[InFlightStep] = deque()
        self._finished_request_ids: dict[str, None] = {}
        self._refused: list[EngineOutput] = []
        self._rolled_back: set[str] = set()
        self._num_prompt_logprobs: dict[str, int] = {}
        self._num_preemptions = 0
        self._num_steps = 0
        self._num_computed_tokens = 0
        self._expected_attention_seconds = self._measured_attention_seconds = 0.0
        self._drafting = DraftingStats()
        self._recent_steps: deque[RecentStep] = deque(maxlen=NUM_RECENT_STEPS)

    def add_request(self, request: Request) -> None:
        """Queue a request. One with status BLOCKED also waits for unblock_request.

        A request that can never fit ends at once: the next update_from_output returns its output, with
        finish_reason ERROR. Raises RequestError if a request of this id is unfinished.
        """
        if request.request_id in self.requests or self.loads.is_sending(request.request_id):
            raise RequestError(
                f"Request id {request.request_id!r} is in use by an unfinished request; choose another."
            )
        request.record_event(EventType.QUEUED)
        error = reason_to_refuse(request, self.config.max_model_len, self.kv_cache_manager.room)
        if error is not None:
            self._refuse(request, error)
            return
        # From here on max_tokens is the only limit: no sequence grows beyond max_model_len.
        request.max_tokens = min(request.max_tokens, self.config.max_model_len - request.num_prompt_tokens)
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def num_tokens_at_hand(self, request: Request) -> int | None:
        """Tokens of a waiting request that need not be computed as things are: cached ones, and those after
        them that the connector has. None: the connector cannot say yet."""
        hits, num_cached = self.kv_cache_manager.get_computed_blocks(request)
        num_remote = self.loads.num_tokens(request, num_cached)
        if num_remote is None:
            return None
        if num_remote:
            return num_cached + num_remote
        return self.kv_cache_manager.continue_prefix(request, hits, num_cached).num_tokens

    def unblock_request(self, request_id: str) -> None:
        """Let a BLOCKED request run. Unknown ids (aborted in the meantime) are ignored."""
        request = self.requests.get(request_id)
        if request is not None and request.status is RequestStatus.BLOCKED:
            request.status = RequestStatus.WAITING

    def fail_request(self, request_id: str, error: str) -> None:
        """End a BLOCKED request; the next update_from_output returns its output, with finish_reason ERROR."""
        request = self.requests.get(request_id)
        if request is not None and request.status is RequestStatus.BLOCKED:
            self.waiting.remove(request)
            del self.requests[request_id]
            self._refuse(request, error)

    def give_up(self, requests: Iterable[Request], error: str) -> None:
        """End requests in any status; the next update_from_output returns their outputs, with finish_reason
        ERROR."""
        for request in requests:
            self.abort_requests([request.request_id])
            request.status = RequestStatus.FINISHED_ERROR
            self._refuse(request, error)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests in any status; they give no further output. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            elif request_id not in self.loads.waiting:
                self.waiting.remove(request)
            self._finish(request, RequestStatus.FINISHED_ABORTED)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Process a connector's report. A request whose load has ended goes to the head of the queue. If keys
        and values did not arrive, they are computed or the request ends, according to
        load_failure_policy."""
        for request, is_whole in reversed(self.loads.end(output)):
            if is_whole or self._load_failure_policy == "recompute":
                self.waiting.prepend(request)
                continue
            request.error = (
                "Keys and values of the prompt did not arrive, and kv_load_failure_policy is 'fail'."
            )
            self._finish(request, RequestStatus.FINISHED_ERROR)
            self._refuse(request, request.error)

    def set_draft_token_ids(self, draft_token_ids: dict[str, list[int]]) -> None:
        """Set the drafts that the next step verifies: guesses of the tokens after the last known one.

        Dropped for a request that is not running, or that has a token in flight which the drafts do not
        follow.
        """
        for request_id, token_ids in draft_token_ids.items():
            request = self.requests.get(request_id)
            if (
                request is not None
                and request.status is RequestStatus.RUNNING
                and request.num_computed_tokens == request.num_tokens - 1
            ):
                mask = request.token_mask
                request.draft_token_ids = (
                    list(token_ids) if mask is None else mask.valid_drafts(list(token_ids))
                )

    def schedule(self) -> SchedulerOutput:
        """Plan one step: running requests first, then waiting ones unless one was preempted, unless the
        policy decides otherwise."""
        budget = self.config.max_num_batched_tokens
        plan = StepPlan(budget, chunk_budget=-(-budget // self.config.num_stages))
        turns = StepTurns(
            plan,
            serve_running=self._serve_running,
            admit_waiting=self._admit_waiting,
            cached_tokens=self.kv_cache_manager.num_cached_tokens,
            has_seats=lambda: len(self.running) < self._num_seats,
        )
        self.policy.take_turns(turns)
        return self._send(plan)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineOutput]:
        """Process the results of the oldest step in flight; returns the new outputs of its requests.

        Called after every schedule(), also after one that scheduled no tokens, since it also returns the
        outputs of refused requests. Raises RuntimeError if results are missing or come out of order.
        """
        outputs, self._refused = self._refused, []
        if not scheduler_output.num_scheduled_tokens:
            return outputs
        step = self._in_flight.popleft() if self._in_flight else None
        if step is None or step.output is not scheduler_output:
            raise RuntimeError("Results must be consumed in the order of their schedules, each once.")
        self._expected_attention_seconds += model_runner_output.expected_attention_seconds
        self._measured_attention_seconds += model_runner_output.measured_attention_seconds
        sampled = model_runner_output.sampled_token_ids
        logprobs, pooled = model_runner_output.logprobs, model_runner_output.pooled
        num_scheduled = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.draft_token_ids
        any_finished = False
        for request in step.requests:
            status = request.status
            if status is not RequestStatus.RUNNING and status is not RequestStatus.PREEMPTED:
                continue
            request_id = request.request_id
            prompt_logprobs = None
            if request_id in step.prompt_logprob_starts:
                prompt_logprobs = self._new_prompt_logprobs(step, request_id, model_runner_output)
            if pooled and request_id in pooled:
                any_finished = True
                outputs.append(self._finish_pooled(request, pooled[request_id], prompt_logprobs))
                continue
            token_ids = sampled.get(request_id)
            if token_ids:
                request.num_output_placeholders -= 1
                if drafts and request_id in drafts:
                    num_drafts = len(drafts[request_id])
                    self._drafting.record(num_drafts, len(token_ids) - 1)
                    request.num_unsure_tokens -= num_drafts
                    if status is RequestStatus.RUNNING:
                        self._roll_back(request, num_scheduled[request_id], len(token_ids))
                new_token_ids = append_until_stop(request, token_ids)
                position_logprobs = logprobs.get(request_id) if logprobs else None
                output = EngineOutput(
                    request_id=request_id,
                    new_token_ids=new_token_ids,
                    logprobs=None if position_logprobs is None else position_logprobs[: len(new_token_ids)],
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=request.num_cached_tokens or 0,
                )
                if request.status is not status:
                    if status is RequestStatus.PREEMPTED:
                        self.waiting.remove(request)
                    any_finished = True
                    self._finish(request, request.status)
                    output.finish_reason = request.finish_reason
                    output.stop_reason, output.error = request.stop_reason, request.error
                if request.events:
                    output.events = request.take_events()
                outputs.append(output)
            elif request_id not in step.unfinished_prompts:
                raise RuntimeError(
                    f"The workers returned no token for {request_id}, whose known tokens are computed."
                )
            elif prompt_logprobs:
                outputs.append(
                    EngineOutput(
                        request_id=request_id,
                        prompt_logprobs=prompt_logprobs,
                        num_cached_tokens=request.num_cached_tokens or 0,
                        events=request.take_events(),
                    )
                )
        if any_finished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        if model_runner_output.draft_token_ids:
            self.set_draft_token_ids(model_runner_output.draft_token_ids)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """True while a request waits for output."""
        return bool(self.requests or self._refused)

    def has_requests(self) -> bool:
        """True while the next step has something to do: for unfinished requests, or to tell the workers
        which ones have finished."""
        return bool(self.requests or self._refused or self._finished_request_ids)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.loads.waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            kv_cache_pools=self.kv_cache_manager.pool_stats(),
            prefix_cache_queried_tokens=self.kv_cache_manager.prefix_cache_queried_tokens,
            prefix_cache_hit_tokens=self.kv_cache_manager.prefix_cache_hit_tokens,
            prefix_cache_copied_tokens=self.kv_cache_manager.prefix_cache_copied_tokens,
            num_preemptions=self._num_preemptions,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_drafts=self._drafting.num_drafts,
            num_draft_tokens=self._drafting.num_draft_tokens,
            num_accepted_tokens=sum(self._drafting.num_accepted_per_position),
            num_accepted_tokens_per_position=list(self._drafting.num_accepted_per_position),
            kv_transfer=self.loads.stats() if self._connector.is_connected else [],
            expected_attention_seconds=self._expected_attention_seconds,
            measured_attention_seconds=self._measured_attention_seconds,
        )

    def recent_steps(self, after: int) -> list[RecentStep]:
        """The kept steps with numbers above ``after``."""
        return [step for step in self._recent_steps if step.step > after]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, and the blocks that a connector keeps in this process. Does nothing and
        returns False while a request or a load holds blocks."""
        if self.loads.num_transfers or not self.kv_cache_manager.reset_prefix_cache():
            return False
        self._connector.reset_cache()
        return True

    def check_integrity(self) -> None:
        """Check requests against block tables and pool, between steps.
        Raises RuntimeError that says what is wrong."""
        self.kv_cache_manager.check_integrity(self.running, self.loads.held())
        if len(self.running) + len(self.waiting) + len(self.loads.waiting) != len(self.requests):
            raise RuntimeError("Scheduler integrity: a request is neither running nor waiting, or both.")
        if self._encodings is not None:
            self._encodings.check_integrity({request.request_id for request in self.running})

    # -- one step ----------------------------------------------------------------------------------

    @property
    def _num_seats(self) -> int:
        return self.config.max_num_seqs - len(self.loads.waiting)

    def _serve_running(self, plan: StepPlan) -> None:
        running = self.running
        threshold, lookahead = self.config.long_prefill_token_threshold, self.config.num_lookahead_tokens
        allocate_slots, cut_chunk = self.kv_cache_manager.allocate_slots, self.kv_cache_manager.cut_chunk
        no_block_ids = self.kv_cache_manager.no_block_ids
        rolled_back, scheduled = self._rolled_back, frozenset(plan.num_scheduled_tokens)
        share, busy = len(running), frozenset[str]()
        if self.config.num_stages > 1:
            share, busy = stage_share(running, self._in_flight, self.config.num_stages)
        index = 0
        while index < len(running) and plan.budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_new = len(request.all_token_ids) - num_computed
            if self._async_scheduling and not self._waits(request):
                num_new += request.num_output_placeholders
                if self._num_guesses:  # drafts in flight are counted on
                    num_new += request.num_unsure_tokens
            is_decode = num_new == 1
            if request.draft_token_ids:
                num_new += len(request.draft_token_ids)
            if num_new != 1:
                num_new = min(num_new, plan.budget, plan.chunk_budget)
                if 0 < threshold < num_new:
                    num_new = threshold
                num_new = cut_chunk(request, num_computed, num_new)
            if request.images and num_computed < request.num_prompt_tokens and self._encodings is not None:
                num_new = self._encodings.cut_chunk(request, num_computed, num_new)
            # The last token of a sequence is never computed, so neither drafts nor placeholders may reach it.
            num_left = request.num_prompt_tokens + max(request.max_tokens, 1) - 1 - num_computed
            num_new = min(num_new, num_left)
            comes_later = is_decode and (share == 0 or request.request_id in busy)
            if num_new <= 0 or comes_later or request.request_id in scheduled:
                # Its next token is in flight, or it was served already, or another stage's share comes first.
                index += 1
                continue

            num_ahead = min(lookahead, num_left - num_new) if lookahead else 0
            if num_computed + num_new + num_ahead <= request.num_settled_slots:
                new_block_ids: BlockIds | None = no_block_ids
            else:
                new_block_ids = allocate_slots(request, num_new, num_lookahead_tokens=num_ahead)
            if new_block_ids is None and scheduled:  # a step that admits requests preempts none
                index += 1
                continue
            while new_block_ids is None:
                position = self.policy.choose_victim(running)
                victim = running[position]
                self._preempt(victim, position, plan)
                if victim is request:
                    break
                if position < index:
                    index -= 1
                new_block_ids = allocate_slots(request, num_new, num_lookahead_tokens=num_ahead)
            if new_block_ids is None:
                continue  # the request itself was preempted, and the next one has its index

            plan.add(request, num_new)
            share -= is_decode
            if new_block_ids is not no_block_ids or (rolled_back and request.request_id in rolled_back):
                plan.differences[request.request_id] = CachedRequestData(
                    request_id=request.request_id,
                    new_block_ids=new_block_ids,
                    num_computed_tokens=num_computed,
                )
            if request.draft_token_ids:
                self._plan_drafts(request, num_new, plan)
            index += 1

    def _admit_waiting(self, plan: StepPlan) -> None:
        waiting, manager = self.waiting, self.kv_cache_manager
        set_aside: list[Request] = []
        promised: list[int] | None = None
        seats = self._num_seats
        if waiting:
            for policy in self._admission:
                policy.begin_step()
        while waiting and min(plan.budget, plan.chunk_budget) > 0 and len(self.running) < seats:
            request = waiting.peek()
            if request.status is RequestStatus.BLOCKED or request.num_output_placeholders:
                # A preempted request with a token in flight must know that token before it starts over.
                set_aside.append(waiting.pop())
                continue
            if not all(policy.may_run(request, self.running) for policy in self._admission):
                set_aside.append(waiting.pop())
                continue
            hits, num_computed = manager.get_computed_blocks(request)
            num_remote = self.loads.num_tokens(request, num_computed)
            if num_remote is None:
                set_aside.append(waiting.pop())
                continue
            if promised is None:
                promised = self._num_promised_blocks(plan)
            if num_remote:
                if not self.loads.begin(request, hits, num_computed, num_remote, promised):
                    break
                waiting.pop()
                seats, promised = seats - 1, self._num_promised_blocks(plan)
                continue
            prefix = manager.continue_prefix(request, hits, num_computed)
            if not request.has_waited_for_prefix and manager.is_worth_waiting(request, hits, prefix):
                request.has_waited_for_prefix = True
                set_aside.append(waiting.pop())
                continue
            is_admitted = self._join(request, prefix, promised, plan)
            if is_admitted is None:
                set_aside.append(waiting.pop())
                continue
            if not is_admitted and prefix.sources:  # copying may take a block more
                is_admitted = self._join(request, Prefix(hits, num_computed), promised, plan)
            if not is_admitted:
                break
            promised = [sum(counts) for counts in zip(promised, manager.num_missing_blocks(request))]
            waiting.pop()
        for request in reversed(set_aside):
            waiting.prepend(request)

    def _join(self, request: Request, prefix: Prefix, promised: list[int], plan: StepPlan) -> bool | None:
        """Admit a waiting request with its cached prefix. Returns False and changes nothing if there is no
        room besides the promised blocks. Returns None if its next token belongs to an image that cannot be
        encoded yet."""
        manager, num_computed = self.kv_cache_manager, prefix.num_tokens
        threshold = self.config.long_prefill_token_threshold
        num_new = min(request.num_tokens - num_computed, plan.budget, plan.chunk_budget)
        if 0 < threshold < num_new:
            num_new = threshold
        num_new = manager.cut_chunk(request, num_computed, num_new)
        if request.images and num_computed < request.num_prompt_tokens and self._encodings is not None:
            num_new = self._encodings.cut_chunk(request, num_computed, num_new)
            if num_new == 0:
                self._encodings.release(request)
                return None
        room = manager.allocate_slots(
            request,
            num_new,
            num_computed,
            prefix.blocks,
            num_reserved_blocks=promised,
            sources=prefix.sources,
        )
        if room is None:
            self._release_images(request)
            return False
        self._admit(request, num_computed, manager.get_block_ids(request.request_id), plan)
        plan.add(request, num_new)
        plan.block_copies += manager.block_copies(request, prefix)
        return True

    def _num_promised_blocks(self, plan: StepPlan) -> list[int]:
        """Blocks of each KV group that the prompts in progress will take after this step."""
        promised = [
            self.kv_cache_manager.num_missing_blocks(request)
            for request in self.running
            if request.num_computed_tokens + plan.num_scheduled_tokens.get(request.request_id, 0)
            < request.num_tokens
        ]
        promised += self.loads.num_promised_blocks()
        return [sum(counts) for counts in zip([0] * len(self.kv_cache_manager.pools), *promised)]

    def _admit(self, request: Request, num_computed_tokens: int, block_ids: BlockIds, plan: StepPlan) -> None:
        """Let a waiting request run, and add what the workers need to know to the plan."""
        request_id = request.request_id
        request.num_computed_tokens = num_computed_tokens
        if request.status is RequestStatus.PREEMPTED:
            plan.differences[request_id] = CachedRequestData(
                request_id=request_id,
                new_block_ids=block_ids,
                num_computed_tokens=num_computed_tokens,
                resumed=True,
            )
        else:
            request.num_cached_tokens = num_computed_tokens
            plan.new_requests.append(
                NewRequestData(
                    request=request.engine_request,
                    block_ids=block_ids,
                    num_computed_tokens=num_computed_tokens,
                )
            )
        request.status = RequestStatus.RUNNING
        request.record_event(EventType.SCHEDULED)
        self.running.append(request)

    def _preempt(self, request: Request, position: int, plan: StepPlan) -> None:
        """Free a running request's blocks. It starts over later, mostly from the prefix cache."""
        del self.running[position]
        plan.take_back(request)
        plan.preempted.append(request.request_id)
        self.kv_cache_manager.free(request)
        self._release_images(request)
        request.num_computed_tokens = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.record_event(EventType.PREEMPTED)
        self._rolled_back.discard(request.request_id)
        self._num_preemptions += 1
        self.waiting.prepend(request)

    def _release_images(self, request: Request) -> None:
        if request.images and self._encodings is not None:
            self._encodings.release(request)

    def _plan_drafts(self, request: Request, num_new_tokens: int, plan: StepPlan) -> None:
        """Send the drafts that fit into this step after the known tokens; drop the rest."""
        num_before = request.num_tokens + request.num_output_placeholders + request.num_unsure_tokens
        num_drafts = request.num_computed_tokens + num_new_tokens - num_before
        if num_drafts > 0:
            plan.drafts[request.request_id] = request.draft_token_ids[:num_drafts]

    def _waits(self, request: Request) -> bool:
        """Whether the last token of a request must be known before its next one is scheduled: a mask depends
        on it, or edits of the logits do, for which a step with drafts would wait."""
        return request.token_mask is not None or (self._num_guesses > 0 and request.edits_logits)

    def _expect_guesses(self, request: Request) -> int:
        """Let the next step verify what the workers guess after this one, as far as it can become tokens."""
        last = request.num_prompt_tokens + request.max_tokens - 1
        count = max(0, min(self._num_guesses, last - request.num_computed_tokens - 1))
        request.draft_token_ids = [UNKNOWN] * count
        return count

    def _send(self, plan: StepPlan) -> SchedulerOutput:
        """Make the plan final: computed counts advance as if the step had already run."""
        self.kv_cache_manager.settle()
        forget, encode = (
            ([], []) if self._encodings is None else self._encodings.take_step(plan.num_scheduled_tokens)
        )
        transfers, num_guesses = None, dict[str, int]()
        if self._connector.is_connected:
            transfers = self._connector.build_connector_meta(self.kv_cache_manager.take_full_blocks())
        output = SchedulerOutput(
            num_scheduled_tokens=plan.num_scheduled_tokens,
            block_copies=plan.block_copies,
            new_requests=plan.new_requests,
            cached_requests=list(plan.differences.values()),
            draft_token_ids=plan.drafts,
            num_guesses=num_guesses,
            finished_request_ids=list(self._finished_request_ids),
            preempted_request_ids=plan.preempted,
            kv_connector_metadata=transfers,
            forget=forget,
            encode=encode,
        )
        self._finished_request_ids = {}
        if plan.differences and self._rolled_back:
            self._rolled_back.difference_update(plan.differences)
        unfinished_prompts: set[str] = set()
        prompt_logprob_starts: dict[str, int] = {}
        for request, num_tokens in zip(plan.requests, plan.num_scheduled_tokens.values()):
            num_computed = request.num_computed_tokens
            params = request.sampling_params
            if num_computed < request.num_prompt_tokens and params.prompt_logprobs is not None:
                prompt_logprob_starts[request.request_id] = max(
                    num_computed, params.prompt_logprobs_start - 1
                )
            request.num_computed_tokens = num_computed = num_computed + num_tokens
            if request.draft_token_ids:
                request.draft_token_ids = []
            if num_computed < len(request.all_token_ids):
                unfinished_prompts.add(request.request_id)
            else:
                request.num_output_placeholders += 1
                if plan.drafts:
                    request.num_unsure_tokens += len(plan.drafts.get(request.request_id, ()))
                if self._num_guesses and not self._waits(request):
                    num_guesses[request.request_id] = self._expect_guesses(request)
        if plan.requests:
            self._num_steps += 1
            self._num_computed_tokens += self.config.max_num_batched_tokens - plan.budget
            self._in_flight.append(
                InFlightStep(output, plan.requests, unfinished_prompts, prompt_logprob_starts)
            )
            self._recent_steps.append(
                RecentStep(
                    step=self._num_steps,
                    num_scheduled_tokens=output.num_scheduled_tokens,
                    unfinished_prompts=unfinished_prompts,
                    preempted=output.preempted_request_ids,
                    loading=list(self.loads.waiting),
                )
            )
        return output

    # -- results and ends --------------------------------------------------------------------------

    def _roll_back(self, request: Request, num_scheduled: int, num_sampled: int) -> None:
        """Take back the computed count of rejected drafts: of 1 + k scheduled tokens, ``num_sampled`` led to
        a token."""
        num_rejected = num_scheduled - num_sampled
        if num_rejected > 0:
            request.num_computed_tokens -= num_rejected
            if not request.num_output_placeholders:  # else the workers know better by now
                self._rolled_back.add(request.request_id)

    def _new_prompt_logprobs(
        self, step: InFlightStep, request_id: str, results: ModelRunnerOutput
    ) -> list[PositionLogprobs] | None:
        """Prompt logprobs that were not returned yet: a preempted request computes the first ones again."""
        entries = results.prompt_logprobs.get(request_id)
        if not entries:
            return None
        start = step.prompt_logprob_starts[request_id]
        num_delivered = self._num_prompt_logprobs.get(request_id, 0)
        self._num_prompt_logprobs[request_id] = max(num_delivered, start + len(entries))
        return entries[max(0, num_delivered - start) :] or None

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """Free a request's blocks and state. The caller removes it from ``running`` or ``waiting``."""
        request.status = status
        request.record_event(EventType.FINISHED)
        self.loads.finish(request)
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        if request.images and self._encodings is not None:
            self._encodings.finish(request, self.requests.values())
        self._finished_request_ids[request.request_id] = None
        self._rolled_back.discard(request.request_id)
        self._num_prompt_logprobs.pop(request.request_id, None)

    def _finish_pooled(
        self, request: Request, vector: list[float], prompt_logprobs: list[PositionLogprobs] | None
    ) -> EngineOutput:
        """End a pooling request, whose vector is computed."""
        if request.status is RequestStatus.PREEMPTED:
            self.waiting.remove(request)
        self._finish(request, RequestStatus.FINISHED_STOPPED)
        return EngineOutput(
            request_id=request.request_id,
            finish_reason=request.finish_reason,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=request.num_cached_tokens or 0,
            events=request.take_events(),
            pooled=vector,
        )

    def _refuse(self, request: Request, error: str) -> None:
        if not request.is_finished:
            request.status = RequestStatus.FINISHED_ERROR
            request.record_event(EventType.FINISHED)
        self._refused.append(
            EngineOutput(
                request_id=request.request_id,
                finish_reason=request.finish_reason,
                error=error,
                events=request.take_events(),
            )
        )
