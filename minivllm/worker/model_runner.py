"""Runs steps on one device: follow the scheduler's differences, build inputs, run the decoder, sample."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from minivllm.config import CudaGraphMode
from minivllm.lora.manager import AdapterManager, BatchAdapters
from minivllm.messages import ModelRunnerOutput, NewRequestData, PositionLogprobs, SchedulerOutput, TokenMasks
from minivllm.models.decoder import Decoder
from minivllm.spec_decode.verification import verify
from minivllm.worker.attention_backend import AttentionBackend, FlexAttentionBackend, GatherSdpaBackend
from minivllm.worker.compiler import RegionCompiler
from minivllm.worker.decode_options import DecodeOptions
from minivllm.worker.device_buffers import ReadBack
from minivllm.worker.graph_capture import GraphBackend
from minivllm.worker.layer_caches import allocate_caches
from minivllm.worker.pending_step import PendingStep
from minivllm.worker.persistent_batch import PersistentBatch
from minivllm.worker.pooling import Pooler
from minivllm.worker.sampler import Sampler, prompt_logprobs
from minivllm.worker.sampling_state import SamplingState
from minivllm.worker.speculation import Speculation
from minivllm.worker.step_graphs import StepGraphs, StepHidden, attention_buckets
from minivllm.worker.step_inputs import Row, StepInputBuilder, StepInputs
from minivllm.worker.token_masks import TokenMaskStage

logger = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 64
"""Prompt positions whose logits are computed at once, which bounds the memory that prompt_logprobs takes."""


class SlotState(Protocol):
    """Something kept for the request in each slot of the batch."""

    def add(self, slot: int, request: NewRequestData, output_token_ids: list[int]) -> None:
        """A request enters the slot, new or back from preemption with tokens it has generated before."""

    def remove(self, slot: int) -> None:
        """The request of the slot has left."""


class GuessingModel(Protocol):
    """A model that runs beside the runner's, by the regions of the same compiler.

    caches: of its own, if it has any: tuples of tensors [pages, page_size, …], which nothing else holds.
    """

    caches: list[Any]

    def use_regions(self) -> None:
        """The runner has changed to other regions."""

    def allocate_caches(self) -> None:
        """Have caches again after they were cleared."""


@dataclass(frozen=True)
class RunnerLimits:
    """Sizes of the persistent buffers. verify_size: most tokens of a row whose drafts are verified, 0 for no drafts."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    verify_size: int = 0


def tile_size_for(query_group: int, device: torch.device) -> int:
    """Queries per tile of a chunk. On CUDA 128, the kernel's own block; on a CPU enough for 64 rows, from where
    FlexAttention uses fast bfloat16 products, and no more, since short chunks pay for the padding."""
    if device.type == "cuda":
        return 128
    return 32 if query_group > 1 else 64


