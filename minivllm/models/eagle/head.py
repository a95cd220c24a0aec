"""An EAGLE draft head as weights and regions: one decoder layer that guesses from the target's own hidden states.

    EAGLE, EAGLE-2:  x = fc([embed(t); f]);                                  attention and MLP on x -> next feature f'
                     logits = the target's head (f')
    EAGLE-3:         g = fc([low; middle; high]) of the target;
                     attention on [norm(embed(t)); norm(g)], residual g      -> next feature g'
                     logits = own head (norm(g')), over a draft vocabulary

t is the token behind the one whose hidden state f or g is: token i + 1 with the feature of position i, at position i.
Where the target has not been yet, the head's own output f' or g' stands in for the feature. (Li et al. 2024, "EAGLE";
Li et al. 2025, "EAGLE-3".)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.norm import rms_norm
from minivllm.compilation.regions import CompileRegion, Region, TensorSpec, specs_of
from minivllm.errors import ModelError
from minivllm.linear.layer import ChooseMethod, Linear, Shard
from minivllm.linear.methods.exact import COMPARED_ROWS, LoopedLinear, PlainLinear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.linear.methods.stored_weight import StoredWeight
from minivllm.models.decoder import Decoder
from minivllm.models.decoder.layer import AfterMixer, BeforeMixer, DecoderLayer
from minivllm.models.eagle.checkpoint import EagleTensors
from minivllm.models.eagle.config import NUM_FUSED_LAYERS, EagleConfig
from minivllm.models.model import ROWS, TOKENS, Hidden, LayerCache, TokenInputs


class _InputWeights(NamedTuple):
    """Weights up to the queries. fc: EAGLE's. hidden_norm: EAGLE-3's. before.norm: that of the embedding (EAGLE-3)."""

    fc: LinearTensors
    hidden_norm: Tensor | None
    before: BeforeMixer


class _OutputWeights(NamedTuple):
    """Weights behind attention. norm and token_map: EAGLE-3's. head: of the target (EAGLE), or its own."""

    after: AfterMixer
    norm: Tensor | None
    head: LinearTensors
    token_map: Tensor | None


