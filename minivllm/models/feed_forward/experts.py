"""The feed-forward part of a layer with experts:
a router, experts of which each token uses a few, and a shared MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.experts.routing import Routing, route
from kernels_triton_free.norm import unit_norm
from minivllm.linear.experts.experts import Experts
from minivllm.linear.experts.methods import ExpertsMethod
from minivllm.linear.factory import LinearFactory, Stored
from minivllm.linear.layer import Linear, Shard
from minivllm.linear.methods.method import LinearTensors
from minivllm.models.feed_forward.gated_mlp import GatedMlp
from minivllm.models.mixers.mixer import LayerContext
from minivllm.models.norms import RmsNorm
from minivllm.models.pieces import Add
from minivllm.models.shards import own_inner
from minivllm.program.program import Name, Piece, Program
from minivllm.program.seams import Combine, Share, Sum
from minivllm.specs.layers import NORMS_BESIDE_EXPERTS, MlpSpec, MoeSpec
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight

_ROUTER_PARTS = (
    "gate.weight",
    "gate.bias",
    "gate.e_score_correction_bias",
    "shared_expert_gate.weight",
    "scale",
    "per_expert_scale",
)


class Router:
    """The small weights that decide: always float32, never quantised.

    tensors: those of _ROUTER_PARTS that the spec calls for, in that order: router [experts, hidden] and its
    bias [experts], the correction [experts], and the gate of the shared MLP [1, hidden]; factors of what the
    router reads [hidden], and of what each expert gives [experts].
    """

    def __init__(self, spec: MoeSpec, device: torch.device) -> None:
        scales = spec.beside is not None
        wanted = (True, spec.router_bias, spec.has_correction, spec.shared_gate, scales, scales)
        self.parts = tuple(part for part, is_there in zip(_ROUTER_PARTS, wanted, strict=True) if is_there)
        self.tensors: LinearTensors = (torch.empty(0),) * len(self.parts)
        self._device = device

    def load(self, part: str, tensor: StoredWeight) -> None:
        values = (
            tensor.restore(torch.float32) if isinstance(tensor, QuantizedWeight) else tensor.to(torch.float32)
        )
        place = self.parts.index(part)
        self.tensors = (*self.tensors[:place], values.clone().to(self._device), *self.tensors[place + 1 :])

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply ``change`` to each tensor."""
        self.tensors = tuple(map(change, self.tensors))

    def tensor(self, part: str) -> Tensor | None:
        """One of _ROUTER_PARTS; None if the spec does not call for it."""
        return self.tensors[self.parts.index(part)] if part in self.parts else None


@dataclass(frozen=True)
class ChosenExperts:
    """What the experts that the router chooses make of x, as far as they are here."""

    method: ExpertsMethod
    routing: Routing
    first: int
    """Number of the first expert here."""

    def __call__(
        self,
        x: Tensor,
        router: Tensor,
        bias: Tensor | None,
        correction: Tensor | None,
        experts: LinearTensors,
    ) -> Tensor:
        """x [tokens, hidden], router [experts, hidden] -> [tokens, hidden]."""
        return self.given(x, *route(F.linear(x.float(), router, bias), self.routing, correction), experts)

    def given(self, x: Tensor, ids: Tensor, factors: Tensor, experts: LinearTensors) -> Tensor:
        """The same for chosen experts. ids, factors: [tokens, top_k]."""
        if self.method.is_part:
            ids = ids - self.first
            ids = torch.where((ids >= 0) & (ids < self.method.num_experts), ids, self.method.num_experts)
        return self.method.apply(x, ids, factors, experts)


@dataclass(frozen=True)
class ScaledExperts:
    """Chosen experts of the normed residual stream (Gemma 4). The router reads the same norm with learned
    factors in place of the weight, and each expert's output has a factor."""

    chosen: ChosenExperts
    norm_eps: float

    def __call__(
        self,
        stream: Tensor,
        weight: Tensor,
        router: Tensor,
        scale: Tensor,
        per_expert: Tensor,
        experts: LinearTensors,
    ) -> Tensor:
        """stream [tokens, hidden]; weight [hidden] of the norm. scale, per_expert: see Router."""
        normed = unit_norm(stream, self.norm_eps)
        logits = F.linear(normed.float() * (scale * stream.shape[-1] ** -0.5), router)
        ids, factors = route(logits, self.chosen.routing)
        return self.chosen.given(normed * weight, ids, factors * per_expert[ids], experts)


@dataclass(frozen=True)
class GateShared:
    """The output of the shared MLP times the sigmoid of a product of the layer's input (Qwen2-MoE)."""

    def __call__(self, shared: Tensor, read: Tensor, gate: Tensor) -> Tensor:
        return shared * torch.sigmoid(F.linear(read.float(), gate)).to(shared.dtype)


