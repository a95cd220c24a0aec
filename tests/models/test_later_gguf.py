"""GGUF files of models with latents or states, and of Ministral 3, mean what their safetensors mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import SamplingParams
from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.gguf_names.layout import GGUFLayout
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.errors import ModelError
from minivllm.families.makers.registry import FAMILIES
from minivllm.models.reference import reference_forward
from minivllm.weights.stored_weight import GroupedWeight
from tests.gguf_families import write_gemma4_gguf, write_later_gguf
from tests.model_families import MLA_YARN
from tests.models.test_family_gguf import weights_of
from tests.parity_reference import check_gguf_in_engine, random_prompts, reference_logits, tiny_llm

TinyModel = Callable[..., Path]
EVEN = {"rope_parameters": {**MLA_YARN["rope_parameters"], "mscale": 1.3, "beta_fast": 20}}
# family -> what a GGUF file cannot say otherwise, or llama.cpp does not compute
CONVERTIBLE: dict[str, dict[str, Any]] = {
    "deepseek-v2": {},
    "deepseek-v2-groups": {**EVEN, "attention_bias": False},
    "deepseek-v3": EVEN,
    "deepseek-v3-halves": {"rope_interleave": True, "attention_bias": False},
    "granite-hybrid": {},
    "granite-hybrid-moe": {},
    "granite-hybrid-biases": {},
    "qwen3-next": {"mlp_only_layers": []},
    "qwen3-next-biases": {"attention_bias": False, "norm_topk_prob": True, "layer_types": None},
    "qwen3.5": {},
    "qwen3.5-tied": {"layer_types": None},
    "qwen3.5-moe": {},
    "ministral3": {},
}
OTHER_LAYOUTS = ["deepseek-v2-groups", "deepseek-v3", "qwen3-next", "qwen3.5-moe"]


@pytest.mark.parametrize(
    ("family", "other_layout"),
    [*((name, False) for name in CONVERTIBLE), *((name, True) for name in OTHER_LAYOUTS)],
)
@torch.inference_mode()
def test_a_gguf_file_gives_the_weights_of_the_safetensors_and_the_logits_of_transformers(
    tiny_model: TinyModel, tmp_path: Path, family: str, other_layout: bool
) -> None:
    source, path = tiny_model(family, **CONVERTIBLE[family]), tmp_path / "model.gguf"
    write_later_gguf(source, path, other_layout=other_layout)
    config, weights, expected = read_decoder_config(path), weights_of(path), weights_of(source)
    assert list(weights) != [] and set(weights) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6)
    (prompt,) = random_prompts((70,))
    logits, theirs = reference_forward(config, weights, prompt), reference_logits(source, prompt)
    assert (logits - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3.5-moe", "granite-hybrid-moe"])
@torch.inference_mode()
def test_the_engine_runs_a_gguf_file(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    source = tiny_model(family, **CONVERTIBLE[family])
    write_later_gguf(source, tmp_path / "model.gguf")
    check_gguf_in_engine(tmp_path / "model.gguf", source, *random_prompts((20,)), max_tokens=4)


@pytest.mark.parametrize(("family", "value_dim"), [("qwen3.5", 32), ("qwen3.5", 16), ("qwen3-next", 32)])
def test_matrices_whose_rows_or_columns_move_keep_their_blocks(
    tiny_model: TinyModel, tmp_path: Path, family: str, value_dim: int
) -> None:
    sizes = {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": value_dim,
        "shared_expert_intermediate_size": 64,
    }
    source, path = tiny_model(family, **CONVERTIBLE[family], **sizes), tmp_path / "model.gguf"
    write_later_gguf(source, path, "Q8_0")
    config, exact = read_decoder_config(path), weights_of(source)
    kept = dict(iterate_weights(path, "auto", config, torch.float32, kept_bits=frozenset({4, 8})))
    restored = weights_of(path)
    for name, weight in kept.items():
        is_small = (
            name.endswith(("conv1d.weight", "in_proj_a.weight", "in_proj_b.weight")) or ".gate.weight" in name
        )
        if name.endswith("_proj.weight") and not is_small and ".experts." not in name:
            assert isinstance(weight, GroupedWeight), name
            torch.testing.assert_close(weight.restore(torch.float32), restored[name], rtol=0, atol=1e-6)
        assert (restored[name] - exact[name]).abs().max() <= 0.01 * exact[name].abs().max() + 1e-5, name


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "deepseek-v3",
            {"expert_gating_func": 3},
            "scoring_func is 'unknown to this decoder', but must be 'softmax'",
        ),
        ("deepseek-v3", {"expert_gating_func": 1}, "norm_topk_prob is True, but must be False"),
        (
            "deepseek-v3",
            {"attention.temperature_scale": 0.5},
            r"attention.temperature_scale is 0\.5, but must be 0",
        ),
        ("deepseek-v3", {"attention.kv_lora_rank": None}, "kv_lora_rank is None, but must be a whole number"),
        ("deepseek-v3", {"attention.key_length_mla": 8}, "qk_nope_head_dim is 0, but must be a whole number"),
        (
            "deepseek-v3",
            {"attention.key_length_mla": "20"},
            "qk_nope_head_dim is None, but must be a whole number",
        ),
        ("deepseek-v3", {"expert_group_count": 3}, "n_group is 3, but must divide the 8 experts"),
        (
            "deepseek-v3",
            {"rope.scaling.yarn_beta_fast": "much"},
            "yarn_beta_fast is 'much', but must be a number",
        ),
        ("granite-hybrid", {"ssm.inner_size": 100}, "mamba_d_head is None, but must be a whole number"),
        (
            "granite-hybrid",
            {"ssm.inner_size": 96},
            "mamba_n_heads is 8, but times mamba_d_head 12 must be 64",
        ),
        ("granite-hybrid", {"ssm.group_count": 3}, "mamba_n_groups is 3, but must divide mamba_n_heads 8"),
        (
            "granite-hybrid",
            {"attention.head_count_kv": [0, 2, 0]},
            "layer_types is .* for each of the 4 layers",
        ),
        ("granite-hybrid", {"attention.head_count_kv": 2}, "layer_types is .* must hold attention"),
        (
            "qwen3.5",
            {"ssm.time_step_rank": 3},
            "linear_num_key_heads is 2, but must divide linear_num_value_heads 3",
        ),
        ("qwen3.5", {"ssm.conv_kernel": None}, "linear_conv_kernel_dim is None, but must be a whole number"),
        (
            "qwen3.5",
            {"full_attention_interval": 0},
            "full_attention_interval is 0, but must be a whole number",
        ),
        ("qwen3.5", {"full_attention_interval": 100}, "layer_types is .* must hold full_attention"),
        ("qwen3.5", {"nextn_predict_layers": 4}, "num_hidden_layers is 0, but must be a whole number"),
        ("qwen3.5", {"feed_forward_length": None}, "does not set qwen35.feed_forward_length"),
        (
            "qwen3.5-moe",
            {"ssm.inner_size": "wide"},
            "linear_value_head_dim is None, but must be a whole number",
        ),
        ("qwen3.5-moe", {"expert_used_count": 7}, "num_experts_per_tok is 7, but there are only 6 experts"),
        (
            "ministral3",
            {"rope.scaling.original_context_length": None},
            "original_max_position_embeddings is None",
        ),
        (
            "ministral3",
            {"attention.temperature_scale": "hot"},
            "llama_4_scaling_beta is 'hot', but must be a number",
        ),
        (
            "ministral3",
            {"rope.scaling.yarn_log_multiplier": -1.0},
            r"mscale_all_dim is -1\.0, but must be a number",
        ),
    ],
)
def test_metadata_that_cannot_be_true_are_refused_in_a_sentence(
    tiny_model: TinyModel, tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    write_later_gguf(tiny_model(family, **CONVERTIBLE[family]), tmp_path / "model.gguf", changes=changes)
    with pytest.raises(ModelError, match=message) as error:
        read_decoder_config(tmp_path / "model.gguf")
    assert "model.gguf" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # As many values in all, but not of keys and of values.
        (
            "deepseek-v3",
            {"attention.key_length_mla": 18, "attention.value_length_mla": 12},
            "calls for|call for",
        ),
        (
            "granite-hybrid",
            {"ssm.state_size": 16},
            r"has shape \[176\], but the configuration calls for \[192\]",
        ),
        ("qwen3.5", {"ssm.state_size": 10}, r"has shape \[\d+, 64\], but the configuration calls for"),
        ("qwen3.5", {"full_attention_interval": 2}, "call"),
    ],
)
def test_tensors_that_contradict_the_metadata_are_refused_before_they_are_read(
    tiny_model: TinyModel, tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_later_gguf(tiny_model(family, **CONVERTIBLE[family]), path, changes=changes)
    with pytest.raises(ModelError, match=message):
        next(iterate_weights(path, "auto", read_decoder_config(path), torch.float32))


def test_a_decay_that_would_grow_is_refused(tiny_model: TinyModel) -> None:
    config = read_decoder_config(tiny_model("granite-hybrid"))
    layout = GGUFLayout(FAMILIES[config.architecture], config, {})
    [(_, decay)] = layout.restored("model.layers.0.mamba.A_log", torch.tensor([-1.0, -torch.e]))
    torch.testing.assert_close(decay, torch.tensor([0.0, 1.0]))
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.mamba\.A_log' is made of must be below 0"):
        list(layout.restored("model.layers.0.mamba.A_log", torch.tensor([-1.0, 0.0])))


def test_layers_that_guess_further_tokens_are_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, path = tiny_model("qwen3.5"), tmp_path / "model.gguf"
    write_later_gguf(source, path, changes={"block_count": 5, "nextn_predict_layers": 1})
    assert set(weights_of(path)) == set(weights_of(source))


def test_a_mistral_small_is_a_ministral_whose_queries_do_not_grow(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    plain = dict.fromkeys(
        ("attention.temperature_scale", "rope.scaling.type", "rope.scaling.yarn_log_multiplier")
    )
    write_later_gguf(tiny_model("ministral3"), path, changes=plain)
    config = read_decoder_config(path)
    assert config.layers[0].attention.query_scaling is None and config.rotary[0].type == "default"


@pytest.mark.parametrize("unused_keys", [False, True])
@pytest.mark.parametrize("family", ["gemma4", "gemma4-small", "gemma4-experts"])
@torch.inference_mode()
def test_a_gguf_file_of_gemma_4_gives_its_weights_and_its_logits(
    tiny_model: TinyModel, tmp_path: Path, family: str, unused_keys: bool
) -> None:
    source, path = tiny_model(family), tmp_path / "model.gguf"
    write_gemma4_gguf(source, path, unused_keys=unused_keys)
    config, weights, expected = read_decoder_config(path), weights_of(path), weights_of(source)
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=0)
    (prompt,) = random_prompts((70,))
    logits, theirs = reference_forward(config, weights, prompt), reference_logits(source, prompt)
    assert (logits - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("family", ["gemma4-small", "gemma4-experts"])
@torch.inference_mode()
def test_the_engine_runs_a_gguf_file_of_gemma_4(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    source = tiny_model(family)
    write_gemma4_gguf(source, tmp_path / "model.gguf")
    check_gguf_in_engine(tmp_path / "model.gguf", source, *random_prompts((20,)), max_tokens=4)


@pytest.mark.parametrize(("matrix_type", "quantization"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_the_table_of_embeddings_for_layers_keeps_its_blocks(
    tiny_model: TinyModel, tmp_path: Path, matrix_type: str, quantization: str
) -> None:
    """The tokens are those of its restored values; codes take 4 or 8 bits, and scales 2 more, not 32."""
    source, path = tiny_model("gemma4-small", hidden_size_per_layer_input=32), tmp_path / "model.gguf"
    write_gemma4_gguf(source, path, matrix_type)
    prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts((20, 5))]
    found = []
    for how in (None, quantization):
        with tiny_llm(path, tokenizer=str(source), quantization=how) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
            model = llm.llm_engine.client.core.executor.worker._model  # type: ignore[attr-defined]
            table = model.per_layer.tensors[:-1]
            size = sum(tensor.nbytes for tensor in table)
            found.append(([output.outputs[0].token_ids for output in outputs], size))
    (tokens, whole), (others, kept) = found
    assert tokens == others
    assert kept < whole * {"int4": 0.2, "int8": 0.35}[quantization]
