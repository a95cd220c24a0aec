"""Rounding weights: every value within half a step of what it was, extremes kept, zeros harmless."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.weights.stored_weight import (
    GroupedWeight,
    round_groups_to_rows,
    round_to_float8_rows,
    round_to_groups,
    round_to_int8_rows,
    round_to_rows,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def random_weight(seed: int, size: float, rows: int = 6, columns: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(rows, columns, generator=generator)
    weight[0] = 0
    weight[1] = size
    weight[2, :32] += 10 * size  # far from zero as a group
    return weight


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.02, 1.0, 30.0]), DTYPES)
def test_int8_is_within_half_a_step_of_the_weight(seed: int, size: float, dtype: torch.dtype) -> None:
    weight = random_weight(seed, size)
    values, scale = round_to_int8_rows(weight, dtype)
    assert values.dtype == torch.int8 and scale.dtype == dtype and scale.shape == (6, 1)
    # The largest weight may be clamped to 127 steps where the scale was rounded downwards.
    slack = 127 * torch.finfo(dtype).eps
    assert ((values * scale.float() - weight).abs() <= (0.5 + slack) * scale.float()).all()
    assert (values[0] == 0).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.02, 1.0, 30.0]), st.sampled_from([32, 64]), DTYPES)
def test_int4_is_within_half_a_step_of_the_weight(
    seed: int, size: float, group: int, dtype: torch.dtype
) -> None:
    weight = random_weight(seed, size)
    rounded = round_to_groups(weight, group, dtype)
    assert rounded.bits == 4 and rounded.group_size == group and int(rounded.codes.max()) <= 15
    step = rounded.scale.repeat_interleave(group, 1)
    # Scale and zero are numbers of the dtype:
    # what their rounding moves comes on top, and so may clamping to 15.
    slack = torch.finfo(dtype).eps * (weight.abs() + 16 * step + 10 * size)
    assert ((rounded.restore(torch.float32) - weight).abs() <= 0.5 * step + slack).all()
    assert torch.equal(rounded.scale.to(dtype).float(), rounded.scale)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-30, 0.02, 30.0]),
    bits=st.sampled_from([4, 8]),
    rounded=st.sampled_from([(8, torch.int8), (10, torch.int16)]),
    part=st.sampled_from([slice(0, 96), slice(32, 96), slice(8, 40)]),
    has_order=st.booleans(),
)
def test_groups_are_rounded_to_rows_as_the_values_that_they_stand_for(
    seed: int, size: float, bits: int, rounded: tuple[int, torch.dtype], part: slice, has_order: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (5, 96), dtype=torch.uint8, generator=generator)
    scale, offset = size * torch.randn(2, 5, 3, generator=generator)
    scale[0] = offset[0] = 0
    codes[1], offset[2] = 0, 100 * offset[2]
    order = torch.randperm(96, generator=generator) if has_order else None
    weight = GroupedWeight(codes, scale, offset, bits, order).part(slice(None), part)
    values, steps = round_groups_to_rows(weight, *rounded)
    exact = weight.restore(torch.float32)
    expected, expected_steps = round_to_rows(exact, *rounded, torch.float32)
    torch.testing.assert_close(steps, expected_steps)
    assert (
        values.dtype == rounded[1]
        and (values[0] == 0).all()
        and (values.int() - expected.int()).abs().max() <= 1
    )
    assert ((values * steps - exact).abs() <= 0.501 * steps).all()


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.02, 1.0, 30.0]))
def test_float8_is_within_half_a_unit_of_its_three_bits(seed: int, size: float) -> None:
    weight = random_weight(seed, size)
    values, scale = round_to_float8_rows(weight)
    assert values.dtype == torch.float8_e4m3fn
    error = (values.float() * scale - weight).abs()
    # Half a unit of three bits, or of the smallest subnormal number, 2 ** -9.
    assert (error <= weight.abs() * 2**-4 * 1.001 + scale * 2**-10).all()
    assert values.float().abs().amax(1)[1:] == pytest.approx(448.0)
