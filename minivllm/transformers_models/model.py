"""A decoder of transformers as the engine's ``Model``: its own layers, our attention, cache and products."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.compilation.regions import CompileRegion
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.stage import Stage
from minivllm.errors import ConfigError, MinivllmError, ModelError
from minivllm.linear.experts.experts import Experts
from minivllm.linear.layer import ChooseMethod, Linear, never_quantized
from minivllm.linear.methods.exact import PlainLinear
from minivllm.models.model import Attend, AttendWeights, Hidden, HiddenTap, TokenInputs
from minivllm.profiling.spans import span
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import CacheSpec, LayerCache
from minivllm.transformers_models.build import Architecture, build_architecture, probe_part
from minivllm.transformers_models.describe.config import TransformersConfig
from minivllm.transformers_models.describe.names import CheckpointNames
from minivllm.transformers_models.layers.attention import OwnPositions, PagedLayer, counts_positions
from minivllm.transformers_models.layers.division import Division
from minivllm.transformers_models.layers.experts import replace_experts
from minivllm.transformers_models.layers.linears import replace_linears, settle_rotary
from minivllm.transformers_models.layers.stages import StageParts
from minivllm.transformers_models.trace.operators import Ranks, Step, StepHolder
from minivllm.transformers_models.trace.trace import CannotTrace, OwnTensors
from minivllm.transformers_models.trace.traced import TracedModel
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight

logger = logging.getLogger(__name__)

LEAK = 0.05
"""Share of the largest hidden value by which a token may change when others do that it does not attend to:
rounding."""


class _Picked:
    """What the body seems to return while logits are made: hidden states, and nothing besides."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