class MixtureOfExperts:
    """Chosen experts, weighted and added up, and a shared MLP where there is one; see MoeSpec.

    Of several workers, each has a part of every expert, or all of some of them (LinearFactory.experts).
    """

    def __init__(self, spec: MoeSpec, hidden_size: int, factory: LinearFactory) -> None:
        self._spec = spec
        self._router = Router(spec, factory.device)
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

    def program(self, context: LayerContext, read: Name, is_shared: bool) -> Program:
        stream, shared = context.stream, None if self._shared is None else self._shared_pieces(context, read)
        if is_shared:
            end = Combine(stream, None if shared is None else "shared")
            return [*(shared or ()), Share(read, "tokens", stream), self._chosen(context, "tokens"), end]
        add = [] if shared is None else [*shared, Piece(Add(), ("x", "shared"), {"x": stream})]
        return [self._chosen(context, read), *add, Sum("x", stream)]

    def _chosen(self, context: LayerContext, read: Name) -> Piece:
        router, experts = self._router, self._experts

        def weights() -> tuple[Any, ...]:
            return (*map(router.tensor, _ROUTER_PARTS[:3]), experts.tensors)

        code = ChosenExperts(experts.method, self._spec.routing, self._own.start)
        return Piece(code, (read,), {"x": context.stream}, weights)

    def scaled(self, context: LayerContext, read: Name) -> Piece:
        """Experts whose router has factors: from the residual stream in ``read`` to "x"."""
        router, experts = self._router, self._experts

        def weights() -> tuple[Any, ...]:
            of_router = (router.tensor(_ROUTER_PARTS[part]) for part in (0, 4, 5))
            return (context.vectors()[NORMS_BESIDE_EXPERTS[0]], *of_router, experts.tensors)

        code = ScaledExperts(
            ChosenExperts(experts.method, self._spec.routing, self._own.start), self._spec.norm_eps
        )
        return Piece(code, (read,), {"x": context.stream}, weights)

    def _shared_pieces(self, context: LayerContext, read: Name) -> list[Piece]:
        """What the shared MLP makes of the tokens, in "shared"."""
        assert self._shared is not None
        pieces = self._shared.pieces(context, read, "shared")
        if self._spec.shared_gate:
            router, gives = self._router, {"shared": context.stream}
            pieces.append(
                Piece(GateShared(), ("shared", read), gives, lambda: (router.tensor(_ROUTER_PARTS[3]),))
            )
        return pieces


class ExpertsBesideMlp:
    """A gated MLP in parallel with experts, both normed before and after (Gemma 4). A ``FeedForward``."""

    def __init__(self, spec: MoeSpec, mlp: MlpSpec, hidden_size: int, factory: LinearFactory) -> None:
        self._norm = RmsNorm(spec.norm_eps)
        self._mlp = GatedMlp(mlp, hidden_size, factory)
        self._experts = MixtureOfExperts(spec, hidden_size, factory)

    @property
    def linears(self) -> Sequence[Linear]:
        return self._mlp.linears

    @property
    def stored(self) -> Sequence[Stored]:
        return (*self._mlp.stored, *self._experts.stored)

    @property
    def methods(self) -> tuple[object, ...]:
        return (*self._mlp.methods, *self._experts.methods)

    @property
    def weights_per_token(self) -> int:
        return self._mlp.weights_per_token + self._experts.weights_per_token

    def load(self, name: str, tensor: StoredWeight) -> None:
        is_of_experts = name in _ROUTER_PARTS or name.startswith("experts.")
        part = self._experts if is_of_experts else self._mlp
        part.load(name, tensor)

    def program(self, context: LayerContext, read: Name, is_shared: bool) -> Program:
        stream = context.stream

        def normed(name: str, register: Name) -> Piece:
            weights = partial(_vector, context, name)
            return Piece(self._norm, ("x",), {register: stream}, weights)

        experts: Program = [self._experts.scaled(context, "stream"), Sum("x", stream)]
        if is_shared:
            share = Share("stream", "tokens", stream)
            experts = [share, self._experts.scaled(context, "tokens"), Combine(stream, None)]
        return [
            *self._mlp.program(context, read, is_shared=False),
            normed(NORMS_BESIDE_EXPERTS[1], "dense"),
            *experts,
            normed(NORMS_BESIDE_EXPERTS[2], "x"),
            Piece(Add(), ("x", "dense"), {"x": stream}),
        ]


def _vector(context: LayerContext, name: str) -> tuple[Tensor]:
    return (context.vectors()[name],)
