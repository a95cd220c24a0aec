"""An EAGLE head as a drafter (Li et al. 2024, 2025), with keys, values and features over the target's blocks.

Every step of the target leaves the features of its tokens in the blocks, beside its keys and values and valid exactly
as long: so blocks from the prefix cache bring them along, and nothing is lost by preemption. The head computes a place
when it first guesses behind it, from the feature of position i and the token at i + 1. Beside each place stands a
fingerprint of the text, up to that token, which its keys and values were made of; what does not match is missing,
whatever happened. Since the head has one layer, keys and values depend on nothing but feature and token: catching up
takes no attention, and single places can be missing. (The last place of a shared block belongs to whoever computed it
last, if the texts part just behind it. That can cost a guess.)

Where the target has not been yet, the head's own output is put in the place of the feature, until verification writes
the real one over it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.batch.layer_caches import allocate_features
from minivllm.batch.persistent_batch import WorkerRequest
from minivllm.batch.step_inputs import Row, StepInputs
from minivllm.compilation.compiler import RegionCompiler
from minivllm.models.decoder import HiddenTap, LayerCache, TokenInputs
from minivllm.models.eagle.head import EagleHead
from minivllm.sampling.sampler import Sampler
from minivllm.spec_decode.draft_model import PrefixFingerprints
from minivllm.spec_decode.drafter import DraftContext


class EagleDraft:
    """Guesses with a head. Implements DraftModel.

    caches: K and V of the head's layer, and the features [blocks, block_size, feature_size], as many blocks as the
    target's.
    """

    def __init__(self, context: DraftContext, head: EagleHead) -> None:
        limits = context.limits
        self.head = head
        self._limits, self._batch = limits, context.batch
        self._model = context.paged(head, token_offset=1)
        self.caches: list[Any] = self._model.caches
        self._add_features()
        # Masks are those of the step that was verified; what a grammar allows next is not known yet.
        self._sampler = Sampler(context.sampling_state)
        self._fingerprints = PrefixFingerprints(limits.max_model_len + 1)
        self._computed = np.zeros(limits.num_blocks * limits.block_size, dtype=np.uint64)
        self.use_regions(context.compiler)
        self.tap: HiddenTap | None = HiddenTap(head.eagle.fused_layers, self._take_features)

    def use_regions(self, compiler: RegionCompiler) -> None:
        self._compiler = compiler
        self._model.use_regions(compiler)
        # What was computed by regions that are only being built is worth nothing.
        self._computed.fill(0)

    def allocate_caches(self) -> None:
        self._model.allocate_caches()
        self._add_features()
        self._computed.fill(0)

    def _add_features(self) -> None:
        limits = self._limits
        self.caches.append((allocate_features(self.head, limits.num_blocks, limits.block_size),))

    def num_places(self, slot: int) -> int:
        # The head computes the token at a position in the place before.
        return int(self._batch.num_blocks[slot]) * self._batch.block_size + 1

    def next_tokens(self, slots: np.ndarray, positions: np.ndarray) -> list[int]:
        batch, compiler = self._batch, self._compiler
        owners = {request.slot: request for request in batch.requests.values() if request.slot >= 0}
        rows = [Row(owners[slot], p - 1, 1) for slot, p in zip(slots.tolist(), positions.tolist())]
        self._catch_up(rows, self._places(slots, positions - 1))
        if not compiler.makes_up_results:
            inputs = self._model.build(rows)
            q, residual = self._queries(inputs)
            o = self._model.attend(inputs)(0, q)
            logits, features = self.head.guess(o, residual, torch.arange(len(o), dtype=torch.int32, device=o.device))
        if compiler.makes_up_results:  # in the warm-up: the next step will go on from here
            self._computed.fill(0)
            return [0] * len(rows)
        token_ids: list[int] = self._sampler(logits[: len(rows)], slots, positions + 1).token_ids.tolist()
        for slot, position, token_id in zip(slots.tolist(), positions.tolist(), token_ids):
            batch.token_ids.write(slot, position + 1, [token_id])
        # What the head foresees is the feature of the next position, if that has a place.
        has_place = positions < batch.num_blocks[slots] * batch.block_size
        index = np.where(has_place, self._places(slots, np.where(has_place, positions, 0)), 0)
        self._put_features(torch.from_numpy(index).to(features.device, non_blocking=True), features[: len(rows)])
        return token_ids

    def _catch_up(self, rows: list[Row], row_places: np.ndarray) -> None:
        """Compute the keys and values that are missing before these rows, in passes within the limits of a step.

        row_places int [R]: of the rows themselves, which are computed next. Those behind a guess count for this guess
        only: their feature is a guess too.
        """
        missing: list[Row] = []
        for row, row_place in zip(rows, row_places):
            if row.start >= row.request.num_computed_tokens:  # behind guesses, so everything before is there
                self._computed[row_place] = 0
                continue
            positions, texts = np.arange(row.start), self._texts(row.request, row.start + 1)
            places = self._places(row.request.slot, positions)
            is_missing = self._computed[places] != texts[:-1]
            self._computed[places], self._computed[row_place] = texts[:-1], texts[-1]
            edges = np.flatnonzero(np.diff(is_missing, prepend=False, append=False)).tolist()
            missing += [Row(row.request, start, end - start) for start, end in zip(edges[::2], edges[1::2])]
        limits = self._limits
        while missing and not self._compiler.makes_up_results:
            room = limits.max_num_batched_tokens
            now: list[Row] = []
            while missing and room > 0 and len(now) < limits.max_num_seqs:
                row = missing.pop()
                count = min(row.count, room)
                now.append(Row(row.request, row.start, count))
                room -= count
                if count < row.count:
                    missing.append(Row(row.request, row.start + count, row.count - count))
            self._queries(self._model.build(now))

    def _queries(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Keys and values of these rows into the cache; queries and residual stream."""
        return self.head.queries(inputs.token_ids, inputs.tokens, self._cache, self._features)

    def _take_features(self, inputs: Sequence[Tensor], o: Tensor, residual: Tensor, tokens: TokenInputs) -> None:
        """The target has computed these tokens."""
        self._put_features(tokens.slot_mapping, self.head.features(inputs, o, residual, tokens))

    def _put_features(self, places: Tensor, features: Tensor) -> None:
        """features [n, feature_size] into places int [n]."""
        self._features.view(-1, self.head.feature_size)[places] = features

    def _places(self, slots: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
        """Where positions int [n] of slots (int [n], or one) lie in the caches, as slot_mapping says it."""
        size = self._batch.block_size
        return self._batch.block_table.host[slots, positions // size].astype(np.int64) * size + positions % size

    def _texts(self, request: WorkerRequest, count: int) -> np.ndarray:
        """Fingerprints of what the first ``count`` places are computed from: the text up to the token behind each, and
        the adapter that the features are of."""
        texts = self._fingerprints(self._batch.token_ids.host[request.slot, : count + 1])[1:]
        name = None if request.data.lora is None else request.data.lora.name
        return texts if name is None else texts ^ (np.uint64(zlib.crc32(name.encode())) << np.uint64(1))

    @property
    def _cache(self) -> LayerCache:
        cache: LayerCache = self.caches[0]
        return cache

    @property
    def _features(self) -> Tensor:
        features: Tensor = self.caches[1][0]
        return features
