"""Embeddings of images on a worker, and the rows of a step that they fill.
The scheduler decides what is kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from minivllm.batch.step_inputs import Row, StepInputs
from minivllm.config import ImagesConfig
from minivllm.messages import UnitsToEncode
from minivllm.models.model import ImageRows
from minivllm.multimodal.eyes.eye import Eye
from minivllm.multimodal.eyes.llava_next import in_lines


class EncodedImages:
    """One for each worker."""

    def __init__(self, eye: Eye, config: ImagesConfig) -> None:
        self.eye = eye
        self._config = config
        self._width = config.bytes_per_embed // eye.dtype.itemsize
        self._levels = 1 + config.deeper_levels
        self._embeds: dict[bytes, Tensor] = {}
        self._is_everywhere = False

    @property
    def num_bytes(self) -> int:
        """Of all embeddings."""
        return sum(tensor.nbytes for tensor in self._embeds.values())

    def clear(self) -> None:
        """Forget everything."""
        self._embeds.clear()

    def apply(self, forget: Sequence[bytes], encode: Sequence[UnitsToEncode]) -> None:
        """Follow a step: forget, then encode. Units of one size are one batch."""
        for digest in forget:
            self._embeds.pop(digest, None)
        for shape, group in groupby(encode, lambda units: units.shape[1:]):
            batch = list(group)
            data = np.concatenate(
                [np.frombuffer(units.pixels, np.uint8).reshape(-1, *shape) for units in batch]
            )
            done = 0
            encoded = self.eye.encode(torch.from_numpy(data))
            for units in batch:
                count = units.shape[0]
                self._keep(units, encoded[done : done + count])
                done += count

    def _keep(self, units: UnitsToEncode, encoded: Tensor) -> None:
        """encoded: [units, embeds, levels · hidden], whose memory is not kept."""
        kept = self._embeds.get(units.digest)
        if kept is None:
            kept = self._embeds[units.digest] = encoded.new_empty(units.num_embeds, self._width)
        size = encoded.shape[1]
        end = (units.first + len(encoded)) * size
        kept[units.first * size : end] = encoded.flatten(0, 1)
        if units.lines is not None:
            self._embeds[units.digest] = in_lines(kept[:end], units.lines)

    def has_rows(self, rows: Sequence[Row]) -> bool:
        """Whether a token of these rows stands for a part of an image."""
        return self._is_everywhere or any(
            item.offset < row.start + row.count and row.start < item.end
            for row in rows
            for item in row.request.data.images
        )

    def rows(self, inputs: StepInputs) -> ImageRows:
        """What the tokens of a step take from images, in the order of its tokens, padding included."""
        num_tokens, device = len(inputs.token_ids), self.eye.device
        shape = (self._levels, num_tokens, self._width // self._levels)
        features = torch.zeros(shape, dtype=self.eye.dtype, device=device)
        is_image = torch.full((num_tokens,), self._is_everywhere, device=device)
        first_token = 0
        for row in inputs.rows:
            for item in row.request.data.images:
                number = 0  # of placeholders in the runs before
                for first, count in item.runs:
                    begin = max(item.offset + first, row.start)
                    end = min(item.offset + first + count, row.start + row.count)
                    if begin < end:
                        start = number + begin - item.offset - first
                        place = slice(first_token + begin - row.start, first_token + end - row.start)
                        embeds = self._embeds[item.digest][start : start + end - begin]
                        features[:, place] = embeds.unflatten(1, (self._levels, -1)).transpose(0, 1)
                        is_image[place] = True
                    number += count
            first_token += row.count
        return ImageRows(features[0], is_image, tuple(features[1:]))

    # -- before the first request ------------------------------------------------------------------

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """All tokens of steps inside stand for images, of zeros."""
        self._is_everywhere = True
        try:
            yield
        finally:
            self._is_everywhere = False

    def warm_up(self) -> None:
        """Encode the smallest unit: for what is made the first time."""
        self.eye.encode(torch.zeros(1, *self._config.least_unit_shape, dtype=torch.uint8))

    def encode_zeros(self, num_embeds: int) -> None:
        """Encode so many embeddings, at least the largest unit's, for the memory that it takes."""
        units = max(1, num_embeds // self._config.unit_embeds)
        self.eye.encode(torch.zeros(units, *self._config.unit_shape, dtype=torch.uint8))
