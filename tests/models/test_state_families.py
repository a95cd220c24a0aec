"""Families with layers that keep a state:
the plain pass is transformers', every piece matters, nonsense is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import build_decoder_config, read_decoder_config
from minivllm.errors import ModelError
from minivllm.models.reference import reference_forward
from minivllm.specs.decoder import DecoderConfig
from minivllm.specs.layers import GatedDeltaSpec, Mamba2Spec, MoeSpec, SelfAttentionSpec, StateMixerSpec
from tests.model_families import CONVOLVED_FAMILIES, STATE_FAMILIES
from tests.parity_reference import MAX_MODEL_LEN, random_prompts, reference_logits

NOTICED = 3e-3
"""Of the largest logit; the pass itself is within 2e-5."""
QWEN, GRANITE = "Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM"


def load(directory: Path) -> tuple[DecoderConfig, dict[str, Tensor]]:
    config = read_decoder_config(directory)
    weights = iterate_weights(directory, "auto", config, torch.float32)
    return config, {name: tensor.clone() for name, tensor in weights if isinstance(tensor, Tensor)}


def pieces(
    config: DecoderConfig, weights: dict[str, Tensor]
) -> Iterator[tuple[str, DecoderConfig, dict[str, Tensor]]]:
    """The model without one of its pieces: vectors made even, small weights emptied, facts of the layers
    changed. Of layers that are alike, in the first one."""
    first = {layer: index for index, layer in reversed(list(enumerate(config.layers)))}
    for name, tensor in weights.items():
        index = name.removeprefix("model.layers.").split(".")[0]
        if index.isdecimal() and int(index) not in first.values():
            continue
        if tensor.dim() == 1:
            even = 0.0 if name.endswith("bias") else float(tensor.mean())
            yield name, config, {**weights, name: torch.full_like(tensor, even)}
        if name.endswith(
            (".D", ".g_proj.weight", "shared_expert_gate.weight", "in_proj_z.weight", "in_proj_b.weight")
        ):
            yield name, config, {**weights, name: torch.zeros_like(tensor)}
        if name.endswith(("conv1d.weight", ".conv.weight")):
            last = torch.zeros_like(tensor)
            last[:, -1] = 1.0
            yield name, config, {**weights, name: last}

    def changed(kind: type, **values: Any) -> DecoderConfig:
        layers = (
            replace(layer, mixer=replace(layer.mixer, **values)) if isinstance(layer.mixer, kind) else layer
            for layer in config.layers
        )
        return replace(config, layers=tuple(layers))

    attention = next(layer.mixer for layer in config.layers if isinstance(layer.mixer, SelfAttentionSpec))
    other_table = None if attention.rotary is not None else 0
    yield "rotary", changed(SelfAttentionSpec, rotary=other_table), weights
    if attention.output_gate:
        yield "output gate", changed(SelfAttentionSpec, output_gate=False), weights
    for field, neutral in (("embedding_scale", 1.0), ("logits_scale", 1.0)):
        if getattr(config, field) != neutral:
            yield field, replace(config, **{field: neutral}), weights


@pytest.mark.parametrize("family", [*STATE_FAMILIES, *CONVOLVED_FAMILIES])
@torch.inference_mode()
def test_the_plain_pass_is_that_of_transformers_and_every_piece_is_noticed(
    tiny_model: Callable[..., Path], family: str
) -> None:
    directory = tiny_model(family)
    config, weights = load(directory)
    (prompt,) = random_prompts((70,))
    whole, expected = (
        reference_forward(config, weights, prompt, MAX_MODEL_LEN),
        reference_logits(directory, prompt),
    )
    largest = float(expected.abs().max())
    assert (whole - expected).abs().max() <= 2e-5 * largest
    (short,) = random_prompts((24,))
    whole = reference_forward(config, weights, short, MAX_MODEL_LEN)
    left_out = 0
    for piece, other_config, other_weights in pieces(config, weights):
        logits = reference_forward(other_config, other_weights, short, MAX_MODEL_LEN)
        difference = float((logits - whole).abs().max() / whole.abs().max())
        assert difference > NOTICED, f"{piece}: {difference:.1e}"
        left_out += 1
    assert left_out > 8


def build(architecture: str, **entries: Any) -> DecoderConfig:
    small = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    return build_decoder_config({"architectures": [architecture], **small, **entries}, {}, "config.json")


@pytest.mark.parametrize(
    ("architecture", "config_class", "entries"),
    [
        (QWEN, "Qwen3NextConfig", {}),
        ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", {}),
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {}),
        (GRANITE, "GraniteMoeHybridConfig", {"layer_types": ["mamba"] * 31 + ["attention"]}),
    ],
)
def test_entries_left_out_take_the_defaults_of_transformers(
    architecture: str, config_class: str, entries: dict[str, Any]
) -> None:
    import transformers

    theirs = getattr(transformers, config_class)(**entries)
    ours = build_decoder_config({"architectures": [architecture], **entries}, {}, "config.json")
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
    )
    keeps_state = [isinstance(layer.mixer, StateMixerSpec) for layer in ours.layers]
    assert keeps_state == [kind == "linear_attention" for kind in theirs.layer_types]
    mixer, mlp = ours.layers[0].mixer, ours.layers[0].mlp
    if isinstance(mixer, Mamba2Spec):
        assert (mixer.heads, mixer.head_dim, mixer.groups) == (
            theirs.mamba_n_heads,
            theirs.mamba_d_head,
            theirs.mamba_n_groups,
        )
        assert (mixer.state_dim, mixer.taps) == (theirs.mamba_d_state, theirs.mamba_d_conv)
        assert (mixer.conv_bias, mixer.bias) == (theirs.mamba_conv_bias, theirs.mamba_proj_bias)
        assert isinstance(mlp, MoeSpec) and mlp.shared is not None
        assert (mlp.num_experts, mlp.shared.inner) == (
            theirs.num_local_experts,
            theirs.shared_intermediate_size,
        )
        return
    assert isinstance(mixer, GatedDeltaSpec)
    assert (mixer.key_heads, mixer.heads) == (theirs.linear_num_key_heads, theirs.linear_num_value_heads)
    assert (mixer.key_dim, mixer.value_dim) == (theirs.linear_key_head_dim, theirs.linear_value_head_dim)
    assert mixer.taps == theirs.linear_conv_kernel_dim
    attention = ours.layers[3].attention
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (
        theirs.num_attention_heads,
        theirs.num_key_value_heads,
        theirs.head_dim,
    )
    assert ours.rotary[0].dim == theirs.head_dim * theirs.rope_parameters["partial_rotary_factor"]
    if isinstance(mlp, MoeSpec):
        assert (mlp.num_experts, mlp.routing.top_k) == (theirs.num_experts, theirs.num_experts_per_tok)
        assert mlp.inner == theirs.moe_intermediate_size
    else:
        assert mlp.inner == theirs.intermediate_size


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        (QWEN, "linear_num_key_heads", 3),
        (QWEN, "linear_num_value_heads", -4),
        (QWEN, "linear_key_head_dim", 0),
        (QWEN, "linear_conv_kernel_dim", 1),
        (QWEN, "hidden_act", "gelu"),
        (QWEN, "layer_types", ["linear_attention"] * 3 + ["sliding_attention"]),
        (QWEN, "layer_types", ["linear_attention"] * 4),
        (QWEN, "num_experts_per_tok", 1000),
        (QWEN, "shared_expert_intermediate_size", -1),
        (GRANITE, "mamba_n_heads", 7),
        (GRANITE, "mamba_d_head", "any"),
        (GRANITE, "mamba_n_groups", 3),
        (GRANITE, "mamba_d_state", -16),
        (GRANITE, "mamba_d_conv", 0),
        (GRANITE, "time_step_limit", [0.0, 0.1]),
        (GRANITE, "hidden_act", "gelu"),
        (GRANITE, "position_embedding_type", "alibi"),
        (GRANITE, "num_local_experts", -1),
        (GRANITE, "shared_intermediate_size", 0),
        (GRANITE, "layer_types", ["mamba", "attention", "mamba", "moe"]),
        (GRANITE, "layer_types", None),
    ],
)
def test_what_cannot_be_computed_is_refused_with_file_and_field(
    architecture: str, field: str, value: Any
) -> None:
    types = ["mamba", "attention", "mamba", "mamba"]
    sizes = (
        {"mamba_n_heads": 8, "num_local_experts": 0, "layer_types": types} if architecture == GRANITE else {}
    )
    build(architecture, **sizes)
    with pytest.raises(ModelError, match=f"^config.json: {field} is "):
        build(architecture, **{**sizes, field: value})


def test_the_text_part_of_a_model_with_images_is_found_and_its_drafting_layers_are_left_out(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    directory = tiny_model("qwen3.5")
    text = json.loads((directory / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": text.pop("dtype"),
    }
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text, "vision_config": {}}))
    stored = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in stored.items()}
    unused = {"mtp.fc.weight": torch.zeros(2, 2), "model.visual.patch_embed.proj.weight": torch.zeros(2, 2)}
    save_file({**renamed, **unused}, tmp_path / "model.safetensors")
    (config, weights), (_, expected) = load(tmp_path), load(directory)
    assert config.layers == read_decoder_config(directory).layers
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
