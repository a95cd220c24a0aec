"""A layer as data: a family is a list of these, and ``models.decoder`` knows no family.

x = x + after(mixer(before(x)))          after and before: norms, or nothing
x = x + after(mlp(before(x)))
x = (x + embeddings for this layer) * scale    in some families
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kernels_triton_free.experts.routing import Routing
from minivllm.specs.attention import AttentionSpec

Activation = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"]
QueryKeyNorm = Literal["per head", "whole width"]
NormPlace = Literal["before", "after", "both"]


@dataclass(frozen=True)
class ClampedSwiglu:
    """The gated activation of gpt-oss; see ``clamped_swiglu``."""

    alpha: float
    limit: float


@dataclass(frozen=True, kw_only=True)
class PositionScaling:
    """Queries grow with their position:
    times 1 + beta * log(1 + floor(position / interval)) (Llama 4, Ministral 3)."""

    beta: float
    interval: int


@dataclass(frozen=True, kw_only=True)
class SelfAttentionSpec:
    """Grouped-query attention with its projections.

    heads, kv_heads, head_dim: of q, and of k and v. attend: what is computed between the projections.
    rotary: index of the rotary table in ``DecoderConfig.rotary``; None leaves q and k as they are.
    qk_norm: RMSNorm of q and k before rotary, over each head (Qwen3) or over all heads together (OLMo 2).
    qk_norm_eps: its epsilon. qkv_bias, o_bias: which projections carry a bias.
    qkv_inputs: vectors of hidden_size, side by side, that q, k and v are made of (2 in an EAGLE-3 head).
    query_scaling: a factor of the queries that grows with the position, after rotary.
    output_gate: attention's output is multiplied by the sigmoid of a projection of the layer's input
    (Qwen3-Next). value_norm: RMSNorm of each head's values, without a weight (Gemma 4). keys_are_values:
    values are what the projection of keys gives, before norm and rotary. shares_cache_of: number of the
    earlier layer with the keys and values that this layer reads; None: it computes them. Such a layer has
    no query_scaling, and no norm over the whole width.
    """

    heads: int
    kv_heads: int
    head_dim: int
    attend: AttentionSpec
    rotary: int | None = 0
    qk_norm: QueryKeyNorm | None = None
    qk_norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    qkv_inputs: int = 1
    query_scaling: PositionScaling | None = None
    output_gate: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    shares_cache_of: int | None = None

    @property
    def projected(self) -> tuple[str, ...]:
        """Names of the projections of q, k and v that the layer has."""
        if self.shares_cache_of is not None:
            return ("q_proj",)
        return ("q_proj", "k_proj") if self.keys_are_values else ("q_proj", "k_proj", "v_proj")

    @property
    def query_group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def attends(self) -> AttentionSpec:
        """``attend``, complete."""
        return self.attend._replace(query_group=self.query_group)


@dataclass(frozen=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): a token keeps one latent, of which the
    keys and values of all heads are made, and one key that is rotated, the same for all heads.

    heads: of q. query_rank: values of the latent that queries are made of; None: they are made of the hidden
    state. kv_rank: values of the latent that is kept. nope_dim, rope_dim: of the parts of a head's query and
    key that know no position, and that are rotated. value_dim: of a head's value. scale: of the scores.
    rotary: see SelfAttentionSpec. interleaved: elements 2i and 2i + 1 turn together, not i and i + rope_dim /
    2. bias: of the projections to the latents, and of the output. norm_eps: of the norms of both latents.
    """

    heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rotary: int = 0
    interleaved: bool = True
    bias: bool = False
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        """Width of a token in the cache, and of an absorbed query."""
        return self.kv_rank + self.rope_dim

    @property
    def attend(self) -> AttentionSpec:
        """Of absorbed queries over what is kept."""
        return AttentionSpec(None, self.scale, value_dim=self.kv_rank)

    @property
    def attends(self) -> AttentionSpec:
        return self.attend._replace(query_group=self.heads)


class StateTensor(NamedTuple):
    """One of the tensors that a state is made of. name: for people. shape: in one state. is_float32: it is
    kept in float32, whatever the model computes in."""

    name: str
    shape: tuple[int, ...]
    is_float32: bool = False


