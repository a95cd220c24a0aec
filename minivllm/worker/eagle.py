"""An EAGLE head as a drafter (Li et al. 2024, 2025), with keys, values and features over the target's blocks.

Every step of the target leaves the features of its tokens in the pages, beside its keys and values and valid exactly as
long: so blocks from the prefix cache bring them along, and nothing is lost by preemption. The head computes a place
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
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from minivllm.models.decoder import HiddenTap, LayerCache, TokenInputs
from minivllm.models.eagle_head import EagleHead
from minivllm.worker.draft_model import PrefixFingerprints
from minivllm.worker.layer_caches import allocate_caches, allocate_features
from minivllm.worker.persistent_batch import WorkerRequest
from minivllm.worker.sampler import Sampler
from minivllm.worker.step_inputs import Row, StepInputs

if TYPE_CHECKING:
    from minivllm.worker.model_runner import ModelRunner


class EagleDraft:
    """Guesses with a head. Implements DraftModel.

    caches: K and V of the head's layer, and the features [pages, page_size, feature_size], as many pages as the
    runner's.
    """

    def __init__(self, runner: ModelRunner, head: EagleHead) -> None:
        limits = runner.limits
        self.head = head
        self._runner, self._batch = runner, runner.batch
        self.caches: list[LayerCache | tuple[Tensor]] = []
        self._builder = runner.make_builder(head, adapters=None, token_offset=1)
        # Masks are those of the step that was verified; what a grammar allows next is not known yet.
        self._sampler = Sampler(runner.sampling_state)
        self._fingerprints = PrefixFingerprints(limits.max_model_len + 1)
        self._computed = np.zeros(limits.num_pages * limits.page_size, dtype=np.uint64)
        runner.guessing_models.append(self)
        self.use_regions()
        self.allocate_caches()
        runner.decoder.tap = HiddenTap(head.eagle.fused_layers, self._take_features)

    def use_regions(self) -> None:
        self.head.build_regions(self._runner.compiler)
        self._attention = self._runner.make_attention(self.head)
        # What was computed by regions that are only being built is worth nothing.
        self._computed.fill(0)

    def allocate_caches(self) -> None:
        num_pages, page_size = self._runner.limits.num_pages, self._batch.page_size
        self.caches += allocate_caches(self.head, num_pages, page_size)
        self.caches.append((allocate_features(self.head, num_pages, page_size),))
        self._computed.fill(0)

    def num_places(self, slot: int) -> int:
        # The head computes the token at a position in the place before.
        return int(self._batch.num_blocks[slot]) * self._batch.page_size + 1

    def next_tokens(self, slots: np.ndarray, positions: np.ndarray) -> list[int]:
        batch, compiler = self._batch, self._runner.compiler
        owners = {request.slot: request for request in batch.requests.values() if request.slot >= 0}
        rows = [Row(owners[slot], p - 1, 1) for slot, p in zip(slots.tolist(), positions.tolist())]
        self._catch_up(rows, self._places(slots, positions - 1))
        if not compiler.makes_up_results:
            inputs = self._builder.build(rows, compiler.min_rows)
            q, residual = self._queries(inputs)
            o = self._attention.attend(inputs, self._cache, self.head.config.layer_windows[0], q)
            logits, features = self.head.guess(o, residual, torch.arange(len(o), dtype=torch.int32, device=o.device))
        if compiler.makes_up_results:  # in the warm-up: the next step will go on from here
            self._computed.fill(0)
            return [0] * len(rows)
        token_ids: list[int] = self._sampler(logits[: len(rows)], slots, positions + 1).token_ids.tolist()
        for slot, position, token_id in zip(slots.tolist(), positions.tolist(), token_ids):
            batch.token_ids.write(slot, position + 1, [token_id])
        # What the head foresees is the feature of the next position, if that has a place.
        has_place = positions < batch.num_blocks[slots] * batch.page_size
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
        limits = self._runner.limits
        while missing and not self._runner.compiler.makes_up_results:
            room = limits.max_num_batched_tokens
            now: list[Row] = []
            while missing and room > 0 and len(now) < limits.max_num_seqs:
                row = missing.pop()
                count = min(row.count, room)
                now.append(Row(row.request, row.start, count))
                room -= count
                if count < row.count:
                    missing.append(Row(row.request, row.start + count, row.count - count))
            # As StepInputs wants them: those with a single token first, then those with few.
            now.sort(key=lambda row: 0 if row.count == 1 else 1 if row.count <= limits.verify_size else 2)
            self._queries(self._builder.build(now, self._runner.compiler.min_rows))

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
        page = self._batch.page_size
        return self._batch.block_table.host[slots, positions // page].astype(np.int64) * page + positions % page

    def _texts(self, request: WorkerRequest, count: int) -> np.ndarray:
        """Fingerprints of what the first ``count`` places are computed from: the text up to the token behind each, and
        the adapter that the features are of."""
        texts = self._fingerprints(self._batch.token_ids.host[request.slot, : count + 1])[1:]
        name = request.data.lora_name
        return texts if name is None else texts ^ (np.uint64(zlib.crc32(name.encode())) << np.uint64(1))

    @property
    def _cache(self) -> LayerCache:
        return cast(LayerCache, self.caches[0])

    @property
    def _features(self) -> Tensor:
        return self.caches[1][0]
