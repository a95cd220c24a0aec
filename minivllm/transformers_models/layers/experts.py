"""The experts of a transformers model, computed and stored by the engine's methods:
packed, quantised, traced.

transformers keeps the matrices of all experts of a layer in two tensors and lets the sum over them be
replaced by name (``ExpertsInterface``), as it does with attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minivllm.linear.experts.experts import Experts
from minivllm.linear.experts.methods import ExpertActivation, activate
from minivllm.linear.layer import ChooseMethod, Shard
from minivllm.specs.layers import ClampedSwiglu
from minivllm.transformers_models.layers.division import Division
from minivllm.transformers_models.trace.operators import Ranks, StepHolder
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OURS, THEIRS = "minivllm", "grouped_mm"
"""Implementations: the engine's own, and that of transformers which can be traced."""

_TENSORS = {"gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"}
_NAMED = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


class EngineExperts:
    """The experts of one layer, in the layout that their module declares. index: of the layer among those
    with some. ranks: the workers that have the other parts of them."""

    def __init__(
        self, module: nn.Module, experts: Experts, index: int, holder: StepHolder, ranks: Ranks | None
    ) -> None:
        self.experts = experts
        self.index = index
        self._holder = holder
        self._ranks = ranks
        self._is_transposed = bool(module.is_transposed)
        self._is_concatenated = bool(module.is_concatenated)

    def load(self, name: str, tensor: StoredWeight) -> None:
        """Take one of ``_TENSORS``, of all experts; a quantised one is [experts * out, in]."""
        part, kind = (name.removesuffix("_bias"), "bias") if name.endswith("_bias") else (name, "weight")
        height = tensor.shape[0] // self.experts.num_experts
        for expert in range(self.experts.num_experts):
            if isinstance(tensor, QuantizedWeight):
                own: StoredWeight = tensor.part(slice(expert * height, (expert + 1) * height), slice(None))
            else:
                own = tensor[expert].T if kind == "weight" and self._is_transposed else tensor[expert]
            if part == "down_proj":
                self.experts.load(expert, part, kind, own)
                continue
            half = own.shape[0] // 2
            gate, up = (
                (slice(half), slice(half, None))
                if self._is_concatenated
                else (slice(0, None, 2), slice(1, None, 2))
            )
            for own_part, rows in (("gate_proj", gate), ("up_proj", up)):
                values = own.part(rows, slice(None)) if isinstance(own, QuantizedWeight) else own[rows]
                self.experts.load(expert, own_part, kind, values)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [..., hidden], ids and weights [tokens, top_k] -> as x."""
        rows = x.reshape(-1, x.shape[-1])
        if self._holder.is_traced:
            out: Tensor = torch.ops.minivllm.experts(rows, ids, weights, self.index)
        else:
            out = self.experts.method.apply(rows, ids, weights, self.experts.tensors)
        out = out.reshape(x.shape)
        return out if self._ranks is None else self._ranks.add(out)


def replace_experts(
    model: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device,
    choose: ChooseMethod,
    holder: StepHolder,
    division: Division | None = None,
) -> dict[str, EngineExperts]:
    """Have the engine compute the experts of all layers, by their names in the model. Empty where they have
    another form than the engine's; then transformers computes them. division: see replace_linears."""
    if not model._can_set_experts_implementation():
        return {}
    found: dict[str, Any] = {
        name: part for name, part in model.named_modules() if hasattr(part, "is_concatenated")
    }
    forms = {name: _activation(part) for name, part in found.items()}
    if any(form is None for form in forms.values()):
        model.set_experts_implementation(THEIRS)
        return {}
    replaced: dict[str, EngineExperts] = {}
    for name, part in found.items():
        rows, columns = part.gate_up_proj.shape[1:]
        hidden, inner = (rows, columns // 2) if part.is_transposed else (columns, rows // 2)
        form = forms[name]
        assert form is not None
        own = None if division is None else division.experts(name, inner)
        ranks = None if division is None or own is None else division.ranks
        experts = Experts(
            part.gate_up_proj.shape[0],
            hidden,
            inner,
            bias=bool(part.has_bias),
            activation=form,
            shard=Shard() if ranks is None else ranks.shard,
            dtype=dtype,
            device=device,
            choose=choose,
            own=own,
        )
        for tensor in _TENSORS:
            part._parameters.pop(tensor, None)
        replaced[name] = part.engine_experts = EngineExperts(part, experts, len(replaced), holder, ranks)
    model.set_experts_implementation(OURS)
    return replaced


def _activation(module: Any) -> ExpertActivation | None:
    """The activation that computes what the module's own does;
    None if there is none, or experts do more than that."""
    tensors = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    wanted = _TENSORS if module.has_bias else _TENSORS - {"gate_up_proj_bias", "down_proj_bias"}
    if tensors != wanted or not module.has_gate or module.has_post_expert_norm:
        return None
    forms: list[ExpertActivation] = [*_NAMED]
    if hasattr(module, "alpha") and hasattr(module, "limit"):
        forms.append(ClampedSwiglu(module.alpha, module.limit))
    gate, up = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)).mul_(5)
    halves = torch.cat([gate, up], -1)
    given = halves if module.is_concatenated else torch.stack([gate, up], -1).flatten(1)
    own = module._apply_gate(given)
    return next(
        (form for form in forms if torch.allclose(activate(halves, form), own, atol=1e-6, rtol=1e-5)), None
    )


def compute_experts(module: Any, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls under OURS."""
    out: Tensor = module.engine_experts(hidden_states, ids, weights)
    return out