@dataclass(frozen=True, kw_only=True)
class StateMixerSpec(ABC):
    """A mixer that remembers a request in a state, whose size does not grow with the request, in place of
    keys and values. Its update by the tokens of a step is computed where other layers attend; see
    ``mixers``."""

    @property
    @abstractmethod
    def state(self) -> tuple[StateTensor, ...]:
        """The tensors of one state. All of them are zero before the first token."""

    @property
    @abstractmethod
    def widths(self) -> tuple[int, int]:
        """Values per token that the update is given, and that it gives."""

    @property
    def attends(self) -> StateMixerSpec:
        return self


@dataclass(frozen=True, kw_only=True)
class ShortConvSpec(StateMixerSpec):
    """A gated short convolution (LFM2): b, c, x = in(h), and out(c * convolved(b * x)), where every one of
    the ``channels`` is convolved by itself, over the last ``taps`` tokens. The state is what the last taps -
    1 tokens gave. bias: both projections and the convolution carry one."""

    channels: int
    taps: int
    bias: bool = False

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return (StateTensor("last tokens", (self.taps - 1, self.channels)),)

    @property
    def widths(self) -> tuple[int, int]:
        return 3 * self.channels, self.channels


@dataclass(frozen=True, kw_only=True)
class GatedDeltaSpec(StateMixerSpec):
    """A gated delta net (Qwen3-Next): linear attention over convolved q, k and v, whose ``heads`` values are
    normed and gated. See ``kernels_triton_free.state.gated_delta``.

    key_heads, key_dim: of q and k; every key serves heads / key_heads values. heads, value_dim: of v. taps:
    tokens that the convolution sees. norm_eps: of the norm of each head's output.
    """

    key_heads: int
    key_dim: int
    heads: int
    value_dim: int
    taps: int
    norm_eps: float

    block = "linear_attn"
    bias = False

    @property
    def projections(self) -> Mapping[str, int]:
        """Names of the projections in front of the update, and how many values each gives."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": self.heads, "a": self.heads}
        return {f"in_proj_{part}": size for part, size in sizes.items()}

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the weights that the update is given."""
        return {
            "conv1d.weight": (self.channels, self.taps),
            "A_log": (self.heads,),
            "dt_bias": (self.heads,),
            "norm.weight": (self.value_dim,),
        }

    @property
    def output_heads(self) -> tuple[int, int]:
        """Width of the scan's output."""
        return self.heads, self.value_dim

    @property
    def rest(self) -> tuple[tuple[int, ...], ...]:
        """What the output is computed from besides: the gate."""
        return (self.output_heads,)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("last tokens", (self.taps - 1, self.channels)),
            StateTensor("keys to values", (self.heads, self.key_dim, self.value_dim), is_float32=True),
        )

    @property
    def widths(self) -> tuple[int, int]:
        return sum(self.projections.values()), self.heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Mamba2Spec(StateMixerSpec):
    """A Mamba2 layer (Granite 4): a state space over a convolved input, gated and normed after it. See
    ``kernels_triton_free.state.mamba2``.

    heads, head_dim: of the input. groups, state_dim: of b and c; every group serves heads / groups heads,
    which are normed together. taps: tokens that the convolution sees. conv_bias: it carries a bias. bias: so
    do the projections. norms_apart: other workers have heads of the only group, so that the norm comes after
    the update.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    norm_eps: float
    conv_bias: bool = True
    bias: bool = False
    norms_apart: bool = False

    block = "mamba"

    @property
    def inner(self) -> int:
        """Values of the input, of the gate and of the output."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.inner + 2 * self.groups * self.state_dim

    @property
    def projections(self) -> Mapping[str, int]:
        """See GatedDeltaSpec."""
        return {"in_proj": self.inner + self.channels + self.heads}

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """See GatedDeltaSpec."""
        bias = {"conv1d.bias": (self.channels,)} if self.conv_bias else {}
        own = dict.fromkeys(("A_log", "dt_bias", "D"), (self.heads,))
        norm = {} if self.norms_apart else {"norm.weight": (self.inner,)}
        return {"conv1d.weight": (self.channels, self.taps), **bias, **own, **norm}

    @property
    def output_heads(self) -> tuple[int, int]:
        """Width of the scan's output."""
        return self.heads, self.head_dim

    @property
    def rest(self) -> tuple[tuple[int, ...], ...]:
        """What the output is computed from besides: what goes past the scan, and the gate."""
        return self.output_heads, (self.inner,)

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("last tokens", (self.taps - 1, self.channels)),
            StateTensor("state space", (self.heads, self.state_dim, self.head_dim), is_float32=True),
        )

    @property
    def widths(self) -> tuple[int, int]:
        return sum(self.projections.values()), self.inner


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x)), with ``inner`` values between.
    bias: all three projections carry one."""

    inner: int
    activation: Activation = "silu"
    bias: bool = False

    @property
    def active_inner(self) -> int:
        """Values between, as many as a token has."""
        return self.inner


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Experts: gated MLPs with ``inner`` values between, of which a router chooses some for each token.

    routing: how it chooses. bias: the experts' projections carry one. router_bias: so does the router.
    has_correction: scores are corrected when experts are chosen (DeepSeek-V3). shared: a gated MLP that all
    tokens go through as well. shared_gate: its output is multiplied by the sigmoid of a product of its own
    (Qwen2-MoE). beside: a gated MLP in parallel with the experts (Gemma 4). Both read the residual stream
    through norms of their own, and both outputs are normed and added. The router reads the stream normed
    without a weight and scaled, and each expert's output has a factor. norm_eps: of these norms.
    """

    num_experts: int
    inner: int
    routing: Routing
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False
    router_bias: bool = False
    has_correction: bool = False
    shared: MlpSpec | None = None
    shared_gate: bool = False
    beside: MlpSpec | None = None
    norm_eps: float = 1e-6

    @property
    def active_inner(self) -> int:
        """Values between, as many as a token has: of its experts and of the MLP that all tokens go
        through."""
        dense = self.shared or self.beside
        return self.routing.top_k * self.inner + (0 if dense is None else dense.inner)