def prefill_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype the attention of chunks is computed. On a CPU without AMX float32 is faster than bfloat16: for 512
    tokens 3.5 instead of 5.6 ms a layer on one core."""
    if device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
        return torch.float32
    return dtype


class ModelRunner:
    """Owns the KV cache, the persistent batch and the sampling state. Decides nothing: it follows SchedulerOutput."""

    def __init__(
        self,
        decoder: Decoder,
        compiler: RegionCompiler,
        limits: RunnerLimits,
        adapters: AdapterManager | None = None,
    ) -> None:
        self.decoder, self.limits = decoder, limits
        config, device = decoder.config, decoder.device
        self.caches = allocate_caches(decoder, limits.num_pages, limits.page_size)
        self.batch = PersistentBatch(
            limits.max_num_seqs, limits.max_model_len, limits.page_size, limits.num_pages, device
        )
        self.sampling_state = SamplingState(limits.max_num_seqs, config.vocab_size, device)
        self.token_masks = TokenMaskStage(limits.max_num_seqs, config.vocab_size, device)
        self.sampler = Sampler(self.sampling_state, masks=(self.token_masks,))
        self._read_back = ReadBack(device)
        self._newest: PendingStep | None = None
        self._pooler = Pooler(decoder)
        self._slot_states: list[SlotState] = [self.sampling_state, self._pooler]
        batch_adapters = None
        if adapters is not None:
            batch_adapters = BatchAdapters(adapters, limits.max_num_seqs)
            self._slot_states.append(batch_adapters)
        # The kernel that CUDA has for decode wants a fixed batch size; on a CPU one graph serves them all.
        self.decode_batches = attention_buckets(limits.max_num_seqs) if device.type == "cuda" else []
        self.decode_options = DecodeOptions.of(device)
        if self.decode_batches and compiler.enabled:
            logger.info("Kernel options of decode attention: %s.", self.decode_options.origin)
        self.builder = self.make_builder(decoder, batch_adapters)
        self.speculation: Speculation | None = None
        self.graphs: StepGraphs | None = None
        self.guessing_models: list[GuessingModel] = []
        self._attention: AttentionBackend
        self.use_regions(compiler)

    def make_builder(self, decoder: Decoder, adapters: BatchAdapters | None, token_offset: int = 0) -> StepInputBuilder:
        """Builds what a decoder reads of the batch; adapters, token_offset: see StepInputBuilder."""
        limits, device = self.limits, decoder.device
        return StepInputBuilder(
            self.batch,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_pages=limits.num_pages,
            tile_size=tile_size_for(decoder.config.query_group, device),
            windows=list(dict.fromkeys(decoder.config.layer_windows)),
            gathers_pages=device.type == "cpu",
            device=device,
            adapters=adapters,
            verify_size=limits.verify_size,
            decode_batches=self.decode_batches,
            token_offset=token_offset,
        )

    def make_attention(self, decoder: Decoder) -> AttentionBackend:
        """The attention that goes with the regions in use."""
        config = decoder.config
        if not self.compiler.enabled:
            return GatherSdpaBackend(self.batch, config.softmax_scale)

        def decode_options(batch: int) -> dict[str, int]:
            return self.decode_options.choose(
                batch_kv_heads=batch * decoder.num_kv_heads,
                head_dim=config.head_dim,
                dtype=decoder.cache_dtype,
                page_size=self.limits.page_size,
            )

        return FlexAttentionBackend(
            self.compiler,
            list(dict.fromkeys(config.layer_windows)),
            config.softmax_scale,
            prefill_dtype(decoder.dtype, decoder.device),
            decoder.device,
            verifies=self.limits.verify_size > 0,
            decode_batches=self.decode_batches,
            decode_options=decode_options,
        )

    def use_regions(self, compiler: RegionCompiler) -> None:
        """Run the model by the regions of this compiler from now on, with the attention that goes with them."""
        self.compiler = compiler
        self.decoder.build_regions(compiler)
        self._attention = self.make_attention(self.decoder)
        for model in self.guessing_models:
            model.use_regions()

    def execute(self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None) -> ModelRunnerOutput:
        """Compute the scheduled tokens and sample where a request reached its last known token.

        token_masks: waits for the masks of the step; called when the logits are there.
        """
        return self.launch(step, token_masks).result()

    def launch(self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None) -> PendingStep:
        """Like execute, but the tokens stay on the device, where a next step may be launched on them at once.

        Waits for the last step's tokens only if what is sampled now depends on them in other ways than through the
        model, and for its own only if somebody wants more than tokens (log-probabilities, drafts, vectors).
        """
        pending = self._newest = PendingStep(self.batch, self.sampling_state, self._newest)
        if self.speculation is not None:
            self.speculation.finish(step.finished_request_ids)
        freed, entered = self.batch.apply(step)
        for state in self._slot_states:
            for slot in freed:
                state.remove(slot)
            for request in entered:
                state.add(request.slot, request.data, request.output_token_ids)
        if not step.num_scheduled_tokens:
            return pending
        rows = self._rows(step)
        graph = None if self.graphs is None else self.graphs.choose([row.count for row in rows])
        inputs = self.builder.build(rows, self.compiler.min_rows if graph is None else graph.num_tokens)
        if graph is None or self.graphs is None:
            hidden = StepHidden(*self.forward(inputs, self.decoder))
        else:
            hidden = self.graphs.forward(inputs, graph)
        pending.output.pooled = self._pooler.pool(inputs, hidden.o, hidden.residual)
        self._prompt_logprobs(inputs, hidden, pending.output)
        self.token_masks.load(None if token_masks is None else token_masks(), self.batch.requests)
        self._sample(inputs, hidden, pending)
        for row in rows:
            # Rejected drafts were computed for nothing: the last known token is yet to be computed, always.
            row.request.num_computed_tokens = min(row.start + row.count, row.request.num_tokens - 1)
        if self.speculation is not None and not self.compiler.makes_up_results:
            output = pending.result()
            output.draft_token_ids = self.speculation.propose(step.draft_token_ids, output.sampled_token_ids)
        return pending

    def capture_graphs(self, mode: CudaGraphMode, backend: GraphBackend) -> None:
        """Capture the steps of all buckets. Everything must be compiled, and the cache's null page free to write."""
        limits = self.limits
        graphs = StepGraphs(
            mode,
            self.decoder,
            self.caches,
            self._attention,
            backend,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        graphs.capture(lambda num_tokens: self.builder.build([], num_tokens))
        self.graphs = graphs

    def _rows(self, step: SchedulerOutput) -> list[Row]:
        """Rows with a single token first, then those with few: their attention is one tile each."""
        requests = self.batch.requests
        single: list[Row] = []
        few: list[Row] = []
        several: list[Row] = []
        for request_id, count in step.num_scheduled_tokens.items():
            request = requests[request_id]
            drafts = step.draft_token_ids.get(request_id, [])
            if drafts:
                self.batch.write_drafts(request, drafts)
            rows = single if count == 1 else few if count <= self.limits.verify_size else several
            rows.append(Row(request, request.num_computed_tokens, count, drafts))
        return single + few + several

    def forward(self, inputs: StepInputs, decoder: Decoder) -> tuple[Tensor, Tensor]:
        """Run the model, or its first layers, over one step; see Decoder.forward."""
        caches, windows = self.caches, self.decoder.config.layer_windows

        def attend(layer: int, q: Tensor) -> Tensor:
            return self._attention.attend(inputs, caches[layer], windows[layer], q)

        return decoder.forward(inputs.token_ids, inputs.tokens, caches, attend)

    def _sample(self, inputs: StepInputs, hidden: StepHidden, pending: PendingStep) -> None:
        last_tokens: list[int] = []
        sampled: list[Row] = []
        token = 0
        for row in inputs.rows:
            token += row.count
            is_last = row.start + row.count == row.request.num_tokens + len(row.drafts)
            if is_last and row.request.data.pooling is None:
                last_tokens += range(token - 1 - len(row.drafts), token)
                sampled.append(row)
        if not sampled:
            return
        logits = self._logits(inputs, hidden, np.asarray(last_tokens, dtype=np.int32))
        requests = [row.request for row in sampled]
        slots = np.fromiter((request.slot for request in requests), np.int64, len(requests))
        positions = np.fromiter((request.num_tokens for request in requests), np.int64, len(requests))
        has_drafts = any(row.drafts for row in sampled)
        unknown = slots[[request.num_pending_tokens > 0 for request in requests]]
        if len(unknown) and (has_drafts or self.sampler.depends_on_output(unknown).any()):
            pending.finish_previous()
        if has_drafts:
            self._verify(logits, slots, positions, sampled, pending.output)
            return
        result = self.sampler(logits, slots, positions)
        self.batch.append_pending(requests, slots, result.token_ids)
        pending.expect(requests, slots, self._read_back.start(result.token_ids))
        for request, entry in zip(requests, result.logprobs):
            if entry is not None:
                pending.output.logprobs[request.data.request_id] = [entry]

    def _verify(
        self, logits: Tensor, slots: np.ndarray, positions: np.ndarray, rows: list[Row], output: ModelRunnerOutput
    ) -> None:
        """Sample where some rows have drafts: one token each, and one more for every draft that is what the model
        says."""
        drafts = [row.drafts for row in rows]
        verified = verify(self.sampler, self.sampling_state, logits, slots, positions, drafts)
        for row, (token_ids, logprobs) in zip(rows, verified):
            request_id = row.request.data.request_id
            self.batch.append_tokens(row.request, token_ids)
            output.sampled_token_ids[request_id] = token_ids
            if logprobs:
                output.logprobs[request_id] = logprobs

    def _prompt_logprobs(self, inputs: StepInputs, hidden: StepHidden, output: ModelRunnerOutput) -> None:
        first_token = 0
        for row in inputs.rows:
            k = row.request.data.sampling_params.prompt_logprobs
            prompt = row.request.data.prompt_token_ids
            # The logits at position p are about the token at p + 1, which the prompt must still hold.
            count = min(row.count, len(prompt) - 1 - row.start)
            if k is not None and count > 0:
                entries: list[PositionLogprobs] = []
                for begin in range(0, count, PROMPT_LOGPROB_ROWS):
                    end = min(begin + PROMPT_LOGPROB_ROWS, count)
                    tokens = np.arange(first_token + begin, first_token + end, dtype=np.int32)
                    targets = torch.tensor(prompt[row.start + begin + 1 : row.start + end + 1], device=hidden.o.device)
                    entries += prompt_logprobs(self._logits(inputs, hidden, tokens), targets, k)
                output.prompt_logprobs[row.request.data.request_id] = entries
            first_token += row.count

    def _logits(self, inputs: StepInputs, hidden: StepHidden, tokens: np.ndarray) -> Tensor:
        """Logits [len(tokens), vocab] of the picked tokens of the step."""
        if hidden.logits is not None:
            if len(tokens) == inputs.num_tokens:
                return hidden.logits[: len(tokens)]
            return hidden.logits[torch.from_numpy(tokens).to(hidden.o.device, non_blocking=True)]
        count = len(tokens)
        if count == 1 and len(hidden.o) > 1:
            tokens = np.repeat(tokens, 2)
        rows = torch.from_numpy(tokens).to(hidden.o.device, non_blocking=True)
        return self.decoder.logits(hidden.o, hidden.residual, rows, inputs.tokens)[:count]
