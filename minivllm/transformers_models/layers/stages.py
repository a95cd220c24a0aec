"""Which layers of a transformers model are a stage's,
by the plan for pipeline parallelism that the model comes with.

A plan (``base_model_pp_plan``) names the parts of a body in their order: the embedding, the list of layers,
and what follows them. Parts of other stages stay where they are, without their contents, and hand on what
they are given; so a body runs as transformers wrote it, whatever it looks up by the number of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.distributed.stage import Stage, divide_layers
from minivllm.errors import ConfigError


class StageParts:
    """The parts of one stage. Raises ConfigError for a model without a plan, or with one of another kind."""

    def __init__(self, model: Any, body: Any, stage: Stage) -> None:
        """model: whole, as transformers builds it. body: the module of it that the plan is about."""
        self._model = model
        self._stage = stage
        self.is_linked = False
        """Whether there is a stage before that sends; until then every token enters with a made-up vector."""
        prefix = next(name for name, module in model.named_modules() if module is body)
        plan = list(getattr(body.config, "base_model_pp_plan", None) or {})
        if not plan:
            self._refuse("transformers has no plan for that")
        parts: dict[str, Any] = {name: getattr(body, name, None) for name in plan}
        lists = [name for name, part in parts.items() if isinstance(part, nn.ModuleList)]
        embedding = model.get_input_embeddings()
        if (
            len(lists) != 1
            or plan.index(lists[0]) != 1
            or parts[plan[0]] is not embedding
            or None in parts.values()
        ):
            self._refuse("its plan names more than an embedding, a list of layers and what follows them")
        self._embedding = embedding
        self._layers = parts[lists[0]]
        self._behind = [parts[name] for name in plan[2:]]
        self._layers_name = f"{prefix}.{lists[0]}."
        self._embedding_name = f"{prefix}.{plan[0]}."
        self._is_tied = bool(model.all_tied_weights_keys)
        named = {f"{prefix}.{name}" for name in plan}
        head = next(name for name, part in model.named_modules() if part is model.get_output_embeddings())
        for name, _ in model.named_parameters():
            if name.rpartition(".")[0] != head and not any(name.startswith(f"{part}.") for part in named):
                self._refuse(f"its plan leaves {name} out")
        costs = [sum(tensor.numel() for tensor in layer.parameters()) for layer in self._layers]
        costs[0] += embedding.embedding_dim
        costs[-1] += embedding.weight.numel()
        self.own = divide_layers(costs, stage.size)[stage.number]

    def has(self, name: str) -> bool:
        """Whether a parameter or a module of this name is this stage's."""
        if name.startswith(self._layers_name):
            return int(name.removeprefix(self._layers_name).partition(".")[0]) in self.own
        if name.startswith(self._embedding_name):
            return self._stage.is_first or (self._stage.is_last and self._is_tied)
        return self._stage.is_last

    def keep(self) -> None:
        """Leave only these parts in the model, whose linear layers may be replaced by now."""
        for index, layer in enumerate(self._layers):
            if index not in self.own:
                _empty(layer, _handed_on)
        if not self._stage.is_first:
            self._receive_in(self._layers[self.own.start])
            self._embedding.forward = self._made_up
            if not self.has(self._embedding_name):
                self._embedding._parameters.clear()
        if not self._stage.is_last:
            for part in self._behind:
                _empty(part, _handed_on)

    def _receive_in(self, layer: Any) -> None:
        """Have a layer take what the stage before sends, whatever the body gives it."""
        compute = layer.forward

        def forward(x: Tensor, *args: Any, **named: Any) -> Tensor:
            x = _handed_on(x)
            if self.is_linked:
                x = self._stage.receive((x.shape[1], x.shape[2]), x.dtype)[None]
            out: Tensor = compute(x, *args, **named)
            return out

        layer.forward = forward

    def _made_up(self, ids: Tensor) -> Tensor:
        """ids [1, tokens] -> [1, tokens, hidden]:
        a stand-in for the embedding, which only the first stage has."""
        size, dtype = self._embedding.embedding_dim, self._model.dtype
        if self.is_linked or ids.is_meta:
            return torch.empty(*ids.shape, size, dtype=dtype, device=ids.device)
        return torch.sin(ids[..., None] * torch.arange(1, size + 1, device=ids.device)).to(dtype)

    def _refuse(self, why: str) -> None:
        name = type(self._model).__name__
        raise ConfigError(
            f"pipeline_parallel_size is {self._stage.size}, but {name} cannot be cut so: {why}."
        )


def _handed_on(x: Tensor, *args: Any, **named: Any) -> Tensor:
    """What a part that is elsewhere does. Raises ValueError where bodies take more than a tensor from it."""
    if x.dim() != 3:
        raise ValueError("its layers give more than hidden states")
    return x


def _empty(module: Any, forward: Callable[..., Tensor]) -> None:
    """Drop all that a module holds, and have it compute something else; its other attributes stay."""
    for contents in (module._modules, module._parameters, module._buffers):
        contents.clear()
    module.forward = forward
