"""One worker per device: loads its shard of the model, sizes its cache, warms up, runs steps."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from minivllm.attention import find_attention
from minivllm.batch.paged_model import RunnerLimits
from minivllm.compilation.compiler import RegionCompiler, cannot_compile_reason
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
from minivllm.config import EngineConfig, KVTransferConfig, SpeculativeConfig
from minivllm.device.buffers import rounded_capacity
from minivllm.device.freed_memory import return_freed_memory
from minivllm.device.memory import cache_memory, touched_bytes
from minivllm.device.policy import DevicePolicy
from minivllm.distributed.other_workers import NO_OTHERS, OtherWorkers
from minivllm.distributed.stage import Stage
from minivllm.errors import RequestError
from minivllm.graphs.graph_capture import CudaGraphs
from minivllm.kv_cache.specs import GroupSpec
from minivllm.kv_transfer.connector import load_connector, make_context
from minivllm.kv_transfer.connectors.worker_side import ConnectorWorker, WorkerContext
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.lora.manager import AdapterManager
from minivllm.messages import (
    LoRARequest,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from minivllm.models.decoder import Decoder
from minivllm.models.model import Model, StagedModel
from minivllm.multimodal.eyes.encoded_images import EncodedImages
from minivllm.multimodal.eyes.eye import Eye, load_eye
from minivllm.profiling.device_profile import DeviceProfile
from minivllm.profiling.spans import span, spanned
from minivllm.sampling.logits_processors import load_logits_processors
from minivllm.spec_decode.adaptive import StepCost
from minivllm.spec_decode.speculation import Speculation, measured_step_cost
from minivllm.specs.facts import ModelFacts
from minivllm.worker.loading.cache_size import bytes_of_draft_inputs, groups_of, pool_text, size_groups
from minivllm.worker.loading.models import (
    check_weights,
    graph_mode_of_drafter,
    load_draft_model,
    load_model,
)
from minivllm.worker.loading.null_steps import (
    null_step,
    null_verification,
    run_null_step,
    verification_after,
)
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.sampled.pending_step import PendingStep
from minivllm.worker.sampled.token_feedback import UnknownTokens

logger = logging.getLogger(__name__)

WARM_UP_DECODES, WARM_UP_FEW, WARM_UP_CHUNKS = 5, 3, 4
"""Requests of the warm-up step with one token, with few (see ``in_step_order``), and with more: every region
gets the two rows that compiling needs."""


class Worker:
    """All workers are identical and receive the same SchedulerOutput; none decides anything."""

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        report_transfer: Callable[[KVConnectorOutput], None] = lambda report: None,
        others: OtherWorkers = NO_OTHERS,
    ) -> None:
        """report_transfer: for what a connector has done, called from any thread."""
        self.config = config
        self.facts = facts
        self._others = others
        self._stage = others.stage or Stage()
        self._report_transfer = report_transfer
        self._connector: ConnectorWorker | None = None
        self.device = torch.device(config.device)
        self.policy = DevicePolicy.of(self.device)
        self._make_attention = find_attention(config.attention_backend)
        self._compiler = self._make_compiler()
        self._unfinished_warm_up: list[int] = []
        self._is_uncompiled = False
        self._model: Model
        self._draft_model: Model | None = None
        self._adapters: AdapterManager | None = None
        self._images: EncodedImages | None = None
        self.runner: ModelRunner
        self._previous_config = config
        self._sleep_level = 0
        self._profile: DeviceProfile | None = None

    def _make_compiler(self) -> RegionCompiler:
        if self.config.enforce_eager:
            return RegionCompiler(enabled=False)
        reason = cannot_compile_reason(self.device)
        if reason is not None:
            logger.warning("Running uncompiled, which is several times slower: %s.", reason)
            return RegionCompiler(enabled=False)
        if self.policy.keeps_packages:
            return PackagedRegionCompiler()
        scheduler = self.config.scheduler
        drafts = getattr(self.config.speculative, "num_speculative_tokens", 0)
        # At least the rows of the warm-up.
        rows = rounded_capacity((1 + drafts) * max(scheduler.max_num_seqs, 64) + 2)
        replayed = drafts * max(scheduler.max_num_seqs, 64) if self.facts.keeps_states else 0
        tokens = max(rows, rounded_capacity(scheduler.max_num_batched_tokens + 2 + replayed))
        return RegionCompiler(True, most={"tokens": tokens, "tiles": tokens, "rows": rows}, single_rows=True)

    @spanned("load")
    @torch.inference_mode()
    def load_model(self) -> None:
        """Load this worker's weights. Raises ModelError,
        or ConfigError for a quantisation that cannot be had."""
        started = time.perf_counter()
        logger.info("Reading the weights of %s …", self.config.model)
        self._model, log_choices = load_model(self.config, self.facts, self._others)
        self._draft_model = load_draft_model(self.config, self._model, self._stage)
        if self.config.images is not None and self._stage.is_first:
            eye = load_eye(self.config, self.config.images, self.device)
            self._images = EncodedImages(eye, self.config.images)
        if self.config.lora is not None:
            self._adapters = AdapterManager(self._model, self.config.lora, self.facts)
        gc.collect()
        return_freed_memory()
        log_choices()
        logger.info("Loaded %s in %.1f s.", self.config.model, time.perf_counter() - started)

    @property
    def _text_models(self) -> list[Model]:
        """The model that is served, and the drafter's."""
        return [self._model] if self._draft_model is None else [self._model, self._draft_model]

    @property
    def _all_weights(self) -> list[Model | Eye]:
        """All modules that hold weights."""
        return [*self._text_models, *([] if self._images is None else [self._images.eye])]

    def size_cache(self) -> list[GroupSpec]:
        """The KV groups with their pools; see ``size_groups``."""
        utilization = self.config.cache.memory_utilization

        def free_bytes() -> int:
            free = cache_memory(self.device, utilization, self._profile_step)
            # The workers of a host share its memory, and each node has as many of them; a GPU has its own.
            has_own = self.policy.has_own_memory
            sharing = 1 if has_own else self.config.tensor_parallel_size * self.config.data_parallel_size
            if self._images is not None and self.config.images is not None:
                free = max(0, free - sharing * self.config.images.encoder_cache_bytes)
            model = self._model
            everywhere = (
                model.all_attention_specs if isinstance(model, StagedModel) else model.attention_specs
            )
            own, all_layers = len(model.cache_specs), len(everywhere)
            own = min(own * self.config.num_workers // len(self.config.local_ranks), all_layers)
            return free if has_own else free * own // (sharing * all_layers)

        kept_bytes = bytes_of_draft_inputs(self.config, self._model)
        groups, origin = size_groups(self.config, self._new_groups(), free_bytes, kept_bytes)
        logger.info("KV cache: %s (%s).", "; ".join(map(pool_text, groups)), origin)
        return groups

    def _new_groups(self) -> list[GroupSpec]:
        return groups_of(self.config, self._model, self._draft_model)

    @torch.inference_mode()
    def _profile_step(self) -> None:
        """Run the largest step there can be, on a cache of two blocks, so that its memory can be measured."""
        groups = tuple(replace(group, num_blocks=2) for group in self._new_groups())
        scheduler = self.config.scheduler
        tokens, length = scheduler.max_num_batched_tokens, scheduler.max_model_len
        limits = RunnerLimits(-(-tokens // length), tokens, length, groups)
        counts = [length] * (tokens // length) + [tokens % length] * (tokens % length > 0)
        if self._images is not None and self.config.images is not None:
            self._images.encode_zeros(self.config.images.max_num_batched_embeds)
        with nullcontext() if self._images is None else self._images.everywhere():
            run_on_null_block(self._make_runner(RegionCompiler(enabled=False), limits), counts)

    def initialize_pools(self, num_blocks: list[int], block_bytes: list[int]) -> None:
        """``initialize`` with pools of so many blocks, one number for each KV group.
        block_bytes: see Executor."""
        groups = zip(self._new_groups(), num_blocks, strict=True)
        self.initialize([replace(group, num_blocks=count) for group, count in groups], block_bytes)

    @torch.inference_mode()
    def initialize(self, groups: Sequence[GroupSpec], block_bytes: Sequence[int]) -> None:
        """Allocate the cache and all buffers, have everything compiled, and run it once."""
        scheduler, speculative = self.config.scheduler, self.config.speculative
        verify_size, few_tokens = 0, self.policy.pair_tokens(scheduler.max_model_len)
        if speculative is not None:
            verify_size = rounded_capacity(1 + speculative.num_speculative_tokens)
            verify_size = min(verify_size, scheduler.max_model_len - 1)
            few_tokens = max(few_tokens, verify_size)
        few = [2] * WARM_UP_FEW if few_tokens > 1 else []
        warm_up = [1] * WARM_UP_DECODES + few + [max(2, few_tokens + 1)] * WARM_UP_CHUNKS
        warms_up_later = self.config.compile_in_background
        self.runner = self._make_runner(
            self._compiler,
            RunnerLimits(
                # A later warm-up finds requests in all slots that the scheduler knows.
                max_num_seqs=max(scheduler.max_num_seqs, len(warm_up)) + warms_up_later * len(warm_up),
                max_num_batched_tokens=max(scheduler.max_num_batched_tokens, sum(warm_up)),
                max_model_len=scheduler.max_model_len,
                groups=tuple(groups),
                verify_size=verify_size,
                num_drafts=0 if speculative is None else speculative.num_speculative_tokens,
            ),
        )
        if speculative is not None and self._stage.is_last:
            self._agree_on_costs(self.runner.speculate(speculative, self._draft_model))
            if self.config.num_guesses:
                self.runner.launch_ahead()
        if self.config.kv_transfer is not None:
            self._connector = self._make_connector(self.config.kv_transfer, groups, block_bytes)
        if warms_up_later:
            self._unfinished_warm_up = warm_up
        else:
            self._warm_up(warm_up)
        if self._compiler.enabled and speculative is not None:
            self._measure_verification(speculative)
        self.capture_graphs()
        for processor in load_logits_processors(self.config.logits_processors):
            # Not earlier: the made-up requests of the warm-up are none of theirs.
            self.runner.sampling_state.add_processor(processor(self.facts.vocab_size, self.device))

    def _make_connector(
        self, config: KVTransferConfig, groups: Sequence[GroupSpec], block_bytes: Sequence[int]
    ) -> ConnectorWorker:
        communicator = self._others.communicator
        rank = 0 if communicator is None else communicator.rank
        rank += self._stage.number * self.config.tensor_parallel_size
        transfer = make_context(config, groups, block_bytes, self.config.num_workers, rank)
        context = WorkerContext(transfer=transfer, device=self.device, report=self._report_transfer)
        connector: ConnectorWorker = load_connector(config).worker_side(context)
        connector.register_kv_caches(self.runner.paged_model.caches)
        return connector

    def _make_runner(self, compiler: RegionCompiler, limits: RunnerLimits) -> ModelRunner:
        stage = self._others.stage
        return ModelRunner(
            self._model,
            compiler,
            limits,
            self.policy,
            self._make_attention,
            self._adapters,
            stage,
            self._images,
        )

    @spanned("compile")
    def _warm_up(self, counts: list[int]) -> None:
        """Have all regions compiled, and run one step of decodes and chunks together,
        then a single decode."""
        compiler = self._compiler
        if not compiler.enabled:
            return
        started = time.perf_counter()
        logger.info("Loading the compiled model …")
        compiler.build()
        run_on_null_block(self.runner, counts)
        for batch in self.runner.paged_model.decode_batches:
            run_on_null_block(self.runner, [1] * batch)
        if self.config.images is not None:  # on all stages: they exchange what the first one made of images
            with nullcontext() if self._images is None else self._images.everywhere():
                run_on_null_block(self.runner, counts)
                run_on_null_block(self.runner, [1])
        if self._images is not None:
            self._images.warm_up()
        self.runner.paged_model.calibrate()
        compiler.freeze()
        logger.info("Warmed up in %.1f s.", time.perf_counter() - started)

    def build_progress(self) -> tuple[int, int, bool]:
        """(regions that are built, all regions, whether a process in the background is building)."""
        # Asked first: a build that ends in between has left its package.
        is_building = self._compiler.is_building
        return self._compiler.num_built(), self._compiler.num_regions, is_building

    @torch.inference_mode()
    def serve_uncompiled(self) -> bool:
        """Serve uncompiled until ``change_over``, while another process builds what is missing. False, and
        nothing has changed, where no other process can do so."""
        if not self._compiler.is_complete and not self._compiler.build_in_background():
            return False
        self._is_uncompiled = True
        self.runner.use_regions(RegionCompiler(enabled=False))
        return True

    @torch.inference_mode()
    def change_over(self) -> None:
        """Use compiled regions from now on. All workers do so after the same step: they warm up together."""
        if self._is_uncompiled:
            self.runner.use_regions(self._compiler)
        self._warm_up(self._unfinished_warm_up)
        self._unfinished_warm_up = []
        self._is_uncompiled = False

    def leave_builds(self) -> None:
        """What is being compiled in the background is finished without this process, for the next start."""
        if self._compiler.is_building:
            logger.info("Compiling goes on in the background, for the next start.", extra={"is_notice": True})
            self._compiler.leave_builds()

    @spanned("capture")
    def capture_graphs(self) -> None:
        """Capture what steps replay. To be called again whenever weights or caches have moved."""
        mode = self.config.cudagraph_mode
        if mode != "none":
            self.runner.graphs = None
            self.runner.capture_graphs(mode, CudaGraphs(), graph_mode_of_drafter(self.config))

    def _measure_verification(self, config: SpeculativeConfig) -> None:
        """Replace the assumed cost of verifying drafts by a measured one, unless the user gave it. All stages
        take part in the steps; the last one, which drafts, takes note."""
        if config.verification_cost is not None:
            return
        k = min(config.num_speculative_tokens, self.config.scheduler.max_model_len - 2)
        if k < 1:
            return
        speculation, self.runner.speculation = self.runner.speculation, None
        execute, groups = self.runner.execute, self.runner.limits.groups
        cost = measured_step_cost(lambda drafts: run_null_step(execute, null_verification(groups, drafts)), k)
        self.runner.speculation = speculation
        if speculation is None:
            return
        speculation.take_costs(*cost)
        self._agree_on_costs(speculation)
        logger.info("Verifying drafts adds %.3f of a step, and %.3f for each of them (measured).", *cost)

    def _agree_on_costs(self, speculation: Speculation) -> None:
        """Drafters that exchange tensors must guess as much on every rank."""
        speculation.lengths.cost = StepCost(*self._others.largest(astuple(speculation.lengths.cost)))

    @property
    def num_recompilations(self) -> int:
        """Regions that were compiled after warm-up, which should stay at 0."""
        return self._compiler.num_recompilations

    def clock(self) -> float:
        """Now, by the clock that the processes of a host share [seconds]."""
        return time.perf_counter()

    @torch.inference_mode()
    def execute(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> ModelRunnerOutput:
        """Run one step; see ModelRunner.execute."""
        return self.launch(step, token_masks).result()

    @torch.inference_mode()
    def launch(
        self, step: SchedulerOutput, token_masks: Callable[[], TokenMasks] | None = None
    ) -> PendingStep | UnknownTokens:
        """Start one step; see ModelRunner.launch."""
        if self._others.group is not None and not step.num_scheduled_tokens:
            assert isinstance(self._model, Decoder), "only these have experts to share"
            self._model.join_step()
        metadata = step.kv_connector_metadata
        connector = None if metadata is None else self._connector
        if connector is not None and metadata is not None:
            connector.save_snapshots(metadata)
        if step.block_copies:
            with span("copy_blocks"):
                self.runner.copy_blocks(step.block_copies)
        if self._images is not None and (step.encode or step.forget):
            with span("encode"):
                self._images.apply(step.forget, step.encode)
        if connector is None or metadata is None:
            return self.runner.launch(step, token_masks)
        connector.start_load_kv(metadata)
        pending = self.runner.launch(step, token_masks)
        connector.wait_for_save(metadata)
        return pending

    def stop_transfers(self) -> None:
        """Finish what a connector has under way, for good."""
        if self._connector is not None:
            self._connector.shutdown()

    @property
    def adapters(self) -> AdapterManager:
        if self._adapters is None:
            raise RuntimeError("This engine was started without enable_lora.")
        return self._adapters

    @torch.inference_mode()
    def load_adapter(self, request: LoRARequest) -> str:
        """Read a LoRA adapter into host memory; the digest of its contents. Raises RequestError."""
        return self.adapters.load(request)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter that no request uses."""
        self.adapters.unload(name)

    # -- calls through Executor.collective ---------------------------------------------------------

    def adapter_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] in the whole model of every linear layer that a LoRA adapter may change, by name."""
        return {} if self._adapters is None else self._adapters.shapes

    def memory_bytes(self) -> dict[str, int]:
        """Device memory of weights and KV cache [bytes]; nothing of what a sleeping worker keeps elsewhere.

        kv_cache_touched: what of the cache takes up memory, which on a CPU is what has ever been written.
        """
        caches = [tensor for caches in self._caches for cache in caches for tensor in cache]
        return {
            "weights": sum(
                tensor.nbytes for tensor in self._weights() if tensor.device.type == self.device.type
            ),
            "kv_cache": sum(tensor.nbytes for tensor in caches),
            "kv_cache_touched": sum(map(touched_bytes, caches)),
        }

    def weight_checksums(self) -> list[float]:
        """The sum of every weight tensor, in float64:
        equal lists mean equal weights, but for sheer coincidence."""
        return [float(tensor.to_dense().double().sum()) for tensor in self._weights()]

    def sleep(self, level: int) -> None:
        """Free the KV cache, and the weights: level 1 moves them to host memory (where they are on a CPU),
        level 2 drops them. LoRA adapters stay. No request may be unfinished."""
        if self._connector is not None:
            self._connector.register_kv_caches(())
        for caches in self._caches:
            caches.clear()
        if self._images is not None:
            self._images.clear()
        for weights in self._all_weights:
            if level == 2:
                weights.map_weights(lambda tensor: torch.empty(0))
            elif self.policy.has_own_memory:
                weights.map_weights(lambda tensor: tensor.to("cpu"))
        self._sleep_level = level
        gc.collect()
        return_freed_memory()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def wake_up(self) -> None:
        """Bring weights and an empty KV cache back.
        Raises ModelError, and goes on sleeping, if the weights cannot be read again."""
        if self._sleep_level == 2:
            model, draft_model, adapters = self._model, self._draft_model, self._adapters
            images = self._images
            try:
                self.load_model()
                model.take_weights(self._model)
                if images is not None and self._images is not None:
                    images.eye.take_weights(self._images.eye)
                if draft_model is not None and self._draft_model is not None:
                    draft_model.take_weights(self._draft_model)
            finally:
                self._model = model
                self._draft_model = draft_model
                self._adapters = adapters
                self._images = images
        elif self.policy.has_own_memory:
            for weights in self._all_weights:
                weights.map_weights(lambda tensor: tensor.to(self.device))
        self.runner.paged_model.allocate_caches()
        for guessing in self.runner.guessing_models:
            guessing.allocate_caches()
        if self._connector is not None:
            self._connector.register_kv_caches(self.runner.paged_model.caches)
        self._sleep_level = 0
        self.capture_graphs()

    def take_weights_from(self, directory: str | None) -> None:
        """Load the weights from a directory of safetensors files from now on; those that are loaded stay.

        None goes back to where they came from before. Raises ModelError, and changes nothing, if the
        directory does not hold the weights of this architecture.
        """
        if directory is None:
            self.config = self._previous_config
            return
        check_weights(self.config, self.facts, self._model, directory)
        self._previous_config = self.config
        self.config = replace(self.config, model_path=directory, load_format="safetensors")

    def new_weights(self, fingerprint: str) -> None:
        """What a connector moves from now on belongs to other weights. fingerprint: see KVTransferConfig."""
        if self._connector is not None:
            self._connector.new_weights(fingerprint)

    @property
    def _caches(self) -> list[list[Any]]:
        paged = self.runner.paged_model
        return [paged.caches, paged.draft_inputs, *(model.caches for model in self.runner.guessing_models)]

    def _weights(self) -> list[Tensor]:
        weights: list[Tensor] = []

        def collect(tensor: Tensor) -> Tensor:
            weights.append(tensor)
            return tensor

        for holder in self._all_weights:
            holder.map_weights(collect)
        return weights

    def start_profile(self, directory: str) -> None:
        """Record what PyTorch runs, and the spans, until stop_profile.

        Raises RequestError if it is recording already, or cannot write.
        """
        if self._profile is not None or (self.config.profile is not None and self.config.executor == "uni"):
            raise RequestError("A profile is being recorded already, and there can be only one.")
        self._profile = DeviceProfile(directory, self.device)

    def stop_profile(self) -> str:
        """Write what was recorded as a Chrome trace (ui.perfetto.dev opens it); its path.
        Raises RequestError."""
        if self._profile is None:
            raise RequestError("No profile is being recorded: start one first.")
        profile, self._profile = self._profile, None
        return profile.stop()


def run_on_null_block(runner: ModelRunner, counts: list[int]) -> None:
    """Run one step of made-up requests, counts[i] tokens each; where drafters guess on the device, also one
    that verifies the guesses."""
    limits, num_guesses = runner.limits, 0
    if runner.batch.true_lengths is not None and max(counts) + 2 * limits.num_drafts < limits.max_model_len:
        num_guesses = limits.num_drafts
    step = null_step(limits.groups, counts, num_guesses)
    run_null_step(runner.execute, step, *([verification_after(step)] if num_guesses else []))
