"""The description that most dense families share:
one kind of layer, with a gated MLP, and windows in some layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from minivllm.families.entries import MAX_POSITIONS, MAX_WIDTH, BiasRule, Entries
from minivllm.families.rotary import read_rotary
from minivllm.specs.attention import AttentionSpec, RotaryConfig
from minivllm.specs.layers import (
    LayerSpec,
    MlpSpec,
    NormPlace,
    NormSpec,
    PerLayerSpec,
    QueryKeyNorm,
    SelfAttentionSpec,
)

WindowRule = Callable[[Entries], Sequence[int | None]]
"""The sliding window of each layer, None for full attention."""
TableRule = Callable[[Entries], Sequence[int | None]]
"""The rotary table of each layer, None for layers that do not rotate."""
RotaryReader = Callable[[Entries, int], tuple[RotaryConfig, ...]]
"""(entries, head_dim) -> the rotary tables."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a family makes of a configuration; see DecoderConfig."""

    layers: tuple[LayerSpec, ...]
    rotary: tuple[RotaryConfig, ...]
    norm_eps: float
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    per_layer: PerLayerSpec | None = None
    placeholder_ids: tuple[int, ...] = ()
    placeholder_text_id: int = 0

    def attending(self, *, scale: float, soft_cap: float | None = None) -> Description:
        """The same with another scale of all scores, and with a cap."""

        def changed(mixer: SelfAttentionSpec) -> SelfAttentionSpec:
            return replace(mixer, attend=mixer.attend._replace(scale=scale, soft_cap=soft_cap))

        return self._with_mixers(changed)

    def looking_ahead(self) -> Description:
        """The same for images that see themselves."""
        return self._with_mixers(lambda mixer: replace(mixer, attend=mixer.attend._replace(looks_ahead=True)))

    def _with_mixers(self, changed: Callable[[SelfAttentionSpec], SelfAttentionSpec]) -> Description:
        return replace(
            self, layers=tuple(replace(layer, mixer=changed(layer.attention)) for layer in self.layers)
        )


def no_windows(entries: Entries) -> Sequence[int | None]:
    return (None,) * entries.num_layers


def one_table(entries: Entries, head_dim: int) -> tuple[RotaryConfig, ...]:
    return (read_rotary(entries, head_dim),)


def first_table(entries: Entries) -> Sequence[int | None]:
    return (0,) * entries.num_layers


def dense(
    entries: Entries,
    *,
    activation: str = "hidden_act",
    qkv_bias: BiasRule = "never",
    o_bias: BiasRule = "never",
    reads_mlp_bias: bool = False,
    qk_norm: QueryKeyNorm | None = None,
    norms: NormPlace = "before",
    windows: WindowRule = no_windows,
    rotary: RotaryReader = one_table,
    tables: TableRule = first_table,
) -> Description:
    """A model of equal layers, but for windows and for rotary tables.

    activation: name of the entry. qkv_bias, o_bias: when the attention projections carry a bias.
    reads_mlp_bias: whether ``mlp_bias`` is looked at. Raises ModelError naming file, field and value where an
    entry cannot be used.
    """
    heads, kv_heads, head_dim = entries.heads()
    eps = entries.norm_eps
    mlp = MlpSpec(
        inner=entries.whole("intermediate_size", 1, MAX_WIDTH),
        activation=entries.activation(activation),
        bias=reads_mlp_bias and entries.flag("mlp_bias"),
    )
    layers = tuple(
        LayerSpec(
            mixer=SelfAttentionSpec(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                attend=AttentionSpec(window, head_dim**-0.5),
                rotary=table,
                qk_norm=qk_norm,
                qk_norm_eps=eps,
                qkv_bias=entries.bias(qkv_bias),
                o_bias=entries.bias(o_bias),
            ),
            mlp=mlp,
            norms=NormSpec(place=norms, eps=eps, after_eps=eps),
        )
        for window, table in zip(windows(entries), tables(entries), strict=True)
    )
    return Description(layers=layers, rotary=rotary(entries, head_dim), norm_eps=eps)


def window_in_every_layer(entries: Entries) -> Sequence[int | None]:
    return (entries.optional_whole("sliding_window", 1, MAX_POSITIONS),) * entries.num_layers
