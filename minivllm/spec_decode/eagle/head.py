"""An EAGLE or MTP draft head as weights and regions:
one decoder layer that guesses from the target's own hidden states.

    EAGLE, EAGLE-2:  x = fc([embed(t); f]);                          attention and MLP on x -> next feature f'
                     logits = the target's head (f')
    EAGLE-3:         g = fc([low; middle; high]) of the target;
                     attention on [norm(embed(t)); norm(g)], residual g      -> next feature g'
                     logits = own head (norm(g')), over a draft vocabulary
    MTP:             x = fc([norm(embed(t)); norm(f)]);              the layer on x, normed -> next feature f'
                     logits = the target's head (f')

f is the target's hidden state after its final norm.
t is the token after the one whose hidden state f or g is: token i + 1 with the feature of position i, at
position i. Where the target has not been yet, the head's own output f' or g' stands in for the feature. (Li
et al. 2024, "EAGLE"; Li et al. 2025, "EAGLE-3"; DeepSeek-AI 2024, "DeepSeek-V3", whose MTP head is the layer
of a model of experts: workers divide it as they divide the model.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.compilation.regions import CompileRegion, TensorSpec
from minivllm.errors import ModelError
from minivllm.linear.layer import ChooseMethod, Linear, Shard
from minivllm.linear.methods.exact import COMPARED_ROWS, LoopedLinear, PlainLinear
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.models.bound_program import BoundProgram, no_attention, program_inputs
from minivllm.models.decoder import Decoder
from minivllm.models.decoder.program import Embed
from minivllm.models.mixers.mixer import LayerContext
from minivllm.models.model import Attend, AttendWeights, Hidden, TokenInputs
from minivllm.models.norms import AddNorm, make_norm
from minivllm.models.pieces import Add
from minivllm.program.fuse import fuse
from minivllm.program.program import Code, Name, Piece, Program, Seam, World
from minivllm.program.runner import Runner
from minivllm.program.seams import Pick, Sum
from minivllm.spec_decode.eagle.checkpoint import EagleTensors
from minivllm.spec_decode.eagle.config import NUM_FUSED_LAYERS, EagleConfig
from minivllm.spec_decode.eagle.mtp import MtpTensors
from minivllm.spec_decode.eagle.pieces import (
    DraftHead,
    Eagle3Input,
    EagleInput,
    FuseFeatures,
    MtpInput,
    ReadFeatures,
)
from minivllm.specs.caches import ROWS, TOKENS, LayerCache
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight


class EagleHead(Decoder):
    """A head for one target, whose embedding it shares unless it has another one,
    and whose head EAGLE and MTP share always.

    Its layer's weights are held as a decoder's are. feature_size: values of a feature, which is kept for
    every token beside the keys and values.
    """

    def __init__(
        self,
        config: EagleConfig,
        tensors: EagleTensors | MtpTensors,
        target: Decoder,
        *,
        max_model_len: int,
        choose_method: ChooseMethod,
        divides_experts: bool = False,
    ) -> None:
        """tensors: what load_weights will bring. max_model_len: positions of the rotary table.
        divides_experts: see Decoder."""
        super().__init__(
            config.layer,
            dtype=target.dtype,
            attention_dtype=target.attention_dtype,
            cache_dtype=target.cache_dtype,
            device=target.device,
            max_model_len=max_model_len,
            communicator=target.communicator if config.version == "mtp" else None,
            choose_method=choose_method,
            divides_experts=divides_experts,
        )
        self.eagle = config
        self._target = target
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
        # Place in the draft vocabulary of every token,
        # the place behind the last one for tokens that are not in it.
        self.token_map: Tensor | None = None
        self._fusion: Runner | None = None
        self._features: Callable[[Hidden, Tensor, TokenInputs], Tensor]

    # -- weights -----------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, StoredWeight]]) -> None:
        """Take tensors under the names of ``EagleTensors``. Raises ModelError for maps of no use."""
        is_guessable: Tensor | None = None
        for name, tensor in weights:
            if name.startswith("layers.0."):
                self.layers[0].load(name.removeprefix("layers.0."), tensor, self.device)
            elif name.startswith(("fc.", "lm_head.")):
                part, kind = name.split(".")
                (self.fc if part == "fc" else self.head).load(part, kind, tensor)
            elif isinstance(tensor, QuantizedWeight):
                raise ModelError(f"The head's tensor {name!r} is quantised, which only a matrix may be.")
            elif name == "embed_tokens.weight":
                self._load_embedding(tensor)
            elif name == "norm.weight":
                self.final_norm = tensor.to(self.device)
            elif name == "d2t":
                self.token_map = self._map_of(tensor.long()).to(self.device)
            else:
                assert name == "t2d", name
                is_guessable = tensor
        if not self.embedding and self._target.shard.size > self.shard.size:
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
            is_equal = all(
                torch.equal(method.rows(own, target.embedding).to(weight), weight[own]) for own in some
            )
        if is_equal:
            return
        self.embedding = (weight.to(self.device, copy=True),)

    def _gathered_embedding(self) -> Tensor:
        """[vocab, hidden]: the target's, which several workers divide."""
        target = self._target
        own = torch.arange(target.vocabulary.stop - target.vocabulary.start, device=self.device)
        return target.gather_vocabulary(target.embedding_method.rows(own, target.embedding).T).T.contiguous()

    def _map_of(self, offsets: Tensor) -> Tensor:
        """offsets int64 [draft vocabulary]:
        how much further a token is in the whole vocabulary -> token_map."""
        size, vocab_size = self.eagle.draft_vocab_size, self.eagle.layer.vocab_size
        tokens = torch.arange(size) + offsets.cpu()
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size or len(tokens.unique()) < size:
            raise ModelError(
                f"The head's map d2t must lead to {size} different tokens from 0 to {vocab_size - 1}."
            )
        return torch.full((vocab_size,), size).index_copy(0, tokens, torch.arange(size))

    @property
    def weights_per_token(self) -> int:
        is_eagle3 = self.eagle.version == "eagle3"
        head = self._target.head if self.eagle.version == "mtp" else self.head
        linears = (head,) if is_eagle3 else (self.fc, head)  # EAGLE-3 fuses once for all guesses
        of_linears = sum(linear.out_features * linear.in_features for linear in linears)
        return self.layers[0].weights_per_token + of_linears

    def map_weights(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every weight of the head by ``change(weight)``; those of the target are not its own."""
        layer = self.layers[0]
        for stored in (*layer.stored, self.fc, self.head):
            stored.map_tensors(change)
        layer.vectors = {name: change(tensor) for name, tensor in layer.vectors.items()}
        self.embedding = tuple(map(change, self.embedding))
        self.final_norm = change(self.final_norm)
        self.token_map = None if self.token_map is None else change(self.token_map)
        self._rebind()

    def _rebind(self) -> None:
        super()._rebind()
        if self._fusion is not None:
            self._fusion.rebind()

    def take_weights(self, other: Decoder) -> None:
        """Take over the weights of another head of the same configuration.
        Raises ModelError if it is none."""
        if not isinstance(other, EagleHead) or self._methods() != other._methods():
            raise ModelError(
                "The head's weights are of another kind than those they replace: start a new engine."
            )
        layer, others = self.layers[0], other.layers[0]
        for stored, theirs in zip(
            (*layer.stored, self.fc, self.head), (*others.stored, other.fc, other.head)
        ):
            stored.tensors = theirs.tensors
        layer.vectors, self.final_norm = others.vectors, other.final_norm
        self.embedding = other.embedding
        self.token_map = other.token_map
        self._rebind()

    def _methods(self) -> list[object]:
        head, embedding = self._head_and_method[1], self._embedding_and_method[1]
        return [self.eagle, self.layers[0].methods, self.fc.method, head, embedding]

    @property
    def _embedding_and_method(self) -> tuple[LinearTensors, LinearMethod]:
        if self.embedding:
            return self.embedding, self.embedding_method
        return self._target.embedding, self._target.embedding_method

    @property
    def _head_and_method(self) -> tuple[LinearTensors, LinearMethod]:
        head = self.head if self.eagle.version == "eagle3" else self._target.head
        return head.tensors, head.method

    # -- computing ---------------------------------------------------------------------------------

    def build_regions(
        self, compile_region: CompileRegion, tokens: TokenInputs, caches: Sequence[LayerCache]
    ) -> None:
        """Make the callables of all regions, among them what turns the target's hidden states into features.
        The target's ``build_regions`` comes first."""
        (cache,) = caches
        self.compile_experts(compile_region)
        features = TensorSpec((*cache.blocks, self.feature_size), self.dtype, self.device)
        inputs = {**program_inputs(tokens, caches), "features": features}
        version, results = self.eagle.version, ("logits", "feature")
        self._step = BoundProgram(
            fuse(self._program(), inputs, ranks=self.shard.size, results=results, label=version),
            compile_region,
        )
        self._programs = [self._step]
        if version != "eagle3":
            self._features = self._target.compile_hidden_states(compile_region)
            return
        tapped = TensorSpec((TOKENS, self.eagle.target_hidden_size), self.dtype, self.device)
        read = dict.fromkeys(("low", "middle", "high"), tapped)
        fuse_features = Piece(
            FuseFeatures(self.fc.method),
            tuple(read),
            {"features": self.stream_spec},
            lambda: (self.fc.tensors,),
        )
        self._fusion = Runner(
            fuse([fuse_features], read, results=("features",), label=version).body, compile_region
        )

    def _program(self) -> Program:
        layer, stream, is_eagle3 = self.layers[0], self.stream_spec, self.eagle.version == "eagle3"
        context = LayerContext(0, 0, lambda: layer.vectors, lambda: (self.cos_sin[0], None), stream)
        vocabulary = self._target.vocabulary
        here = (vocabulary.start, vocabulary.stop) if self.shard.size > 1 else None
        embed = Embed(self._embedding_and_method[1], 1.0, here)
        items: list[Piece | Seam] = [
            Piece(embed, ("token_ids",), {"embedded": stream}, lambda: (self._embedding_and_method[0],)),
            Sum("embedded", stream),
            Piece(ReadFeatures(), ("features", "cache.0"), {"feature": stream}),
        ]
        norm = make_norm(layer.spec.norms.kind, self.config.rms_norm_eps)
        if self.eagle.version == "mtp":
            return [*items, *self._layer_of_mtp(context, norm), self._draft_head("feature")]
        read = "h" if is_eagle3 else "stream"
        if is_eagle3:
            both = context.activation(2 * self.config.hidden_size)
            items.append(
                Piece(
                    Eagle3Input(self.config.rms_norm_eps, self.eagle.norm_before_residual),
                    ("embedded", "feature"),
                    {"h": both, "stream": stream},
                    lambda: (layer.vectors["input_layernorm"], layer.vectors["hidden_norm"]),
                )
            )
        else:
            code = EagleInput(self.fc.method)
            items.append(Piece(code, ("embedded", "feature"), {"stream": stream}, lambda: (self.fc.tensors,)))
        q, o = layer.mixer.before_attention(context, read), layer.attend(context)
        items += [*q, o, Pick(), *layer.after_attention(context, False), *layer.leave(context)]
        items.append(Piece(Add(), ("stream", "x"), {"feature": stream}))
        if is_eagle3:
            items.append(Piece(norm, ("feature",), {"h": stream}, lambda: (self.final_norm,)))
        return [*items, self._draft_head("h" if is_eagle3 else "feature")]

    def _layer_of_mtp(self, context: LayerContext, norm: Code) -> Program:
        """From "embedded" and "feature" to the next "feature"."""
        layer, stream = self.layers[0], self.stream_spec

        def weights() -> tuple[Any, ...]:
            return layer.vectors["enorm"], layer.vectors["hnorm"], self.fc.tensors

        return [
            Piece(MtpInput(norm, self.fc.method), ("embedded", "feature"), {"stream": stream}, weights),
            *layer.before_attention(context, is_first=True),
            Pick(),
            *layer.after_attention(context, False),
            *layer.leave(context),
            Piece(
                AddNorm(norm),
                ("x", "stream"),
                {"feature": stream, "stream": stream},
                lambda: (self.final_norm,),
            ),
        ]

    def _draft_head(self, read: Name) -> Piece:
        """From the register ``read`` to "logits": where workers divide the target's head, of their part."""
        logits = TensorSpec((ROWS, self.vocab_size), self.dtype, self.device)

        def weights() -> tuple[Any, ...]:
            return self._head_and_method[0], self.token_map

        return Piece(DraftHead(self._head_and_method[1]), (read,), {"logits": logits}, weights)

    def features(self, inputs: Sequence[Tensor], hidden: Hidden, tokens: TokenInputs) -> Tensor:
        """Features [tokens, feature_size] of a step of the target, from what its tap hands out."""
        if self.eagle.version == "eagle3":
            assert self._fusion is not None
            (features,) = self._fusion(inputs, World(no_attention))
            return features
        rows = torch.arange(len(tokens.positions), dtype=torch.int32, device=self.device)
        return self._features(hidden, rows, tokens)

    def attended(
        self,
        token_ids: Tensor,
        tokens: TokenInputs,
        cache: LayerCache,
        features: Tensor,
        attend: Attend | None,
    ) -> Hidden:
        """From tokens and features to attention's output; keys and values go into the cache.

        token_ids int32 [tokens]: each the one behind the token whose position and slot ``tokens`` says, and
        whose feature is in ``features`` [blocks, block_size, feature_size]. attend: None where only keys and
        values are wanted.
        """
        return self._step.body(token_ids, tokens, [cache], self.world(attend or _queries), features)

    def guess(self, hidden: Hidden, rows: Tensor, tokens: TokenInputs) -> tuple[Tensor, Tensor]:
        """Logits [len(rows), vocabulary of the target] and the next features [len(rows), feature_size] of the
        picked rows (int32). hidden: from ``attended``. Tokens that the head cannot guess get the lowest logit
        there is."""
        logits, features = self._step.tail(hidden, rows, tokens, self.world(no_attention))
        is_eagle3 = self.eagle.version == "eagle3"
        return (logits if is_eagle3 else self._target.gather_vocabulary(logits)), features


def _queries(layer: int, q: Tensor, weights: AttendWeights = None) -> Tensor:
    """In place of attention whose output is not looked at."""
    return q
