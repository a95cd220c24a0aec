"""A model over the blocks of the persistent batch: its caches, its step inputs and its attention.

The runner's model is one, and so is every draft model that has a cache of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from kernels_triton_free.strips.layout import can_have_strips
from minivllm.attention import AttentionBackend, AttentionContext, MeasuredBackend, SharingBackend, StepRows
from minivllm.attention.registry import AttentionFactory, reads_strips
from minivllm.batch.layer_caches import allocate_caches, allocate_draft_inputs, copy_blocks
from minivllm.batch.persistent_batch import GroupTables, PersistentBatch
from minivllm.batch.states.replay import ReplayBuilder, ReplayRows
from minivllm.batch.states.state_tables import StateRowBuilder
from minivllm.batch.step_inputs import Row, StepInputBuilder, StepInputs
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import Size
from minivllm.compilation.row_counts import RowCounts
from minivllm.device.buffers import to_device
from minivllm.device.policy import DevicePolicy
from minivllm.kv_cache.specs import GroupSpec
from minivllm.lora.manager import BatchAdapters
from minivllm.models.mixers.factory import make_update
from minivllm.models.mixers.mixer import StateUpdate
from minivllm.models.model import Attend, AttendWeights, Hidden, Model
from minivllm.profiling.spans import span
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import NO_CACHE, CacheSpec, LayerCache, StateSpec, StateTensors
from minivllm.specs.layers import StateMixerSpec


@dataclass(frozen=True)
class RunnerLimits:
    """Sizes of the persistent buffers. groups: the KV groups of the model that is served. verify_size: most
    tokens of a row whose drafts are verified, 0 for no drafts. num_drafts: most drafts of a row."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    groups: tuple[GroupSpec, ...]
    verify_size: int = 0
    num_drafts: int = 0

    @property
    def max_step_rows(self) -> int:
        """Requests of a step, at most: each brings a token."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(slots=True)
class AttentionSeconds:
    """Of all layers in a step. expected: 0 where no costs were measured. measured: until calls return, which
    is all of it where the host computes."""

    expected: float = 0.0
    measured: float = 0.0


class PagedModel:
    """Builds the inputs of steps, and runs the model over them.

    caches: K and V of every layer, or its states, which nothing else holds. draft_inputs: of every layer that
    keeps a state what its update was given of the last drafts of each batch slot, see ``ReplayBuilder``;
    empty for other layers, and without drafts. layers: of each layer, what it keeps and how it attends.
    backends: those that go with the regions in use, one for each KV group and each shape of queries and
    caches. attention_seconds: of the last step.
    """

    def __init__(
        self,
        model: Model,
        batch: PersistentBatch,
        limits: RunnerLimits,
        policy: DevicePolicy,
        make_attention: AttentionFactory,
        *,
        adapters: BatchAdapters | None = None,
        token_offset: int = 0,
        is_draft: bool = False,
    ) -> None:
        """adapters, token_offset: see StepInputBuilder. is_draft: all layers lie in the first KV group of the
        model that is served. ``use_regions`` comes before the first step."""
        self.model = model
        self._batch = batch
        self._limits = limits
        self._policy = policy
        self._make_attention = make_attention
        self._groups = batch.groups[:1] if is_draft else batch.groups
        self._launches_ahead = (
            1 + limits.num_drafts if is_draft else 1
        )  # a pass for each guess, in every step
        self._group_of = [0] * len(model.cache_specs)
        for index, group in enumerate(() if is_draft else limits.groups):
            for layer in group.layers:
                self._group_of[layer] = index
        self.layers = [
            (self._laid_out(cache, attention, limits.groups[group].block_size), attention)
            for group, cache, attention in zip(
                self._group_of, model.cache_specs, model.attention_specs, strict=True
            )
        ]
        attending = [cache for cache, _ in self.layers if isinstance(cache, CacheSpec)]
        in_strips = bool(attending) and all(cache.in_strips for cache in attending)
        pair_tokens = policy.pair_tokens(limits.max_model_len) if in_strips else 0
        self._few_tokens = max(limits.verify_size, pair_tokens)
        states = batch.states if any(isinstance(cache, StateSpec) for cache, _ in self.layers) else []
        self._state_rows = [
            StateRowBuilder(tables, limits.max_num_batched_tokens, model.device) for tables in states
        ]
        self._replays = [
            ReplayBuilder(
                tables, limits.num_drafts, limits.max_num_seqs, limits.max_num_batched_tokens, model.device
            )
            for tables in states
            if limits.num_drafts
        ]
        self._updates: list[StateUpdate] = []
        self.caches: list[LayerCache | StateTensors] = []
        self.draft_inputs: list[tuple[Tensor, ...]] = []
        self.allocate_caches()
        self.rows = RowCounts()
        self.attention_seconds = AttentionSeconds()
        self._builder = StepInputBuilder(
            batch,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            device=model.device,
            few_tokens=self._few_tokens,
            adapters=adapters,
            tiles_adapters=policy.tiles_adapters,
            token_offset=token_offset,
            groups=self._groups,
            position_axes=model.position_axes,
            launches_ahead=self._launches_ahead,
        )

    def _laid_out(
        self, cache: CacheSpec | StateSpec, attention: AttentionSpec | StateMixerSpec, block_size: int
    ) -> CacheSpec | StateSpec:
        """The layer's cache in the layout that is best here."""
        if not isinstance(cache, CacheSpec) or not isinstance(attention, AttentionSpec):
            return cache
        can = cache.keeps_values and can_have_strips(block_size, cache.head_dim, cache.dtype)
        wants = reads_strips(self._make_attention) and self._policy.stores_strips(attention.query_group)
        return cache._replace(in_strips=can and wants)

    def allocate_caches(self) -> None:
        """Have caches, also again after they were cleared. Raises ConfigError if the memory cannot be had."""
        groups = [self._limits.groups[group] for group in self._group_of]
        num_blocks, sizes = [group.num_blocks for group in groups], [group.block_size for group in groups]
        self.caches += allocate_caches(self.model, num_blocks, sizes, [cache for cache, _ in self.layers])
        num_drafts = self._limits.max_num_seqs * self._limits.num_drafts
        self.draft_inputs += allocate_draft_inputs(self.model, num_drafts)

    def copy_blocks(self, group: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy blocks of the layers of a KV group, sources to targets int64 [copies]."""
        caches = [cache for cache, place in zip(self.caches, self._group_of) if place == group]
        copy_blocks(
            [x for cache in caches if isinstance(cache, LayerCache) for x in cache[:2]], sources, targets
        )

    def use_regions(self, compiler: RegionCompiler) -> None:
        """Run by the regions of this compiler from now on, with the attention that goes with them."""
        model, groups = self.model, self._groups
        # The number of blocks follows from the free memory: a package should serve the next start too, and
        # one region the layers of all groups.
        fewest = min(group.num_blocks for group in groups)
        varies = self._policy.keeps_packages or len(groups) > 1
        blocks = Size("blocks", min(64, fewest)) if varies else fewest
        caches = [
            spec.declare(blocks, groups[group].block_size, model.device)
            if isinstance(spec, CacheSpec)
            else NO_CACHE
            for group, (spec, _) in zip(self._group_of, self.layers)
        ]
        model.build_regions(compiler, self._builder.token_specs, caches)
        self.rows = compiler.rows
        specs_of_shape: dict[tuple[GroupTables, CacheSpec, int], list[AttentionSpec]] = {}
        updates: dict[StateMixerSpec, StateUpdate] = {}
        cuts: list[tuple[GroupTables, CacheSpec, int] | StateMixerSpec] = []
        for group, (cache, spec) in zip(self._group_of, self.layers):
            if isinstance(cache, StateSpec):
                assert isinstance(spec, StateMixerSpec)
                if spec not in updates:
                    updates[spec] = make_update(spec, cache, compiler)
                cuts.append(spec)
            else:
                assert isinstance(spec, AttentionSpec)
                specs_of_shape.setdefault((groups[group], cache, spec.query_group), []).append(spec)
                cuts.append((groups[group], cache, spec.query_group))
        attending = (spec for _, spec in self.layers if isinstance(spec, AttentionSpec))
        self._shares_kernels = any(spec.reach.is_limited for spec in attending)
        order = [*specs_of_shape, *updates]
        self._backend_of = [order.index(cut) for cut in cuts]
        self.backends = [
            self._new_backend(*shape, specs, compiler) for shape, specs in specs_of_shape.items()
        ]
        self._updates = list(updates.values())
        self._measured = [
            (index, backend)
            for index, backend in enumerate(self.backends)
            if isinstance(backend, MeasuredBackend)
        ]
        self._sharing = [backend for backend in self.backends if isinstance(backend, SharingBackend)]
        self._num_alike = Counter(
            (index, spec.reach)
            for index, (_, spec) in zip(self._backend_of, self.layers)
            if isinstance(spec, AttentionSpec)
        )

    def calibrate(self) -> None:
        """Let backends measure what they choose by. Everything must be compiled."""
        for _, backend in self._measured:
            backend.calibrate()

    def _new_backend(
        self,
        tables: GroupTables,
        cache: CacheSpec,
        query_group: int,
        specs: Sequence[AttentionSpec],
        compiler: RegionCompiler,
    ) -> AttentionBackend:
        model, limits = self.model, self._limits
        return self._make_attention(
            AttentionContext(
                specs=tuple(dict.fromkeys(specs)),
                kv_heads=cache.kv_heads,
                query_group=query_group,
                head_dim=cache.head_dim,
                dtype=model.dtype,
                query_dtype=model.attention_dtype,
                cache_dtype=cache.dtype,
                tables=tables,
                num_blocks=tables.num_blocks,
                max_num_seqs=limits.max_step_rows,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                few_tokens=self._few_tokens,
                compile_region=compiler,
                compiles=compiler.enabled,
                policy=self._policy,
                device=model.device,
                in_strips=cache.in_strips,
                launches_ahead=self._launches_ahead,
                shares_kernels=self._shares_kernels,
            )
        )

    @property
    def captured_few(self) -> int:
        """Most tokens of a row in graphs of rows with few tokens; 0: there can be none."""
        can = not self._state_rows and all(getattr(each, "captures_few", False) for each in self.backends)
        return self._few_tokens if can else 0

    @property
    def decode_batches(self) -> list[int]:
        """Numbers of single-token rows of which each needs a step of its own in the warm-up."""
        by_backends = (batch for backend in self.backends for batch in backend.decode_batches)
        return sorted({1, self.rows.few or 1, *by_backends})

    def build(self, rows: Sequence[Row], padded: int = 0, num_short: int = 0) -> StepInputs:
        """The inputs of a step with these rows, in any order, valid until the next call. padded, num_short:
        see StepInputBuilder."""
        least = self.rows.of_step(sum(row.count for row in rows))
        prepare: Callable[[StepRows], Any] = self._prepare
        if self._replays:
            drafts = {row.request.slot: len(row.drafts) for row in rows if row.drafts}
            prepare = partial(self._prepare, drafts=drafts)
        inputs = self._builder.build(rows, max(padded, least), prepare, num_short)
        self.attention_seconds = AttentionSeconds(self._expected_seconds(inputs))
        return inputs

    def _expected_seconds(self, inputs: StepInputs) -> float:
        """Attention of all layers."""
        total = 0.0
        for index, backend in self._measured:
            expected = backend.expected_seconds(inputs.attention[index])
            total += sum(self._num_alike[index, reach] * each for reach, each in expected.items())
        return total

    def last_tokens(self, inputs: StepInputs) -> tuple[Tensor, int]:
        """The last token of every row, int32 on the device: as many as regions take; and how many there
        are."""
        last = np.cumsum(inputs.row_arrays.counts) - 1
        padded = np.resize(last, self.rows.of_pick(len(last), inputs.token_ids.shape[0]))
        return to_device(padded.astype(np.int32), self.model.device), len(last)

    def _prepare(self, rows: StepRows, drafts: Mapping[int, int] | None = None) -> tuple[Any, ...]:
        """What each backend, and then the update of each kind of state, wants to know of a step.
        drafts: batch slot -> how many tokens of its row are drafts, the last ones."""
        prepared: list[Any] = [backend.prepare(rows) for backend in self.backends]
        for index, builder in enumerate(self._state_rows):
            if self._replays:
                replay = self._replays[index].build(rows, drafts or {}, self.rows.fewest, self._updates)
                if replay is not None:
                    prepared += [(replay, kind) for kind in range(len(self._updates))]
                    continue
            state_rows, counts = builder.build(rows)
            prepared += [(state_rows, update.prepare(counts)) for update in self._updates]
        return tuple(prepared)

    def runs_in_pieces(self, rows: Sequence[Row]) -> bool:
        """Whether a step of single tokens does more than the graph of such steps: accepted drafts get into
        states, or rows read a prefix together."""
        sharing = self._sharing
        if not self._replays and not sharing:
            return False
        slots = np.fromiter([row.request.slot for row in rows], np.int64, len(rows))
        starts = np.fromiter([row.start for row in rows], np.int64, len(rows))
        if any(replay.has_replays(slots, starts) for replay in self._replays):
            return True
        counts = np.fromiter([row.count for row in rows], np.int64, len(rows))
        if not sharing or (counts > 1).any():
            return False
        single = StepRows(slots, starts, counts, len(rows), 0, len(rows))
        return any(backend.shares_prefixes(single) for backend in sharing)

    def attend(self, inputs: StepInputs) -> Attend:
        """The attention of every layer over this step, or the update of its state."""
        caches, layers, backends, backend_of = self.caches, self.layers, self.backends, self._backend_of
        draft_inputs, seconds = self.draft_inputs, self.attention_seconds

        def attend(layer: int, q: Tensor, weights: AttendWeights = None) -> Tensor:
            index, cache, spec = backend_of[layer], caches[layer], layers[layer][1]
            metadata = inputs.attention[index]
            if index >= len(backends):
                assert isinstance(weights, tuple)
                rows, prepared = metadata
                update = self._updates[index - len(backends)]
                with span("state"):
                    if isinstance(rows, ReplayRows):
                        kept = draft_inputs[layer][0]
                        return rows.update(prepared, update, q, tuple(cache), weights, kept)
                    return update(q, tuple(cache), rows, prepared, weights)
            assert (
                isinstance(spec, AttentionSpec)
                and isinstance(cache, LayerCache)
                and not isinstance(weights, tuple)
            )
            with span("attention"):
                if spec.has_sinks == (weights is None):
                    raise TypeError(
                        f"Layer {layer} must give its sinks if, and only if, its spec has them: {spec}."
                    )
                started = time.perf_counter()
                o = backends[index].attend(metadata, cache, spec, q, weights)
                seconds.measured += time.perf_counter() - started
                return o

        return attend

    def step_caches(self, inputs: StepInputs) -> list[LayerCache]:
        """Of every layer, and where the tokens of this step go."""
        return [
            LayerCache(cache.k, cache.v, inputs.slots[group]) if isinstance(cache, LayerCache) else NO_CACHE
            for cache, group in zip(self.caches, self._group_of)
        ]

    def forward(self, inputs: StepInputs, model: Model | None = None, attend: Attend | None = None) -> Hidden:
        """Run the model, or another one over its caches, over one step; see Model.forward.
        attend: in place of its own."""
        caches, attend = self.step_caches(inputs), attend or self.attend(inputs)
        return (model or self.model).forward(inputs.token_ids, inputs.tokens, caches, attend)
