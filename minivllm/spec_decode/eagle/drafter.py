"""An EAGLE or MTP head as a drafter (Li et al. 2024, 2025): keys, values and features in the target's blocks.

Every step of the target leaves the features of its tokens in the blocks, beside its keys and values and valid
exactly as long: so blocks from the prefix cache bring them along, and nothing is lost by preemption. The head
computes a place when it first guesses the next token, from the feature of position i and the token at i + 1.
Beside each place stands a fingerprint of the text, up to that token, which its keys and values were made of;
a place that does not match counts as missing. Since the head has one layer, keys and values depend on nothing
but feature and token: catching up
takes no attention, and single places can be missing. (If two texts differ directly after a shared block, the
block's last place belongs to the request that computed it last. That can cost a guess.)

Where the target has not been yet, the head's own output is put in the place of the feature, until
verification writes the real one over it.
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
from minivllm.device.buffers import to_device
from minivllm.errors import ConfigError
from minivllm.models.model import Hidden, HiddenTap, TokenInputs
from minivllm.spec_decode.drafter import DraftContext
from minivllm.spec_decode.eagle.head import EagleHead
from minivllm.spec_decode.paged_draft import CachedDraft
from minivllm.specs.caches import LayerCache


def eagle(context: DraftContext) -> EagleDraft:
    """The drafter of a loaded head."""
    head = context.draft_model
    if not isinstance(head, EagleHead):
        raise ValueError(f"{context.settings.method} needs a loaded head.")
    return EagleDraft(context, head)


class EagleDraft(CachedDraft):
    """Guesses with a head. caches: K and V of its layer, and the features [blocks,
    block_size, feature_size]."""

    model: EagleHead

    def __init__(self, context: DraftContext, head: EagleHead) -> None:
        """Raises ConfigError if the stage that has the head has no layer in the KV group whose blocks it
        shares."""
        super().__init__(context, head, token_offset=1)
        if not context.limits.groups[0].layers:
            raise ConfigError(
                "A head keeps features beside full attention, of which the last stage has no layer: "
                "choose "
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
        """Rows after a guess count for this guess only: their feature is a guess too."""
        request = row.request
        places = self._places(request.slot, np.arange(row.start + 1))
        if row.start >= request.num_computed_tokens:  # after guesses, so everything before is there
            self._computed[places[-1]] = 0
            return []
        texts = self._texts(request, row.start + 1)
        is_missing = self._computed[places[:-1]] != texts[:-1]
        self._computed[places] = texts
        edges = np.flatnonzero(np.diff(is_missing, prepend=False, append=False)).tolist()
        return [Row(request, start, end - start) for start, end in zip(edges[::2], edges[1::2])]

    def _compute(self, rows: list[Row], attends: bool = False) -> tuple[StepInputs, Hidden]:
        """Keys and values into the cache, and what attention makes of them, if it is wanted."""
        inputs = self._paged.build(rows)
        [cache] = self._paged.step_caches(inputs)
        attend = self._paged.attend(inputs) if attends else None
        return inputs, self.model.attended(inputs.token_ids, inputs.tokens, cache, self._features, attend)

    def _logits(self, rows: list[Row]) -> Tensor:
        inputs, hidden = self._compute(rows, attends=True)
        every = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=inputs.token_ids.device)
        logits, features = self.model.guess(hidden, every, inputs.tokens)
        # What the head foresees is the feature of the next position, if that has a place.
        slots, following = (
            np.array(values) for values in zip(*((r.request.slot, r.start + 1) for r in rows))
        )
        has_place = following < self._tables.num_held[slots] * self._tables.block_size
        index = np.where(has_place, self._places(slots, np.where(has_place, following, 0)), 0)
        self._put_features(
            torch.from_numpy(index).to(features.device, non_blocking=True), features[: len(rows)]
        )
        return logits

    def _num_changed(self, num_verified: int) -> int:
        """Those of the row that was verified, to which the target has given features."""
        return 1 + num_verified

    def _last_logits(self, rows: list[Row]) -> tuple[StepInputs, Tensor]:
        inputs, hidden = self._compute(rows, attends=True)
        index, count = self._paged.last_tokens(inputs)
        logits, features = self.model.guess(hidden, index, inputs.tokens)
        self._put_features(self._following(inputs), features[:count])
        return inputs, logits[:count]

    def _following(self, inputs: StepInputs) -> Tensor:
        """The place after each row, int64 [rows] on the device; the null block's first one where there may be
        none."""
        true_lengths = self._batch.true_lengths
        assert true_lengths is not None
        arrays, tables = inputs.row_arrays, self._tables
        following = arrays.starts + arrays.counts
        assumed = np.array([row.request.num_tokens for row in inputs.rows], dtype=np.int64)
        has_place = following < tables.num_held[arrays.slots] * tables.block_size
        slots, there, is_known = to_device(
            np.stack([arrays.slots, np.where(has_place, following, 0), has_place]), self.model.device
        )
        positions = (there - true_lengths.behind(arrays.slots, assumed)).clamp_(min=0)
        return torch.where(is_known > 0, tables.cache_slots_on_device(slots, positions), 0)

    def _take_features(
        self, inputs: Sequence[Tensor], hidden: Hidden, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        """The target has computed these tokens."""
        self._put_features(
            caches[self._limits.groups[0].layers[0]].slots, self.model.features(inputs, hidden, tokens)
        )

    def _put_features(self, places: Tensor, features: Tensor) -> None:
        """features [n, feature_size] into places int [n]."""
        self._features.view(-1, self.model.feature_size)[places] = features

    def _texts(self, request: WorkerRequest, count: int) -> np.ndarray:
        """Fingerprints of texts, combined with the adapter that the features come from."""
        texts = super()._texts(request, count)
        name = None if request.data.lora is None else request.data.lora.name
        return texts if name is None else texts ^ (np.uint64(zlib.crc32(name.encode())) << np.uint64(1))

    @property
    def _features(self) -> Tensor:
        features: Tensor = self.caches[1][0]
        return features
