"""The description that most dense families share: one kind of layer, with a gated MLP, and windows in some layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minivllm.models.decoder_config import AttentionSpec, RotaryConfig
from minivllm.models.families.entries import MAX_WIDTH, BiasRule, Entries
from minivllm.models.families.rotary import read_rotary
from minivllm.models.layer_specs import LayerSpec, MlpSpec, NormPlace, NormSpec, QueryKeyNorm, SelfAttentionSpec

WindowRule = Callable[[Entries], Sequence[int | None]]
"""The sliding window of each layer, None for full attention."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a family makes of a configuration; see DecoderConfig."""

    layers: tuple[LayerSpec, ...]
    rotary: tuple[RotaryConfig, ...]
    norm_eps: float
    embedding_scale: float = 1.0
    logits_soft_cap: float | None = None


def no_windows(entries: Entries) -> Sequence[int | None]:
    return (None,) * entries.num_layers


def all_rotate(entries: Entries) -> Sequence[bool]:
    return (True,) * entries.num_layers


def dense(
    entries: Entries,
    *,
    qkv_bias: BiasRule = "never",
    o_bias: BiasRule = "never",
    reads_mlp_bias: bool = False,
    qk_norm: QueryKeyNorm | None = None,
    norms: NormPlace = "before",
    windows: WindowRule = no_windows,
    rotates: Callable[[Entries], Sequence[bool]] = all_rotate,
) -> Description:
    """A model of equal layers, but for windows and for layers that do not rotate.

    qkv_bias, o_bias: when the attention projections carry a bias. reads_mlp_bias: whether ``mlp_bias`` is looked at.
    Raises ModelError naming file, field and value where an entry cannot be used.
    """
    heads, kv_heads, head_dim = entries.heads()
    eps = entries.norm_eps
    mlp = MlpSpec(
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        activation=entries.activation("hidden_act"),
        bias=reads_mlp_bias and entries.flag("mlp_bias"),
    )
    layers = tuple(
        LayerSpec(
            mixer=SelfAttentionSpec(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                attend=AttentionSpec(window, head_dim**-0.5),
                rotary=0 if is_rotated else None,
                qk_norm=qk_norm,
                qk_norm_eps=eps,
                qkv_bias=entries.bias(qkv_bias),
                o_bias=entries.bias(o_bias),
            ),
            mlp=mlp,
            norms=NormSpec(place=norms, eps=eps, after_eps=eps),
        )
        for window, is_rotated in zip(windows(entries), rotates(entries), strict=True)
    )
    return Description(layers=layers, rotary=(read_rotary(entries, head_dim),), norm_eps=eps)
