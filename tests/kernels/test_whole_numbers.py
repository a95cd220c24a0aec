"""Products of whole numbers: by themselves and compiled,
against the sums of the numbers and of what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton_free.cpu_code.loops.whole_number_loops import ROWS_TOGETHER, generate_whole_number_loops
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.packed.whole_numbers import (
    DTYPES,
    LARGEST_NUMBER,
    LARGEST_SUM,
    MOST_INPUTS,
    WholeNumbers,
    can_multiply_whole_numbers,
    parts_of,
    whole_numbers_linear,
)
from minivllm.compilation.compiler import cannot_compile_reason
from minivllm.device.policy import DevicePolicy

needs_compiler = pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler"
)


def new_weight(outputs: int, inputs: int, seed: int = 0, bits: int = 8) -> tuple[WholeNumbers, Tensor]:
    """A weight, and what it stands for, float64 [outputs, inputs]."""
    generator = torch.Generator().manual_seed(seed)
    largest, parts = 2 ** (bits - 1), parts_of(inputs)
    values = torch.randint(-largest, largest, (outputs, inputs), generator=generator, dtype=DTYPES[bits])
    scale = torch.rand(len(parts), outputs, generator=generator) + 0.1
    weight = [values[:, own].double() * scale[part].double().unsqueeze(1) for part, own in enumerate(parts)]
    return WholeNumbers(values, scale), torch.cat(weight, 1)


def kept_bits(inputs: int, bits: int) -> int:
    """Of the magnitudes of inputs, with a sign."""
    size = max(len(range(inputs)[own]) for own in parts_of(inputs))
    return min(LARGEST_NUMBER, LARGEST_SUM // (2 ** (bits - 1) * size)).bit_length()


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> None:
    """Inputs are rounded to so many bits, with a sign, each token by its largest."""
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    half_a_step = x.double().abs().amax(1, keepdim=True) / 2**bits
    allowed = half_a_step * weight.abs().sum(1) + 1e-6 * (x.double().abs() @ weight.abs().T)
    allowed = allowed + 2**-8 * expected.abs() * (x.dtype != torch.float32)
    assert out.shape == expected.shape and out.dtype == x.dtype
    assert ((out.double() - expected).abs() <= allowed).all()


@given(
    seed=st.integers(0, 2**31),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 70) | st.sampled_from([MOST_INPUTS, MOST_INPUTS + 1, 2 * MOST_INPUTS + 5]),
    rows=st.integers(1, 10),
    has_bias=st.booleans(),
    bits=st.sampled_from(sorted(DTYPES)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_inputs_keep_as_many_bits_as_sums_have_room_for(
    seed: int, outputs: int, inputs: int, rows: int, has_bias: bool, bits: int, dtype: torch.dtype
) -> None:
    whole, weight = new_weight(outputs, inputs, seed, bits)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    check(whole_numbers_linear(x, whole, bias), x, weight, bias, kept_bits(inputs, bits))


def test_a_token_of_zeros_is_zero() -> None:
    whole, _ = new_weight(5, 8)
    assert torch.equal(whole_numbers_linear(torch.zeros(3, 8), whole), torch.zeros(3, 5))


@given(st.integers(1, 100_000))
def test_parts_are_about_equal_and_as_few_as_their_size_allows(in_features: int) -> None:
    parts = [range(in_features)[own] for own in parts_of(in_features)]
    assert [place for part in parts for place in part] == list(range(in_features))
    assert max(map(len, parts)) <= MOST_INPUTS and len(parts) == -(-in_features // MOST_INPUTS)


def package(
    inputs: int, path: Path, whole: WholeNumbers, bias: Tensor
) -> torch._inductor.package.package.AOTICompiledModel:
    """The product of twice a dynamic number of rows, compiled as regions are."""
    patch_inductor()
    generate_whole_number_loops()

    class Doubled(torch.nn.Module):
        def forward(self, x: Tensor, values: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            return whole_numbers_linear(x * 2, WholeNumbers(values, scale), bias)

    sizes = ({0: torch.export.Dim("rows", min=2, max=1024)}, None, None, None)
    exported = torch.export.export(Doubled(), (torch.randn(13, inputs), *whole, bias), dynamic_shapes=sizes)
    torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
    compiled: Callable[..., Tensor] = torch._inductor.aoti_load_package(path)
    return compiled


@needs_compiler
@pytest.mark.parametrize(
    ("outputs", "inputs", "bits"),
    [
        (20, MOST_INPUTS + 33, 8),
        pytest.param(48, 64, 8, marks=pytest.mark.slow),
        pytest.param(48, 65, 10, marks=pytest.mark.slow),
        pytest.param(7, 100, 8, marks=pytest.mark.slow),
    ],
)
def test_compiled_code_takes_any_number_of_rows(outputs: int, inputs: int, bits: int, tmp_path: Path) -> None:
    whole, weight = new_weight(outputs, inputs, bits=bits)
    bias = torch.randn(outputs)
    compiled = package(inputs, tmp_path / "doubled.pt2", whole, bias)
    for rows in (2, 3, ROWS_TOGETHER, ROWS_TOGETHER + 1, 200):
        x = torch.randn(rows, inputs) + 3
        check(compiled(x, *whole, bias), 2 * x, weight, bias, kept_bits(inputs, bits))


@needs_compiler
@pytest.mark.parametrize("bits", [8, pytest.param(10, marks=pytest.mark.slow)])
def test_sums_of_the_largest_numbers_do_not_overflow(bits: int, tmp_path: Path) -> None:
    """All inputs as large as the largest, all weights the lowest: a sum is next to what 32 bits hold."""
    lowest = -(2 ** (bits - 1))
    whole = WholeNumbers(torch.full((8, MOST_INPUTS), lowest, dtype=DTYPES[bits]), torch.ones(1, 8))
    compiled = package(MOST_INPUTS, tmp_path / "doubled.pt2", whole, torch.zeros(8))
    for sign in (1, -1):
        out = compiled(torch.full((9, MOST_INPUTS), sign * 0.7), *whole, torch.zeros(8))
        torch.testing.assert_close(out, torch.full_like(out, sign * 1.4 * lowest * MOST_INPUTS))
    assert -LARGEST_SUM // (lowest * MOST_INPUTS) == 2 ** (21 - bits) - 1


def test_the_policy_of_a_cpu_says_whether_it_has_avx2_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ("AVX2", "AVX512", "DEFAULT"):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda own=capability: own)
        assert can_multiply_whole_numbers() == (capability == "AVX2")
        assert DevicePolicy.of(torch.device("cpu")).multiplies_whole_numbers == (capability == "AVX2")