NORMS_BESIDE_EXPERTS = (
    "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
)
"""Norms of a layer with ``MoeSpec.beside``: of the experts' input, of the MLP's output and of the experts'
output."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Norms around each of the two sublayers. Weights that a family stores less 1 get it back when they are
    loaded."""

    eps: float
    """Of the norms of what a sublayer reads."""
    place: NormPlace = "before"
    """Norms of what a sublayer reads ("before": Llama), of what it adds to the residual stream ("after": OLMo
    2), or both (Gemma 2)."""
    after_eps: float = 1e-6
    """Of the norms of what a sublayer adds. It differs from eps where a factor of the residual stream was
    folded into eps."""
    kind: str = "rms"
    """The norm, as ``make_norm`` knows it. The norm after the last layer is of the kind of that layer's."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the norms in a layer's weights: around attention, then around the MLP."""
        before = ("input_layernorm", "post_attention_layernorm") if self.place != "after" else ()
        after = ("post_self_attn_layernorm", "post_mlp_layernorm") if self.place != "before" else ()
        return (*before, *after)


MixerSpec = SelfAttentionSpec | LatentSpec | StateMixerSpec
"""How tokens learn of one another."""

FeedForwardSpec = MlpSpec | MoeSpec
"""What is computed for every token by itself."""


@dataclass(frozen=True, kw_only=True)
class PerLayerSpec:
    """Per-layer embeddings (Gemma 3n, Gemma 4).

    A table holds ``width`` values for every token and layer. A projection of the model's input, normed, is
    added to them. After its MLP a layer adds norm(back(activation(gate(x)) * values)) to the residual stream
    x. norm_eps: of both norms.
    """

    width: int
    activation: Activation
    norm_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer of a decoder. per_layer: its per-layer embedding; None: it has none. output_scale: at its end
    the residual stream is multiplied by a learned number."""

    mixer: MixerSpec
    mlp: FeedForwardSpec
    norms: NormSpec
    per_layer: PerLayerSpec | None = None
    output_scale: bool = False

    @property
    def shares_cache_of(self) -> int | None:
        """See SelfAttentionSpec."""
        return self.mixer.shares_cache_of if isinstance(self.mixer, SelfAttentionSpec) else None

    @property
    def attention(self) -> SelfAttentionSpec:
        """The mixer of a layer with grouped-query attention. Raises TypeError for any other."""
        if isinstance(self.mixer, SelfAttentionSpec):
            return self.mixer
        raise TypeError(f"A layer with {self.mixer} has no grouped-query attention.")
