"""Experts in checkpoints of every form, and what is refused before memory is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.expert_tensors import ExpertTensors
from minivllm.checkpoints.hf_config import build_decoder_config, read_decoder_config
from minivllm.errors import ModelError
from minivllm.models.reference import reference_forward
from minivllm.weights.stored_weight import GroupedWeight
from tests.gguf_families import write_expert_gguf
from tests.parity_reference import random_prompts, reference_logits

TinyModel = Callable[..., Path]
PREFIX = "model.layers.0.mlp.experts."


def copied(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A model with other tensors."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def stack(tensors: dict[str, torch.Tensor]) -> None:
    """One tensor for all experts of a layer, as transformers 5 has them in memory."""
    for layer in range(8):
        prefix = f"model.layers.{layer}.mlp.experts."
        if f"{prefix}0.down_proj.weight" not in tensors:
            continue
        count = sum(name.startswith(prefix) for name in tensors) // 3
        parts = {
            part: torch.stack([tensors.pop(f"{prefix}{expert}.{part}.weight") for expert in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{prefix}down_proj"] = parts["down_proj"]


def load(path: Path) -> dict[str, Any]:
    weights = iterate_weights(path, "auto", read_decoder_config(path), torch.float32)
    return {name: tensor.clone() for name, tensor in weights if isinstance(tensor, torch.Tensor)}


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-moe-plain"])
def test_stacked_experts_are_the_same_as_single_ones(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    path = tiny_model(family)
    single, stacked = load(path), load(copied(path, tmp_path / "stacked", stack))
    assert set(single) == set(stacked)
    assert any(".experts." in name for name in single)
    assert all(torch.equal(single[name], stacked[name]) for name in single)


def without_one_expert(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{PREFIX}3.up_proj.weight"]


def with_one_more(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{PREFIX}8.up_proj.weight"] = tensors[f"{PREFIX}7.up_proj.weight"].clone()


def stacked_with_too_few(tensors: dict[str, torch.Tensor]) -> None:
    stack(tensors)
    tensors[f"{PREFIX}down_proj"] = tensors[f"{PREFIX}down_proj"][:-1].clone()


def stacked_and_single(tensors: dict[str, torch.Tensor]) -> None:
    single = tensors[f"{PREFIX}2.down_proj.weight"].clone()
    stack(tensors)
    tensors[f"{PREFIX}2.down_proj.weight"] = single


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_one_expert, r"lacks tensor 'model\.layers\.0\.mlp\.experts\.3\.up_proj\.weight'"),
        (with_one_more, r"experts\.8\.up_proj\.weight', which the model's configuration does not call for"),
        (
            stacked_with_too_few,
            r"has shape \[7, 64, 32\], but 8 experts of this configuration make \[8, 64, 32\]",
        ),
        (stacked_and_single, r"experts\.2\.down_proj\.weight', which is also in another"),
    ],
)
def test_files_with_other_experts_are_refused_in_a_sentence(
    tiny_model: TinyModel, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    path = copied(tiny_model("qwen3-moe"), tmp_path / "broken", change)
    with pytest.raises(ModelError, match=message):
        next(iterate_weights(path, "auto", read_decoder_config(path), torch.float32))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"num_experts_per_tok": 9},
            r"num_experts_per_tok is 9, but there are only 8 experts \(num_experts\)",
        ),
        ({"num_experts": 0}, "num_experts is 0, but must be a whole number"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok is -1, but must be a whole number"),
        ({"moe_intermediate_size": "many"}, "moe_intermediate_size is 'many', but must be a whole number"),
        ({"mlp_only_layers": [True]}, r"mlp_only_layers is \[True\], but must list numbers of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0, but must be a whole number"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob is 'yes', but must be true or false"),
    ],
)
def test_impossible_experts_are_refused_in_a_sentence(
    tiny_model: TinyModel, entries: dict[str, Any], message: str
) -> None:
    given = json.loads((tiny_model("qwen3-moe") / "config.json").read_text())
    given.setdefault("num_experts", given.pop("num_local_experts", 8))
    with pytest.raises(ModelError, match=message):
        build_decoder_config({**given, **entries}, {}, "config.json")


@pytest.mark.parametrize(
    ("family", "entries", "message"),
    [
        (
            "qwen2-moe",
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0, but must be a whole",
        ),
        ("qwen2-moe", {"qkv_bias": 1}, "qkv_bias is 1, but must be true or false"),
        ("qwen2-moe", {"hidden_act": "swiglu"}, "hidden_act is 'swiglu', but must be one of silu"),
        ("mixtral", {"num_local_experts": -8}, "num_local_experts is -8, but must be a whole number"),
        ("mixtral", {"num_experts_per_tok": 5}, r"there are only 4 experts \(num_local_experts\)"),
        ("gpt-oss", {"swiglu_limit": -1.0}, "swiglu_limit is -1.0, but must be a number above 0"),
        ("gpt-oss", {"sliding_window": None}, "sliding_attention needs sliding_window"),
        (
            "glm4-moe",
            {"scoring_func": "tanh"},
            "scoring_func is 'tanh', but must be 'sigmoid' in this family",
        ),
        (
            "glm4-moe",
            {"topk_method": "greedy"},
            "topk_method is 'greedy', but must be 'noaux_tc' in this family",
        ),
        ("glm4-moe", {"n_group": 3}, "n_group is 3, but must divide the 8 experts into groups of at least 2"),
        ("glm4-moe", {"n_group": 8}, "n_group is 8, but must divide the 8 experts into groups of at least 2"),
        ("glm4-moe", {"n_group": 4, "topk_group": 5}, "topk_group is 5, but must name some of the 4 groups"),
        ("glm4-moe", {"n_group": 4, "topk_group": 1}, "with at least 3 experts together"),
        (
            "glm4-moe",
            {"routed_scaling_factor": 0.0},
            "routed_scaling_factor is 0.0, but must be a number above 0",
        ),
        (
            "glm4-moe",
            {"first_k_dense_replace": -1},
            "first_k_dense_replace is -1, but must be a whole number",
        ),
        ("glm4-moe", {"n_shared_experts": 1.5}, "n_shared_experts is 1.5, but must be a whole number"),
        ("glm4-moe", {"n_routed_experts": "all"}, "n_routed_experts is 'all', but must be a whole number"),
        (
            "qwen3-moe",
            {"num_experts": 4096, "num_hidden_layers": 1000},
            "must make at most 131072 experts together with",
        ),
    ],
)
def test_what_a_family_of_experts_cannot_have_is_refused_in_a_sentence(
    tiny_model: TinyModel, family: str, entries: dict[str, Any], message: str
) -> None:
    given = json.loads((tiny_model(family) / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        build_decoder_config({**given, **entries}, {}, "config.json")


@pytest.mark.parametrize(
    ("family", "piece", "shape"),
    [
        ("glm4-moe", "model.layers.2.mlp.gate.e_score_correction_bias", (8,)),
        ("qwen2-moe", "model.layers.0.mlp.shared_expert_gate.weight", (1, 64)),
        ("qwen2-moe", "model.layers.0.mlp.gate.weight", (6, 64)),
        ("gpt-oss", "model.layers.1.mlp.router.bias", (6,)),
        ("gpt-oss", "model.layers.1.mlp.experts.down_proj_bias", (6, 64)),
        ("gpt-oss", "model.layers.1.self_attn.sinks", (4,)),
    ],
)
def test_a_piece_that_is_missing_or_misshapen_is_refused_before_anything_is_read(
    tiny_model: TinyModel, tmp_path: Path, family: str, piece: str, shape: tuple[int, ...]
) -> None:
    def shortened(tensors: dict[str, torch.Tensor]) -> None:
        assert tensors[piece].shape == shape
        tensors[piece] = tensors[piece][..., :-1].clone()

    module = (
        piece.split(".")[-2]
        if piece.endswith(("weight", ".bias"))
        else piece.split(".")[-1].removesuffix("_bias")
    )
    module = {"router": "gate"}.get(module, module)
    for name, change, message in (
        ("less", lambda tensors: tensors.pop(piece), f"lacks tensor .*{module}"),
        ("short", shortened, f"{module}.* has shape"),
    ):
        path = copied(tiny_model(family), tmp_path / name, change)
        with pytest.raises(ModelError, match=message):
            next(iterate_weights(path, "auto", read_decoder_config(path), torch.float32))


def test_layers_that_guess_further_tokens_are_left_out(tiny_model: TinyModel, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.3.mlp.gate.weight"] = torch.zeros(8, 64)

    source = tiny_model("glm4-moe")
    assert set(load(copied(source, tmp_path / "more", add))) == set(load(source))


@pytest.mark.parametrize(("number", "name"), [(1, "softmax"), (7, "unknown to this decoder")])
def test_a_gguf_file_with_another_router_is_refused(
    tiny_model: TinyModel, tmp_path: Path, number: int, name: str
) -> None:
    write_expert_gguf(tiny_model("glm4-moe"), tmp_path / "model.gguf", gating=number)
    with pytest.raises(ModelError, match=f"scoring_func is '{name}', but must be 'sigmoid'"):
        read_decoder_config(tmp_path / "model.gguf")


# family -> what a GGUF file cannot say otherwise
CONVERTIBLE: dict[str, dict[str, Any]] = {
    "qwen2-moe": {"mlp_only_layers": []},
    "qwen3-moe": {"mlp_only_layers": []},
    "mixtral": {"sliding_window": None},
    "gpt-oss": {"swiglu_limit": 7.0},
    "glm4-moe": {},
    "glm4-moe-groups": {},
}


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "MXFP4"])
@pytest.mark.parametrize("family", CONVERTIBLE)
@torch.inference_mode()
def test_experts_of_a_gguf_file_mean_what_they_say_and_keep_their_blocks(
    tiny_model: TinyModel, tmp_path: Path, family: str, kind: str
) -> None:
    sizes = {"intermediate_size": 64} if family in ("mixtral", "gpt-oss") else {"moe_intermediate_size": 32}
    source, path = tiny_model(family, **CONVERTIBLE[family], **sizes), tmp_path / "model.gguf"
    stored = write_expert_gguf(source, path, kind, num_drafting=family.startswith("glm4"))
    config = read_decoder_config(path)
    kept = dict(iterate_weights(path, "auto", config, torch.float32, kept_bits=frozenset({4, 8})))
    assert set(kept) == set(stored)
    for name, weight in kept.items():
        assert isinstance(weight, GroupedWeight) is (
            kind != "F32" and ".experts." in name and "weight" in name
        )
        values = weight.restore(torch.float32) if isinstance(weight, GroupedWeight) else weight
        torch.testing.assert_close(values, stored[name])
    (prompt,) = random_prompts((70,))
    logits = reference_forward(config, stored, prompt)
    torch.testing.assert_close(logits, reference_forward(read_decoder_config(source), stored, prompt))
    if kind == "F32":
        torch.testing.assert_close(logits, reference_logits(source, prompt), rtol=1e-4, atol=1e-4)


def test_a_router_is_read_as_it_is_stored_whatever_the_model_computes_in(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = tiny_model("glm4-moe")
    write_expert_gguf(source, tmp_path / "model.gguf")
    exact = load(source)
    for path in (source, tmp_path / "model.gguf"):
        for name, tensor in iterate_weights(path, "auto", read_decoder_config(path), torch.bfloat16):
            assert isinstance(tensor, torch.Tensor)
            assert torch.equal(tensor.float(), exact[name]) is (
                ".gate." in name or name.endswith("shared_expert_gate")
            )


def test_quantised_experts_that_may_lie_transposed_are_refused() -> None:
    experts = ExpertTensors({f"{PREFIX}0.down_proj.weight": (4, 8)}, may_be_transposed=True)
    codes, scale = torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 1)
    weight = GroupedWeight(codes, scale, scale, bits=4)
    with pytest.raises(ModelError, match=r"experts\.down_proj' holds quantised experts"):
        list(experts.split(f"{PREFIX}down_proj", weight))
