"""Products over codes in words: by themselves and compiled, against the weight that the codes stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from kernels_triton_free.cpu_code.loops.word_loops import generate_word_loops
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.packed.code_words import (
    LANES,
    MANY_ROWS,
    ROWS_TOGETHER,
    code_words_linear,
    codes_in,
    floats_in,
    floats_in_words,
    put_in_words,
    rows_of_words,
)
from kernels_triton_free.packed.rows import MAX_ROWS
from minivllm.compilation.compiler import cannot_compile_reason

needs_compiler = pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler"
)


def new_weight(
    shape: tuple[int, int], group_size: int, bits: int, seed: int = 0, scales: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs], scale_and_zero, and what both stand for, in float64."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    both = torch.randn(shape[1] // group_size, shape[0], 2, generator=generator).to(scales)
    scale, zero = (part.T.repeat_interleave(group_size, 1).double() for part in both.unbind(2))
    return codes, both, (codes.double() - 2 ** (bits - 1)) * scale + zero


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, allowed: float) -> None:
    """allowed: part of the sum of all terms' magnitudes, for each output by itself."""
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    assert out.shape == expected.shape and out.dtype == x.dtype
    assert (
        (out.double() - expected).abs()
        <= allowed * terms + 2**-8 * expected.abs() * (x.dtype != torch.float32)
    ).all()


WEIGHTS = {
    "seed": st.integers(0, 2**31),
    "bits": st.sampled_from([4, 8]),
    "blocks": st.integers(1, 3),
    "groups": st.integers(1, 3),
    "group_size": st.sampled_from([32, 64, 128]),
    "scales": st.sampled_from([torch.bfloat16, torch.float32]),
}


@given(**WEIGHTS)
def test_words_hold_codes_and_scales(
    seed: int, bits: int, blocks: int, groups: int, group_size: int, scales: torch.dtype
) -> None:
    codes, both, weight = new_weight((LANES * blocks, groups * group_size), group_size, bits, seed, scales)
    words = put_in_words(codes, both, bits)
    found, found_scales = codes_in(words, bits)
    assert torch.equal(found, codes) and torch.equal(found_scales, both)
    assert words.nbytes == codes.numel() * bits // 8 + both.nbytes
    indices = torch.randint(0, len(codes), (5,), generator=torch.Generator().manual_seed(seed))
    rows = rows_of_words(words, indices, bits)
    assert rows.dtype == torch.float32
    assert (rows.double() - weight[indices]).abs().max() <= 1e-6 * weight.abs().max()


@given(
    **WEIGHTS,
    rows=st.sampled_from([1, MAX_ROWS, MAX_ROWS + 1, MANY_ROWS, MANY_ROWS + 1]),
    has_bias=st.booleans(),
)
def test_uncompiled_it_is_the_product(
    seed: int,
    bits: int,
    blocks: int,
    groups: int,
    group_size: int,
    scales: torch.dtype,
    rows: int,
    has_bias: bool,
) -> None:
    codes, both, weight = new_weight((LANES * blocks, groups * group_size), group_size, bits, seed, scales)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, weight.shape[1], generator=generator)
    bias = torch.randn(len(weight), generator=generator) if has_bias else None
    check(code_words_linear(x, put_in_words(codes, both, bits), bits, bias), x, weight, bias, 1e-6)


