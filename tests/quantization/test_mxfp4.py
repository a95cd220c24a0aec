"""MXFP4 as gpt-oss stores its experts: values as transformers converts them, and the same as whole numbers."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from minivllm.errors import ModelError
from minivllm.weight_formats.mxfp4 import dequantize_mxfp4, group_mxfp4
from minivllm.weight_formats.packed_weights import PackedWeights, StoredPart
from minivllm.weight_formats.quantization_config import read_quantization

EXPERTS, OUT, GROUPS = 3, 10, 4
NAME = "model.layers.0.mlp.experts.gate_up_proj"


def random_parts(low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (EXPERTS, OUT, GROUPS, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(low, high, blocks.shape[:-1], generator=generator).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exponents", [(0, 256), (100, 140)])
def test_values_are_those_of_transformers_bit_for_bit(dtype: torch.dtype, exponents: tuple[int, int]) -> None:
    blocks, scales = random_parts(*exponents)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype).transpose(1, 2)
    got = dequantize_mxfp4(blocks, scales, dtype)
    assert got.shape == (EXPERTS, OUT, GROUPS * 32) and got.dtype == dtype
    assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(got.isnan(), expected.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_numbers_are_exactly_the_values(dtype: torch.dtype) -> None:
    blocks, scales = random_parts(100, 140)
    grouped = group_mxfp4(blocks, scales)
    assert grouped.bits == 8 and grouped.group_size == 32 and grouped.shape == (EXPERTS * OUT, GROUPS * 32)
    assert torch.equal(grouped.restore(dtype), dequantize_mxfp4(blocks, scales, dtype).flatten(0, 1))
    assert torch.equal(group_mxfp4(blocks[1], scales[1]).restore(dtype), dequantize_mxfp4(blocks[1], scales[1], dtype))


def packed() -> PackedWeights:
    quantization = read_quantization({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "config.json")
    assert quantization is not None
    return PackedWeights(quantization)


def placed(weights: PackedWeights, **shapes: tuple[int, ...] | None) -> dict[str, StoredPart]:
    """What a header says of the parts that have a shape."""
    given = {part: StoredPart("U8", shape) for part, shape in shapes.items() if shape is not None}
    assert [weights.place(f"{NAME}_{part}", f"{NAME}_{part}") for part in given] == [(NAME, part) for part in given]
    return given


def test_a_checkpoint_s_blocks_become_what_transformers_makes_of_them() -> None:
    blocks, scales = random_parts(110, 130)
    weights = packed()
    for own in ("model.norm.weight", NAME + "_bias", "model.layers.0.self_attn.q_proj.weight"):
        assert weights.place(own, own) is None
    described = placed(weights, blocks=tuple(blocks.shape), scales=tuple(scales.shape))
    assert weights.shape(NAME, described) == (EXPERTS, GROUPS * 32, OUT)
    weight = weights.assemble(NAME, {"blocks": blocks, "scales": scales}, torch.bfloat16)
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))


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
