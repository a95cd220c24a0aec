"""The mixer that computes a spec."""

from __future__ import annotations

import torch

from minivllm.compilation.regions import CompileRegion
from minivllm.linear.factory import LinearFactory
from minivllm.models.mixers.attention import SelfAttention
from minivllm.models.mixers.gated_delta import GATED_DELTA
from minivllm.models.mixers.latent import LatentAttention
from minivllm.models.mixers.mamba2 import MAMBA2
from minivllm.models.mixers.mixer import Mixer, StateUpdate
from minivllm.models.mixers.scan import ScanMixer, ScanUpdate
from minivllm.models.mixers.short_conv import ShortConv, ShortConvUpdate
from minivllm.specs.caches import StateSpec
from minivllm.specs.layers import (
    GatedDeltaSpec,
    LatentSpec,
    Mamba2Spec,
    MixerSpec,
    SelfAttentionSpec,
    ShortConvSpec,
    StateMixerSpec,
)


def make_mixer(
    spec: MixerSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype
) -> Mixer:
    """The projections of a layer. attention_dtype: of what is computed at the cut."""
    if isinstance(spec, SelfAttentionSpec):
        return SelfAttention(spec, hidden_size, factory, attention_dtype)
    if isinstance(spec, LatentSpec):
        return LatentAttention(spec, hidden_size, factory, attention_dtype)
    if isinstance(spec, ShortConvSpec):
        return ShortConv(spec, hidden_size, factory, attention_dtype)
    if isinstance(spec, GatedDeltaSpec | Mamba2Spec):
        return ScanMixer(spec, hidden_size, factory, attention_dtype)
    raise TypeError(f"There is no mixer for {spec}.")


def make_update(spec: StateMixerSpec, state: StateSpec, compile_region: CompileRegion) -> StateUpdate:
    """What updates the states of layers with this spec. state: how their tensors are declared."""
    if isinstance(spec, ShortConvSpec):
        return ShortConvUpdate(spec, state, compile_region)
    if isinstance(spec, GatedDeltaSpec | Mamba2Spec):
        steps = GATED_DELTA if isinstance(spec, GatedDeltaSpec) else MAMBA2
        return ScanUpdate(spec, state, compile_region, steps)
    raise TypeError(f"There is no update of a state for {spec}.")
