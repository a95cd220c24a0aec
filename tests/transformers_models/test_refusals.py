"""What transformers cannot compute for the engine is refused in a sentence, before memory is taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from minivllm.checkpoints.choose import choose_implementation, read_model_facts
from minivllm.errors import ModelError
from minivllm.transformers_models.build import build_architecture
from minivllm.transformers_models.describe.config import read_transformers_config
from minivllm.transformers_models.describe.names import iterate_parameters
from minivllm.transformers_models.model import TransformersModel
from tests.transformers_models.families import FAMILIES, SHAPE, save_model

OWN_ATTENTION: dict[str, dict[str, Any]] = {"falcon": {"head_dim": None, "alibi": True}}
CPU = torch.device("cpu")


def write_config(directory: Path, model_type: str | None, **entries: Any) -> Path:
    directory.mkdir(exist_ok=True)
    known = {"model_type": model_type, **SHAPE, **entries}
    known = {name: value for name, value in known.items() if value is not None or name == "model_type"}
    (directory / "config.json").write_text(json.dumps(known))
    return directory


def new_model(directory: Path) -> TransformersModel:
    config = read_transformers_config(directory)
    return TransformersModel(
        config, dtype=torch.float32, attention_dtype=torch.float32, device=CPU, max_model_len=64
    )


@pytest.mark.parametrize(
    ("model_type", "entries", "sentence"),
    [
        (None, {}, "model_type is None, which neither minivllm nor transformers knows"),
        ("nobodys", {"auto_map": {"AutoConfig": "x.Y"}}, "Code that a model brings along is never run"),
        ("t5", {"d_model": 32}, "has no decoder of text|is an encoder"),
        ("bart", {}, "is an encoder with a decoder, which is not served"),
        ("recurrent_gemma", {}, "layer_types names linear_attention"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "layer_types names conv"),
        ("gemma2", {"num_hidden_layers": -3}, "num_hidden_layers.*-3"),
        ("gemma2", {"architectures": ["Gemma2ForTokenClassification"]}, "only the decoder of text"),
        ("gemma2", {"hidden_size": "wide"}, "is refused by transformers: .*hidden_size"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused_with_its_entry(
    model_type: str | None, entries: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=sentence):
        read_transformers_config(write_config(tmp_path, model_type, **entries))


def test_heads_of_different_widths_are_no_reason_to_refuse_a_configuration(tmp_path: Path) -> None:
    directory = write_config(tmp_path, "gemma4_text", **FAMILIES["gemma4_text"][0])
    assert read_transformers_config(directory).num_layers == 4


@pytest.mark.parametrize("model_type", ["bloom", "mpt"])
def test_a_bias_for_distances_is_refused_by_its_name(model_type: str, tmp_path: Path) -> None:
    config = read_transformers_config(write_config(tmp_path, model_type))
    with pytest.raises(ModelError, match="it adds a bias such as ALiBi to its mask"):
        build_architecture(config, torch.float32, CPU)


def test_tokens_behind_the_query_are_refused(tmp_path: Path) -> None:
    config = read_transformers_config(write_config(tmp_path, "bert"))
    with pytest.raises(
        ModelError, match="its attention mask is neither causal, nor a sliding window, nor in chunks"
    ):
        build_architecture(config, torch.float32, CPU)


@pytest.mark.parametrize("model_type", ["falcon", "gptj", "jamba", "mamba", "rwkv", "xlstm"])
def test_attention_and_state_of_its_own_are_refused(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError,
        match=r"attention interface|keep another state|keeps another state|cannot run on|must be a whole",
    ):
        config = read_transformers_config(
            write_config(tmp_path, model_type, **OWN_ATTENTION.get(model_type, {}))
        )
        build_architecture(config, torch.float32, CPU)


def test_the_table_decides_and_the_user_may(tmp_path: Path) -> None:
    native = write_config(tmp_path / "native", "llama", architectures=["LlamaForCausalLM"])
    other = write_config(tmp_path / "other", "starcoder2", architectures=["Starcoder2ForCausalLM"])
    assert choose_implementation(native)[0] == "minivllm"
    assert choose_implementation(native, wanted="transformers") == ("transformers", "as asked for")
    assert choose_implementation(other) == (
        "transformers",
        "minivllm's own decoder does not know Starcoder2ForCausalLM",
    )
    assert read_model_facts(other).implementation == "transformers"
    with pytest.raises(ModelError, match="supported are"):
        read_model_facts(other, wanted="minivllm")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state.pop("model.norm.weight"), "lacks tensor 'model.norm.weight'"),
        (lambda state: state.update({"model.extra": torch.zeros(3)}), "holds tensor 'model.extra', which"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(5)}),
            r"shape \[5\], but .* calls for \[32\]",
        ),
        (lambda state: state.pop("model.layers.1.mlp.experts.3.up_proj.weight"), "do not make up"),
    ],
)
def test_files_of_another_model_are_refused_by_tensor(change: Any, sentence: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    directory = save_model(tmp_path, "qwen3_moe", experts)
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors")
    model = new_model(directory)
    with pytest.raises(ModelError, match=sentence):
        model.load_weights(iterate_parameters(directory, model.names, None))


@pytest.mark.parametrize("broken", ["neighbours", "places"])
def test_layers_that_would_mix_requests_are_refused(broken: str, tmp_path: Path) -> None:
    """A layer that reads its neighbour, or takes a token's place in the step for its position."""
    directory = save_model(tmp_path, "llama", {})
    model = new_model(directory)
    layer: nn.Module = model.module.model.layers[1].mlp
    compute = layer.forward

    def reads_neighbours(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compute(x) + x.roll(1, 1)
        return out

    def counts(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compute(x) * (1 + torch.arange(x.shape[1]))[:, None]
        return out

    layer.forward = reads_neighbours if broken == "neighbours" else counts  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="would mix the requests"):
        model.load_weights(iterate_parameters(directory, model.names, None))


@pytest.mark.parametrize(
    ("model_type", "architecture", "value", "why"),
    [
        ("llama", "LlamaForCausalLM", "minivllm", "its decoder knows this family"),
        (
            "starcoder2",
            "Starcoder2ForCausalLM",
            "transformers",
            "minivllm's own decoder does not know Starcoder2",
        ),
        ("olmoe", "OlmoeForCausalLM", "transformers", "minivllm's own decoder does not know Olmoe"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", None, "keep another state than keys and values"),
        ("nobodys", "NobodysForCausalLM", None, "which neither minivllm nor transformers knows"),
    ],
)
def test_env_says_whose_layers_compute_a_model_or_why_nobody_s_do(
    model_type: str, architecture: str, value: str | None, why: str, tmp_path: Path
) -> None:
    from minivllm.cli.machine.model_findings import implementation

    model = str(write_config(tmp_path, model_type, architectures=[architecture]))
    if value is None:
        with pytest.raises(ModelError, match=why):
            implementation(model)
    else:
        said = implementation(model)
        assert said["value"] == value and said["why"].startswith(why)
