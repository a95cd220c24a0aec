"""The decoder as one of several workers computes it: a part of every product, and a sum where the parts meet.

    embed:    own rows of the vocabulary                          -> part of the residual stream
    queries:  norm -> qkv -> rotary -> KV write                   -> q of the own heads
              (cut behind qkv where all heads are normed together: what their squares are)
              attention(q)                                        -> o
    output:   o-proj                                              -> part of what attention adds
    mlp:      norm -> own columns of the MLP                      -> part of what the MLP adds
    ...
    head:     final norm -> own columns of the head               -> part of the logits

A stage of a pipeline that is not the first begins with the stream that it receives, and one that is not the last ends
with the stream that it sends, which is whole on every rank.

Where inputs of a product are rounded to int8 by a token's largest, and divided, the ranks agree on that first: "output"
is told, and "mlp" is cut in two.

Parts are added, and those of the logits put side by side, between regions: a region stays a pure function of its
tensors. (Megatron-LM: Shoeybi et al. 2019, with ranges instead of equal parts.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.lora import RowAdapters
from kernels_triton_free.norm import add_rms_norm
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, specs_of
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.shard import Shard
from minivllm.linear.methods.method import LinearTensors, largest_inputs
from minivllm.models.decoder import Decoder
from minivllm.models.decoder.feed_forward import GatedMlp
from minivllm.models.decoder.layer import AfterMixer, BeforeMixer, DecoderLayer
from minivllm.models.decoder_config import DecoderConfig
from minivllm.models.mixers.attention import QueryWeights, SelfAttention
from minivllm.models.mixers.scan import ScanMixer
from minivllm.models.model import TOKENS, Attend, Hidden, LayerCache, TokenInputs
from minivllm.models.shards import VOCABULARY_UNIT
from minivllm.profiling.spans import span, spanned


class ShardedDecoder(Decoder):
    """A ``Decoder`` of one rank. Logits are gathered, so that all ranks sample alike. Of an adapter, too, each rank has
    the part that goes with its own of the layer."""

    def __init__(self, config: DecoderConfig, *, communicator: Communicator, **settings: Any) -> None:
        """settings: those of ``Decoder``."""
        super().__init__(config, shard=Shard(communicator.rank, communicator.size), **settings)
        self._communicator = communicator
        ranks = (Shard(rank, communicator.size) for rank in range(communicator.size))
        parts = [shard.own(config.vocab_size, VOCABULARY_UNIT) for shard in ranks]
        self._vocabulary_widths = [part.stop - part.start for part in parts]
        self._embed: Callable | None = None
        self._queries: list[Callable]
        self._output: list[Callable]
        self._mlp: list[Callable]
        self._head: Callable
        """What follows the last layer: the head, or in a stage before the last one, the stream to send."""

    def build_regions(self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]) -> None:
        self._declared_tokens = tokens
        self._list_weights()
        self._compile_experts(compile_region)
        made: dict[object, Callable] = {}

        def region(name: str, function: Callable, inputs: dict[str, Any], *constants: object) -> Callable:
            """Layers that compute the same thing share one."""
            key = name, constants, tuple(inputs.values())
            if key not in made:
                made[key] = compile_region(Region(name, function, inputs, (self._region_constants, constants)))
            return made[key]

        stream: Any = TensorSpec((TOKENS, self.config.hidden_size), self.dtype, self.device)
        token_ids = TensorSpec((TOKENS,), torch.int32, self.device)
        embedding = {"token_ids": token_ids, "embedding": specs_of(self.embedding)}
        if self.stage.is_first:
            self._embed = region("embed", self._embed_region, embedding, self.embedding_method, self.vocabulary.start)
        self._queries, self._output, self._mlp = [], [], []
        for index, (previous, layer) in enumerate(pairwise([None, *self.layers])):
            assert layer is not None
            inputs = {
                "x": stream,
                "residual": stream,
                "tokens": tokens,
                "cos_sin": specs_of(self.cos_sin[index]),
                "cache": layer.own_cache(caches[index]),
                "norm": None if previous is None else specs_of(previous.after.mlp_norm),
                "before": specs_of(layer.before),
            }
            kind: object = None if previous is None else previous.spec.behind, layer.spec.ahead, layer.methods.ahead
            if isinstance(layer.mixer, SelfAttention) and layer.mixer.norms_whole_width:
                self._queries.append(self._normed_queries(previous, layer, layer.mixer, inputs, kind, region))
            else:
                self._queries.append(region("queries", partial(self._queries_region, previous, layer), inputs, kind))
            after, mixer = layer.after, layer.mixer
            is_apart = isinstance(mixer, ScanMixer) and mixer.norms_apart
            is_scaled = isinstance(mixer, SelfAttention) and mixer.scales_outputs
            per_token = TensorSpec((TOKENS, 1), torch.float32, self.device)
            inputs = {
                "o": TensorSpec((TOKENS, *layer.mixer.output_shape), self.attention_dtype, self.device),
                "mean_square": per_token if is_apart else None,
                "largest": per_token if is_scaled else None,
                "residual": stream if layer.mixer.reads_again else None,
                "norm": specs_of(after.read_norm),
                "adapters": tokens.adapters,
                "weights": specs_of(after.mixer),
            }
            kind = layer.spec.behind, layer.methods.behind
            self._output.append(region("output", partial(self._output_region, layer), inputs, kind))
            self._mlp.append(self._compile_mlp(layer, stream, region))
        self._head = self._compile_head(compile_region)

    def _compile_mlp(self, layer: DecoderLayer, stream: Any, region: Callable[..., Callable]) -> Callable:
        """(what attention adds, the stream, adapters, weights) -> (what the layer's MLP adds, the stream)."""
        kind = layer.spec.behind, layer.methods.mlp
        if isinstance(layer.mlp, GatedMlp) and layer.mlp.scales_inner:
            return self._scaled_mlp(layer, layer.mlp, stream, region)
        own = region("mlp", partial(self._mlp_region, layer), self._behind_attention(layer, stream), kind)

        def mlp(*args: Any) -> tuple[Tensor, Tensor]:
            x, residual = own(*args)
            return self._communicator.all_reduce(x), residual

        return mlp

    def _scaled_mlp(self, layer: DecoderLayer, mlp: GatedMlp, stream: Any, region: Callable[..., Callable]) -> Callable:
        """The same in two halves, with a token's largest value agreed on between them."""
        kind = layer.spec.behind, layer.methods.mlp

        def enter(
            x: Tensor, residual: Tensor, adapters: RowAdapters | None, after: AfterMixer
        ) -> tuple[Tensor, Tensor, Tensor]:
            x, residual = layer.enter(layer.leaving(x, after.mixer_norm), residual, after.norm)
            x = mlp.inner(x, after.mlp, adapters)
            return x, largest_inputs(x), residual

        inputs = {
            "x": TensorSpec((TOKENS, mlp.inner_size), self.dtype, self.device),
            "largest": TensorSpec((TOKENS, 1), torch.float32, self.device),
            "weights": specs_of(layer.after.mlp),
            "adapters": self._declared_tokens.adapters,
        }
        first = region("inner", enter, self._behind_attention(layer, stream), kind)
        second = region("down", mlp.down, inputs, kind)

        def both(x: Tensor, residual: Tensor, adapters: RowAdapters | None, after: AfterMixer) -> tuple[Tensor, Tensor]:
            x, largest, residual = first(x, residual, adapters, after)
            x = second(x, self._communicator.all_reduce_max(largest), after.mlp, adapters)
            return self._communicator.all_reduce(x), residual

        return both

    def _behind_attention(self, layer: DecoderLayer, stream: Any) -> dict[str, Any]:
        """Specs of what the region takes that follows a layer's attention."""
        return {
            "x": stream,
            "residual": stream,
            "adapters": self._declared_tokens.adapters,
            "after": specs_of(layer.after),
        }

    def _compile_head(self, compile_region: CompileRegion) -> Callable:
        last = self.layers[-1]
        stream = TensorSpec((TOKENS, self.config.hidden_size), self.dtype, self.device)
        inputs: dict[str, Any] = {"x": stream, "residual": stream, "norm": specs_of(last.after.mlp_norm)}
        constants = self._region_constants, last.spec.behind, self.head.method
        if not self.stage.is_last:
            return compile_region(Region("leave", partial(self._leave_region, last), inputs, constants))
        inputs |= {"final_norm": specs_of(self.final_norm), "head": specs_of(self.head.tensors)}
        return compile_region(Region("head", partial(self._head_region, last), inputs, constants))

    def first_layers(self, count: int, compile_region: CompileRegion) -> ShardedDecoder:
        """See Decoder. All ranks have to be asked for the same."""
        shortened = self._shorten(count)
        shortened._queries = self._queries[:count]
        if shortened.layers[-1].spec.behind != self.layers[-1].spec.behind:
            shortened._head = shortened._compile_head(compile_region)
        return shortened

    def _normed_queries(
        self,
        previous: DecoderLayer | None,
        layer: DecoderLayer,
        mixer: SelfAttention,
        inputs: dict[str, Any],
        kind: object,
        region: Callable[..., Callable],
    ) -> Callable:
        """The region "queries" of a layer whose heads are normed together: in two halves, with a sum between them."""

        def project(
            x: Tensor, residual: Tensor, tokens: TokenInputs, norm: Tensor | None, before: BeforeMixer
        ) -> tuple[Tensor, Tensor, Tensor]:
            x, residual = self._entered(previous, layer, x, residual, norm, before)
            qkv = mixer.projected(x, tokens.adapters, QueryWeights(*before.mixer))
            return qkv, mixer.mean_squares(qkv), residual

        def rotate(
            qkv: Tensor,
            mean_squares: Tensor,
            tokens: TokenInputs,
            cos_sin: Tensor,
            cache: LayerCache,
            before: BeforeMixer,
        ) -> Tensor:
            return mixer.rotated(qkv, mean_squares, tokens, cos_sin, cache, QueryWeights(*before.mixer))

        outer = {name: inputs[name] for name in ("x", "residual", "tokens", "norm", "before")}
        projected = {
            "qkv": TensorSpec((TOKENS, mixer.qkv.out_features), self.dtype, self.device),
            "mean_squares": TensorSpec((TOKENS, 2), torch.float32, self.device),
        }
        inner = {name: inputs[name] for name in ("tokens", "cos_sin", "cache", "before")}
        first = region("projections", project, outer, kind)
        second = region("rotary", rotate, projected | inner, layer.spec.ahead)

        def queries(
            x: Tensor,
            residual: Tensor,
            tokens: TokenInputs,
            cos_sin: Tensor,
            cache: LayerCache,
            norm: Tensor | None,
            before: BeforeMixer,
        ) -> tuple[Tensor, Tensor]:
            qkv, mean_squares, residual = first(x, residual, tokens, norm, before)
            mean_squares = self._communicator.all_reduce(mean_squares)
            return second(qkv, mean_squares, tokens, cos_sin, cache, before), residual

        return queries

    def forward(self, token_ids: Tensor, tokens: TokenInputs, caches: Sequence[LayerCache], attend: Attend) -> Hidden:
        """See Decoder. A part in each of the two sums of a layer is this rank's."""
        if self._embed is None:
            x = self._received(token_ids)
        else:
            with span("embed"):
                x = self._communicator.all_reduce(self._embed(token_ids, self.embedding))
        residual: Tensor = x
        norm: Tensor | None = None
        last = len(self.layers) - 1
        tapped = () if self.tap is None else self.tap.layers
        wanted = []
        for layer, queries in enumerate(self._queries):
            with span("queries"):
                before, table = self._weights[layer][0], self.cos_sin[layer]
                cache = self.layers[layer].own_cache(caches[layer])
                q, residual = queries(x, residual, tokens, table, cache, norm, before)
            if layer in tapped:
                wanted.append(residual)
            o = attend(layer, q, self.layers[layer].given)
            if layer < last:
                x, residual = self._behind(layer, o, residual, tokens.adapters)
                norm = self._weights[layer][1].mlp_norm
        if self.tap is not None:
            self.tap.take(wanted, (o, residual), tokens, caches)
        if self.stage.is_last:
            return o, residual
        x, residual = self._behind(last, o, residual, tokens.adapters)
        self.stage.send(self._head(x, residual, self._weights[last][1].mlp_norm))
        return ()

    def _behind(self, layer: int, o: Tensor, residual: Tensor, adapters: RowAdapters | None) -> tuple[Tensor, Tensor]:
        """Behind a layer's attention: what its MLP adds, and the stream without it."""
        after, mixer = self._weights[layer][1], self.layers[layer].mixer
        with span("output"):
            mean_square = largest = None
            if isinstance(mixer, ScanMixer) and mixer.norms_apart:
                mean_square = self._communicator.all_reduce(mixer.mean_square(o))
            if isinstance(mixer, SelfAttention) and mixer.scales_outputs:
                largest = self._communicator.all_reduce_max(mixer.largest(o))
            stream = residual if mixer.reads_again else None
            x = self._output[layer](o, mean_square, largest, stream, after.read_norm, adapters, after.mixer)
            x = self._communicator.all_reduce(x)
        with span("mlp"):
            added: tuple[Tensor, Tensor] = self._mlp[layer](x, residual, adapters, after)
            return added

    @spanned("last")
    def logits(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """See Decoder."""
        x, residual, norm = self._behind_all(hidden, rows, tokens)
        return self.gather_vocabulary(self._head(x, residual, norm, self.final_norm, self.head.tensors))

    def gather_vocabulary(self, x: Tensor) -> Tensor:
        """See Decoder."""
        return self._communicator.gather_columns(x, self._vocabulary_widths)

    def hidden_states(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> Tensor:
        """See Decoder."""
        count = len(rows)
        if count == 1 and len(hidden[0]) > 1:  # a region that takes one row takes those of a step of one token
            rows = rows.repeat(2)
        x, residual, norm = self._behind_all(hidden, rows, tokens)
        return self._normed(self.layers[-1], x, residual, norm, self.final_norm)[:count]

    def compile_hidden_states(self, compile_region: CompileRegion) -> Callable[[Hidden, Tensor, TokenInputs], Tensor]:
        """See Decoder. All but the last norm is in regions anyway."""
        return self.hidden_states

    def _behind_all(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the last MLP adds for these rows, the stream without it, and the norm in between."""
        last = len(self.layers) - 1
        adapters = None if tokens.adapters is None else tokens.adapters.of(rows)
        x, residual = self._behind(last, hidden[0][rows], hidden[1][rows], adapters)
        return x, residual, self._weights[last][1].mlp_norm

    # The regions.

    def _embed_region(self, token_ids: Tensor, embedding: LinearTensors) -> Tensor:
        size = self.vocabulary.stop - self.vocabulary.start
        places = token_ids - self.vocabulary.start
        is_own = (places >= 0) & (places < size)
        x = self.embedding_method.rows(places.clamp(0, size - 1), embedding)
        if self.config.embedding_scale != 1.0:
            x = x * self.config.embedding_scale
        return torch.where(is_own[:, None], x, 0.0)

    def _queries_region(
        self,
        previous: DecoderLayer | None,
        layer: DecoderLayer,
        x: Tensor,
        residual: Tensor,
        tokens: TokenInputs,
        cos_sin: Tensor,
        cache: LayerCache | None,
        norm: Tensor | None,
        before: BeforeMixer,
    ) -> tuple[Tensor, Tensor]:
        x, residual = self._entered(previous, layer, x, residual, norm, before)
        return layer.mixer.ahead(x, tokens, cos_sin, cache, before.mixer), residual

    @staticmethod
    def _entered(
        previous: DecoderLayer | None,
        layer: DecoderLayer,
        x: Tensor,
        residual: Tensor,
        norm: Tensor | None,
        before: BeforeMixer,
    ) -> tuple[Tensor, Tensor]:
        if previous is None:  # the embeddings are the stream, and nothing was added yet
            return layer.enter(None, x.clone(), before.norm)
        return layer.enter(previous.leaving(x, norm), residual, before.norm)

    def _output_region(
        self,
        layer: DecoderLayer,
        o: Tensor,
        mean_square: Tensor | None,
        largest: Tensor | None,
        residual: Tensor | None,
        norm: Tensor | None,
        adapters: RowAdapters | None,
        weights: tuple[Any, ...],
    ) -> Tensor:
        if mean_square is not None:
            assert isinstance(layer.mixer, ScanMixer)
            o = layer.mixer.normed(o, mean_square, weights)
        read = None if residual is None else layer.enter(None, residual, norm)[0]
        if largest is not None:
            assert isinstance(layer.mixer, SelfAttention)
            return layer.mixer.behind(o, read, adapters, weights, largest)
        return layer.mixer.behind(o, read, adapters, weights)

    def _mlp_region(
        self, layer: DecoderLayer, x: Tensor, residual: Tensor, adapters: RowAdapters | None, after: AfterMixer
    ) -> tuple[Tensor, Tensor]:
        x, residual = layer.enter(layer.leaving(x, after.mixer_norm), residual, after.norm)
        return layer.mlp.apply(x, after.mlp, adapters), residual

    def _head_region(
        self,
        layer: DecoderLayer,
        x: Tensor,
        residual: Tensor,
        norm: Tensor | None,
        final_norm: Tensor,
        head: LinearTensors,
    ) -> Tensor:
        return self._capped(self.head.method.apply(self._normed(layer, x, residual, norm, final_norm), head))

    def _leave_region(self, layer: DecoderLayer, x: Tensor, residual: Tensor, norm: Tensor | None) -> Tensor:
        return residual + layer.leaving(x, norm)

    def _normed(
        self, layer: DecoderLayer, x: Tensor, residual: Tensor, norm: Tensor | None, final_norm: Tensor
    ) -> Tensor:
        x = layer.leaving(x, norm)
        return add_rms_norm(x, residual, final_norm, self.config.rms_norm_eps)[0]