class TransformersModel:
    """Weights and layers of any decoder of transformers that attends through its attention interface.
    A ``Model``.

    The body computes packed tokens [1, tokens] with their positions, without a mask or a cache of its own;
    the head is the model's own ``forward`` on picked rows, so that what a family does to its logits is done.

    A tied embedding is one tensor with the head only where the head's method stores the weight as it is.
    """

    feature_size = 0

    def __init__(
        self,
        config: TransformersConfig,
        *,
        dtype: torch.dtype,
        attention_dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        choose_method: ChooseMethod = never_quantized,
        cache_dtype: torch.dtype | None = None,
        communicator: Communicator | None = None,
        input_unit: int = 1,
        stage: Stage | None = None,
    ) -> None:
        """See Decoder. communicator: to the workers that divide its layers, if there are some; input_unit:
        see Division; stage: which layers are this worker's, if not all. Raises ModelError, or ConfigError,
        with the reason if the model cannot be served or divided; no memory is taken by then."""
        self.config = config
        self.dtype = dtype
        self.attention_dtype = attention_dtype
        self.position_axes = 1
        self.device = device
        self.cache_dtype = cache_dtype or attention_dtype
        self.tap: HiddenTap | None = None
        architecture = build_architecture(config, dtype, device)
        self.module = architecture.model
        self._body = architecture.body
        self._language = architecture.language
        self.layers = architecture.layers
        self.all_attention_specs = tuple(layer.spec for layer in self.layers)
        """Those of other stages too."""
        self.names = CheckpointNames(self.module, architecture.eye)
        self._holder = StepHolder()
        self._communicator = communicator
        self._per_token = architecture.per_token
        self._max_model_len = max_model_len
        self._stage = stage or Stage()
        self._parts = None if self._stage.size == 1 else StageParts(self.module, self._language, self._stage)
        settle_rotary(self.module, max_model_len, device)
        self._division: Division | None = None
        if communicator is None:
            self._replace_products(architecture, choose_method)
        else:
            self._divide(architecture, choose_method, communicator, input_unit)
        self._linear_shapes = {
            f"{block}.{part}": linear.whole_shape(part)
            for block, linear in self.linears
            for part in linear.sizes
        }
        if self._parts is not None:
            self._keep_own(self._parts, architecture)
        modules = [self.module.get_submodule(layer.module) for layer in self.layers]
        self._own_positions = any(map(counts_positions, modules))
        for index, (layer, module) in enumerate(zip(self.layers, modules)):
            module.paged_layer = PagedLayer(index, layer, attention_dtype, self._holder)  # type: ignore[assignment]
        self._traced: TracedModel | None = None
        self._picked: Tensor | None = None
        self._compute_body = self._body.forward
        self._body.forward = self._run_body
        if self._stage.is_first:
            embedding = self.module.get_input_embeddings()
            self._embed = embedding.forward
            embedding.forward = self._embed_with_images

    def _replace_products(self, architecture: Architecture, choose_method: ChooseMethod) -> None:
        how = self.dtype, self.device, choose_method, self._holder, self._division
        self._linears = replace_linears(self.module, architecture.siblings, *how)
        self._products = list(
            {id(module.linear): module.linear for module in self._linears.values()}.values()
        )
        self._experts = replace_experts(self.module, *how)

    def _divide(
        self,
        architecture: Architecture,
        choose_method: ChooseMethod,
        communicator: Communicator,
        input_unit: int,
    ) -> None:
        """Keep what is this worker's. Raises ConfigError on all workers if one of them cannot."""
        reason = ""
        try:
            ranks = Ranks(communicator, self._holder)
            self._division = Division(self.module, self._language, self.layers, ranks, input_unit)
            self._replace_products(architecture, choose_method)
            self._division.divide_parameters(self.module)
            self.layers = probe_part(architecture, self._division, self._holder, architecture.layers)
        except MinivllmError as error:
            reason = str(error)
        reason = communicator.first_text(reason)
        if reason:
            raise ConfigError(reason)

    def _keep_own(self, parts: StageParts, architecture: Architecture) -> None:
        """Leave what is this stage's. Raises ConfigError."""
        parts.keep()
        layers = [layer for layer in architecture.layers if parts.has(layer.module)]
        self.layers = probe_part(architecture, self._division, self._holder, layers)
        self._linears = {name: module for name, module in self._linears.items() if parts.has(name)}
        self._products = list(
            {id(module.linear): module.linear for module in self._linears.values()}.values()
        )
        self._experts = {name: module for name, module in self._experts.items() if parts.has(name)}
        self.names.wants = parts.has

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return tuple(layer.spec for layer in self.layers)

    @property
    def cache_specs(self) -> list[CacheSpec]:
        return [CacheSpec(layer.kv_heads, layer.cache_dim, self.cache_dtype) for layer in self.layers]

    @property
    def linears(self) -> list[tuple[str, Linear]]:
        """Those of the body that see every token of a step once, which experts do not."""
        found = {
            id(module.linear): (name.rpartition(".")[0], module.linear)
            for name, module in self._linears.items()
            if name in self._per_token and "." in name
        }
        return list(found.values())

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return self._linear_shapes

    @property
    def weights_per_token(self) -> int:
        own = self._language.config
        total = sum(linear.in_features * linear.out_features for linear in self._products)
        experts = sum(parameter.numel() for parameter in self.module.parameters() if parameter.dim() == 3)
        stacks = [module.experts for module in self._experts.values()]
        experts += sum(3 * stack.inner * stack.hidden_size * stack.num_experts for stack in stacks)
        counts = (
            getattr(own, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")
        )
        num_experts = next((count for count in counts if count), 1)
        return total + experts * (getattr(own, "num_experts_per_tok", None) or 1) // num_experts

    @property
    def _stored(self) -> list[Linear | Experts]:
        """All that keeps weights in tensors of the engine's."""
        return [*self._products, *(module.experts for module in self._experts.values())]

    def load_weights(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Take parameters under transformers' names (see ``weights.iterate_parameters``).

        Raises ModelError for a name that has no place,
        and for a model that mixes tokens other than by attention.
        """
        tied = self.names.tied if self._stage.is_last else {}
        sources = {source: target for target, source in tied.items()}
        for name, weight in weights:
            self._load(name, weight)
            if name in sources:
                self._load(sources[name], weight)
        for target, source in tied.items():
            module = self._linears.get(target.rpartition(".")[0])
            if module is None:
                self._set(target, self.module.get_parameter(source))
            elif isinstance(module.linear.method, PlainLinear):
                self._set(source, module.linear.tensors[0])
        missing = [name for name, tensor in self._own_tensors() if tensor.is_meta]
        missing += [f"{name}.weight" for name, module in self._linears.items() if not module.linear.tensors]
        missing += [
            f"{name}.gate_up_proj" for name, module in self._experts.items() if not module.experts.tensors
        ]
        if missing:
            raise ModelError(
                f"The checkpoint of {self.config.architecture} lacks {missing[0]!r}; it is incomplete."
            )
        self._check_that_only_attention_mixes()
        if self._parts is not None:
            self._parts.is_linked = True

    def _load(self, name: str, weight: StoredWeight) -> None:
        module, _, kind = name.rpartition(".")
        if module in self._linears:
            self._linears[module].load(kind, weight)
            return
        if module in self._experts:
            self._experts[module].load(kind, weight)
            return
        value = weight.restore(self.dtype) if isinstance(weight, QuantizedWeight) else weight
        if self._division is not None:
            value = self._division.parameter(name, value)
        try:
            self._set(
                name, value.to(self.device, copy=True)
            )  # what a checkpoint hands out may lie in its mapped file
        except AttributeError:
            raise ModelError(
                f"The checkpoint holds a tensor {name!r} that a {self.config.architecture} has no place for."
            ) from None

    def _set(self, name: str, value: Tensor) -> None:
        module, _, own = name.rpartition(".")
        parent = self.module.get_submodule(module)
        if own in parent._parameters:
            parent._parameters[own] = nn.Parameter(value, requires_grad=False)
        elif own in parent._buffers:
            parent._buffers[own] = value
        else:
            raise AttributeError(name)

    def _own_tensors(self) -> list[tuple[str, Tensor]]:
        """All parameters and buffers but those of the linear layers, by every name that they have."""
        named = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        return [(name, tensor) for name, tensor in named]

    @torch.inference_mode()
    def _check_that_only_attention_mixes(self) -> None:
        """Layers that read other tokens than by attention (a convolution, a scan) would mix requests, and so
        would layers that take a token's place in a step for its position. A token is computed in two steps,
        at another place and between other tokens: without attention, nothing may change."""
        cache = [
            LayerCache(
                *torch.zeros(2, 1, 8, spec.kv_heads, spec.head_dim, dtype=spec.dtype, device=self.device)
            )
            for spec in self.cache_specs
        ]
        last = self._max_model_len - 1

        def compute(place: int, ids: list[int], positions: list[int]) -> list[Tensor]:
            seen: list[Tensor] = []

            def attend(layer: int, q: Tensor, weights: AttendWeights = None) -> Tensor:
                seen.append(q[place])
                return q * 0

            ids_, positions_, slots = torch.tensor(
                [ids, positions, [0] * 3], dtype=torch.int32, device=self.device
            )
            here = [layer.at(slots) for layer in cache]
            return [self._run(ids_, Step(TokenInputs(positions_), here, attend))[place], *seen]

        for one, other in zip(compute(2, [1, 2, 3], [0, 1, last]), compute(0, [3, 0, 4], [last, 1, 2])):
            if not bool(((one - other).abs() <= LEAK * one.abs().max() + 1e-6).all()):
                raise ModelError(
                    f"{self.config.source}: layers of {self.config.architecture} read other tokens otherwise "
                    "than by "
                    "attention, or take their place for their position, which would mix the requests of a "
                    "step."
                )

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight by ``change(weight)``; those that are one tensor stay one."""
        changed: dict[int, Tensor] = {}

        def once(tensor: Tensor) -> Tensor:
            if id(tensor) not in changed:
                changed[id(tensor)] = change(tensor)
            return changed[id(tensor)]

        for name, tensor in self._own_tensors():
            self._set(name, once(tensor.data if isinstance(tensor, nn.Parameter) else tensor))
        for stored in self._stored:
            stored.map_tensors(once)
        self._refresh()

    def take_weights(self, other: TransformersModel) -> None:
        """Take over the weights of another model of the same configuration; adapters stay.

        Raises ModelError if they are quantised differently:
        the layers are compiled for the methods there are.
        """
        pairs = list(zip(self._stored, other._stored, strict=True))
        if any(mine.method != theirs.method for mine, theirs in pairs):
            raise ModelError(
                "The weights are quantised otherwise than those they replace, or need more bits: start a new "
                "engine "
                "with them."
            )
        for mine, theirs in pairs:
            mine.tensors = theirs.tensors
        for name, tensor in other._own_tensors():
            self._set(name, tensor.data)
        self._refresh()

    def _refresh(self) -> None:
        if self._traced is not None:
            self._traced.refresh()

    def build_regions(
        self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        """Trace the model and compile what lies between attentions. Where nothing is compiled, or tracing
        fails, the layers are run as transformers wrote them."""
        self._traced = None
        if not getattr(compile_region, "enabled", True):
            return
        if self._parts is not None:
            logger.warning(
                "%s runs uncompiled, which is slower, since it runs in stages.", self.config.architecture
            )
            return
        try:
            self._traced = self._trace()
        except CannotTrace as error:
            logger.warning(
                "%s runs uncompiled, since it cannot be traced: %s.", self.config.architecture, error
            )
            return
        for module in self._experts.values():
            module.experts.compile_few_rows(compile_region)
        self._traced.build_regions(compile_region, tokens, caches)

    def _trace(self) -> TracedModel:
        def body(token_ids: Tensor, positions: Tensor) -> Tensor:
            return self._run(token_ids, Step(TokenInputs(positions), (), None))

        def head(hidden: Tensor, ids: Tensor) -> Tensor:
            with self._holder.running(Step(TokenInputs(ids), (), None)):
                return self._run_head(hidden, ids)

        return TracedModel(
            body,
            head,
            self.layers,
            OwnTensors(self.module),
            self._products,
            [module.experts for module in self._experts.values()],
            dtype=self.dtype,
            attention_dtype=self.attention_dtype,
            device=self.device,
            communicator=self._communicator,
        )

    def forward(
        self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend
    ) -> Hidden:
        """Run the body. Returns (final hidden states [tokens, hidden],), normalised, where nothing is
        compiled; a stage before the last one, nothing: it sends the stream on."""
        if self._traced is not None and tokens.images is None:
            return self._traced.forward(token_ids, tokens, caches, attend)
        with span("body"):
            hidden = self._run(token_ids, Step(tokens, caches, attend))
        if self._stage.is_last:
            return (hidden,)
        self._stage.send(hidden)
        return ()

    def _run(self, token_ids: Tensor, step: Step) -> Tensor:
        """Final hidden states [tokens, hidden], by transformers' own layers."""
        ids, positions = token_ids.long()[None], step.tokens.positions.long()[None]
        past = {"past_key_values": OwnPositions(positions[0])} if self._own_positions else {}
        with self._holder.running(step):
            out: Any = self._body(input_ids=ids, position_ids=positions, use_cache=False, **past)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _embed_with_images(self, ids: Tensor) -> Tensor:
        """ids [1, tokens] -> [1, tokens, hidden], with features in the rows of images."""
        step = self._holder.step
        images = None if step is None else step.tokens.images
        if images is None or ids.shape != images.is_image[None].shape:
            return self._embed(ids)
        is_image = images.is_image[None]
        # A placeholder may be beyond the vocabulary.
        x = self._embed(torch.where(is_image, 0, ids))
        return torch.where(is_image[..., None], images.features[None].to(x.dtype), x)

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab] of the picked rows (int32)."""
        if self._traced is not None and tokens.images is None:
            return self._traced.logits(hidden, rows, tokens)
        with span("head"):
            return self._run_head(hidden[0][rows], rows)

    def _run_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [rows, hidden] -> logits [rows, vocab].
        ids: never looked at, since the body hands out ``hidden``."""
        self._picked = hidden[None]
        try:
            out: Any = self.module(input_ids=ids.long()[None], use_cache=False)
        finally:
            self._picked = None
        logits: Tensor = out.logits[0]
        return logits

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden] of the picked rows (int32)."""
        if self._traced is not None and tokens.images is None:
            return self._traced.hidden_states(hidden, rows, tokens)
        return hidden[0][rows]

    def _run_body(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute_body(*args, **kwargs) if self._picked is None else _Picked(self._picked)
