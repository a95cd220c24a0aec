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

import numpy as np
import torch
from torch import Tensor

from minivllm.batch.layer_caches import allocate_features, copy_blocks
from minivllm.batch.persistent_batch import WorkerRequest
from minivllm.batch.step_inputs import Row, StepInputs
from minivllm.errors import ConfigError
from minivllm.models.eagle.head import EagleHead
from minivllm.models.model import Hidden, HiddenTap, LayerCache, TokenInputs
from minivllm.spec_decode.drafter import DraftContext
from minivllm.spec_decode.paged_draft import CachedDraft


class EagleDraft(CachedDraft):
    """Guesses with a head. caches: K and V of its layer, and the features [blocks, block_size, feature_size]."""

    model: EagleHead

    def __init__(self, context: DraftContext, head: EagleHead) -> None:
        """Raises ConfigError if the stage that has the head has no layer in the KV group whose blocks it shares."""
        super().__init__(context, head, token_offset=1)
        if not context.limits.groups[0].layers:
            raise ConfigError(
                "An EAGLE head keeps features beside full attention, of which the last stage has no layer: choose "
                "another method, or fewer stages."
            )
        self._add_features()
        self.tap = HiddenTap(head.eagle.fused_layers, self._take_features)

    def allocate_caches(self) -> None:
        super().allocate_caches()
        self._add_features()

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        super().copy_blocks(sources, targets)
        copy_blocks([self._features], sources, targets)

    def _add_features(self) -> None:
        self.caches.append((allocate_features(self.model, self._tables.num_blocks, self._tables.block_size),))

    def _missing(self, row: Row) -> list[Row]:
        """Those behind a guess count for this guess only: their feature is a guess too."""
        request = row.request
        places = self._places(request.slot, np.arange(row.start + 1))
        if row.start >= request.num_computed_tokens:  # behind guesses, so everything before is there
            self._computed[places[-1]] = 0
            return []
        texts = self._texts(request, row.start + 1)
        is_missing = self._computed[places[:-1]] != texts[:-1]
        self._computed[places] = texts
        edges = np.flatnonzero(np.diff(is_missing, prepend=False, append=False)).tolist()
        return [Row(request, start, end - start) for start, end in zip(edges[::2], edges[1::2])]

    def _compute(self, rows: list[Row]) -> tuple[StepInputs, Tensor, Tensor]:
        """Keys and values into the cache: no attention. Returns (inputs, queries, residual stream)."""
        inputs = self._paged.build(rows)
        [cache] = self._paged.step_caches(inputs)
        return inputs, *self.model.queries(inputs.token_ids, inputs.tokens, cache, self._features)

    def _logits(self, rows: list[Row]) -> Tensor:
        inputs, q, residual = self._compute(rows)
        o = self._paged.attend(inputs)(0, q)
        logits, features = self.model.guess(o, residual, torch.arange(len(o), dtype=torch.int32, device=o.device))
        # What the head foresees is the feature of the next position, if that has a place.
        slots, following = (np.array(values) for values in zip(*((r.request.slot, r.start + 1) for r in rows)))
        has_place = following < self._tables.num_held[slots] * self._tables.block_size
        index = np.where(has_place, self._places(slots, np.where(has_place, following, 0)), 0)
        self._put_features(torch.from_numpy(index).to(features.device, non_blocking=True), features[: len(rows)])
        return logits

    def _take_features(
        self, inputs: Sequence[Tensor], hidden: Hidden, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        """The target has computed these tokens."""
        self._put_features(caches[self._limits.groups[0].layers[0]].slots, self.model.features(inputs, hidden, tokens))

    def _put_features(self, places: Tensor, features: Tensor) -> None:
        """features [n, feature_size] into places int [n]."""
        self._features.view(-1, self.model.feature_size)[places] = features

    def _texts(self, request: WorkerRequest, count: int) -> np.ndarray:
        """As everywhere, and the adapter that the features are of."""
        texts = super()._texts(request, count)
        name = None if request.data.lora is None else request.data.lora.name
        return texts if name is None else texts ^ (np.uint64(zlib.crc32(name.encode())) << np.uint64(1))

    @property
    def _features(self) -> Tensor:
        features: Tensor = self.caches[1][0]
        return features
