"""Which part of a model belongs to which worker, and which models can be divided at all.

Parts are ranges of whole units, and need not be equal: KV heads with their query heads, MLP_UNIT values between the
products of an MLP, VOCABULARY_UNIT tokens. Where there are fewer KV heads than workers, several workers keep the same
KV head and divide its query heads.
"""

from __future__ import annotations

from typing import NamedTuple

from minivllm.distributed.shard import Shard
from minivllm.errors import ConfigError
from minivllm.models.decoder_config import DecoderConfig
from minivllm.models.layer_specs import LayerSpec, MlpSpec, SelfAttentionSpec

MLP_UNIT = 32
"""Also the inputs that share a scale where weights are rounded to 4 bits."""
VOCABULARY_UNIT = 64


class OwnHeads(NamedTuple):
    """A worker's query heads and KV heads, of those of the whole layer."""

    heads: slice
    kv_heads: slice


def own_heads(spec: SelfAttentionSpec, shard: Shard) -> OwnHeads:
    """Those of one worker."""
    group = spec.query_group
    if shard.size <= spec.kv_heads:
        own = shard.own(spec.kv_heads)
        return OwnHeads(times(own, group), own)
    replicas = shard.size // spec.kv_heads
    kv_head = shard.rank // replicas
    own = Shard(shard.rank % replicas, replicas).own(group)
    return OwnHeads(slice(kv_head * group + own.start, kv_head * group + own.stop), slice(kv_head, kv_head + 1))


def times(own: slice, width: int) -> slice:
    """The columns of so many heads, ``width`` each."""
    return slice(own.start * width, own.stop * width)


def check_layout(config: DecoderConfig, size: int, quantization: str | None) -> None:
    """Raises ConfigError where ``size`` workers cannot divide this model."""
    for number, layer in enumerate(config.layers):
        reason = _obstacle(layer, size, quantization)
        if reason is not None:
            raise ConfigError(f"tensor_parallel_size is {size}, but layer {number} of this model {reason}.")
    units = -(-config.vocab_size // VOCABULARY_UNIT)
    if units < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but the vocabulary of {config.vocab_size} tokens is divided in units of "
            f"{VOCABULARY_UNIT}, which are {units}: use {units} or less."
        )


def _obstacle(layer: LayerSpec, size: int, quantization: str | None) -> str | None:
    mixer, mlp = layer.mixer, layer.mlp
    if type(mixer) is not SelfAttentionSpec:
        return f"has a {type(mixer).__name__}, which is computed by one worker only: use 1"
    if type(mlp) is not MlpSpec:
        return f"has a {type(mlp).__name__}, which is computed by one worker only: use 1"
    if mixer.output_gate:
        return "has a gate behind attention, which is computed by one worker only: use 1"
    if mixer.qk_norm == "whole width":
        return "normalises queries over all heads, which one worker must see: use 1"
    if size > mixer.kv_heads and size % mixer.kv_heads:
        return (
            f"has {mixer.kv_heads} KV heads, which more workers can only share evenly: use at most {mixer.kv_heads} or "
            f"a multiple of it"
        )
    if size > mixer.heads:
        return f"has {mixer.heads} query heads: use that many or less"
    units = -(-mlp.inner // MLP_UNIT)
    if units < size:
        return f"has an MLP of {mlp.inner} values, in units of {MLP_UNIT}: use {units} or less"
    width = mixer.head_dim * (mixer.query_group if size <= mixer.kv_heads else 1)
    if quantization == "int4" and width % MLP_UNIT:
        return (
            f"has attention outputs in units of {width}, and 4-bit scales are for {MLP_UNIT} inputs: use int8 or one "
            f"worker"
        )
    return None
