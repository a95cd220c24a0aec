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
from minivllm.models.decoder_config import AttentionSpec, DecoderConfig
from minivllm.models.layer_specs import SelfAttentionSpec
from minivllm.models.reference import reference_forward
from tests.model_families import FAMILIES
from tests.parity_reference import MAX_MODEL_LEN, random_prompts

NOTICED = 3e-3
"""Of the largest logit; the parity tests allow 1e-4."""

Changed = tuple[str, DecoderConfig, dict[str, Tensor]]


def without_weights(config: DecoderConfig, weights: dict[str, Tensor]) -> Iterator[Changed]:
    """Each norm replaced by its mean, each bias by zeros; and all norms of one name left out."""
    for name, tensor in weights.items():
        if tensor.dim() == 1 and not name.startswith("model.layers.1."):  # the first layer and others
            mean = 0.0 if name.endswith("bias") else float(tensor.mean())
            yield name, config, {**weights, name: torch.full_like(tensor, mean)}
    for norm in sorted({name.split(".")[-2] for name in weights if "layernorm" in name}):
        yield f"all {norm}", config, {name: tensor for name, tensor in weights.items() if f".{norm}." not in name}


def without_facts(config: DecoderConfig, weights: dict[str, Tensor]) -> Iterator[Changed]:
    """What is not the neutral value, in the whole model or in a layer, replaced by that; windows by longer ones."""
    for field, neutral in (("embedding_scale", 1.0), ("logits_scale", 1.0), ("logits_soft_cap", None)):
        if getattr(config, field) != neutral:
            yield field, replace(config, **{field: neutral}), weights

    def changed(change: Callable[[SelfAttentionSpec], dict[str, Any]]) -> DecoderConfig:
        layers = (replace(layer, mixer=replace(layer.mixer, **change(layer.mixer))) for layer in config.layers)
        return replace(config, layers=tuple(layers))

    def attending(change: Callable[[AttentionSpec], dict[str, Any]]) -> DecoderConfig:
        return changed(lambda mixer: {"attend": mixer.attend._replace(**change(mixer.attend))})

    mixer, specs = config.layers[0].mixer, config.attention_specs
    if any(spec.window for spec in specs):
        yield "window", attending(lambda spec: {"window": None}), weights
        yield "window - 1", attending(lambda spec: {"window": spec.window and spec.window - 1}), weights
        yield "window + 1", attending(lambda spec: {"window": spec.window and spec.window + 1}), weights
    if specs[0].soft_cap is not None:
        yield "soft cap", attending(lambda spec: {"soft_cap": None}), weights
    if specs[0].scale != mixer.head_dim**-0.5:
        yield "scale", attending(lambda spec: {"scale": mixer.head_dim**-0.5}), weights
    yield "rotary", changed(lambda mixer: {"rotary": None}), weights
    if len(set(config.rotary)) > 1:
        yield "second table", changed(lambda mixer: {"rotary": 0}), weights
    if mixer.qk_norm is not None:
        yield "norms of q and k", changed(lambda mixer: {"qk_norm": None}), weights
    layers = tuple(replace(layer, mlp=replace(layer.mlp, activation="gelu")) for layer in config.layers)
    if config.layers[0].mlp.activation == "silu":  # the two forms of gelu differ by less than is noticed
        yield "activation", replace(config, layers=layers), weights


@pytest.mark.parametrize("family", FAMILIES)
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
    for changed in (without_weights, without_facts):
        for piece, other_config, other_weights in changed(config, weights):
            logits = reference_forward(other_config, other_weights, prompt, MAX_MODEL_LEN)
            difference = float((logits - whole).abs().max() / whole.abs().max())
            assert difference > NOTICED, f"{piece}: {difference:.1e}"
