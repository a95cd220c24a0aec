"""The decoder as one of several engines computes it that share the experts of a model.

Attention, dense MLPs and shared MLPs are those of a ``ShardedDecoder``: the workers of this engine divide them. Experts
are divided among the workers of all engines, so a layer's second half is cut once more:

    enter:    norm -> shared MLP                                  -> tokens of this engine
              (the tokens of all engines are gathered)
    experts:  router -> own experts                               -> part of what they add, for all tokens
              (parts are summed, for this engine's tokens)

Every engine comes to the same experts in the same order in every step, with its own tokens or without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from minivllm.compilation.regions import TensorSpec, specs_of
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.expert_group import ExpertGroup
from minivllm.linear.methods.method import LinearTensors
from minivllm.models.decoder.layer import AfterMixer, DecoderLayer
from minivllm.models.decoder.moe import MixtureOfExperts
from minivllm.models.decoder_config import DecoderConfig
from minivllm.models.model import TOKENS, Attend, Hidden, LayerCache, TokenInputs
from minivllm.models.sharded.decoder import ShardedDecoder
from minivllm.profiling.spans import span


class SharedExpertsDecoder(ShardedDecoder):
    """A ``ShardedDecoder`` of one rank of an engine. The last MLP, too, sees all tokens of a step: how many logits are
    wanted, and how often, is this engine's business only."""

    def __init__(
        self, config: DecoderConfig, *, communicator: Communicator, group: ExpertGroup, **settings: Any
    ) -> None:
        """group: to the workers of all engines. settings: those of ``Decoder``."""
        super().__init__(config, communicator=communicator, experts=group.shard, **settings)
        self._group = group
        self._experts: dict[int, Callable] = {}
        """The experts of each layer that has some: (tokens of all engines, weights) -> this worker's part."""

    def _compile_mlp(self, layer: DecoderLayer, stream: Any, region: Callable[..., Callable]) -> Callable:
        """See ShardedDecoder."""
        if not isinstance(layer.mlp, MixtureOfExperts):
            return super()._compile_mlp(layer, stream, region)
        kind = layer.spec.behind, layer.methods.mlp
        enter = region("enter", partial(self._enter_region, layer), self._behind_attention(layer, stream), kind)
        everyone: Any = TensorSpec((TOKENS, self.config.hidden_size), self.dtype, self.device)
        inputs = {"x": everyone, "weights": specs_of(layer.after.mlp)}
        experts = region("experts", layer.mlp.chosen, inputs, kind, self._group.shard)
        self._experts[self.layers.index(layer)] = experts

        def mlp(x: Tensor, residual: Tensor, adapters: RowAdapters | None, after: AfterMixer) -> tuple[Tensor, Tensor]:
            x, residual, *shared = enter(x, residual, adapters, after)
            return self._run(experts, x, after.mlp, shared), residual

        return mlp

    def _run(
        self, experts: Callable, x: Tensor, weights: tuple[LinearTensors, ...], shared: Sequence[Tensor]
    ) -> Tensor:
        """x [own tokens, hidden] -> what experts anywhere add, and the shared MLP of this engine's workers."""
        everything: Tensor = experts(self._group.gather(x), weights)
        for part in shared:
            everything[self._group.own] += part
        return self._group.combine(everything)

    def forward(self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend) -> Hidden:
        """See Decoder. Returns what the last MLP adds, and the residual stream without it."""
        self._group.begin_step(len(token_ids))
        o, residual = super().forward(token_ids, tokens, caches, attend)
        return self._behind(len(self.layers) - 1, o, residual, tokens.adapters)

    def _behind_all(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        return hidden[0][rows], hidden[1][rows], self._weights[-1][1].mlp_norm

    def join_step(self) -> None:
        """Compute this worker's experts for a step in which its engine has no tokens."""
        if not self._group.begin_step(0):
            return
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        with span("mlp"):
            for layer, experts in self._experts.items():
                self._run(experts, nothing, self._weights[layer][1].mlp, ())

    def _enter_region(
        self, layer: DecoderLayer, x: Tensor, residual: Tensor, adapters: RowAdapters | None, after: AfterMixer
    ) -> tuple[Tensor, ...]:
        x, residual = layer.enter(layer.leaving(x, after.mixer_norm), residual, after.norm)
        assert isinstance(layer.mlp, MixtureOfExperts)
        shared = layer.mlp.shared(x, after.mlp, adapters)
        return (x, residual) if shared is None else (x, residual, shared)
