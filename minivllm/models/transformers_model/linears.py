"""The linear layers of a transformers model, computed by the engine's methods: packed, quantised, with adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from minivllm.linear.layer import ChooseMethod, Linear, Shard
from minivllm.linear.stored_weight import QuantizedWeight, StoredWeight
from minivllm.models.transformers_model.attention import StepHolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

HEAD = "lm_head"
"""What the layer that makes logits is called, by whatever name a model has it: rounding it costs more."""

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class LinearModule(nn.Module):
    """Stands in the place of an ``nn.Linear`` (or of GPT-2's ``Conv1D``, which stores its weight [in, out])."""

    def __init__(self, linear: Linear, part: str, is_transposed: bool, holder: StepHolder) -> None:
        super().__init__()
        self.linear, self.part, self._is_transposed, self._holder = linear, part, is_transposed, holder
        self.in_features, self.out_features = linear.in_features, linear.out_features

    @property
    def weight(self) -> Tensor:
        """The stored weight, for layers that look at its dtype or device."""
        return self.linear.tensors[0]

    def load(self, kind: str, tensor: StoredWeight) -> None:
        """Take "weight" or "bias" as the checkpoint has it."""
        if kind == "weight" and self._is_transposed:
            tensor = (tensor.restore(torch.float32) if isinstance(tensor, QuantizedWeight) else tensor).T
        self.linear.load(self.part, kind, tensor)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        step = self._holder.step
        adapters = None if step is None or not self.linear.adapters else step.tokens.adapters
        arguments = self.linear.tensors if adapters is None else self.linear.arguments
        out = self.linear.apply(x.reshape(-1, x.shape[-1]), arguments, adapters)
        return out.reshape(*x.shape[:-1], out.shape[-1])


def replace_linears(
    model: PreTrainedModel, dtype: torch.dtype, device: torch.device, choose: ChooseMethod, holder: StepHolder
) -> dict[str, LinearModule]:
    """Put a LinearModule in the place of every linear layer. Returns them by their names in the model.

    Classes derived from ``nn.Linear`` compute something else and stay, and so do the products that choose experts,
    which are small, and on whose exact values the choice depends.
    """
    from transformers.pytorch_utils import Conv1D

    expert_counts = {getattr(model.config, name, None) for name in _EXPERT_COUNTS} - {None}
    head = model.get_output_embeddings()
    replaced: dict[str, LinearModule] = {}
    for name, module in list(model.named_modules()):
        if type(module) not in (nn.Linear, Conv1D):
            continue
        is_transposed = type(module) is Conv1D
        shape: Any = module.weight.shape  # on the meta device
        out_features, in_features = reversed(shape) if is_transposed else shape
        if out_features in expert_counts and module is not head:
            continue
        parent, _, part = name.rpartition(".")
        part = HEAD if module is head else part
        linear = Linear(
            {part: out_features},
            in_features,
            bias=module.bias is not None,
            split="column",
            shard=Shard(),
            dtype=dtype,
            device=device,
            choose=choose,
        )
        replaced[name] = LinearModule(linear, part, is_transposed, holder)
        setattr(model.get_submodule(parent), name.rpartition(".")[2], replaced[name])
    return replaced


def settle_rotary(model: nn.Module, max_model_len: int, device: torch.device) -> None:
    """Rotary frequencies that depend on the length of a text are settled once, for max_model_len, so that the tokens of
    a request do not depend on how long the texts beside it are, and cached blocks stay true."""
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
