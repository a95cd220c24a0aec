"""Arithmetic of EAGLE and MTP heads that no other layer has, as codes of pieces (``minivllm.program``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.norm import rms_norm
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.program.program import Code
from minivllm.specs.caches import LayerCache


@dataclass(frozen=True)
class ReadFeatures:
    """The features of the tokens of a step, [tokens, feature_size], out of [blocks,
    block_size, feature_size]."""

    def __call__(self, features: Tensor, cache: LayerCache) -> Tensor:
        return features.view(features.shape[0] * features.shape[1], features.shape[2])[cache.slots]


@dataclass(frozen=True)
class EagleInput:
    """EAGLE: fc([embedding; feature]), the residual stream."""

    method: LinearMethod

    def __call__(self, embedded: Tensor, feature: Tensor, fc: LinearTensors) -> Tensor:
        return self.method.apply(torch.cat((embedded, feature), dim=-1), fc)


@dataclass(frozen=True)
class Eagle3Input:
    """EAGLE-3: ([norm(embedding); norm(feature)], residual stream).
    norm_before_residual: the stream is the normed feature."""

    eps: float
    norm_before_residual: bool

    def __call__(
        self, embedded: Tensor, feature: Tensor, embedding_norm: Tensor, hidden_norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        normed = rms_norm(feature, hidden_norm, self.eps)
        both = torch.cat((rms_norm(embedded, embedding_norm, self.eps), normed), dim=-1)
        return both, normed if self.norm_before_residual else feature


@dataclass(frozen=True)
class MtpInput:
    """MTP: fc([norm(embedding); norm(feature)]), the residual stream."""

    norm: Code
    method: LinearMethod

    def __call__(
        self,
        embedded: Tensor,
        feature: Tensor,
        embedding_norm: Tensor,
        feature_norm: Tensor,
        fc: LinearTensors,
    ) -> Tensor:
        both = torch.cat((self.norm(embedded, embedding_norm), self.norm(feature, feature_norm)), dim=-1)
        return self.method.apply(both, fc)


@dataclass(frozen=True)
class FuseFeatures:
    """EAGLE-3: a feature, out of the inputs of three layers of the target, [tokens,
    target's hidden size] each."""

    method: LinearMethod

    def __call__(self, low: Tensor, middle: Tensor, high: Tensor, fc: LinearTensors) -> Tensor:
        return self.method.apply(torch.cat((low, middle, high), dim=-1), fc)


@dataclass(frozen=True)
class DraftHead:
    """Logits over the target's vocabulary. token_map int64 [vocab]: the place of every token in the draft
    vocabulary, the place after its last one for tokens that are not in it; None where both are the same."""

    method: LinearMethod

    def __call__(self, x: Tensor, head: LinearTensors, token_map: Tensor | None) -> Tensor:
        logits = self.method.apply(x, head)
        if token_map is None:
            return logits
        return F.pad(logits, (0, 1), value=torch.finfo(logits.dtype).min)[:, token_map]
