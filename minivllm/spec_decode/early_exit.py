"""The model's own first layers as a drafter: nothing to download, and no KV cache but the model's own.

What the first layers compute for a drafted token is what verification will compute for it again, so their keys and
values go where they belong anyway. (After Zhang et al. 2023, "Draft & Verify", and Elhoushi et al. 2024, "LayerSkip".)
"""

from __future__ import annotations

import numpy as np
import torch

from minivllm.batch.step_inputs import Row
from minivllm.compilation.compiler import RegionCompiler
from minivllm.models.decoder import HiddenTap, LayerCache
from minivllm.models.decoder_config import DecoderConfig
from minivllm.sampling.sampler import Sampler
from minivllm.spec_decode.drafter import DraftContext


class EarlyExit:
    """Guesses with the first layers, the final norm and the head. Implements DraftModel."""

    tap: HiddenTap | None = None

    def __init__(self, context: DraftContext, num_layers: int) -> None:
        self._target, self._batch = context.target, context.batch
        self._num_layers = num_layers
        self.caches: list[LayerCache] = []  # it writes into the target's
        self.use_regions(context.compiler)
        # Masks are those of the step that was verified; what a grammar allows next is not known yet.
        self._sampler = Sampler(context.sampling_state)

    def use_regions(self, compiler: RegionCompiler) -> None:
        self._decoder = self._target.decoder.first_layers(self._num_layers, compiler)

    def allocate_caches(self) -> None:
        """There are none of its own."""

    def num_places(self, slot: int) -> int:
        batch = self._batch
        return int(batch.num_blocks[slot]) * batch.block_size

    def next_tokens(self, slots: np.ndarray, positions: np.ndarray) -> list[int]:
        batch = self._batch
        owners = {request.slot: request for request in batch.requests.values() if request.slot >= 0}
        rows = [Row(owners[slot], position, 1) for slot, position in zip(slots.tolist(), positions.tolist())]
        inputs = self._target.build(rows)
        o, residual = self._target.forward(inputs, self._decoder)
        index = torch.arange(len(o), dtype=torch.int32, device=o.device)
        logits = self._decoder.logits(o, residual, index, inputs.tokens)[: len(rows)]
        token_ids: list[int] = self._sampler(logits, slots, positions + 1).token_ids.tolist()
        for slot, position, token_id in zip(slots.tolist(), positions.tolist(), token_ids):
            batch.token_ids.write(slot, position + 1, [token_id])
        return token_ids


def weights_per_token(config: DecoderConfig, num_layers: int) -> int:
    """Weights that the first layers and the head read for a token."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv_heads + 3 * config.intermediate_size)
    head = config.hidden_size * config.vocab_size
    return num_layers * layer + head
