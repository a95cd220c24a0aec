"""A second, smaller model as a drafter (Leviathan et al. 2023), with a KV cache of its own over the same blocks.

Block b of a request is block b of both caches, so blocks are counted once and the scheduler knows of one model only.
But the drafter computes a token when it first guesses behind it, not when the scheduler says so: prompts come in
chunks, blocks from the prefix cache, requests back from preemption, and guesses are rejected. So beside each place of
its cache it keeps a fingerprint of the text, up to there, that the keys and values in this place stand for. What is
missing is what does not match, whatever happened, and blocks that were shared for the target are shared for the drafter
too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minivllm.batch.step_inputs import Row, StepInputs
from minivllm.compilation.compiler import RegionCompiler
from minivllm.models.decoder import Decoder, HiddenTap
from minivllm.sampling.sampler import Sampler
from minivllm.spec_decode.drafter import DraftContext

_MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that all its powers modulo 2 ** 64 are; the fractional part of the golden ratio mixes bits well."""


class PrefixFingerprints:
    """64 bits for every prefix of a text, quickly: sums of (token + 1) ** 2 times powers of a constant, modulo 2 ** 64.

    Two texts with equal fingerprints are equal but for a chance in very many; where they are not, guesses are bad.
    """

    def __init__(self, max_length: int) -> None:
        self._powers = np.cumprod(np.full(max_length, _MULTIPLIER, dtype=np.uint64), dtype=np.uint64)

    def __call__(self, token_ids: np.ndarray) -> np.ndarray:
        """token_ids [n] int -> uint64 [n], never 0: entry i is that of the first i + 1 tokens."""
        values = token_ids.astype(np.uint64) + np.uint64(1)
        sums = np.cumsum(values * values * self._powers[: len(values)], dtype=np.uint64)
        return sums | np.uint64(1)


class DraftDecoder:
    """Guesses with another decoder, which has as many blocks as the target. Implements DraftModel."""

    tap: HiddenTap | None = None

    def __init__(self, context: DraftContext, decoder: Decoder) -> None:
        limits = context.limits
        self.decoder = decoder
        self._limits, self._batch = limits, context.batch
        self._model = context.paged(decoder)
        self.caches = self._model.caches
        # Masks are those of the step that was verified; what a grammar allows next is not known yet.
        self._sampler = Sampler(context.sampling_state)
        self._fingerprints = PrefixFingerprints(limits.max_model_len + 1)
        self._computed = np.zeros(limits.num_blocks * limits.block_size, dtype=np.uint64)
        self.use_regions(context.compiler)

    def use_regions(self, compiler: RegionCompiler) -> None:
        self._compiler = compiler
        self._model.use_regions(compiler)
        # What was computed by regions that are only being built is worth nothing.
        self._computed.fill(0)

    def allocate_caches(self) -> None:
        self._model.allocate_caches()
        self._computed.fill(0)

    def num_places(self, slot: int) -> int:
        return int(self._batch.num_blocks[slot]) * self._batch.block_size

    def next_tokens(self, slots: np.ndarray, positions: np.ndarray) -> list[int]:
        batch = self._batch
        self._catch_up(slots, positions)
        if self._compiler.makes_up_results:  # in the warm-up: the next step will go on from here
            return [0] * len(slots)
        inputs, hidden = self._compute([(slot, p, 1) for slot, p in zip(slots.tolist(), positions.tolist())])
        index = torch.arange(len(hidden[0]), dtype=torch.int32, device=hidden[0].device)
        logits = self.decoder.logits(*hidden, index, inputs.tokens)[: len(slots)]
        token_ids: list[int] = self._sampler(logits, slots, positions + 1).token_ids.tolist()
        for slot, position, token_id in zip(slots.tolist(), positions.tolist(), token_ids):
            batch.token_ids.write(slot, position + 1, [token_id])
        return token_ids

    def _catch_up(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Compute what is missing before these positions, in passes within the budget of a step."""
        missing = []
        for slot, position in zip(slots.tolist(), positions.tolist()):
            is_computed = self._computed[self._places(slot, 0, position)] == self._texts(slot, position)
            start = position if is_computed.all() else int(np.argmin(is_computed))
            if start < position:
                missing.append((slot, start, position - start))
        while missing and not self._compiler.makes_up_results:
            room, spans = self._limits.max_num_batched_tokens, []
            while missing and room > 0:
                slot, start, count = missing.pop()
                now = min(count, room)
                spans.append((slot, start, now))
                room -= now
                if now < count:
                    missing.append((slot, start + now, count - now))
            self._compute(spans)

    def _compute(self, spans: list[tuple[int, int, int]]) -> tuple[StepInputs, tuple[Tensor, Tensor]]:
        """Run the decoder over count tokens from position start of each slot."""
        owners = {request.slot: request for request in self._batch.requests.values() if request.slot >= 0}
        inputs = self._model.build([Row(owners[slot], start, count) for slot, start, count in spans])
        hidden = self._model.forward(inputs)
        for slot, start, count in spans:
            self._computed[self._places(slot, start, start + count)] = self._texts(slot, start + count)[start:]
        return inputs, hidden

    def _places(self, slot: int, start: int, end: int) -> np.ndarray:
        """Places in the cache of the positions start to end - 1."""
        positions, size = np.arange(start, end), self._batch.block_size
        return self._batch.block_table.host[slot, positions // size].astype(np.int64) * size + positions % size

    def _texts(self, slot: int, end: int) -> np.ndarray:
        """Fingerprints of the first 1, 2, … end tokens."""
        return self._fingerprints(self._batch.token_ids.host[slot, :end])
