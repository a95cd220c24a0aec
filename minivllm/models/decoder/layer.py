"""One layer of a decoder: its mixer, its feed-forward part, and the norms around them.

What a layer is stands in its spec. Everything here is a pure function of the tensors that it is given, which may be
those of any layer with an equal spec: that is how layers share compiled regions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import add_rms_norm, rms_norm
from minivllm.linear.layer import Linear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.linear.methods.stored_weight import QuantizedWeight, StoredWeight
from minivllm.models.decoder.feed_forward import FeedForward, GatedMlp
from minivllm.models.decoder.moe import MixtureOfExperts
from minivllm.models.layer_specs import FeedForwardSpec, LayerSpec, MoeSpec, StateMixerSpec
from minivllm.models.linear_factory import LinearFactory, Stored
from minivllm.models.mixers.registry import make_mixer
from minivllm.models.model import Given, LayerCache


class BeforeMixer(NamedTuple):
    """Weights from a layer's input to where it attends, or updates a state. norm: None in layers that have none there.
    mixer: see ``Mixer.ahead_weights``."""

    norm: Tensor | None
    mixer: tuple[Any, ...]


class AfterMixer(NamedTuple):
    """Weights from there to a layer's own output. read_norm: of the layer's input, where the mixer reads that again.
    mixer: see ``Mixer.behind_weights``. mixer_norm, norm, mlp_norm: of what the mixer adds to the residual stream, of
    what the MLP reads, and of what it adds; None in layers that have none."""

    read_norm: Tensor | None
    mixer: tuple[Any, ...]
    mixer_norm: Tensor | None
    norm: Tensor | None
    mlp: tuple[LinearTensors, ...]
    mlp_norm: Tensor | None


class LayerMethods(NamedTuple):
    """How a layer's products are computed. Layers with equal specs and equal methods share their regions."""

    ahead: tuple[LinearMethod, ...]
    behind: tuple[LinearMethod, ...]
    mlp: tuple[object, ...]


def make_feed_forward(spec: FeedForwardSpec, hidden_size: int, factory: LinearFactory) -> FeedForward:
    """The code behind a spec."""
    if isinstance(spec, MoeSpec):
        return MixtureOfExperts(spec, hidden_size, factory)
    return GatedMlp(spec, hidden_size, factory)


class DecoderLayer:
    """The weights of one layer, and its arithmetic."""

    def __init__(self, spec: LayerSpec, hidden_size: int, factory: LinearFactory, attention_dtype: torch.dtype) -> None:
        self.spec, self._dtype = spec, factory.dtype
        self.keeps_state = isinstance(spec.mixer, StateMixerSpec)
        self.mixer = make_mixer(spec.mixer, hidden_size, factory, attention_dtype)
        self.mlp = make_feed_forward(spec.mlp, hidden_size, factory)
        self.vectors: dict[str, Tensor] = {}  # norms, sinks, and weights that belong to no linear layer
        self.linears = (*self.mixer.linears, *self.mlp.linears)
        self._linear_of = {part: linear for linear in self.mixer.linears for part in linear.sizes}

    def load(self, name: str, tensor: StoredWeight, device: torch.device) -> None:
        """Take ``self_attn.q_proj.weight``, ``input_layernorm.weight``, … of this layer."""
        *_, module, kind = name.split(".")
        if name.startswith("mlp."):
            self.mlp.load(name.removeprefix("mlp."), tensor)
        elif module in self._linear_of:
            self._linear_of[module].load(module, kind, tensor)
        else:
            if isinstance(tensor, QuantizedWeight):
                tensor = tensor.restore(self._dtype)
            key = {"weight": module, "bias": f"{module}.bias"}.get(kind, kind)
            is_given = kind == key or (name.startswith(f"{self.mixer.block}.") and self.keeps_state)
            own = self.mixer.own(key, tensor) if name.startswith(f"{self.mixer.block}.") else tensor
            tensor = own if own is tensor else own.clone()
            self.vectors[key] = tensor.to(device, torch.float32 if is_given else tensor.dtype)

    @property
    def stored(self) -> Sequence[Stored]:
        """All that keeps weights, but for the norms."""
        return (*self.mixer.linears, *self.mlp.stored)

    @property
    def weights_per_token(self) -> int:
        """How many weights computing a token reads."""
        projections = sum(linear.in_features * linear.out_features for linear in self.mixer.linears)
        return projections + self.mlp.weights_per_token

    @property
    def named_linears(self) -> list[tuple[str, Linear]]:
        """The linear layers by the block that they lie in."""
        blocks = (self.mixer.block, self.mixer.linears), ("mlp", self.mlp.linears)
        return [(block, linear) for block, linears in blocks for linear in linears]

    @property
    def methods(self) -> LayerMethods:
        return LayerMethods(self.mixer.ahead_methods, self.mixer.behind_methods, self.mlp.methods)

    def own_cache(self, cache: LayerCache) -> LayerCache | None:
        """The cache that the code in front of attention writes; None in a layer that keeps a state."""
        return None if self.keeps_state else cache

    @property
    def given(self) -> Given:
        """See Mixer.given."""
        return self.mixer.given(self.vectors)

    @property
    def before(self) -> BeforeMixer:
        return BeforeMixer(self.vectors.get("input_layernorm"), self.mixer.ahead_weights(self.vectors))

    @property
    def after(self) -> AfterMixer:
        norms = self.vectors.get
        return AfterMixer(
            norms("input_layernorm") if self.mixer.reads_again else None,
            self.mixer.behind_weights(self.vectors),
            norms("post_self_attn_layernorm"),
            norms("post_attention_layernorm"),
            self.mlp.weights,
            norms("post_mlp_layernorm"),
        )

    def enter(self, x: Tensor | None, residual: Tensor, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add x, where there is some, to the residual stream: (what the next sublayer reads, the stream)."""
        eps = self.spec.norms.eps
        if x is None:
            return (residual if norm is None else rms_norm(residual, norm, eps)), residual
        if norm is None:
            residual = residual + x
            return residual, residual
        return add_rms_norm(x, residual, norm, eps)

    def output(
        self, o: Tensor, residual: Tensor, adapters: RowAdapters | None, weights: AfterMixer
    ) -> tuple[Tensor, Tensor]:
        """From o, which attention or the update of a state gave, to what the layer still has to add to the residual
        stream, and the stream without it."""
        read = self.enter(None, residual, weights.read_norm)[0] if self.mixer.reads_again else None
        x = self.mixer.behind(o, read, adapters, weights.mixer)
        x, residual = self.enter(self.leaving(x, weights.mixer_norm), residual, weights.norm)
        return self.leaving(self.mlp.apply(x, weights.mlp, adapters), weights.mlp_norm), residual

    def leaving(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """What a sublayer adds to the residual stream."""
        return x if norm is None else rms_norm(x, norm, self.spec.norms.after_eps)
