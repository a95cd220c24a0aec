"""MXFP4 as gpt-oss stores its experts:
values as transformers converts them, and engines that multiply them so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.errors import ModelError
from minivllm.weights.mxfp4 import group_mxfp4
from minivllm.weights.packed_weights import PackedWeights, StoredPart
from minivllm.weights.quantization_config import read_quantization
from minivllm.weights.stored_weight import GroupedWeight
from tests.parity_reference import engine_logits, random_prompts, reference_logits, runner_of, tiny_llm

TinyModel = Callable[..., Path]
EXPERTS, OUT, GROUPS = 3, 10, 4
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def random_parts(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, OUT, GROUPS, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(low, high, blocks.shape[:-1], generator=generator).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponents", [(0, 251), (100, 140)])
def test_whole_numbers_are_the_values_of_transformers_bit_for_bit(
    dtype: torch.dtype, exponents: tuple[int, int]
) -> None:
    blocks, scales = random_parts(*exponents)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    grouped = group_mxfp4(blocks, scales)
    assert grouped.bits == 8 and grouped.group_size == 32 and grouped.shape == (EXPERTS * OUT, GROUPS * 32)
    assert torch.equal(grouped.restore(dtype), expected.flatten(0, 1))
    assert torch.equal(group_mxfp4(blocks[1], scales[1]).restore(dtype), expected[1])


def packed() -> PackedWeights:
    quantization = read_quantization(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "config.json"
    )
    assert quantization is not None
    return PackedWeights(quantization)


def placed(weights: PackedWeights, **shapes: tuple[int, ...] | None) -> dict[str, StoredPart]:
    """What a header says of the parts that have a shape."""
    given = {part: StoredPart("U8", shape) for part, shape in shapes.items() if shape is not None}
    assert [weights.place(f"{NAME}_{part}", f"{NAME}_{part}") for part in given] == [
        (NAME, part) for part in given
    ]
    return given


def test_a_checkpoint_s_blocks_become_what_transformers_makes_of_them() -> None:
    blocks, scales = random_parts(110, 130)
    weights = packed()
    for own in ("model.norm.weight", NAME + "_bias", "model.layers.0.self_attn.q_proj.weight"):
        assert weights.place(own, own) is None
    described = placed(weights, blocks=tuple(blocks.shape), scales=tuple(scales.shape))
    assert weights.shape(NAME, described) == (EXPERTS, GROUPS * 32, OUT)
    weight = weights.assemble(NAME, {"blocks": blocks, "scales": scales}, torch.bfloat16)
    assert isinstance(weight, GroupedWeight)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(weight.restore(torch.bfloat16), expected.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [
        ((3, 10, 4, 16), None),
        (None, (3, 10, 4)),
        ((3, 10, 4, 8), (3, 10, 4)),
        ((3, 10, 4, 16), (3, 10, 5)),
        ((16,), ()),
        ((4, 16), (4,)),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    blocks: tuple[int, ...] | None, scales: tuple[int, ...] | None
) -> None:
    weights = packed()
    described = placed(weights, blocks=blocks, scales=scales)
    with pytest.raises(ModelError, match=r"parts of '.*gate_up_proj' do not make up a weight of mxfp4"):
        weights.shape(NAME, described)


def gpt_oss_copies(source: Path, target: Path) -> tuple[Path, Path]:
    """(a checkpoint as gpt-oss is published, the same dequantised): random blocks in place of all experts."""
    generator = torch.Generator().manual_seed(0)
    weights = load_file(source / "model.safetensors")
    stored = dict(weights)
    for name, weight in weights.items():
        if name.endswith((".gate_up_proj", ".down_proj")):
            num_experts, inputs, outputs = weight.shape
            shape = num_experts, outputs, inputs // 32
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(121, 125, shape, generator=generator, dtype=torch.uint8)
            weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del stored[name]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    for name, tensors in (("stored", stored), ("values", weights)):
        shutil.copytree(source, target / name)
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, target / name / "model.safetensors", metadata={"format": "pt"})
    (target / "stored" / "config.json").write_text(json.dumps(config))
    return target / "stored", target / "values"


def test_an_engine_computes_what_transformers_computes_with_the_values(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, reference = gpt_oss_copies(tiny_model("gpt-oss", intermediate_size=64), tmp_path)
    with tiny_llm(path, max_num_batched_tokens=16) as llm:
        for prompt in random_prompts((2, 62)):
            completion, logits = engine_logits(llm, prompt, max_tokens=3)
            expected = reference_logits(reference, prompt + completion[:-1])
            assert (logits - expected).abs().max() <= 2e-4 * expected.abs().max()


@pytest.mark.skipif(not can_multiply_int4(), reason="this CPU's order of 4-bit weights is not known")
def test_experts_take_less_memory_than_their_values_in_bfloat16(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, reference = gpt_oss_copies(tiny_model("gpt-oss", intermediate_size=64), tmp_path)
    sizes = []
    for directory in (path, reference):
        with tiny_llm(directory, dtype="bfloat16") as llm:
            [_, experts, *_] = runner_of(llm).paged_model.model.layers[0].mlp.stored  # type: ignore[attr-defined]
            sizes.append(sum(tensor.numel() * tensor.element_size() for tensor in experts.tensors))
    assert sizes[0] < 0.65 * sizes[1]


def test_expert_blocks_of_another_size_are_refused_before_anything_is_read(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, _ = gpt_oss_copies(tiny_model("gpt-oss", intermediate_size=64), tmp_path)
    config = read_decoder_config(path, overrides={"num_local_experts": 7})
    with pytest.raises(
        ModelError, match=r"has shape \[6, 64\], but 7 experts of this configuration make \[7, 64"
    ):
        next(iterate_weights(path, "auto", config, torch.float32))
