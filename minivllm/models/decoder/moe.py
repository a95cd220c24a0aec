"""The feed-forward part of a layer with experts: a router, experts of which each token uses a few, and a shared MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.experts.routing import route
from kernels_triton_free.lora import RowAdapters
from minivllm.linear.experts.experts import Experts
from minivllm.linear.layer import Linear, Shard
from minivllm.linear.methods.method import LinearTensors
from minivllm.linear.methods.stored_weight import QuantizedWeight, StoredWeight
from minivllm.models.decoder.feed_forward import GatedMlp
from minivllm.models.layer_specs import MoeSpec
from minivllm.models.linear_factory import LinearFactory, Stored
from minivllm.models.shards import own_inner

_ROUTER_PARTS = ("gate.weight", "gate.bias", "gate.e_score_correction_bias", "shared_expert_gate.weight")


class Router:
    """The small weights that decide: always float32, never quantised.

    tensors: those of _ROUTER_PARTS that the spec calls for, in that order: router [experts, hidden] and its bias
    [experts], the correction [experts], and the gate of the shared MLP [1, hidden].
    """

    def __init__(self, spec: MoeSpec, device: torch.device) -> None:
        wanted = (True, spec.router_bias, spec.has_correction, spec.shared_gate)
        self.parts = tuple(part for part, is_there in zip(_ROUTER_PARTS, wanted, strict=True) if is_there)
        self.tensors: LinearTensors = (torch.empty(0),) * len(self.parts)
        self._device = device

    def load(self, part: str, tensor: StoredWeight) -> None:
        values = tensor.restore(torch.float32) if isinstance(tensor, QuantizedWeight) else tensor.to(torch.float32)
        place = self.parts.index(part)
        self.tensors = (*self.tensors[:place], values.clone().to(self._device), *self.tensors[place + 1 :])

    def named(self, tensors: LinearTensors) -> dict[str, Tensor]:
        """The tensors of any equal router by the part that they are."""
        return dict(zip(self.parts, tensors, strict=True))


class MixtureOfExperts:
    """Chosen experts, weighted and added up, and a shared MLP where there is one; see MoeSpec.

    Of several workers, each has a part of every expert, or all of some of them (LinearFactory.experts).
    """

    def __init__(self, spec: MoeSpec, hidden_size: int, factory: LinearFactory) -> None:
        self._spec, self._router = spec, Router(spec, factory.device)
        self._own = slice(0, spec.num_experts)
        own, shard = own_inner(spec.inner, factory.shard), factory.shard
        if factory.experts is not None:
            self._own, own, shard = factory.experts.own(spec.num_experts), slice(0, spec.inner), Shard()
        self._experts = Experts(
            self._own.stop - self._own.start,
            hidden_size,
            spec.inner,
            bias=spec.bias,
            activation=spec.activation,
            shard=shard,
            own=own,
            is_part=factory.experts is not None,
            dtype=factory.dtype,
            device=factory.device,
            choose=factory.choose,
        )
        self._shared = None if spec.shared is None else GatedMlp(spec.shared, hidden_size, factory)

    @property
    def linears(self) -> Sequence[Linear]:
        return () if self._shared is None else self._shared.linears

    @property
    def stored(self) -> Sequence[Stored]:
        return (self._router, self._experts, *self.linears)

    @property
    def methods(self) -> tuple[object, ...]:
        return (self._experts.method, *(linear.method for linear in self.linears))

    @property
    def weights(self) -> tuple[LinearTensors, ...]:
        return (self._router.tensors, self._experts.tensors, *(linear.arguments for linear in self.linears))

    @property
    def weights_per_token(self) -> int:
        experts = self._experts
        per_expert = 3 * experts.inner * experts.hidden_size
        shared = sum(linear.in_features * linear.out_features for linear in self.linears)
        chosen = -(-self._spec.routing.top_k * experts.num_experts // self._spec.num_experts)
        return chosen * per_expert + self._spec.num_experts * experts.hidden_size + shared

    def load(self, name: str, tensor: StoredWeight) -> None:
        if name in self._router.parts:
            self._router.load(name, tensor)
            return
        block, *which, part, kind = name.split(".")
        if block == "experts":
            if self._own.start <= int(which[0]) < self._own.stop:
                self._experts.load(int(which[0]) - self._own.start, part, kind, tensor)
        else:
            assert self._shared is not None
            self._shared.load(f"{part}.{kind}", tensor)

    def apply(self, x: Tensor, weights: tuple[LinearTensors, ...], adapters: RowAdapters | None) -> Tensor:
        out, own = self.chosen(x, weights), self.shared(x, weights, adapters)
        return out if own is None else out + own

    def chosen(self, x: Tensor, weights: tuple[LinearTensors, ...]) -> Tensor:
        """What the chosen experts make of x, as far as they are here."""
        router, experts = self._router.named(weights[0]), weights[1]
        logits = F.linear(x.float(), router["gate.weight"], router.get("gate.bias"))
        ids, factors = route(logits, self._spec.routing, router.get("gate.e_score_correction_bias"))
        method = self._experts.method
        if method.is_part:
            ids = ids - self._own.start
            ids = torch.where((ids >= 0) & (ids < method.num_experts), ids, method.num_experts)
        return method.apply(x, ids, factors, experts)

    def shared(self, x: Tensor, weights: tuple[LinearTensors, ...], adapters: RowAdapters | None) -> Tensor | None:
        """What the shared MLP makes of x, if there is one."""
        if self._shared is None:
            return None
        router = self._router.named(weights[0])
        own = self._shared.apply(x, weights[2:], adapters)
        if "shared_expert_gate.weight" in router:
            own = own * torch.sigmoid(F.linear(x.float(), router["shared_expert_gate.weight"])).to(own.dtype)
        return own
