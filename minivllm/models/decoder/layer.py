"""One layer of a decoder: its mixer, its feed-forward part, and the norms around them.

What a layer is stands in its spec, what it computes in its pieces. Layers with equal pieces share compiled
regions, which take the weights as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm.compilation.regions import TensorSpec
from minivllm.linear.factory import LinearFactory, Stored
from minivllm.linear.layer import Linear
from minivllm.models.decoder.per_layer import PerLayerReader
from minivllm.models.feed_forward.factory import make_feed_forward
from minivllm.models.mixers.factory import make_mixer
from minivllm.models.mixers.mixer import LayerContext
from minivllm.models.norms import AddNorm, make_norm
from minivllm.models.pieces import Add, Scale
from minivllm.program.program import Name, Piece, Program
from minivllm.program.seams import Attend, Sum
from minivllm.specs.caches import TOKENS, LayerCache
from minivllm.specs.layers import LayerSpec, StateMixerSpec
from minivllm.weights.stored_weight import QuantizedWeight, StoredWeight


class DecoderLayer:
    """The weights of one layer, and its pieces."""

    def __init__(
        self,
        spec: LayerSpec,
        hidden_size: int,
        factory: LinearFactory,
        attention_dtype: torch.dtype,
        number: int = 0,
    ) -> None:
        """number: of the layer in the model."""
        self.spec = spec
        self._number = torch.tensor([number], device=factory.device)
        self.reader = None if spec.per_layer is None else PerLayerReader(spec.per_layer, hidden_size, factory)
        self._dtype = factory.dtype
        self._attention_dtype = attention_dtype
        self.keeps_state = isinstance(spec.mixer, StateMixerSpec)
        self.mixer = make_mixer(spec.mixer, hidden_size, factory, attention_dtype)
        self.mlp = make_feed_forward(spec.mlp, hidden_size, factory)
        self.vectors: dict[str, Tensor] = {}  # norms, sinks, and weights that belong to no linear layer
        self.linears = (*self.mixer.linears, *self.mlp.linears)
        self._linear_of = {part: linear for linear in self.mixer.linears for part in linear.sizes}

    def load(self, name: str, tensor: StoredWeight, device: torch.device) -> None:
        """Take ``self_attn.q_proj.weight``, ``input_layernorm.weight``, … of this layer."""
        *_, module, kind = name.split(".")
        if name.startswith("mlp."):
            self.mlp.load(name.removeprefix("mlp."), tensor)
        elif module in self._linear_of:
            self._linear_of[module].load(module, kind, tensor)
        elif self.reader is not None and module in self.reader.linears:
            self.reader.linears[module].load(module, kind, tensor)
        else:
            if isinstance(tensor, QuantizedWeight):
                tensor = tensor.restore(self._dtype)
            key = {"weight": module, "bias": f"{module}.bias"}.get(kind, kind)
            is_attended = kind == key or (name.startswith(f"{self.mixer.block}.") and self.keeps_state)
            own = self.mixer.own(key, tensor) if name.startswith(f"{self.mixer.block}.") else tensor
            tensor = own if own is tensor else own.clone()
            self.vectors[key] = tensor.to(device, torch.float32 if is_attended else tensor.dtype)

    @property
    def stored(self) -> Sequence[Stored]:
        """All that keeps weights, but for the norms."""
        return (*self.mixer.linears, *self.mlp.stored, *self._reads_with)

    @property
    def _reads_with(self) -> Sequence[Linear]:
        """Products around the per-layer embedding."""
        return () if self.reader is None else tuple(self.reader.linears.values())

    @property
    def weights_per_token(self) -> int:
        """How many weights computing a token reads."""
        linears = (*self.mixer.linears, *self._reads_with)
        projections = sum(linear.in_features * linear.out_features for linear in linears)
        return projections + self.mlp.weights_per_token

    @property
    def named_linears(self) -> list[tuple[str, Linear]]:
        """The linear layers that adapters may change, by the block that they lie in."""
        blocks = (self.mixer.block, self.mixer.linears), ("mlp", self.mlp.linears)
        return [(block, linear) for block, linears in blocks for linear in linears]

    @property
    def methods(self) -> tuple[object, ...]:
        """How its products are computed."""
        linears = (*self.mixer.linears, *self._reads_with)
        return (*(linear.method for linear in linears), *self.mlp.methods)

    def own_cache(self, cache: LayerCache) -> LayerCache | None:
        """The cache that the pieces before attention write; None in a layer that keeps a state."""
        return None if self.keeps_state else cache

    def norm(self, name: str, x: Name, spec: TensorSpec) -> list[Piece]:
        """The norm of what a sublayer gave, in its register, in layers that have one there."""
        if name not in self.spec.norms.names:
            return []
        norms = self.spec.norms
        norm = make_norm(norms.kind, norms.after_eps)
        return [Piece(norm, (x,), {x: spec}, lambda: (self.vectors[name],))]

    def enter(self, name: str, stream: TensorSpec, *, adds: bool = True) -> tuple[list[Piece], Name]:
        """What leads into a sublayer, and the register that it reads. name: of its norm.
        adds: "x" joins the residual stream first."""
        norm, weights = make_norm(self.spec.norms.kind, self.spec.norms.eps), lambda: (self.vectors[name],)
        if name not in self.spec.norms.names:
            return ([Piece(Add(), ("stream", "x"), {"stream": stream})] if adds else []), "stream"
        if adds:
            return [Piece(AddNorm(norm), ("x", "stream"), {"h": stream, "stream": stream}, weights)], "h"
        return [Piece(norm, ("stream",), {"h": stream}, weights)], "h"

    def before_attention(self, context: LayerContext, is_first: bool) -> Program:
        """From the residual stream, and "x", which the layer before gave, to "o"."""
        pieces, read = self.enter("input_layernorm", context.stream, adds=not is_first)
        return [*pieces, *self.mixer.before_attention(context, read), self.attend(context)]

    def attend(self, context: LayerContext) -> Attend:
        """The seam in the middle."""
        o = TensorSpec((TOKENS, *self.mixer.output_shape), self._attention_dtype, context.stream.device)
        return Attend(context.number, o, lambda: self.mixer.attend_weights(self.vectors), cache=context.cache)

    def after_attention(self, context: LayerContext, is_shared: bool) -> Program:
        """From "o" to "x", which is still to be added to the stream.
        is_shared: see ``FeedForward.program``."""
        stream = context.stream
        again, read = (
            self.enter("input_layernorm", stream, adds=False) if self.mixer.reads_again else ([], "")
        )
        enter, inner = self.enter("post_attention_layernorm", stream)
        return [
            *again,
            *self.mixer.after_attention(context, read),
            Sum("x", stream),
            *self.norm("post_self_attn_layernorm", "x", stream),
            *enter,
            *self.mlp.program(context, inner, is_shared),
        ]

    def leave(self, context: LayerContext) -> Program:
        """The end of the layer: the norm of the MLP's output, the per-layer embedding and the output scale,
        in layers that have them."""
        stream = context.stream
        items: list[Piece] = self.norm("post_mlp_layernorm", "x", stream)
        if self.reader is not None and self.spec.per_layer is not None:
            norm = make_norm(self.spec.norms.kind, self.spec.per_layer.norm_eps)
            items += self.reader.program(context, self._number)
            items.append(
                Piece(norm, ("x",), {"x": stream}, lambda: (self.vectors["post_per_layer_input_norm"],))
            )
        if self.spec.output_scale:
            gives = {"stream": stream, "x": stream}
            items.append(Piece(Scale(), ("stream", "x"), gives, lambda: (self.vectors["output_scale"],)))
        return items
