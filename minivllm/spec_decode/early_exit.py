"""The model's own first layers as a drafter: nothing to download, and no KV cache but the model's own.

What the first layers compute for a drafted token is what verification will compute for it again, so their
keys and values go where they belong anyway. (After Zhang et al. 2023, "Draft & Verify", and Elhoushi et al.
2024, "LayerSkip".)
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from minivllm.batch.step_inputs import Row
from minivllm.compilation.compiler import RegionCompiler
from minivllm.compilation.regions import CompileRegion
from minivllm.errors import ConfigError
from minivllm.models.model import Model
from minivllm.spec_decode.drafter import DraftContext
from minivllm.spec_decode.paged_draft import PagedDraft


@runtime_checkable
class CanBeShortened(Protocol):
    """A model whose first layers are a model themselves."""

    def first_layers(self, count: int, compile_region: CompileRegion) -> Model:
        """That of the first ``count`` layers, which shares all weights. ``build_regions`` comes first."""


class EarlyExit(PagedDraft):
    """Guesses with the first layers, the final norm and the head. It writes into the target's caches, where
    everything before a guess is computed already."""

    def __init__(self, context: DraftContext, num_layers: int) -> None:
        """Raises ConfigError if the model cannot leave out layers."""
        super().__init__(context, context.target)
        self.caches = []
        self._num_layers = num_layers
        self.use_regions(context.compiler)
        self.cost_per_token = self.model.weights_per_token / context.target.model.weights_per_token

    def use_regions(self, compiler: RegionCompiler) -> None:
        target = self._paged.model
        if not isinstance(target, CanBeShortened):
            raise ConfigError(
                f"A {type(target).__name__} cannot leave out layers: choose another method than early_exit."
            )
        self.model = target.first_layers(self._num_layers, compiler)

    def allocate_caches(self) -> None:
        """There are none of its own."""

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Those of the target are all that it reads."""

    def _catch_up(self, rows: list[Row]) -> None:
        """The target has computed everything."""

    def _logits(self, rows: list[Row]) -> Tensor:
        inputs = self._paged.build(rows)
        hidden = self._paged.forward(inputs, self.model)
        index = torch.arange(len(inputs.token_ids), dtype=torch.int32, device=self.model.device)
        return self.model.logits(hidden, index, inputs.tokens)
