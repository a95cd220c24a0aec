"""GGUF files of the families mean what their safetensors mean, and quantised matrices keep their blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.errors import ModelError
from minivllm.models.reference import reference_forward
from minivllm.weights.stored_weight import QuantizedWeight
from tests.gguf_families import write_family_gguf
from tests.gguf_models import write_gguf
from tests.parity_reference import check_gguf_in_engine, random_prompts, reference_logits

TinyModel = Callable[..., Path]

# family -> what a GGUF file cannot say otherwise:
# patterns of layers, the scale and the local base are fixed there.
CONVERTIBLE = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma2-no-caps": {
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "layer_types": None},
    "gemma3-mqa": {"query_pre_attn_scalar": 32, "attention_bias": False, "layer_types": None},
    "phi3": {},
    "phi3-partial": {},
    "phi3-long": {},
    "olmo2": {},
    "olmo2-tied": {},
    "olmo3": {},
    "glm4": {},
    "glm4-quarter": {},
    "granite": {},
    "granite-mqa": {},
    "lfm2": {},
    "lfm2-two-taps": {},
}
LINEAR_GEMMA3 = {
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": None,
    "num_hidden_layers": 7,
    "layer_types": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def weights_of(path: Path) -> dict[str, Tensor]:
    found = iterate_weights(path, "auto", read_decoder_config(path), torch.float32)
    return {name: tensor.clone() for name, tensor in found if isinstance(tensor, Tensor)}


@pytest.mark.parametrize(("family", "overrides"), [*CONVERTIBLE.items(), ("gemma3-far", LINEAR_GEMMA3)])
@torch.inference_mode()
def test_a_gguf_file_gives_the_logits_of_transformers(
    tiny_model: TinyModel, tmp_path: Path, family: str, overrides: dict[str, object]
) -> None:
    source, path = tiny_model(family, **overrides), tmp_path / "model.gguf"
    write_family_gguf(source, path)
    config, (prompt,) = read_decoder_config(path), random_prompts((70,))
    expected = reference_logits(source, prompt)
    logits = reference_forward(config, weights_of(path), prompt)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@torch.inference_mode()
def test_a_llama_file_with_a_window_is_a_mistral_whose_rotary_rows_are_put_back(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source, path = tiny_model("mistral-window"), tmp_path / "model.gguf"
    write_gguf(source, path, "llama")
    config, (prompt,) = read_decoder_config(path), random_prompts((70,))
    assert config.architecture == "MistralForCausalLM"
    expected = reference_logits(source, prompt)
    assert (
        reference_forward(config, weights_of(path), prompt) - expected
    ).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("family", ["gemma3", "glm4"])
@torch.inference_mode()
def test_the_engine_runs_a_gguf_file_of_a_family(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    source = tiny_model(family, **CONVERTIBLE[family])
    write_family_gguf(source, tmp_path / "model.gguf")
    check_gguf_in_engine(tmp_path / "model.gguf", source, *random_prompts((40,)), max_tokens=8)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "glm4"])
def test_quantised_matrices_keep_their_blocks_where_a_family_changes_nothing(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    source, path = tiny_model(family, intermediate_size=128, **CONVERTIBLE[family]), tmp_path / "model.gguf"
    write_family_gguf(source, path, "Q8_0")
    config = read_decoder_config(path)
    kept = dict(iterate_weights(path, "auto", config, torch.float32, kept_bits=frozenset({8})))
    restored = weights_of(path)
    for name, weight in kept.items():
        if isinstance(weight, QuantizedWeight):
            torch.testing.assert_close(weight.restore(torch.float32), restored[name], rtol=0, atol=1e-6)
    matrices = [name for name in kept if name.endswith("_proj.weight")]
    unchanged = [
        name for name in matrices if family != "glm4" or name.split(".")[-2] not in ("q_proj", "k_proj")
    ]
    assert all(isinstance(kept[name], QuantizedWeight) for name in unchanged)


def test_a_fused_matrix_of_another_height_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_family_gguf(tiny_model("phi3"), path)
    config = read_decoder_config(path, overrides={"intermediate_size": 95})
    with pytest.raises(ModelError, match=r"mlp\.gate_up_proj\.weight' has shape \[192, 64\].*\[190, 64\]"):
        list(iterate_weights(path, "auto", config, torch.float32))
