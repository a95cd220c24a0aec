"""The decoder: the weights of every model whose layers are described by specs,
and the plans that its program becomes.

What it computes stands in ``program.py``;
``models/reference/reference.py`` has the same arithmetic without regions, caches and fused products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.rotary import rotary_table
from minivllm.compilation.regions import CompileRegion, TensorSpec
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.expert_group import ExpertGroup
from minivllm.distributed.stage import Stage
from minivllm.errors import ModelError
from minivllm.linear.experts.experts import Experts
from minivllm.linear.factory import LinearFactory
from minivllm.linear.layer import ChooseMethod, Linear, Shard, never_quantized
from minivllm.linear.methods.exact import PlainLinear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.models.bound_program import BoundProgram, no_attention, program_inputs
from minivllm.models.decoder.layer import DecoderLayer
from minivllm.models.decoder.per_layer import PER_LAYER, PerLayerValues
from minivllm.models.decoder.program import decoder_program, image_inputs
from minivllm.models.decoder.stages import layers_of, linear_shapes
from minivllm.models.mixers.attention import SelfAttention
from minivllm.models.model import Attend, Hidden, HiddenTap, ImageRows, TokenInputs
from minivllm.models.rotary import rotary_frequencies
from minivllm.models.shards import VOCABULARY_UNIT
from minivllm.profiling.spans import span
from minivllm.program.fuse import Plan, fuse
from minivllm.program.program import World
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import TOKENS, CacheSpec, LayerCache, StateSpec
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import LatentSpec, StateMixerSpec
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight


class Decoder:
    """Weights of a decoder whose layers are described by specs (see ``families``),
    and the runners of its program. A ``Model``."""

    feature_size = 0

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        attention_dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        communicator: Communicator | None = None,
        choose_method: ChooseMethod = never_quantized,
        cache_dtype: torch.dtype | None = None,
        divides_experts: bool = False,
        group: ExpertGroup | None = None,
        stage: Stage | None = None,
        embeds_last: bool = False,
        sees: bool = False,
        deeper_levels: int = 0,
        in_space: bool = False,
    ) -> None:
        """attention_dtype: dtype of q and o. max_model_len: positions of the rotary table.

        communicator: to the ranks that divide each layer, of which this is one. divides_experts: each of them
        has some experts whole, not a part of every one. group: to the workers of all engines that divide the
        experts. choose_method: picks the quantised method of each linear layer, if it gets one.
        cache_dtype: of the KV cache, if it is not attention_dtype.
        stage: which of the layers are this decoder's; all, if it is not given. embeds_last: the last stage
        has the embedding too, for a head that drafts there. sees: some steps have images. deeper_levels: of
        their features, added after as many layers. in_space: images are rotated in space, if the
        configuration says how.
        """
        shard = Shard() if communicator is None else Shard(communicator.rank, communicator.size)
        self.communicator = communicator
        self._group = group
        experts = group.shard if group is not None else shard if divides_experts else None
        self.config = config
        self.dtype = dtype
        self.attention_dtype = attention_dtype
        self.device = device
        self.cache_dtype = cache_dtype or attention_dtype
        self.shard = shard
        factory = LinearFactory(dtype, device, choose_method, shard, experts)
        self.stage = stage or Stage()
        self._embeds = self.stage.is_first or (embeds_last and self.stage.is_last)
        own_layers = layers_of(self.stage, config)
        self.first_layer, specs = own_layers.start, config.layers[own_layers.start : own_layers.stop]
        self.layers = [
            DecoderLayer(spec, config.hidden_size, factory, attention_dtype, number)
            for number, spec in enumerate(specs, self.first_layer)
        ]
        caches = config.caches[own_layers.start : own_layers.stop]
        self.caches = [number - caches[0] for number in caches]
        """The number of each layer's cache on this worker."""
        self.vocabulary = shard.own(config.vocab_size, VOCABULARY_UNIT)
        self.per_layer = None
        if config.per_layer is not None:
            self.per_layer = PerLayerValues(
                config.per_layer, config.num_layers, config.hidden_size, factory, self.vocabulary
            )
        own = {"lm_head": self.vocabulary}
        parts = (
            Shard(rank, shard.size).own(config.vocab_size, VOCABULARY_UNIT) for rank in range(shard.size)
        )
        self._vocabulary_widths = [part.stop - part.start for part in parts]
        self.head = factory.make({"lm_head": config.vocab_size}, config.hidden_size, False, "column", own)
        # Where the embedding is looked up:
        # a tensor of its own, or what the head's method has made of a tied one.
        self.embedding: LinearTensors = ()
        self.embedding_method: LinearMethod = PlainLinear()
        self.final_norm = torch.empty(0)
        # A rounded length, so that compiled code on disk also serves other values of max_model_len.
        positions = 1 << (max_model_len - 1).bit_length()
        tables = [
            rotary_table(rotary_frequencies(rotary, max_model_len), positions, rotary.attention_factor).to(
                device
            )
            for rotary in config.rotary
        ]
        rotated = (0 if isinstance(spec.mixer, StateMixerSpec) else spec.mixer.rotary for spec in specs)
        own_tables = [index or 0 for index in rotated]
        self.cos_sin = [tables[index] for index in own_tables]
        self.position_axes = 3 if in_space and any(rotary.axes for rotary in config.rotary) else 1
        axes = [
            torch.tensor(rotary.axes * 2, dtype=torch.int64, device=device)
            if self.position_axes > 1
            else None
            for rotary in config.rotary
        ]
        self.axes = [axes[index] if axes else None for index in own_tables]
        self.tap: HiddenTap | None = None
        self._declared: tuple[TokenInputs, Sequence[LayerCache]]
        self._step: BoundProgram
        self._sees = sees
        self._deeper_levels = deeper_levels
        self._seeing: BoundProgram | None = None
        self._final: BoundProgram | None = None
        self._programs: list[BoundProgram] = []
        """All that are bound to these weights."""

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def attention_specs(self) -> tuple[AttentionSpec | StateMixerSpec, ...]:
        return tuple(layer.mixer.attends for layer in self.layers if layer.spec.shares_cache_of is None)

    @property
    def all_attention_specs(self) -> tuple[AttentionSpec | StateMixerSpec, ...]:
        """Those of other stages too."""
        return self.config.attention_specs

    @property
    def cache_specs(self) -> list[CacheSpec | StateSpec]:
        return [self._cache_spec(layer) for layer in self.layers if layer.spec.shares_cache_of is None]

    def _cache_spec(self, layer: DecoderLayer) -> CacheSpec | StateSpec:
        spec, mixer = layer.spec.mixer, layer.mixer
        if isinstance(mixer.attends, StateMixerSpec):
            return StateSpec.of(mixer.attends, self.attention_dtype, self.device)
        if isinstance(spec, LatentSpec):
            return CacheSpec(1, spec.head_dim, self.cache_dtype, keeps_values=False)
        assert isinstance(mixer, SelfAttention)
        return CacheSpec(mixer.kv_heads, mixer.spec.head_dim, self.cache_dtype)

    @property
    def linears(self) -> list[tuple[str, Linear]]:
        return [
            (f"model.layers.{index}.{block}", linear)
            for index, layer in enumerate(self.layers, self.first_layer)
            for block, linear in layer.named_linears
        ]

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        return linear_shapes(self.config)

    @property
    def weights_per_token(self) -> int:
        in_layers = sum(layer.weights_per_token for layer in self.layers)
        in_layers += 0 if self.per_layer is None else self.per_layer.weights_per_token
        return in_layers + (self.config.hidden_size * self.head.out_features if self.stage.is_last else 0)

    def wants(self, name: str) -> bool:
        """Whether this stage has a place for the tensor of this Hugging Face name."""
        if name.startswith("model.layers."):
            return 0 <= int(name.split(".")[2]) - self.first_layer < len(self.layers)
        if name == "model.embed_tokens.weight":
            return self._embeds or (self.stage.is_last and self.config.tie_word_embeddings)
        return self.stage.is_last

    def load_weights(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Take tensors under their Hugging Face names. Raises ModelError for a name that has no place."""
        for name, tensor in weights:
            if name == "model.embed_tokens.weight":
                self._load_embedding(tensor)
            elif name == "lm_head.weight":
                self.head.load("lm_head", "weight", tensor)
            elif name == "model.norm.weight":
                assert isinstance(tensor, Tensor)
                self.final_norm = tensor.to(self.device)
            elif self.per_layer is not None and name.startswith(PER_LAYER):
                self.per_layer.load(name.removeprefix("model."), tensor)
            elif name.startswith("model.layers."):
                _, _, index, rest = name.split(".", 3)
                self.layers[int(index) - self.first_layer].load(rest, tensor, self.device)
            else:
                raise ModelError(
                    f"The checkpoint holds a tensor {name!r} that a {self.config.architecture} has no place "
                    "for."
                )

    def _load_embedding(self, weight: StoredWeight) -> None:
        """A tied embedding is kept once, as the head's weight,
        if the head's method can look up rows in that."""
        if self.config.tie_word_embeddings:
            self.head.load("lm_head", "weight", weight)
            if self.head.method.gathers_rows and self._embeds:
                self.embedding = self.head.tensors
                self.embedding_method = self.head.method
                return
            if not self.stage.is_last:
                self.head.tensors = ()
        if not self._embeds:
            return
        values = weight.restore(self.dtype) if isinstance(weight, QuantizedWeight) else weight
        self.embedding = (values[self.vocabulary].to(self.device),)

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight by ``change(weight)``.
        Regions take the weights as arguments, so they stay valid."""
        is_tied = self.embedding is self.head.tensors
        for stored in () if self.per_layer is None else self.per_layer.stored:
            stored.map_tensors(change)
        for layer in self.layers:
            for stored in layer.stored:
                stored.map_tensors(change)
            layer.vectors = {name: change(tensor) for name, tensor in layer.vectors.items()}
        self.head.map_tensors(change)
        self.embedding = self.head.tensors if is_tied else tuple(map(change, self.embedding))
        self.final_norm = change(self.final_norm)
        self._rebind()

    def take_weights(self, other: Decoder) -> None:
        """Take over the weights of another decoder of the same configuration; adapters stay.

        Raises ModelError if they are quantised differently: the regions are made for the methods there are.
        """
        if self._methods() != other._methods():
            raise ModelError(
                "The weights are quantised otherwise than those they replace, or need more bits: start a new "
                "engine "
                "with them."
            )
        if self.per_layer is not None and other.per_layer is not None:
            for stored, theirs in zip(self.per_layer.stored, other.per_layer.stored):
                stored.tensors = theirs.tensors
        for layer, others in zip(self.layers, other.layers):
            layer.vectors = others.vectors
            for stored, theirs in zip(layer.stored, others.stored):
                stored.tensors = theirs.tensors
        self.head.tensors, self.embedding, self.final_norm = (
            other.head.tensors,
            other.embedding,
            other.final_norm,
        )
        self._rebind()

    def _methods(self) -> list[object]:
        per_layer = () if self.per_layer is None else self.per_layer.methods
        return [
            self.embedding_method,
            *per_layer,
            *(layer.methods for layer in self.layers),
            self.head.method,
        ]

    # -- the program -------------------------------------------------------------------------------

    @property
    def stream_spec(self) -> TensorSpec:
        """Of the residual stream."""
        return TensorSpec((TOKENS, self.config.hidden_size), self.dtype, self.device)

    @property
    def shares_experts(self) -> bool:
        """Whether the workers of several engines divide the experts."""
        return self._group is not None

    def plan(
        self,
        tokens: TokenInputs,
        caches: Sequence[LayerCache],
        layers: int | None = None,
        result: str = "logits",
    ) -> Plan:
        """The program of this worker, fused. tokens, caches: specs. layers: only so many."""
        own = self.layers[:layers]
        caching = [layer for layer in own if layer.spec.shares_cache_of is None]
        read = [layer.own_cache(cache) for layer, cache in zip(caching, caches)]
        inputs = dict(program_inputs(tokens, read))
        if tokens.images is not None:
            rows = inputs.pop("rows")  # the last input always
            inputs |= {**image_inputs(tokens.images), "rows": rows}
        program = decoder_program(self, own, self._vocabulary_widths, images=tokens.images)
        return fuse(program, inputs, ranks=self.shard.size, results=(result,) if self.stage.is_last else ())

    def build_regions(
        self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        """Have all regions compiled; layers that compute the same thing share one."""
        self._declared = tokens, caches
        self.compile_experts(compile_region)
        self._step = BoundProgram(self.plan(tokens, caches), compile_region)
        self._programs = [self._step]
        self._final = None
        if self._sees:
            self._seeing = BoundProgram(self.plan(self.with_images(tokens), caches), compile_region)
            self._programs.append(self._seeing)

    def compile_experts(self, compile_region: CompileRegion) -> None:
        """Compile the loops over experts, which run inside the operators of regions."""
        for layer in self.layers:
            for stored in layer.stored:
                if isinstance(stored, Experts):
                    stored.compile_few_rows(compile_region)

    def with_images(self, tokens: TokenInputs) -> TokenInputs:
        """The same specs, of a step with images."""
        is_image: Any = TensorSpec((TOKENS,), torch.bool, self.device)
        features: Any = self.stream_spec
        return tokens._replace(images=ImageRows(features, is_image, (features,) * self._deeper_levels))

    def _bind(
        self, compile_region: CompileRegion, layers: int | None = None, result: str = "logits"
    ) -> BoundProgram:
        """One more program with these weights. ``build_regions`` comes first."""
        program = BoundProgram(self.plan(*self._declared, layers, result), compile_region)
        self._programs.append(program)
        return program

    def _rebind(self) -> None:
        """The weights moved or were replaced."""
        for program in self._programs:
            program.rebind()

    def world(self, attend: Attend, note_input: Callable[[int, Tensor], None] | None = None) -> World:
        """What the seams of the program lead to."""
        return World(attend, self.communicator, self.stage, self._group, note_input)

    def first_layers(self, count: int, compile_region: CompileRegion) -> ShortenedDecoder:
        """The decoder of the first ``count`` layers with this one's final norm and head; all weights and,
        where they compute the same, all regions are shared. ``build_regions`` comes first. All ranks have to
        be asked for the same."""
        return ShortenedDecoder(self, count, self._bind(compile_region, layers=count))

    def forward(
        self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend
    ) -> Hidden:
        """Run all layers up to the last attention. Returns what follows it needs: o [tokens, kv_heads, G, D]
        of the last attention, and the residual stream [tokens, hidden]; a stage before the last one, nothing:
        it sends the stream on."""
        tap, wanted = self.tap, list[Tensor]()

        def note_input(layer: int, stream: Tensor) -> None:
            if tap is not None and layer in tap.layers:
                wanted.append(stream)

        if self._group is not None:
            self._group.begin_step(len(token_ids))
        world = self.world(attend, None if tap is None else note_input)
        if tokens.images is None:
            hidden = self._step.body(token_ids, tokens, caches, world)
        else:
            assert self._seeing is not None, "this decoder was made to read text only"
            more = image_inputs(tokens.images).values()
            hidden = self._seeing.body(token_ids, tokens, caches, world, *more)
        if tap is not None:
            tap.take(wanted, hidden, tokens, caches)
        return hidden

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab] of the picked rows (int32)."""
        return self._step.tail(hidden, rows, tokens, self.world(no_attention))[0]

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden] of the picked rows (int32).

        Not compiled: it is one layer's MLP, and only requests for embeddings need it.
        """
        if self._final is None:
            self._final = self._bind(lambda region: region.function, result="h")
        return self._final.tail(hidden, rows, tokens, self.world(no_attention))[0]

    def compile_hidden_states(
        self, compile_region: CompileRegion
    ) -> Callable[[Hidden, Tensor, TokenInputs], Tensor]:
        """``hidden_states``, compiled, for what needs them in every step."""
        program = self._bind(compile_region, result="h")
        return lambda hidden, rows, tokens: program.tail(hidden, rows, tokens, self.world(no_attention))[0]

    def join_step(self) -> None:
        """Compute this worker's experts for a step in which its engine has no tokens."""
        assert self._group is not None
        if self._group.begin_step(0):
            nothing = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
            with span("mlp"):
                self._step.join(nothing, self.world(no_attention))

    def gather_vocabulary(self, x: Tensor) -> Tensor:
        """x [rows, this worker's part of the vocabulary] -> [rows, vocab]: what all workers have."""
        return (
            x if self.communicator is None else self.communicator.gather_columns(x, self._vocabulary_widths)
        )


class ShortenedDecoder:
    """The first layers of a decoder, as a model to guess with."""

    def __init__(self, whole: Decoder, num_layers: int, program: BoundProgram) -> None:
        self._whole = whole
        self._program = program
        in_layers = sum(layer.weights_per_token for layer in whole.layers[:num_layers])
        self.weights_per_token = in_layers + whole.config.hidden_size * whole.head.out_features
        self.device = whole.device
        self.vocab_size = whole.vocab_size

    def forward(
        self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend
    ) -> Hidden:
        """See Decoder."""
        return self._program.body(token_ids, tokens, caches, self._whole.world(attend))

    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """See Decoder."""
        return self._program.tail(hidden, rows, tokens, self._whole.world(no_attention))[0]
