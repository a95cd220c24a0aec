"""Products over tiles: they hold the weight, and compiled code gives its product."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton_free.activation import gated_product
from kernels_triton_free.cpu_code.patches import patch_inductor
from kernels_triton_free.cpu_code.template import ROWS, generate_tiled_products
from kernels_triton_free.packed.tiles import (
    AMX_OUTPUTS,
    FEWER_OUTPUTS,
    OUTPUTS,
    can_halve,
    can_tile,
    outputs_of_tiles,
    tile,
    tiled_linear,
    tiled_linear_halves,
    weight_in,
    words_in,
)
from minivllm.compilation.compiler import cannot_compile_reason, only_marked_sizes_are_dynamic

needs_compiler = pytest.mark.skipif(
    cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler"
)
needs_tiles = pytest.mark.skipif(not can_tile(64, 64), reason="this CPU multiplies no tiles")
OWN = outputs_of_tiles()
WIDTHS = [OWN] if OWN in (0, AMX_OUTPUTS) else [FEWER_OUTPUTS, OWN]
"""Outputs side by side on this CPU. A number of outputs that both divide goes in the first."""


def as_tiles(weight: Tensor, outputs: int) -> Tensor:
    """weight [out, in] in the order that tiles.py describes."""
    blocks = weight.view(-1, outputs, weight.shape[1] // 2, 2).transpose(1, 2)
    return blocks.reshape(len(weight) // outputs, weight.shape[1], outputs)


def check(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    assert out.dtype == torch.bfloat16
    # The product is rounded before the bias is added.
    torch.testing.assert_close(out.double(), expected, rtol=1.6e-2, atol=2e-2)


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 70),
    outputs=st.sampled_from([AMX_OUTPUTS, FEWER_OUTPUTS, OUTPUTS]),
    blocks=st.integers(1, 4),
    runs=st.integers(1, 5),
    has_bias=st.booleans(),
)
def test_uncompiled_it_is_the_product(
    seed: int, rows: int, outputs: int, blocks: int, runs: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs * blocks, 32 * runs, generator=generator).bfloat16()
    x = torch.randn(rows, 32 * runs, generator=generator).bfloat16()
    bias = torch.randn(outputs * blocks, generator=generator).bfloat16() if has_bias else None
    check(tiled_linear(x, as_tiles(weight, outputs), bias), x, weight, bias)


@needs_tiles
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("blocks", "inputs"), [(1, 32), (5, 96), (16, 160)])
def test_a_weight_lies_in_tiles(width: int, blocks: int, inputs: int) -> None:
    weight = torch.randn(blocks * width, inputs).bfloat16()
    assert can_tile(*weight.shape)
    tiles = tile(weight)
    assert torch.equal(tiles, as_tiles(weight, width)) and torch.equal(weight_in(tiles), weight)
    halves = words_in(tiles).view(torch.bfloat16).view(blocks, inputs // 2, width, 2)
    assert torch.equal(halves[-1, 0, 3], weight[(blocks - 1) * width + 3, :2])
    odd = torch.cat([weight.flatten()[:1], weight.flatten()])[1:].view_as(weight)
    assert (
        odd.storage_offset() == 1
        and torch.equal(tile(odd), tiles)
        and torch.equal(tile(weight.T.contiguous().T), tiles)
    )
    part = tile(weight[:, : inputs - 16])
    assert torch.equal(weight_in(part), F.pad(weight[:, : inputs - 16], (0, 16)))


@pytest.mark.parametrize("shape", [(64, 48), (16, 64), (80, 64)])
def test_what_is_no_whole_tile_has_none(shape: tuple[int, int]) -> None:
    assert not can_tile(*shape)


@needs_tiles
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(OWN * 2, 32), (OWN * 7, 160), (WIDTHS[0] * 7, 160), (1536, 576)])
def test_compiled_code_gives_the_product_of_any_number_of_rows(
    shape: tuple[int, int], has_bias: bool
) -> None:
    """Also where the rows are no whole tile, where outputs are not as many for each thread,
    and inside other code."""
    patch_inductor()
    generate_tiled_products()
    torch._dynamo.reset()
    weight = torch.randn(shape).bfloat16()
    bias = torch.randn(shape[0]).bfloat16() if has_bias else None
    tiles = tile(weight)

    def doubled(x: Tensor, tiles: Tensor, bias: Tensor | None) -> Tensor:
        return tiled_linear(x * 2, tiles, bias) * 2

    compiled, fixed = torch.compile(doubled), torch.compile(doubled, dynamic=False)
    for rows in (47, 1, 2, 15, 16, 17, 32, 33, 65, 96, 97, 193, 400):
        x = torch.randn(rows, shape[1]).bfloat16()
        if rows > 1:
            torch._dynamo.mark_dynamic(x, 0)
        with only_marked_sizes_are_dynamic():
            check(compiled(x, tiles, bias) / 2, x * 2, weight, bias)
    for rows in (1, 4):
        x = torch.randn(rows, shape[1]).bfloat16()
        with only_marked_sizes_are_dynamic():
            check(fixed(x, tiles, bias) / 2, x * 2, weight, bias)


@needs_tiles
@needs_compiler
@pytest.mark.parametrize(
    "activation",
    ["silu", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gelu", "gelu_pytorch_tanh"))],
)
@pytest.mark.parametrize(
    "width",
    [OWN, *(pytest.param(width, marks=pytest.mark.slow) for width in WIDTHS if width != OWN)],
)
def test_halves_are_those_of_the_product_and_what_follows_of_both_is_computed_with_them(
    width: int, activation: str
) -> None:
    """For any number of rows; of sums in float32, which are not rounded between."""
    patch_inductor()
    generate_tiled_products()
    torch._dynamo.reset()
    weight = torch.randn(width * 10, 96).bfloat16()
    tiles = tile(weight)
    assert can_halve(tiles) and not can_halve(tiles[:3])

    def gated(x: Tensor, tiles: Tensor) -> Tensor:
        return gated_product(*tiled_linear_halves(x * 2, tiles), activation)

    compiled, fixed = torch.compile(gated), torch.compile(gated, dynamic=False)
    for function, counts in ((compiled, (47, 2, 16, 33, 400)), (fixed, (1, 4))):
        for rows in counts:
            x = torch.randn(rows, 96).bfloat16()
            if function is compiled:
                torch._dynamo.mark_dynamic(x, 0)
            with only_marked_sizes_are_dynamic():
                got = function(x, tiles)
            exact = F.linear(x.double() * 2, weight.double())
            expected = gated_product(*exact.chunk(2, dim=-1), activation)
            torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-3)
            check(torch.cat(tiled_linear_halves(x * 2, tiles), dim=-1), x * 2, weight, None)


@needs_compiler
@pytest.mark.skipif(OWN != OUTPUTS, reason="not a CPU on which oneDNN's kernel multiplies a block")
@pytest.mark.parametrize(
    ("threads", "varies"),
    [
        (1, True),
        (2, False),
        pytest.param(1, False, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_up_to_a_block_of_rows_inputs_are_cut_only_for_the_second_cache(threads: int, varies: bool) -> None:
    """Whether Inductor's code still has what is changed of it,
    and the product of as many inputs as must be cut."""
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check_cuts(varies)
    finally:
        torch.set_num_threads(used)


def check_cuts(varies: bool) -> None:
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    patch_inductor()
    generate_tiled_products()
    torch._dynamo.reset()
    inputs = torch.cpu.get_capabilities()["l2_cache_size"] // (2 * 2 * OUTPUTS) + 96
    weight = torch.randn(OUTPUTS * 2, inputs).bfloat16()
    tiles = tile(weight)
    compiled = torch.compile(lambda x, tiles: tiled_linear(x, tiles), dynamic=None if varies else False)
    of_any_number = "Kc_blocks = std::max(Kc_blocks, std::min<int64_t>("
    generated = []  # once, if the number of rows varies
    for rows in (ROWS + 1, ROWS, 7) if varies else (7,):
        x = torch.randn(rows, inputs).bfloat16()
        if varies:
            torch._dynamo.mark_dynamic(x, 0)
        with only_marked_sizes_are_dynamic(), config.patch("force_disable_caches", True):
            out, codes = run_and_get_code(compiled, x, tiles)
        check(out, x, weight, None)
        generated += codes
    assert generated
    for code in generated:
        assert (of_any_number if varies else f"Kc_blocks = {inputs // 32 - 3};") in code