class EagleHead(Decoder):
    """A head for one target, whose embedding it shares unless it has another one, and whose head EAGLE shares always.

    Its layer's weights are held as a decoder's are. feature_size: values of a feature, which is kept for every token
    beside the keys and values.
    """

    def __init__(
        self,
        config: EagleConfig,
        tensors: EagleTensors,
        target: Decoder,
        *,
        max_model_len: int,
        choose_method: ChooseMethod,
    ) -> None:
        """tensors: what load_weights will bring. max_model_len: positions of the rotary table."""
        super().__init__(
            config.layer,
            dtype=target.dtype,
            attention_dtype=target.attention_dtype,
            cache_dtype=target.cache_dtype,
            device=target.device,
            max_model_len=max_model_len,
            choose_method=choose_method,
        )
        self.eagle, self._target = config, target
        self.feature_size = hidden = config.layer.hidden_size
        is_eagle3 = config.version == "eagle3"
        inputs = NUM_FUSED_LAYERS * config.target_hidden_size if is_eagle3 else 2 * hidden

        def make(name: str, out_features: int, in_features: int, bias: bool) -> Linear:
            return Linear(
                {name: out_features},
                in_features,
                bias=bias,
                split="column",
                shard=Shard(),
                dtype=target.dtype,
                device=target.device,
                choose=choose_method,
            )

        self.fc = make("fc", hidden, inputs, "fc.bias" in tensors.shapes)
        self.head = make("lm_head", config.draft_vocab_size, hidden, False)
        # Place in the draft vocabulary of every token, the place behind the last one for tokens that are not in it.
        self.token_map: Tensor | None = None
        self._input: Callable
        self._output: Callable
        self._features: Callable

    # -- weights -------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Take tensors under the names of ``EagleTensors``. Raises ModelError for maps of no use."""
        is_guessable: Tensor | None = None
        for name, tensor in weights:
            assert isinstance(tensor, Tensor)
            if name == "embed_tokens.weight":
                self._load_embedding(tensor)
            elif name == "norm.weight":
                self.final_norm = tensor.to(self.device)
            elif name == "d2t":
                self.token_map = self._map_of(tensor.long()).to(self.device)
            elif name == "t2d":
                is_guessable = tensor
            elif name.startswith("layers.0."):
                self.layers[0].load(name.removeprefix("layers.0."), tensor, self.device)
            else:
                part, kind = name.split(".")
                (self.fc if part == "fc" else self.head).load(part, kind, tensor)
        if not self.embedding and self._target.shard.size > 1:
            self.embedding = (self._gathered_embedding(),)
        if is_guessable is None or self.token_map is None:
            return
        if not torch.equal(is_guessable, self.token_map.cpu() < self.eagle.draft_vocab_size):
            raise ModelError("The head's maps d2t and t2d contradict each other: fetch it again.")

    def _load_embedding(self, weight: StoredWeight) -> None:
        assert isinstance(weight, Tensor)
        target = self._target
        method, is_equal = target.embedding_method, False
        if isinstance(method, PlainLinear):
            is_equal = torch.equal(target.embedding[0].to(weight), weight)
        elif isinstance(method, LoopedLinear) and target.shard.size == 1:
            some = torch.arange(len(weight)).split(COMPARED_ROWS)
            is_equal = all(torch.equal(method.rows(own, target.embedding).to(weight), weight[own]) for own in some)
        if is_equal:
            return
        self.embedding = (weight.to(self.device, copy=True),)

    def _gathered_embedding(self) -> Tensor:
        """[vocab, hidden]: the target's, which several workers divide."""
        target = self._target
        own = torch.arange(target.vocabulary.stop - target.vocabulary.start, device=self.device)
        return target.gather_vocabulary(target.embedding_method.rows(own, target.embedding).T).T.contiguous()

    def _map_of(self, offsets: Tensor) -> Tensor:
        """offsets int64 [draft vocabulary]: how much further a token is in the whole vocabulary -> token_map."""
        size, vocab_size = self.eagle.draft_vocab_size, self.eagle.layer.vocab_size
        tokens = torch.arange(size) + offsets.cpu()
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size or len(tokens.unique()) < size:
            raise ModelError(f"The head's map d2t must lead to {size} different tokens from 0 to {vocab_size - 1}.")
        return torch.full((vocab_size,), size).index_copy(0, tokens, torch.arange(size))

    @property
    def weights_per_token(self) -> int:
        fusion = [self.fc] if self.eagle.version == "eagle" else []  # EAGLE-3 fuses once for all guesses
        linears = (*self.layers[0].linears, *fusion, self.head)
        return sum(linear.out_features * linear.in_features for linear in linears)

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight of the head by ``change(weight)``; those of the target are not its own."""
        layer = self.layers[0]
        for linear in (*layer.linears, self.fc, self.head):
            linear.tensors = tuple(map(change, linear.tensors))
        layer.vectors = {name: change(tensor) for name, tensor in layer.vectors.items()}
        self.embedding = tuple(map(change, self.embedding))
        self.final_norm = change(self.final_norm)
        self.token_map = None if self.token_map is None else change(self.token_map)

    def take_weights(self, other: Decoder) -> None:
        """Take over the weights of another head of the same configuration. Raises ModelError if it is none."""
        if not isinstance(other, EagleHead) or self._constants != other._constants:
            raise ModelError("The head's weights are of another kind than those they replace: start a new engine.")
        layer, others = self.layers[0], other.layers[0]
        for linear, theirs in zip((*layer.linears, self.fc, self.head), (*others.linears, other.fc, other.head)):
            linear.tensors = theirs.tensors
        layer.vectors, self.final_norm = others.vectors, other.final_norm
        self.embedding, self.token_map = other.embedding, other.token_map

    @property
    def _constants(self) -> tuple[object, ...]:
        return (
            self._region_constants,
            self.eagle,
            self.layers[0].methods,
            self.fc.method,
            self._head_and_method[1],
            self._embedding_and_method[1],
        )

    @property
    def _embedding_and_method(self) -> tuple[LinearTensors, LinearMethod]:
        if self.embedding:
            return self.embedding, self.embedding_method
        return self._target.embedding, self._target.embedding_method

    @property
    def _head_and_method(self) -> tuple[LinearTensors, LinearMethod]:
        head = self.head if self.eagle.version == "eagle3" else self._target.head
        return head.tensors, head.method

    @property
    def _input_weights(self) -> _InputWeights:
        layer, norms = self.layers[0], self.layers[0].vectors
        norm = norms.get("input_layernorm", norms["post_attention_layernorm"])  # read by EAGLE-3 only
        before = BeforeMixer(norm, layer.mixer.ahead_weights(norms))
        fc = self.fc.tensors if self.eagle.version == "eagle" else ()
        return _InputWeights(fc, norms.get("hidden_norm"), before)

    @property
    def _output_weights(self) -> _OutputWeights:
        norm = self.final_norm if self.eagle.version == "eagle3" else None
        return _OutputWeights(self.layers[0].after, norm, self._head_and_method[0], self.token_map)

    # -- computing -----------------------------------------------------------------------------------------------

    def build_regions(self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]) -> None:
        """Make the callables of all regions, among them what turns the target's hidden states into features. The
        target's ``build_regions`` comes first."""
        (cache,) = caches
        version, layer, constants = self.eagle.version, self.layers[0], self._constants
        embedding, embedding_method = self._embedding_and_method
        inputs = {
            "token_ids": TensorSpec((TOKENS,), torch.int32, self.device),
            "tokens": tokens,
            "cos_sin": specs_of(self.cos_sin[0]),
            "cache": cache,
            "features": TensorSpec((*cache.blocks, self.feature_size), self.dtype, self.device),
            "embedding": specs_of(embedding),
            "weights": specs_of(self._input_weights),
        }
        function = partial(self._input_region, layer, embedding_method)
        self._input = compile_region(Region(f"{version} input", function, inputs, constants))
        inputs = {
            **self._attended(layer),
            "rows": TensorSpec((ROWS,), torch.int32, self.device),
            "weights": specs_of(self._output_weights),
        }
        function = partial(self._output_region, layer, self._head_and_method[1])
        self._output = compile_region(Region(f"{version} output", function, inputs, constants))
        if version == "eagle":
            self._features = self._target.compile_hidden_states(compile_region)
            return
        tapped = TensorSpec((TOKENS, self.eagle.target_hidden_size), self.dtype, self.device)
        inputs = {"low": tapped, "middle": tapped, "high": tapped, "fc": specs_of(self.fc.tensors)}
        self._features = compile_region(Region("eagle3 features", self._fusion_region, inputs, constants))

    def features(self, inputs: Sequence[Tensor], hidden: Hidden, tokens: TokenInputs) -> Tensor:
        """Features [tokens, feature_size] of a step of the target, from what its tap hands out."""
        if self.eagle.version == "eagle3":
            features: Tensor = self._features(*inputs, self.fc.tensors)
        else:
            rows = torch.arange(len(tokens.positions), dtype=torch.int32, device=self.device)
            features = self._features(hidden, rows, tokens)
        return features

    def queries(
        self, token_ids: Tensor, tokens: TokenInputs, cache: LayerCache, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """From tokens and features to queries; keys and values go into the cache.

        token_ids int32 [tokens]: each the one behind the token whose position and slot ``tokens`` says, and whose
        feature is in ``features`` [blocks, block_size, feature_size]. Returns (q [tokens, kv_heads, G, D], residual
        stream [tokens, hidden]).
        """
        embedding = self._embedding_and_method[0]
        q, residual = self._input(token_ids, tokens, self.cos_sin[0], cache, features, embedding, self._input_weights)
        return q, residual

    def guess(self, o: Tensor, residual: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [len(rows), vocabulary of the target] and the next features [len(rows), feature_size] of the picked
        rows (int32). o: attention's output for what ``queries`` returned. Tokens that the head cannot guess get the
        lowest logit there is."""
        logits, features = self._output(o, residual, rows, self._output_weights)
        return (self._target.gather_vocabulary(logits) if self.eagle.version == "eagle" else logits), features

    # The regions, as a decoder's.

    def _fusion_region(self, low: Tensor, middle: Tensor, high: Tensor, fc: LinearTensors) -> Tensor:
        return self.fc.method.apply(torch.cat((low, middle, high), dim=-1), fc)

    def _input_region(
        self,
        layer: DecoderLayer,
        embedding_method: LinearMethod,
        token_ids: Tensor,
        tokens: TokenInputs,
        cos_sin: Tensor,
        cache: LayerCache,
        features: Tensor,
        embedding: LinearTensors,
        weights: _InputWeights,
    ) -> tuple[Tensor, Tensor]:
        embedded = embedding_method.rows(token_ids, embedding)
        feature = features.view(features.shape[0] * features.shape[1], features.shape[2])[cache.slots]
        eps = self.config.rms_norm_eps
        if weights.hidden_norm is None or weights.before.norm is None:
            x = residual = self.fc.method.apply(torch.cat((embedded, feature), dim=-1), weights.fc)
        else:
            normed = rms_norm(feature, weights.hidden_norm, eps)
            residual = normed if self.eagle.norm_before_residual else feature
            x = torch.cat((rms_norm(embedded, weights.before.norm, eps), normed), dim=-1)
        return layer.mixer.ahead(x, tokens, cos_sin, cache, weights.before.mixer), residual

    def _output_region(
        self,
        layer: DecoderLayer,
        head_method: LinearMethod,
        o: Tensor,
        residual: Tensor,
        rows: Tensor,
        weights: _OutputWeights,
    ) -> tuple[Tensor, Tensor]:
        x, residual = layer.output(o[rows], residual[rows], None, weights.after)
        feature = residual + x
        hidden = feature if weights.norm is None else rms_norm(feature, weights.norm, self.config.rms_norm_eps)
        logits = head_method.apply(hidden, weights.head)
        if weights.token_map is not None:
            lowest = torch.finfo(logits.dtype).min
            logits = F.pad(logits, (0, 1), value=lowest)[:, weights.token_map]
        return logits, feature
