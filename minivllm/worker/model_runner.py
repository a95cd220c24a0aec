"""Runs steps on one device: follow the scheduler's differences, build inputs, run the model, sample."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.attention.registry import AttentionFactory
from minivllm.batch.layer_caches import too_large
from minivllm.batch.paged_model import PagedModel, RunnerLimits
from minivllm.batch.persistent_batch import PersistentBatch
from minivllm.batch.step_inputs import Row, StepInputs, scheduled_rows
from minivllm.batch.true_lengths import TrueLengths
from minivllm.compilation.compiler import RegionCompiler
from minivllm.config import CudaGraphMode, SpeculativeConfig
from minivllm.device.buffers import ReadBack, to_device
from minivllm.device.policy import DevicePolicy
from minivllm.distributed.stage import Stage
from minivllm.graphs.graph_capture import GraphBackend
from minivllm.graphs.step_graphs import StepGraphs, StepHidden
from minivllm.kv_cache.specs import total_bytes
from minivllm.linear.methods.method import forget_uncompiled_copies
from minivllm.lora.manager import AdapterManager, BatchAdapters
from minivllm.messages import (
    UNKNOWN,
    BlockCopy,
    EngineRequest,
    ModelRunnerOutput,
    PositionLogprobs,
    SchedulerOutput,
    TokenMasks,
)
from minivllm.models.model import Model
from minivllm.multimodal.eyes.encoded_images import EncodedImages
from minivllm.profiling.spans import span, spanned
from minivllm.sampling.sampler import Sampler, prompt_logprobs
from minivllm.sampling.sampling_state import SamplingState
from minivllm.sampling.token_masks import TokenMaskStage
from minivllm.sampling.verification import accept, verify
from minivllm.spec_decode.drafter import DraftContext, GuessingModel
from minivllm.spec_decode.speculation import Speculation, make_speculation
from minivllm.worker.pooling import Pooler
from minivllm.worker.sampled.pending_step import PendingStep
from minivllm.worker.sampled.token_feedback import TokenFeedback, UnknownTokens

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions whose logits are computed at once, which bounds the memory that prompt_logprobs takes."""


class SlotState(Protocol):
    """Something kept for the request in each slot of the batch."""

    def add(self, slot: int, request: EngineRequest, output_token_ids: list[int]) -> None:
        """A request enters the slot, new or back from preemption with tokens it has generated before."""

    def remove(self, slot: int) -> None:
        """The request of the slot has left."""


