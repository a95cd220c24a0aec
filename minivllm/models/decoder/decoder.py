"""One config-driven decoder, cut at attention into three kinds of region.

    first:    embed -> norm -> qkv -> rotary -> KV write                                  -> q
              attention(q)                                                                -> o
    between:  o-proj -> norm -> MLP -> (next layer) norm -> qkv -> rotary -> KV write     -> q
              attention(q) ...
    last:     pick rows -> o-proj -> norm -> MLP -> final norm -> head                    -> logits

Where a decoder is one of several stages, its first region begins with the residual stream that the stage before has
sent, and its last one ends with that of the next stage:

    entry:    norm -> qkv -> rotary -> KV write                                           -> q
    exit:     o-proj -> norm -> MLP                                                       -> residual stream

A layer that keeps a state is cut in the same way, where the state is updated. A region is a pure function of tensors
(it writes the KV cache it is given, and nothing else), so one compiled ``between`` serves all layers, and the MLP of
one layer fuses with the QKV projection of the next.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import add_rms_norm
from kernels_triton_free.rotary import rotary_table
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, bound, specs_of
from minivllm.distributed.stage import Stage
from minivllm.errors import ModelError
from minivllm.linear.experts.experts import Experts
from minivllm.linear.layer import ChooseMethod, Linear, Shard, never_quantized
from minivllm.linear.methods.exact import PlainLinear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.linear.methods.stored_weight import QuantizedWeight, StoredWeight
from minivllm.models.decoder.layer import AfterMixer, BeforeMixer, DecoderLayer
from minivllm.models.decoder.stages import layers_of, linear_shapes
from minivllm.models.decoder_config import AttentionSpec, DecoderConfig
from minivllm.models.layer_specs import LatentSpec, StateMixerSpec
from minivllm.models.linear_factory import LinearFactory
from minivllm.models.mixers.attention import SelfAttention
from minivllm.models.model import (
    ROWS,
    TOKENS,
    Attend,
    CacheSpec,
    Given,
    Hidden,
    HiddenTap,
    LayerCache,
    StateSpec,
    TokenInputs,
)
from minivllm.models.rotary import rotary_frequencies
from minivllm.models.shards import VOCABULARY_UNIT
from minivllm.profiling.spans import span, spanned


class Decoder:
    """Weights and regions of a decoder whose layers are described by specs (see ``families``). A ``Model``.

    What a layer computes stands in ``reference.py``, without regions, caches and fused products.
    """

    feature_size = 0

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        attention_dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        shard: Shard | None = None,
        choose_method: ChooseMethod = never_quantized,
        cache_dtype: torch.dtype | None = None,
        experts: Shard | None = None,
        stage: Stage | None = None,
        embeds_last: bool = False,
    ) -> None:
        """attention_dtype: dtype of q and o. max_model_len: positions of the rotary table.

        choose_method: picks the quantised method of each linear layer, if it gets one. experts: see LinearFactory.
        cache_dtype: of the KV cache, if it is not attention_dtype.
        stage: which of the layers are this decoder's; all, if it is not given. embeds_last: the last stage has the
        embedding too, for a head that drafts there.
        """
        shard = shard or Shard()
        self.config, self.dtype, self.attention_dtype, self.device = config, dtype, attention_dtype, device
        self.cache_dtype, self.shard = cache_dtype or attention_dtype, shard
        factory = LinearFactory(dtype, device, choose_method, shard, experts)
        self.stage = stage or Stage()
        self._embeds = self.stage.is_first or (embeds_last and self.stage.is_last)
        own_layers = layers_of(self.stage, config)
        self.first_layer, specs = own_layers.start, config.layers[own_layers.start : own_layers.stop]
        self.layers = [DecoderLayer(spec, config.hidden_size, factory, attention_dtype) for spec in specs]
        self.vocabulary = shard.own(config.vocab_size, VOCABULARY_UNIT)
        own = {"lm_head": self.vocabulary}
        self.head = factory.make({"lm_head": config.vocab_size}, config.hidden_size, False, "column", own)
        # Where the embedding is looked up: a tensor of its own, or what the head's method has made of a tied one.
        self.embedding: LinearTensors = ()
        self.embedding_method: LinearMethod = PlainLinear()
        self.final_norm = torch.empty(0)
        # A rounded length, so that compiled code on disk also serves other values of max_model_len.
        positions = 1 << (max_model_len - 1).bit_length()
        tables = [
            rotary_table(rotary_frequencies(rotary, max_model_len), positions, rotary.attention_factor).to(device)
            for rotary in config.rotary
        ]
        rotated = (0 if isinstance(spec.mixer, StateMixerSpec) else spec.mixer.rotary for spec in specs)
        self.cos_sin = [tables[index or 0] for index in rotated]
        self.tap: HiddenTap | None = None
        self._first: Callable
        self._between: list[Callable] = []
        self._last: Callable
        self._declared_tokens: TokenInputs
        self._weights: list[tuple[BeforeMixer, AfterMixer]] = []
        self._passages: list[tuple[Given, Callable]] = []  # between two layers each, with the weights of both
        self._shortened: Decoder | None = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def attention_specs(self) -> tuple[AttentionSpec | StateMixerSpec, ...]:
        return tuple(layer.mixer.attends for layer in self.layers)

    @property
    def all_attention_specs(self) -> tuple[AttentionSpec | StateMixerSpec, ...]:
        """Those of other stages too."""
        return self.config.attention_specs

    @property
    def cache_specs(self) -> list[CacheSpec | StateSpec]:
        return [self._cache_spec(layer) for layer in self.layers]

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
            elif name.startswith("model.layers."):
                _, _, index, rest = name.split(".", 3)
                self.layers[int(index) - self.first_layer].load(rest, tensor, self.device)
            else:
                raise ModelError(
                    f"The checkpoint holds a tensor {name!r} that a {self.config.architecture} has no place for."
                )

    def _load_embedding(self, weight: StoredWeight) -> None:
        """A tied embedding is kept once, as the head's weight, if the head's method can look up rows in that."""
        if self.config.tie_word_embeddings:
            self.head.load("lm_head", "weight", weight)
            if self.head.method.gathers_rows and self._embeds:
                self.embedding, self.embedding_method = self.head.tensors, self.head.method
                return
            if not self.stage.is_last:
                self.head.tensors = ()
        if not self._embeds:
            return
        values = weight.restore(self.dtype) if isinstance(weight, QuantizedWeight) else weight
        self.embedding = (values[self.vocabulary].to(self.device),)

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight by ``change(weight)``. Regions take the weights as arguments, so they stay valid."""
        is_tied = self.embedding is self.head.tensors
        for layer in self.layers:
            for stored in layer.stored:
                stored.tensors = tuple(map(change, stored.tensors))
            layer.vectors = {name: change(tensor) for name, tensor in layer.vectors.items()}
        self.head.tensors = tuple(map(change, self.head.tensors))
        self.embedding = self.head.tensors if is_tied else tuple(map(change, self.embedding))
        self.final_norm = change(self.final_norm)
        self._list_weights()

    def _list_weights(self) -> None:
        """The weights are others now."""
        self._weights = [(layer.before, layer.after) for layer in self.layers]
        self._passages = [
            (layer.given, bound(between, table, after, before))
            for between, layer, table, (_, after), (before, _) in zip(
                self._between, self.layers, self.cos_sin[1:], self._weights, self._weights[1:]
            )
        ]
        if self._shortened is not None:
            self._shortened._share_weights(self)

    def _share_weights(self, whole: Decoder) -> None:
        self.embedding, self.final_norm = whole.embedding, whole.final_norm
        self._weights, self._passages = whole._weights[: len(self.layers)], whole._passages[: len(self.layers) - 1]

    def take_weights(self, other: Decoder) -> None:
        """Take over the weights of another decoder of the same configuration; adapters stay.

        Raises ModelError if they are quantised differently: the regions are made for the methods there are.
        """
        if self._methods() != other._methods():
            raise ModelError(
                "The weights are quantised otherwise than those they replace, or need more bits: start a new engine "
                "with them."
            )
        for layer, others in zip(self.layers, other.layers):
            layer.vectors = others.vectors
            for stored, theirs in zip(layer.stored, others.stored):
                stored.tensors = theirs.tensors
        self.head.tensors, self.embedding, self.final_norm = other.head.tensors, other.embedding, other.final_norm
        self._list_weights()

    def _methods(self) -> list[object]:
        return [self.embedding_method, *(layer.methods for layer in self.layers), self.head.method]

    def build_regions(self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]) -> None:
        """Make the callables of all regions; layers that compute the same thing share one."""
        self._declared_tokens = tokens
        layers, common = self.layers, self._region_constants
        self._compile_experts(compile_region)
        name, function, inputs = "entry", partial(self._entry_region, layers[0]), dict[str, Any](stream=self._stream)
        if self.stage.is_first:
            name, function = "first", partial(self._first_region, layers[0])
            token_ids = TensorSpec((TOKENS,), torch.int32, self.device)
            inputs = {"token_ids": token_ids, "embedding": specs_of(self.embedding)}
        inputs |= {
            "tokens": tokens,
            "cos_sin": specs_of(self.cos_sin[0]),
            "cache": layers[0].own_cache(caches[0]),
            "before": specs_of(layers[0].before),
        }
        constants = common, layers[0].spec.ahead, layers[0].methods.ahead, self.embedding_method
        self._first = compile_region(Region(name, function, inputs, constants))
        # What tells two regions apart: the specs of both layers, how their products are computed, and the inputs. The
        # first layers of a kind stand for all of it.
        regions: dict[object, Callable] = {}
        self._between = []
        for index, (layer, following) in enumerate(pairwise(layers)):
            inputs = {
                **self._attended(layer),
                "tokens": tokens,
                "cache": following.own_cache(caches[index + 1]),
                "cos_sin": specs_of(self.cos_sin[index + 1]),
                "after": specs_of(layer.after),
                "before": specs_of(following.before),
            }
            methods = layer.methods._replace(ahead=following.methods.ahead)
            kind = layer.spec.behind, following.spec.ahead, methods
            key = kind, tuple(inputs.values())
            if key not in regions:
                function = partial(self._between_region, layer, following)
                regions[key] = compile_region(Region("between", function, inputs, (common, kind)))
            self._between.append(regions[key])
        self._last = self._compile_last(compile_region) if self.stage.is_last else self._compile_exit(compile_region)
        self._list_weights()

    def _compile_experts(self, compile_region: CompileRegion) -> None:
        """Loops that run inside the operators of regions."""
        for layer in self.layers:
            for stored in layer.stored:
                if isinstance(stored, Experts):
                    stored.compile_few_rows(compile_region)

    @property
    def _region_constants(self) -> tuple[object, ...]:
        """What all regions depend on beside tensors, specs and methods."""
        config = self.config
        model_wide = config.rms_norm_eps, config.embedding_scale, config.logits_scale, config.logits_soft_cap
        return model_wide, self.shard, self.dtype, self.attention_dtype

    @property
    def _stream(self) -> TensorSpec:
        """Spec of the residual stream."""
        return TensorSpec((TOKENS, self.config.hidden_size), self.dtype, self.device)

    def _attended(self, layer: DecoderLayer) -> dict[str, Any]:
        """Specs of what every region behind a layer's attention takes."""
        return {
            "o": TensorSpec((TOKENS, *layer.mixer.output_shape), self.attention_dtype, self.device),
            "residual": self._stream,
        }

    @property
    def _picked(self) -> dict[str, Any]:
        """Specs of what the regions take that compute the final hidden states of some rows."""
        return {
            **self._attended(self.layers[-1]),
            "rows": TensorSpec((ROWS,), torch.int32, self.device),
            "adapters": self._declared_tokens.adapters,
            "after": specs_of(self.layers[-1].after),
            "final_norm": specs_of(self.final_norm),
        }

    def _compile_last(self, compile_region: CompileRegion) -> Callable:
        layer = self.layers[-1]
        inputs = {**self._picked, "head": specs_of(self.head.tensors)}
        constants = (self._region_constants, layer.spec.behind, layer.methods, self.head.method)
        return compile_region(Region("last", partial(self._last_region, layer), inputs, constants))

    def _compile_exit(self, compile_region: CompileRegion) -> Callable:
        layer = self.layers[-1]
        adapters = self._declared_tokens.adapters
        inputs = {**self._attended(layer), "adapters": adapters, "after": specs_of(layer.after)}
        constants = self._region_constants, layer.spec.behind, layer.methods
        return compile_region(Region("exit", partial(self._exit_region, layer), inputs, constants))

    def _shorten(self, count: int) -> Self:
        """One with fewer layers, which gets new weights with this one."""
        shortened = self._shortened = copy.copy(self)
        shortened.layers, shortened._shortened = self.layers[:count], None
        shortened._share_weights(self)
        return shortened

    def first_layers(self, count: int, compile_region: CompileRegion) -> Decoder:
        """The decoder of the first ``count`` layers with this one's final norm and head; all weights and, where they
        compute the same, all regions are shared. ``build_regions`` comes first."""
        shortened = self._shorten(count)
        own, whole = shortened.layers[-1], self.layers[-1]
        if (own.spec.behind, own.methods) != (whole.spec.behind, whole.methods):
            shortened._last = shortened._compile_last(compile_region)
        return shortened

    def forward(self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend) -> Hidden:
        """Run all layers up to the last attention. Returns (o [tokens, kv_heads, G, D] of the last attention, residual
        stream [tokens, hidden]); a stage before the last one, nothing: it sends the stream behind its last layer on."""
        entered = (token_ids, self.embedding) if self.stage.is_first else (self._received(token_ids),)
        own_caches = [layer.own_cache(cache) for layer, cache in zip(self.layers, caches)]
        with span("first"):
            q, residual = self._first(*entered, tokens, self.cos_sin[0], own_caches[0], self._weights[0][0])
        tapped = () if self.tap is None else self.tap.layers
        wanted = [residual] if 0 in tapped else []
        for layer, (given, between) in enumerate(self._passages):
            o = attend(layer, q, given)
            with span("between"):
                q, residual = between(o, residual, tokens, own_caches[layer + 1])
            if layer + 1 in tapped:
                wanted.append(residual)
        hidden = attend(len(self.layers) - 1, q, self.layers[-1].given), residual
        if self.tap is not None:
            self.tap.take(wanted, hidden, tokens, caches)
        if self.stage.is_last:
            return hidden
        with span("last"):
            self.stage.send(self._last(*hidden, tokens.adapters, self._weights[-1][1]))
        return ()

    @spanned("receive")
    def _received(self, token_ids: Tensor) -> Tensor:
        """The residual stream [tokens, hidden] from the stage before."""
        return self.stage.receive((len(token_ids), self.config.hidden_size), self.dtype)

    @spanned("last")
    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Logits [len(rows), vocab] of the picked rows (int32)."""
        return self._last(*hidden, rows, tokens.adapters, self._weights[-1][1], self.final_norm, self.head.tensors)

    def gather_vocabulary(self, x: Tensor) -> Tensor:
        """x [rows, this worker's part of the vocabulary] -> [rows, vocab]: what all workers have."""
        return x

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """Final hidden states [len(rows), hidden] of the picked rows (int32).

        Not compiled: it is one layer's MLP, and only requests for embeddings need it.
        """
        (o, residual), layer, after = hidden, self.layers[-1], self._weights[-1][1]
        return self._final_hidden(layer, o, residual, rows, tokens.adapters, after, self.final_norm)

    def compile_hidden_states(self, compile_region: CompileRegion) -> Callable[[Hidden, Tensor, TokenInputs], Tensor]:
        """``hidden_states`` as a region, for who needs them in every step."""
        layer = self.layers[-1]
        constants = (self._region_constants, layer.spec.behind, layer.methods)
        function = partial(self._final_hidden, layer)
        region = compile_region(Region("hidden states", function, self._picked, constants))

        def hidden_states(hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
            final: Tensor = region(*hidden, rows, tokens.adapters, self._weights[-1][1], self.final_norm)
            return final

        return hidden_states

    # The regions. Everything that differs between layers but is not a tensor is an argument bound before compiling.

    def _first_region(
        self,
        layer: DecoderLayer,
        token_ids: Tensor,
        embedding: LinearTensors,
        tokens: TokenInputs,
        cos_sin: Tensor,
        cache: LayerCache | None,
        before: BeforeMixer,
    ) -> tuple[Tensor, Tensor]:
        residual = self.embedding_method.rows(token_ids, embedding)
        if self.config.embedding_scale != 1.0:
            residual = residual * self.config.embedding_scale
        x, residual = layer.enter(None, residual, before.norm)
        return layer.mixer.ahead(x, tokens, cos_sin, cache, before.mixer), residual

    def _entry_region(
        self,
        layer: DecoderLayer,
        stream: Tensor,
        tokens: TokenInputs,
        cos_sin: Tensor,
        cache: LayerCache | None,
        before: BeforeMixer,
    ) -> tuple[Tensor, Tensor]:
        x, residual = layer.enter(None, stream.clone(), before.norm)  # what a region returns is none of its inputs
        return layer.mixer.ahead(x, tokens, cos_sin, cache, before.mixer), residual

    def _between_region(
        self,
        layer: DecoderLayer,
        following: DecoderLayer,
        o: Tensor,
        residual: Tensor,
        tokens: TokenInputs,
        cache: LayerCache | None,
        cos_sin: Tensor,
        after: AfterMixer,
        before: BeforeMixer,
    ) -> tuple[Tensor, Tensor]:
        x, residual = layer.output(o, residual, tokens.adapters, after)
        x, residual = following.enter(x, residual, before.norm)
        return following.mixer.ahead(x, tokens, cos_sin, cache, before.mixer), residual

    def _exit_region(
        self, layer: DecoderLayer, o: Tensor, residual: Tensor, adapters: RowAdapters | None, after: AfterMixer
    ) -> Tensor:
        x, residual = layer.output(o, residual, adapters, after)
        return residual + x

    def _last_region(
        self,
        layer: DecoderLayer,
        o: Tensor,
        residual: Tensor,
        rows: Tensor,
        adapters: RowAdapters | None,
        after: AfterMixer,
        final_norm: Tensor,
        head: LinearTensors,
    ) -> Tensor:
        x = self._final_hidden(layer, o, residual, rows, adapters, after, final_norm)
        return self._capped(self.head.method.apply(x, head))

    def _capped(self, logits: Tensor) -> Tensor:
        """What the model does to its logits, whichever they are."""
        scale, cap = self.config.logits_scale, self.config.logits_soft_cap
        logits = logits if scale == 1.0 else logits * scale
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _final_hidden(
        self,
        layer: DecoderLayer,
        o: Tensor,
        residual: Tensor,
        rows: Tensor,
        adapters: RowAdapters | None,
        after: AfterMixer,
        final_norm: Tensor,
    ) -> Tensor:
        own = None if adapters is None else adapters.of(rows)
        x, residual = layer.output(o[rows], residual[rows], own, after)
        return add_rms_norm(x, residual, final_norm, self.config.rms_norm_eps)[0]
