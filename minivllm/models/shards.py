"""Which part of a model belongs to which worker, and which models can be divided at all.

Parts are ranges of whole units, and need not be equal: KV heads with their query heads, MLP_UNIT values
between the products of an MLP, VOCABULARY_UNIT tokens. Where there are fewer KV heads than workers, several
workers keep the same KV head and divide its query heads.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from minivllm.distributed.shard import Shard
from minivllm.errors import ConfigError
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import (
    FeedForwardSpec,
    GatedDeltaSpec,
    LatentSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    MoeSpec,
    SelfAttentionSpec,
    ShortConvSpec,
)

MLP_UNIT = 32
"""Also the inputs that share a scale where weights are rounded to 4 bits."""
VOCABULARY_UNIT = 64


class OwnHeads(NamedTuple):
    """A worker's query heads and KV heads, of those of the whole layer. is_first: of the workers with these
    KV heads it is the first one, or the only one."""

    heads: slice
    kv_heads: slice
    is_first: bool = True


class Heads(Protocol):
    """Attention's: ``query_group`` query heads for each KV head."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def query_group(self) -> int: ...


def own_heads(spec: Heads, shard: Shard) -> OwnHeads:
    """Those of one worker."""
    group = spec.query_group
    if shard.size <= spec.kv_heads:
        own = shard.own(spec.kv_heads)
        return OwnHeads(times(own, group), own)
    replicas = shard.size // spec.kv_heads
    kv_head = shard.rank // replicas
    own = Shard(shard.rank % replicas, replicas).own(group)
    return OwnHeads(
        slice(kv_head * group + own.start, kv_head * group + own.stop),
        slice(kv_head, kv_head + 1),
        own.start == 0,
    )


def own_inner(inner: int, shard: Shard) -> slice:
    """A worker's range of the values between the products of an MLP or of every expert of a layer,
    or of the channels of a short convolution."""
    return shard.own(inner, MLP_UNIT, last_get_more=True)


def times(own: slice, width: int) -> slice:
    """The columns of so many heads, ``width`` each."""
    return slice(own.start * width, own.stop * width)


def check_layout(config: DecoderConfig, size: int, quantization: str | None, num_sharing: int | None) -> None:
    """Raises ConfigError where ``size`` workers cannot divide this model. num_sharing: workers that divide
    the experts of a layer, each of them whole; None where they have a part of every one."""
    if num_sharing is not None and not any(isinstance(layer.mlp, MoeSpec) for layer in config.layers):
        raise ConfigError(
            f"enable_expert_parallel divides experts among workers, but the layers of {config.architecture} "
            "have none: "
            f"leave it out."
        )
    for number, layer in enumerate(config.layers):
        mlp = layer.mlp
        if num_sharing is not None and isinstance(mlp, MoeSpec) and mlp.num_experts < num_sharing:
            raise ConfigError(
                f"{num_sharing} workers divide experts (tensor_parallel_size times data_parallel_size), but "
                "layer "
                f"{number} of this model has {mlp.num_experts} experts: use that many or less."
            )
        reason = None if size == 1 else _obstacle(layer, size, quantization, num_sharing is not None)
        if reason is not None:
            raise ConfigError(f"tensor_parallel_size is {size}, but layer {number} of this model {reason}.")
    units = -(-config.vocab_size // VOCABULARY_UNIT)
    if units < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the vocabulary of {config.vocab_size} tokens is divided in "
            "units of "
            f"{VOCABULARY_UNIT}, which are {units}: use {units} or less."
        )


def agrees_on_scales(config: DecoderConfig) -> bool:
    """Whether workers who divide the inputs of a product can agree on the largest of them,
    everywhere in this model."""
    return all(
        isinstance(layer.mixer, SelfAttentionSpec)
        and not layer.mixer.output_gate
        and isinstance(layer.mlp, MlpSpec)
        for layer in config.layers
    )


def _obstacle(layer: LayerSpec, size: int, quantization: str | None, whole_experts: bool) -> str | None:
    mixer, mlp = layer.mixer, layer.mlp
    reason = _obstacle_to_heads(mixer, size, quantization)
    if reason is not None:
        return reason
    for kind, inner in _divided(mixer, mlp, whole_experts).items():
        units = -(-inner // MLP_UNIT)
        if units < size:
            return f"has {kind} of {inner} values, in units of {MLP_UNIT}: use {units} or less"
    return None


def obstacle_to_heads(heads: int, kv_heads: int, size: int) -> str | None:
    """Why ``size`` workers cannot divide the heads of a layer, if they cannot."""
    if size > kv_heads and size % kv_heads:
        return (
            f"has {kv_heads} KV heads, which more workers can only share evenly: use at most {kv_heads} or a "
            "multiple "
            f"of it"
        )
    return f"has {heads} query heads: use that many or less" if size > heads else None


def _obstacle_to_heads(spec: MixerSpec, size: int, quantization: str | None) -> str | None:
    if isinstance(spec, SelfAttentionSpec):
        reason = obstacle_to_heads(spec.heads, spec.kv_heads, size)
        if reason is not None:
            return reason
        heads, kind = spec.heads, "query heads"
        unit = spec.head_dim * (spec.query_group if size <= spec.kv_heads else 1)
    elif isinstance(spec, LatentSpec):
        heads, kind, unit = spec.heads, "query heads", spec.value_dim
    elif isinstance(spec, GatedDeltaSpec):
        heads, kind, unit = spec.key_heads, "heads of keys", spec.heads // spec.key_heads * spec.value_dim
    elif isinstance(spec, Mamba2Spec):
        heads, kind = (spec.heads, "heads") if spec.groups == 1 else (spec.groups, "groups of heads")
        unit = spec.heads // heads * spec.head_dim
    else:
        return None
    if size > heads:
        return f"has {heads} {kind}: use that many or less"
    if quantization == "int4" and unit % MLP_UNIT:
        return (
            f"has attention outputs in units of {unit}, and 4-bit scales are for {MLP_UNIT} inputs: use int8 "
            "or one "
            f"worker"
        )
    return None


def _divided(mixer: MixerSpec, mlp: FeedForwardSpec, whole_experts: bool) -> dict[str, int]:
    """What workers divide by ``own_inner``, and how many values it has."""
    divided = {"a convolution": mixer.channels} if isinstance(mixer, ShortConvSpec) else {}
    if not isinstance(mlp, MoeSpec):
        return {**divided, "an MLP": mlp.inner}
    if not whole_experts:
        divided["experts"] = mlp.inner
    return divided if mlp.shared is None else {**divided, "a shared MLP": mlp.shared.inner}