class ModelRunner:
    """Owns the KV cache, the persistent batch and the sampling state.
    Decides nothing: it follows SchedulerOutput."""

    def __init__(
        self,
        model: Model,
        compiler: RegionCompiler,
        limits: RunnerLimits,
        policy: DevicePolicy,
        make_attention: AttentionFactory,
        adapters: AdapterManager | None = None,
        stage: Stage | None = None,
        images: EncodedImages | None = None,
    ) -> None:
        self._images = images
        self.model = model
        self.limits = limits
        self._policy = policy
        self._make_attention = make_attention
        device = model.device
        try:
            self.batch = PersistentBatch(limits.max_num_seqs, limits.max_model_len, limits.groups, device)
        except MemoryError:  # its tables are small, unless the cache is beyond all bounds
            raise too_large(
                max(group.num_blocks for group in limits.groups), total_bytes(limits.groups)
            ) from None
        self.sampling_state = SamplingState(limits.max_num_seqs, model.vocab_size, device)
        self.token_masks = TokenMaskStage(limits.max_num_seqs, model.vocab_size, device)
        self.sampler = Sampler(self.sampling_state, masks=(self.token_masks,))
        self._read_back = ReadBack(device)
        self._newest: PendingStep | None = None
        self._stage = stage or Stage()
        self._is_last_stage = self._stage.is_last
        self._feedback = TokenFeedback(self.batch, self._stage)
        self._pooler = Pooler(model)
        self._slot_states: list[SlotState] = [self.sampling_state, self._pooler]
        batch_adapters = None
        if adapters is not None:
            batch_adapters = BatchAdapters(adapters, limits.max_num_seqs)
            self._slot_states.append(batch_adapters)
        self.paged_model = PagedModel(
            model, self.batch, limits, policy, make_attention, adapters=batch_adapters
        )
        self.speculation: Speculation | None = None
        self.graphs: StepGraphs | None = None
        self.use_regions(compiler)

    def use_regions(self, compiler: RegionCompiler) -> None:
        """Run the model by the regions of this compiler from now on,
        with the attention that goes with them."""
        self.compiler = compiler
        forget_uncompiled_copies()
        self.paged_model.use_regions(compiler)
        for model in self.guessing_models:
            model.use_regions(compiler)
        self.sampler.use_regions(compiler, self.model.dtype)

    @property
    def guessing_models(self) -> Sequence[GuessingModel]:
        """What the drafter runs beside the model."""
        return () if self.speculation is None else self.speculation.models

    def speculate(self, settings: SpeculativeConfig, draft_model: Model | None) -> Speculation:
        """Let a drafter guess ahead from now on. draft_model: see DraftContext. Raises ConfigError."""
        context = DraftContext(
            settings,
            self.paged_model,
            self.batch,
            self.sampling_state,
            self.limits,
            self.compiler,
            self._policy,
            self._make_attention,
            draft_model,
        )
        self.speculation = make_speculation(context)
        self.model.tap = next((model.tap for model in self.guessing_models if model.tap is not None), None)
        return self.speculation

    def launch_ahead(self) -> None:
        """From now on, launch steps before the host knows which drafts of the last one were accepted."""
        self.batch.true_lengths = TrueLengths(self.limits.max_num_seqs, self.model.device)
        self._slot_states.append(self.batch.true_lengths)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks of this worker's layers, and what drafters keep beside those of the first KV group."""
        for group in sorted({copy.group for copy in copies}):
            pairs = [(copy.source, copy.target) for copy in copies if copy.group == group]
            sources, targets = np.array(pairs, dtype=np.int64).T
            self.paged_model.copy_blocks(group, sources, targets)
            for model in self.guessing_models if group == 0 else ():
                model.copy_blocks(sources, targets)

    def execute(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> ModelRunnerOutput:
        """Compute the scheduled tokens and sample where a request reached its last known token.

        token_masks: waits for the masks of the step; called when the logits are there.
        """
        return self.launch(step, token_masks).result()

    @spanned("execute")
    def launch(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingStep | UnknownTokens:
        """Like execute, but the tokens stay on the device, where a next step may be launched on them at once.

        Waits for the last step's tokens only if what is sampled now depends on them in other ways than
        through the model, and for its own only if more than tokens is wanted (log-probabilities, drafts,
        vectors).
        """
        pending = self._newest = PendingStep(self.batch, self.sampling_state, self._newest)
        if self.speculation is not None:
            self.speculation.finish(step.finished_request_ids)
        with span("apply"):
            freed, entered = self.batch.apply(step)
        for state in self._slot_states:
            for slot in freed:
                state.remove(slot)
            for request in entered:
                state.add(request.slot, request.data, request.output_token_ids)
        if not step.num_scheduled_tokens:
            return pending
        if not self._is_last_stage:
            self._feedback.learn_for(step)
        if self.batch.true_lengths is not None and not self._settles(step):
            pending.finish_previous()
        rows = scheduled_rows(self.batch, step)
        has_images = self._images is not None and self._images.has_rows(rows)
        graph = None
        if self.graphs is not None and not has_images:  # the graphs are those of steps that read text
            in_pieces = self.paged_model.runs_in_pieces(rows)
            graph = self.graphs.choose([row.count for row in rows], in_pieces=in_pieces)
        with span("prepare"):
            if graph is None or self.graphs is None:
                inputs = self.paged_model.build(rows)
            else:
                inputs = self.graphs.build(rows, graph)
            if has_images and self._images is not None:
                inputs = replace(inputs, tokens=inputs.tokens._replace(images=self._images.rows(inputs)))
        expected = self.paged_model.attention_seconds.expected
        if expected:
            with span(f"attention should take {1e6 * expected:.0f} us"):
                pass  # for traces to show beside what it takes
        if graph is None or self.graphs is None:
            hidden = StepHidden(self.paged_model.forward(inputs))
        else:
            hidden = self.graphs.forward(inputs, graph)
        pending.tell_seconds(self.paged_model.attention_seconds)
        if not self._is_last_stage:
            if token_masks is not None:
                token_masks()  # sent to all
            self._newest = None
            return self._feedback.expect(inputs)
        if self._pooler.slots:
            pending.output.pooled = self._pooler.pool(inputs, hidden.hidden)
        self._prompt_logprobs(inputs, hidden, pending.output)
        if token_masks is not None or not self.token_masks.is_empty:
            self.token_masks.load(None if token_masks is None else token_masks(), self.batch.requests)
        self._sample(inputs, hidden, pending)
        for row in rows:
            # Rejected drafts were computed for nothing: the last known token is yet to be computed, always.
            request, end = row.request, row.start + row.count
            request.num_computed_tokens = end if end < request.num_tokens else request.num_tokens - 1
        if self._stage.size > 1:
            self._feedback.tell(pending.result().sampled_token_ids)
        if self.batch.true_lengths is not None and self.speculation is not None:
            with span("draft"):
                self.speculation.guess_ahead(step.num_guesses, step.draft_token_ids)
        elif self.speculation is not None:
            output = pending.result()
            with span("draft"):
                output.draft_token_ids = self.speculation.propose(
                    step.draft_token_ids, output.sampled_token_ids
                )
        return pending

    def capture_graphs(
        self, mode: CudaGraphMode, backend: GraphBackend, of_drafts: CudaGraphMode = "none"
    ) -> None:
        """Capture the steps of all buckets, and those of what the drafter runs. of_drafts: its mode.
        Everything must be compiled, and the cache's null block free to write."""
        graphs = StepGraphs(
            mode,
            self.paged_model,
            backend,
            max_num_seqs=self.limits.max_step_rows,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            has_logits=self._is_last_stage,
        )
        graphs.capture()
        self.graphs = graphs
        for model in self.guessing_models:
            model.capture_graphs(of_drafts, backend)

    @spanned("sample")
    def _sample(self, inputs: StepInputs, hidden: StepHidden, pending: PendingStep) -> None:
        is_sampled = inputs.is_sampled()
        rows = list(compress(inputs.rows, is_sampled))
        if not rows:
            return
        requests = [row.request for row in rows]
        num_drafts = np.fromiter([len(row.drafts) for row in rows], np.int64, len(rows))
        slots, last = inputs.row_arrays.slots[is_sampled], np.cumsum(inputs.row_arrays.counts)[is_sampled] - 1
        positions = (inputs.row_arrays.starts + inputs.row_arrays.counts)[is_sampled] - num_drafts
        has_drafts = bool(num_drafts.any())
        if has_drafts:
            last = np.concatenate([np.arange(end - drafts, end + 1) for end, drafts in zip(last, num_drafts)])
        logits = self._logits(inputs, hidden, last.astype(np.int32))
        depends = self.sampler.depends_on_output(slots)
        if self.batch.true_lengths is not None and not (depends & (num_drafts > 0)).any():
            if any(request.num_pending_tokens for request in compress(requests, depends)):
                pending.finish_previous()
            self._sample_ahead(inputs, logits, last, slots, num_drafts, rows, pending)
            return
        if has_drafts:
            depends[:] = True
        if any(request.num_pending_tokens for request in compress(requests, depends)):
            pending.finish_previous()
        if has_drafts:
            positions = np.fromiter([request.num_tokens for request in requests], np.int64, len(rows))
            self._verify(logits, slots, positions, rows, self._drafts_of(rows, inputs, last), pending.output)
            return
        result = self.sampler(logits, slots, positions)
        self.batch.append_pending(requests, slots, positions, result.token_ids)
        pending.expect(requests, slots, positions, self._read_back.start(result.token_ids))
        for request, entry in zip(requests, result.logprobs):
            if entry is not None:
                pending.output.logprobs[request.data.request_id] = [entry]

    def _sample_ahead(
        self,
        inputs: StepInputs,
        logits: Tensor,
        last: np.ndarray,
        slots: np.ndarray,
        num_drafts: np.ndarray,
        rows: list[Row],
        pending: PendingStep,
    ) -> None:
        """Sample, and verify drafts, without waiting for either: the host learns later how many were
        accepted. last int [sum of 1 + num_drafts]: tokens of the step that logits follow."""
        true_lengths = self.batch.true_lengths
        assert true_lengths is not None
        device, counts = logits.device, 1 + num_drafts
        offsets = np.arange(len(last)) - np.repeat(np.cumsum(counts) - counts, counts)
        of_each, further = to_device(np.stack([np.repeat(slots, counts), offsets]), device)
        result = self.sampler(logits, np.repeat(slots, counts), true_lengths.lengths[of_each] + further)
        given = inputs.token_ids[to_device(last, device)]
        accepted = accept(result.token_ids, given, num_drafts)
        news = true_lengths.append(self.batch, slots, accepted.offsets, accepted.token_ids, accepted.counts)
        requests, drafted = [row.request for row in rows], num_drafts.tolist()
        self.batch.append_unsure(requests, drafted)
        pending.expect_unsure(requests, slots, drafted, self._read_back.start(news))
        first = 0
        for request, count in zip(requests, counts.tolist()):
            entries = [entry for entry in result.logprobs[first : first + count] if entry is not None]
            if entries:
                pending.output.logprobs[request.data.request_id] = entries
            first += count

    def _settles(self, step: SchedulerOutput) -> bool:
        """Whether rows of the step can be computed where only the device knows how many tokens there are."""
        requests = (self.batch.requests[request_id] for request_id in step.num_scheduled_tokens)
        if not any(request.num_unsure_tokens for request in requests):
            return True
        backends = [*self.paged_model.backends]
        for model in self.guessing_models:
            backends += model.backends
        return all(getattr(backend, "settles", False) for backend in backends)

    @staticmethod
    def _drafts_of(rows: list[Row], inputs: StepInputs, last: np.ndarray) -> list[Sequence[int]]:
        """The drafts of rows, read from the device where only it knows them. last: see ``_sample_ahead``."""
        if all(UNKNOWN not in row.drafts for row in rows):
            return [row.drafts for row in rows]
        given = inputs.token_ids[to_device(last, inputs.token_ids.device)].tolist()
        ends = np.cumsum([1 + len(row.drafts) for row in rows]).tolist()
        return [given[end - len(row.drafts) : end] for end, row in zip(ends, rows)]

    def _verify(
        self,
        logits: Tensor,
        slots: np.ndarray,
        positions: np.ndarray,
        rows: list[Row],
        drafts: Sequence[Sequence[int]],
        output: ModelRunnerOutput,
    ) -> None:
        """Sample where some rows have drafts:
        one token each, and one more for every draft that is what the model says."""
        verified = verify(self.sampler, self.sampling_state, logits, slots, positions, drafts)
        for row, (token_ids, logprobs) in zip(rows, verified):
            request_id = row.request.data.request_id
            self.batch.append_tokens(row.request, token_ids)
            output.sampled_token_ids[request_id] = token_ids
            if logprobs:
                output.logprobs[request_id] = logprobs

    def _prompt_logprobs(self, inputs: StepInputs, hidden: StepHidden, output: ModelRunnerOutput) -> None:
        if not self.sampling_state.wants_prompt_logprobs[inputs.row_arrays.slots].any():
            return
        first_token = 0
        for row in inputs.rows:
            k = row.request.data.sampling_params.prompt_logprobs
            prompt = row.request.data.prompt_token_ids
            # The logits at position p are about the token at p + 1, which the prompt must still hold.
            count = min(row.count, len(prompt) - 1 - row.start)
            first = max(0, row.request.data.sampling_params.prompt_logprobs_start - 1 - row.start)
            if k is not None and count > first:
                entries: list[PositionLogprobs] = []
                for begin in range(first, count, PROMPT_LOGPROB_ROWS):
                    end = min(begin + PROMPT_LOGPROB_ROWS, count)
                    tokens = np.arange(first_token + begin, first_token + end, dtype=np.int32)
                    targets = torch.tensor(
                        prompt[row.start + begin + 1 : row.start + end + 1], device=self.model.device
                    )
                    entries += prompt_logprobs(self._logits(inputs, hidden, tokens), targets, k)
                output.prompt_logprobs[row.request.data.request_id] = entries
            first_token += row.count

    def _logits(self, inputs: StepInputs, hidden: StepHidden, tokens: np.ndarray) -> Tensor:
        """Logits [len(tokens), vocab] of the picked tokens of the step."""
        if hidden.logits is not None:
            if len(tokens) == inputs.num_tokens:
                return hidden.logits[: len(tokens)]
            return hidden.logits[to_device(tokens, self.model.device)]
        count = len(tokens)
        padded = np.resize(tokens, self.paged_model.rows.of_pick(count, inputs.token_ids.shape[0]))
        rows = to_device(padded, self.model.device)
        return self.model.logits(hidden.hidden, rows, inputs.tokens)[:count]
