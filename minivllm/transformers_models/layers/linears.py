"""The linear layers of a transformers model, computed by the engine's methods:
packed, quantised, with adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minivllm.linear.layer import ChooseMethod, Linear, Shard
from minivllm.linear.methods.exact import LoopedLinear
from minivllm.transformers_models.layers.division import Division, LinearPart
from minivllm.transformers_models.trace.operators import Ranks, StepHolder
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HEAD = "lm_head"
"""What the layer that makes logits is called, by whatever name a model has it: rounding it costs more."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class SharedProduct:
    """One product for all linear layers of a block that read the same input, such as q, k and v.

    index: of the product in the model.
    widths: outputs of every worker in each of the layers, if they are put together.
    """

    def __init__(
        self,
        linear: Linear,
        index: int,
        holder: StepHolder,
        ranks: Ranks | None = None,
        widths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.linear = linear
        self.index = index
        self.ranks = ranks
        self.sizes = dict(linear.sizes if widths is None else zip(linear.sizes, map(sum, widths)))
        self._holder = holder
        self._widths = widths
        self._input: Tensor | None = None
        self._parts: dict[str, Tensor] = {}

    def part(self, name: str, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out of that part].
        What is computed for one part is kept until all others have asked."""
        if len(self.sizes) == 1:
            return self._joined(self._compute(x))
        if self._input is not x or name not in self._parts:
            parts = self._joined(self._compute(x)).split(list(self.sizes.values()), dim=-1)
            self._input = x
            self._parts = dict(zip(self.sizes, parts))
        out = self._parts.pop(name)
        if not self._parts:
            self._input = None
        return out

    def _joined(self, x: Tensor) -> Tensor:
        """The outputs of all workers, layer by layer."""
        if self.ranks is None or self._widths is None:
            return x
        by_rank = list(zip(*self._widths))
        x = self.ranks.gather(x, [sum(widths) for widths in by_rank])
        if len(self._widths) == 1:
            return x
        pieces = x.split([width for widths in by_rank for width in widths], dim=-1)
        count = len(self._widths)
        return torch.cat([piece for part in range(count) for piece in pieces[part::count]], dim=-1)

    def _compute(self, x: Tensor) -> Tensor:
        if self._holder.is_traced:
            out: Tensor = torch.ops.minivllm.product(x, self.index, self.linear.out_features)
            return out
        step = self._holder.step
        adapters = None if step is None or not self.linear.adapters else step.tokens.adapters
        arguments = self.linear.tensors if adapters is None else self.linear.arguments
        out = self.linear.product(x.reshape(-1, x.shape[-1]), arguments, adapters)
        return out.reshape(*x.shape[:-1], out.shape[-1])


class LinearModule(nn.Module):
    """Stands in the place of an ``nn.Linear`` (or of GPT-2's ``Conv1D``, which stores its weight [in, out]).

    takes_whole: see LinearPart.
    """

    def __init__(
        self, product: SharedProduct, part: str, is_transposed: bool, takes_whole: bool = False
    ) -> None:
        super().__init__()
        self._product = product
        self.part = part
        self._is_transposed = is_transposed
        self._takes_whole = takes_whole
        self.in_features = product.linear.in_features
        self.out_features = product.sizes[part]

    @property
    def linear(self) -> Linear:
        """What holds the weight, and those of the layers that are computed with it."""
        return self._product.linear

    @property
    def weight(self) -> Tensor:
        """The stored weight, for layers that look at its dtype or device."""
        stored, method = self.linear.tensors[0], self.linear.method
        return stored.new_empty(0, dtype=method.dtype) if isinstance(method, LoopedLinear) else stored

    def load(self, kind: str, tensor: StoredWeight) -> None:
        """Take "weight" or "bias" as the checkpoint has it."""
        if kind == "weight" and self._is_transposed:
            tensor = (tensor.restore(torch.float32) if isinstance(tensor, QuantizedWeight) else tensor).T
        self.linear.load(self.part, kind, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self._takes_whole and x.shape[-1] > self.in_features:
            x = x[..., self.linear.inputs]
        if x.shape[-1] != self.in_features:
            raise ValueError(f"{self.part} takes {self.in_features} values, but was given {x.shape[-1]}")
        out = self._product.part(self.part, x)
        ranks = self._product.ranks
        return out if ranks is None or self.linear.split == "column" else ranks.add(out)


def replace_linears(
    model: PreTrainedModel,
    siblings: Sequence[Sequence[str]],
    dtype: torch.dtype,
    device: torch.device,
    choose: ChooseMethod,
    holder: StepHolder,
    division: Division | None = None,
) -> dict[str, LinearModule]:
    """Put a LinearModule in the place of every linear layer. Returns them by their names in the model.

    siblings: names of layers of one block that read the same input. division: which part of them is this
    worker's, if not all. Classes derived from ``nn.Linear`` compute
    something else and stay, and so do the products that choose experts, which are small,
    and on whose exact values the choice depends.
    """
    from transformers.pytorch_utils import Conv1D

    expert_counts = {getattr(model.config, name, None) for name in _EXPERT_COUNTS} - {None}
    head = model.get_output_embeddings()
    found = {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D) and (module is head or _shape(module)[0] not in expert_counts)
    }
    replaced: dict[str, LinearModule] = {}
    divided = _divided(found, head, division)
    for names in _together(found, siblings, divided):
        first, own = found[names[0]], divided.get(names[0])
        parts = {HEAD if found[name] is head else name.rpartition(".")[2]: name for name in names}
        linear = Linear(
            {part: _shape(found[name])[0] for part, name in parts.items()},
            _shape(first)[1],
            bias=first.bias is not None,
            split="column" if own is None else own.split,
            shard=Shard() if own is None or division is None else division.shard,
            dtype=dtype,
            device=device,
            choose=choose,
            own=None if own is None else {part: divided[name].own for part, name in parts.items()},
        )
        widths = None if own is None or own.widths is None else [divided[name].widths or () for name in names]
        ranks = None if own is None or division is None else division.ranks
        product = SharedProduct(
            linear, len({id(one.linear) for one in replaced.values()}), holder, ranks, widths
        )
        for part, name in parts.items():
            parent, _, last = name.rpartition(".")
            is_transposed = type(found[name]) is Conv1D
            replaced[name] = LinearModule(product, part, is_transposed, own is not None and own.takes_whole)
            setattr(model.get_submodule(parent), last, replaced[name])
    return replaced


def _divided(
    found: Mapping[str, nn.Module], head: nn.Module | None, division: Division | None
) -> dict[str, LinearPart]:
    """This worker's parts of all layers that are divided."""
    if division is None:
        return {}
    parts: dict[str, LinearPart | None] = {}
    for name, module in found.items():
        out_features, in_features = _shape(module)
        is_head = module is head
        parts[name] = (
            division.head(out_features) if is_head else division.linear(name, out_features, in_features)
        )
    return {name: part for name, part in parts.items() if part is not None}


def _shape(module: nn.Module) -> tuple[int, int]:
    """[out, in]; the weight may lie on the meta device."""
    weight: Any = module.weight
    out_features, in_features = weight.shape if type(module) is nn.Linear else reversed(weight.shape)
    return out_features, in_features


def _together(
    found: Mapping[str, nn.Module], siblings: Sequence[Sequence[str]], divided: Mapping[str, LinearPart]
) -> list[list[str]]:
    """All names, those in one list whose layers can be computed as one product: both or none with a bias, and
    divided by outputs in the same way if they are."""
    group_of: dict[str, tuple[object, ...]] = {name: (name,) for name in found}
    for number, names in enumerate(siblings):
        for name in names:
            part = divided.get(name)
            if name in found and (part is None or part.split == "column"):
                kind = None if part is None else part.widths is not None
                group_of[name] = number, found[name].bias is not None, kind
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, group in group_of.items():
        groups.setdefault(group, []).append(name)
    return list(groups.values())


def settle_rotary(model: nn.Module, max_model_len: int, device: torch.device) -> None:
    """Rotary frequencies that depend on the length of a text are settled once, for max_model_len, so that the
    tokens of a request do not depend on how long the texts beside it are, and cached blocks stay true."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        config: PretrainedConfig | None = getattr(module, "config", None)
        if kinds is None or config is None:
            continue
        settled = {}
        by_layer: Mapping[str | None, str] = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in by_layer.items():
            if "dynamic" in kind or kind == "longrope":
                own = {} if layer_type is None else {"layer_type": layer_type}
                inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=max_model_len, **own)
                prefix = "" if layer_type is None else f"{layer_type}_"
                setattr(module, f"{prefix}inv_freq", inv_freq)
                kind = "settled"
            settled[layer_type] = kind
        module.rope_type = settled if isinstance(kinds, dict) else settled[None]  # type: ignore[assignment]
