"""A decoder as a program: what stands between its weights and the arithmetic of a step.

    Embed, or Receive                                                                         stream
    Overlay                            features of images, in steps that have some            stream
    each layer:  AddNorm, mixer.before_attention    norm -> qkv -> rotary -> KV write         q
                 Attend                             attention over the cache                  o
                 mixer.after_attention, Sum         o-proj                                    x
                 AddNorm, MLP, Sum                  norm -> gate, up -> down                  x
                 Add                                deeper features of images, in some models x
    AddNorm, Head, Gather, or Add and Send                                                    logits

Fused for one rank, only attention cuts it, so the MLP of one layer and the projections of the next become one
region. Where ranks divide the layers, sums cut it too (Megatron-LM: Shoeybi et al. 2019, with ranges instead
of equal parts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.compilation.regions import TensorSpec
from minivllm.linear.methods.method import LinearMethod, LinearTensors
from minivllm.models.decoder.layer import DecoderLayer
from minivllm.models.mixers.mixer import LayerContext
from minivllm.models.model import ImageRows
from minivllm.models.norms import AddNorm, make_norm
from minivllm.models.pieces import Add
from minivllm.program.program import Name, Piece, Program, Seam
from minivllm.program.seams import Gather, Pick, Receive, Send, Sum
from minivllm.specs.caches import ROWS, TOKENS

if TYPE_CHECKING:
    from minivllm.models.decoder.decoder import Decoder


@dataclass(frozen=True)
class Embed:
    """Rows of the embedding, scaled.
    here: the range of token ids that this rank has, where ranks divide them; rows of others are zero."""

    method: LinearMethod
    scale: float
    here: tuple[int, int] | None

    def __call__(self, token_ids: Tensor, embedding: LinearTensors) -> Tensor:
        """token_ids int32 [tokens] -> [tokens, hidden]."""
        if self.here is None:
            x = self.method.rows(token_ids, embedding)
            return x if self.scale == 1.0 else x * self.scale
        start, stop = self.here
        rows = token_ids - start
        is_here = (rows >= 0) & (rows < stop - start)
        x = self.method.rows(rows.clamp(0, stop - start - 1), embedding)
        x = x if self.scale == 1.0 else x * self.scale
        return torch.where(is_here[:, None], x, 0.0)


@dataclass(frozen=True)
class TextIds:
    """Token ids with ``text_id`` in place of placeholders."""

    placeholders: tuple[int, ...]
    text_id: int

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int32 [tokens] -> int32 [tokens]."""
        for placeholder in self.placeholders:
            token_ids = token_ids.masked_fill(token_ids == placeholder, self.text_id)
        return token_ids


@dataclass(frozen=True)
class Overlay:
    """Features of images take the place of embeddings. They are not scaled as those are."""

    def __call__(self, stream: Tensor, features: Tensor, is_image: Tensor) -> Tensor:
        """stream, features: [tokens, hidden]; is_image: bool [tokens]."""
        return torch.where(is_image[:, None], features, stream)


@dataclass(frozen=True)
class Head:
    """Logits: the product of the head, scaled, with a soft cap (Gemma 2)."""

    method: LinearMethod
    scale: float
    soft_cap: float | None

    def __call__(self, h: Tensor, head: LinearTensors) -> Tensor:
        """h [rows, hidden] -> [rows, tokens of the vocabulary here]."""
        logits = self.method.apply(h, head)
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap


def decoder_program(
    decoder: Decoder,
    layers: Sequence[DecoderLayer],
    vocabulary_widths: Sequence[int],
    *,
    images: ImageRows | None = None,
) -> Program:
    """The program of a decoder's stage. layers: all of the stage, or the first ones, for an early exit.

    vocabulary_widths: tokens of the vocabulary that each rank has. images: specs of steps in which some
    tokens stand for images; ``image_inputs`` says which, and what.
    """
    config, stage = decoder.config, decoder.stage
    levels = 0 if images is None else len(images.deeper)
    stream = decoder.stream_spec
    items: list[Piece | Seam] = []
    if stage.is_first:
        here = None
        if decoder.shard.size > 1:
            here = decoder.vocabulary.start, decoder.vocabulary.stop
        embed, token_ids = Embed(decoder.embedding_method, config.embedding_scale, here), "token_ids"
        if config.placeholder_ids:
            ids = TensorSpec((TOKENS,), torch.int32, decoder.device)
            code = TextIds(config.placeholder_ids, config.placeholder_text_id)
            items.append(Piece(code, (token_ids,), {"text_ids": ids}))
            token_ids = "text_ids"
        items += [
            Piece(embed, (token_ids,), {"stream": stream}, lambda: (decoder.embedding,)),
            Sum("stream", stream),
            *(
                [Piece(Overlay(), ("stream", "features", "is_image"), {"stream": stream})]
                if images is not None
                else []
            ),
        ]
        if decoder.per_layer is not None:
            items += decoder.per_layer.program(
                lambda method, scale: Embed(method, scale, here), token_ids, stream
            )
    else:
        items.append(Receive(stream))
    is_shared = decoder.shares_experts
    for number, layer in enumerate(layers):
        cache = decoder.caches[number]
        context = LayerContext(number, cache, _vectors_of(layer), _table_of(decoder, number), stream)
        is_last = stage.is_last and layer is layers[-1]
        items += [
            *layer.before_attention(context, is_first=number == 0),
            # How many logits are wanted, and how often, is known to this engine alone:
            # an MLP that engines share is computed before.
            *([Pick()] if is_last and not is_shared else []),
            *layer.after_attention(context, is_shared),
            *([Pick()] if is_last and is_shared else []),
            *layer.leave(context),
            *([Piece(Add(), ("x", f"deep.{number}"), {"x": stream})] if number < levels else []),
        ]
    if not stage.is_last:
        return [*items, Piece(Add(), ("stream", "x"), {"stream": stream}), Send()]
    norm = AddNorm(make_norm(config.layers[-1].norms.kind, config.rms_norm_eps))
    head = Head(decoder.head.method, config.logits_scale, config.logits_soft_cap)
    logits = TensorSpec((ROWS, config.vocab_size), decoder.dtype, decoder.device)
    width = decoder.vocabulary.stop - decoder.vocabulary.start
    part = TensorSpec((ROWS, width), decoder.dtype, decoder.device)
    return [
        *items,
        Piece(norm, ("x", "stream"), {"h": stream, "stream": stream}, lambda: (decoder.final_norm,)),
        Piece(head, ("h",), {"logits": part}, lambda: (decoder.head.tensors,)),
        Gather("logits", logits, vocabulary_widths),
    ]


def image_inputs(images: ImageRows) -> Mapping[Name, Any]:
    """The registers that only steps with images have. "deep.n" is added after layer n."""
    deeper = {f"deep.{number}": added for number, added in enumerate(images.deeper)}
    return {"features": images.features, "is_image": images.is_image, **deeper}


def _vectors_of(layer: DecoderLayer) -> Callable[[], Mapping[str, Tensor]]:
    return lambda: layer.vectors


def _table_of(decoder: Decoder, number: int) -> Callable[[], tuple[Tensor, Tensor | None]]:
    return lambda: (decoder.cos_sin[number], decoder.axes[number])