@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    blocks=st.integers(1, 3),
    pairs=st.integers(1, 20),
    rows=st.integers(1, 3),
)
def test_words_hold_floats(seed: int, dtype: torch.dtype, blocks: int, pairs: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(LANES * blocks, 2 * pairs, generator=generator).to(dtype)
    words, bits = floats_in_words(weight), 8 * dtype.itemsize
    assert words.nbytes == weight.nbytes and torch.equal(floats_in(words, bits), weight.float())
    indices = torch.randint(0, len(weight), (5,), generator=generator)
    assert torch.equal(rows_of_words(words, indices, bits), weight[indices].float())
    x = torch.randn(rows, 2 * pairs, generator=generator)
    check(code_words_linear(x, words, bits), x, weight.double(), None, 1e-6)


@needs_compiler
@pytest.mark.parametrize("scales", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("bits", "group_size", "rows", "dtype"),
    [
        (4, 32, 1, torch.float32),
        (4, 64, 3, torch.bfloat16),
        (8, 32, 1, torch.bfloat16),
        (8, 96, 2, torch.float32),
        pytest.param(4, 32, 1, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(4, 64, 3, torch.float32, marks=pytest.mark.slow),
        pytest.param(8, 32, 1, torch.float32, marks=pytest.mark.slow),
        pytest.param(8, 96, 2, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_compiled_code_multiplies_the_bits_of_floats(
    bits: int, group_size: int, rows: int, dtype: torch.dtype, scales: torch.dtype
) -> None:
    """With inputs of one sign what is added to the codes is most of each sum,
    and nothing of it must remain."""
    patch_inductor()
    generate_word_loops()
    torch._dynamo.reset()
    codes, both, weight = new_weight((3 * LANES, 2 * group_size), group_size, bits, scales=scales)
    words, bias = put_in_words(codes, both, bits), torch.randn(len(weight)).to(dtype)

    def doubled(x: Tensor, words: Tensor, bias: Tensor) -> Tensor:
        return code_words_linear(x * 2, words, bits, bias)

    compiled = torch.compile(doubled, dynamic=False)
    for shift in (0.0, 5.0, -5.0):
        x = (torch.randn(rows, weight.shape[1]) + shift).to(dtype)
        check(compiled(x, words, bias), 2 * x, weight, bias, 3e-5 if scales == torch.bfloat16 else 1e-6)


@needs_compiler
@pytest.mark.parametrize(
    ("bits", "scales", "inputs"),
    [
        (4, torch.bfloat16, 64),
        pytest.param(16, None, 64, marks=pytest.mark.slow),
        pytest.param(8, torch.float32, 64, marks=pytest.mark.slow),
        pytest.param(32, None, 51, marks=pytest.mark.slow),
        pytest.param(4, torch.float32, 64, marks=pytest.mark.slow),
        pytest.param(8, torch.bfloat16, 64, marks=pytest.mark.slow),
        pytest.param(16, None, 54, marks=pytest.mark.slow),
        pytest.param(32, None, 64, marks=pytest.mark.slow),
    ],
)
def test_compiled_code_takes_any_number_of_rows(
    bits: int, scales: torch.dtype | None, inputs: int, tmp_path: Path
) -> None:
    """Exported with a dynamic number, as regions are:
    the same code goes through words, and restores for many."""
    patch_inductor()
    generate_word_loops()
    if scales is None:
        values = torch.randn(3 * LANES, inputs).to(torch.bfloat16 if bits == 16 else torch.float32)
        words, weight = floats_in_words(values), values.double()
    else:
        codes, both, weight = new_weight((3 * LANES, inputs), 32, bits, scales=scales)
        words = put_in_words(codes, both, bits)
    x = torch.randn(13, inputs)

    class Doubled(torch.nn.Module):
        def forward(self, x: Tensor, words: Tensor) -> Tensor:
            return code_words_linear(x * 2, words, bits)

    sizes = ({0: torch.export.Dim("rows", min=2, max=1024)}, None)
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(Doubled(), (x, words), dynamic_shapes=sizes),
        package_path=str(tmp_path / "doubled.pt2"),
        inductor_configs={"aot_inductor.precompile_headers": False},  # which would take longer than it saves
    )
    compiled = torch._inductor.aoti_load_package(package)
    for rows in (2, ROWS_TOGETHER, ROWS_TOGETHER + 1, MANY_ROWS, MANY_ROWS + 1, 200):
        x = torch.randn(rows, inputs) + 3
        check(compiled(x, words), 2 * x, weight, None, 3e-6)


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "rows"),
    [
        (torch.bfloat16, 1),
        (torch.float32, 3),
        pytest.param(torch.bfloat16, 3, marks=pytest.mark.slow),
        pytest.param(torch.float32, 1, marks=pytest.mark.slow),
    ],
)
def test_compiled_code_for_a_few_rows_multiplies_floats(dtype: torch.dtype, rows: int) -> None:
    patch_inductor()
    generate_word_loops()
    torch._dynamo.reset()
    weight, bias = torch.randn(3 * LANES, 54).to(dtype), torch.randn(3 * LANES).to(dtype)
    x = torch.randn(rows, 54).to(dtype)
    compiled = torch.compile(code_words_linear, dynamic=False)
    check(compiled(x, floats_in_words(weight), 8 * dtype.itemsize, bias), x, weight.double(), bias, 1e-6)


@needs_compiler
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="nothing is fetched with AMX")
@torch._inductor.config.patch(force_disable_caches=True)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_cache_line_of_words_is_asked_for_ahead(bits: int) -> None:
    patch_inductor()
    generate_word_loops()
    torch._dynamo.reset()
    codes, both, _ = new_weight((3 * LANES, 320), 32, bits, scales=torch.float32)
    words = put_in_words(codes, both, bits)

    def product(x: Tensor, words: Tensor) -> Tensor:
        return code_words_linear(x, words, bits)

    _, code = run_and_get_code(torch.compile(product, dynamic=False), torch.randn(1, 320), words)
    of_group = words[0, 0].nbytes
    assert "".join(code).count("__builtin_prefetch") == of_group // 64


@needs_compiler
def test_compiled_code_sums_up_rows_that_it_looks_up() -> None:
    """Inductor copies such words to the stack first, where nothing is to be fetched ahead."""
    patch_inductor()
    torch._dynamo.reset()
    codes, both, weight = new_weight((3 * LANES, 320), 32, 4, scales=torch.float32)

    def squares(words: Tensor, indices: Tensor) -> Tensor:
        return rows_of_words(words, indices, 4).square().sum(1)

    indices = torch.tensor([0, 5, len(codes) - 1, 5])
    found = torch.compile(squares, dynamic=False)(put_in_words(codes, both, 4), indices)
    torch.testing.assert_close(found.double(), weight[indices].square().sum(1), rtol=1e-5, atol=1e-5)
