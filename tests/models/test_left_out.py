"""Every piece of a family's layers matters to its small models: without it, the logits are others.

A piece whose absence goes unnoticed here would be a piece that no parity test tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.models.reference import reference_forward
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import ClampedSwiglu, LatentSpec, MoeSpec, SelfAttentionSpec
from tests.model_families import ATTENDING_FAMILIES
from tests.parity_reference import MAX_MODEL_LEN, random_prompts

NOTICED = 3e-3
"""Of the largest logit; the parity tests allow 1e-4."""

Changed = tuple[str, DecoderConfig, dict[str, Tensor]]


def without_weights(config: DecoderConfig, weights: dict[str, Tensor]) -> Iterator[Changed]:
    """Each norm replaced by its mean, each bias by zeros, each factor of all by 1; and all norms of one name left out."""
    for name, tensor in weights.items():
        is_last = name == f"model.layers.{config.num_layers - 1}.output_scale.weight"  # which a norm follows
        if tensor.dim() == 1 and not is_last and not name.startswith("model.layers.1."):
            mean = 0.0 if name.endswith("bias") else float(tensor.mean()) if len(tensor) > 1 else 1.0
            yield name, config, {**weights, name: torch.full_like(tensor, mean)}
    for norm in sorted({name.split(".")[-2] for name in weights if "layernorm" in name}):
        yield (
            f"all {norm}",
            config,
            {name: tensor for name, tensor in weights.items() if f".{norm}." not in name},
        )


def without_facts(config: DecoderConfig, weights: dict[str, Tensor]) -> Iterator[Changed]:
    """What is not the neutral value, in the whole model or in a layer, replaced by that;
    windows by longer ones."""
    for field, neutral in (("embedding_scale", 1.0), ("logits_scale", 1.0), ("logits_soft_cap", None)):
        if getattr(config, field) != neutral:
            yield field, replace(config, **{field: neutral}), weights

    layers = tuple(replace(layer, mlp=replace(layer.mlp, activation="gelu")) for layer in config.layers)
    if config.layers[0].mlp.activation == "silu":  # the two forms of gelu differ by less than is noticed
        yield "activation", replace(config, layers=layers), weights
    without = (
        without_latent_facts if isinstance(config.layers[0].mixer, LatentSpec) else without_attention_facts
    )
    yield from without(config, weights)


def without_latent_facts(config: DecoderConfig, weights: dict[str, Tensor]) -> Iterator[Changed]:
    def changed(**fields: Any) -> DecoderConfig:
        layers = (replace(layer, mixer=replace(layer.mixer, **fields)) for layer in config.layers)
        return replace(config, layers=tuple(layers))

    mixer = config.layers[0].mixer
    assert isinstance(mixer, LatentSpec)
    plain = (mixer.nope_dim + mixer.rope_dim) ** -0.5
    assert (mixer.scale != plain) == (config.rotary[0].type == "yarn")
    if mixer.scale != plain:
        yield "mscale", changed(scale=plain), weights
        yield (
            "attention factor",
            replace(config, rotary=(replace(config.rotary[0], attention_factor=1.0),)),
            weights,
        )
    yield "pairs", changed(interleaved=not mixer.interleaved), weights


def without_attention_facts(config: DecoderConfig, weights: dict[str, Tensor]) -> Iterator[Changed]:
    def changed(change: Callable[[SelfAttentionSpec], dict[str, Any]]) -> DecoderConfig:
        layers = (
            replace(layer, mixer=replace(layer.mixer, **change(layer.attention))) for layer in config.layers
        )
        return replace(config, layers=tuple(layers))

    def attending(change: Callable[[AttentionSpec], dict[str, Any]]) -> DecoderConfig:
        return changed(lambda mixer: {"attend": mixer.attend._replace(**change(mixer.attend))})

    mixer, specs = config.layers[0].attention, config.attention_specs
    if any(spec.window for spec in specs):
        yield "window", attending(lambda spec: {"window": None}), weights
        yield "window - 1", attending(lambda spec: {"window": spec.window and spec.window - 1}), weights
        yield "window + 1", attending(lambda spec: {"window": spec.window and spec.window + 1}), weights
    if specs[0].soft_cap is not None:
        yield "soft cap", attending(lambda spec: {"soft_cap": None}), weights
    if specs[0].scale != mixer.head_dim**-0.5:
        yield "scale", attending(lambda spec: {"scale": mixer.head_dim**-0.5}), weights
    yield "rotary", changed(lambda mixer: {"rotary": None}), weights
    if len(set(config.rotary)) > 1 and len({table.dim for table in config.rotary}) == 1:
        yield "second table", changed(lambda mixer: {"rotary": 0}), weights
    if mixer.qk_norm is not None:
        yield "norms of q and k", changed(lambda mixer: {"qk_norm": None}), weights
    if mixer.value_norm:
        yield "norm of v", changed(lambda mixer: {"value_norm": False}), weights
    for number, table in enumerate(config.rotary):
        if table.turned:
            whole = replace(table, turned=table.dim)
            tables = tuple(whole if index == number else other for index, other in enumerate(config.rotary))
            yield "elements that stay", replace(config, rotary=tables), weights
    if any(layer.shares_cache_of for layer in config.layers):
        yield "whose keys", changed(other_source), weights
    if config.per_layer is not None:
        layers = tuple(replace(layer, per_layer=None) for layer in config.layers)
        yield "embeddings for layers", replace(config, layers=layers), weights
    if mixer.query_scaling is not None:
        yield "query scaling", changed(lambda mixer: {"query_scaling": None}), weights
        interval = mixer.query_scaling.interval
        longer = replace(mixer.query_scaling, interval=interval + 1)
        yield "interval", changed(lambda mixer: {"query_scaling": longer}), weights


def other_source(mixer: SelfAttentionSpec) -> dict[str, Any]:
    """Keys and values of another layer of the same type."""
    return {"shares_cache_of": {3: 2}.get(mixer.shares_cache_of or 0, mixer.shares_cache_of)}


def without_choices(config: DecoderConfig, weights: dict[str, Tensor]) -> Iterator[Changed]:
    """What a layer with experts adds to a dense one, piece by piece."""

    def changed(change: Callable[[MoeSpec], dict[str, Any]]) -> DecoderConfig:
        layers = (
            replace(layer, mlp=replace(layer.mlp, **change(layer.mlp)))
            if isinstance(layer.mlp, MoeSpec)
            else layer
            for layer in config.layers
        )
        return replace(config, layers=tuple(layers))

    def routed(**fields: Any) -> DecoderConfig:
        return changed(lambda spec: {"routing": replace(spec.routing, **fields)})

    specs = [layer.mlp for layer in config.layers if isinstance(layer.mlp, MoeSpec)]
    if not specs:
        return
    spec, routing = specs[0], specs[0].routing
    yield "an expert of a token", routed(top_k=routing.top_k - 1), weights
    if spec.beside is None:  # a norm follows
        yield "normalised", routed(normalized=not routing.normalized), weights
    yield "scores", routed(scores="softmax" if routing.scores == "sigmoid" else "sigmoid"), weights
    if routing.scale != 1.0:
        yield "scale of routing", routed(scale=1.0), weights
    if routing.groups > 1:
        yield "groups", routed(groups=1, groups_kept=1), weights
        yield "groups kept", routed(groups_kept=routing.groups_kept + 1), weights
        yield "best of a group", routed(group_best=3 - routing.group_best), weights
    if spec.shared is not None:
        yield "shared", changed(lambda spec: {"shared": None}), weights
    if spec.shared_gate:
        yield "its gate", changed(lambda spec: {"shared_gate": False}), weights
    uncorrected = {
        name: torch.zeros_like(tensor) if "correction" in name else tensor for name, tensor in weights.items()
    }
    if spec.has_correction:
        yield "all corrections", config, uncorrected
    if isinstance(spec.activation, ClampedSwiglu):
        for field, other in (("alpha", 1.0), ("limit", 100.0)):
            activation = replace(spec.activation, **{field: other})
            yield field, changed(lambda spec, activation=activation: {"activation": activation}), weights


@pytest.mark.parametrize("family", ATTENDING_FAMILIES)
@torch.inference_mode()
def test_a_piece_that_is_left_out_is_noticed(tiny_model: Callable[..., Path], family: str) -> None:
    directory = tiny_model(family)
    config = read_decoder_config(directory)
    weights = {
        name: tensor.clone()
        for name, tensor in iterate_weights(directory, "auto", config, torch.float32)
        if isinstance(tensor, Tensor)
    }
    (prompt,) = random_prompts((70,), vocab_size=config.vocab_size)
    whole = reference_forward(config, weights, prompt, MAX_MODEL_LEN)
    for changed in (without_weights, without_facts, without_choices):
        for piece, other_config, other_weights in changed(config, weights):
            logits = reference_forward(other_config, other_weights, prompt, MAX_MODEL_LEN)
            difference = float((logits - whole).abs().max() / whole.abs().max())
            assert difference > NOTICED, f"{piece}: {difference:.1e}"
