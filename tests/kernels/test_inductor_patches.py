"""What Inductor is told in place of its own answers is what it would have found."""

from __future__ import annotations

import subprocess
import sys

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor import sizevars
from torch._inductor.codegen import cpp
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from kernels_triton_free.cpu_code.patches import patch_inductor

LOOPS = [sympy.Symbol(f"x{number}", integer=True, nonnegative=True) for number in range(3)]
SIZE = sympy.Symbol("ks0", integer=True, positive=True)

factors = st.sampled_from(
    [*LOOPS, SIZE, sympy.Integer(1), FloorDiv(LOOPS[0], 16), ModularIndexing(LOOPS[0], 1, 8)]
)
terms = st.tuples(st.integers(0, 4096), factors, factors).map(lambda term: term[0] * term[1] * term[2])
indices = st.lists(terms, min_size=1, max_size=4).map(sum).map(sympy.sympify)


@pytest.fixture(scope="module", autouse=True)
def patched() -> None:
    patch_inductor()


@pytest.mark.skipif(not hasattr(sizevars, "stride_at_vec_range"), reason="PyTorch 2.11 has no such function")
@settings(max_examples=60)
@given(index=indices, loop=st.sampled_from(LOOPS), lanes=st.sampled_from([None, 8, 16]))
def test_strides_are_those_that_inductor_finds(
    index: sympy.Expr, loop: sympy.Symbol, lanes: int | None
) -> None:
    stride = cpp.stride_at_vec_range(index, loop, lanes)
    expected = sizevars.stride_at_vec_range(index, loop, lanes)
    assert sympy.simplify(stride - expected) == 0
    assert stride.is_number == expected.is_number and stride.free_symbols == expected.free_symbols


def test_every_change_fits_this_version_of_pytorch() -> None:
    """In a process of its own: a second time they would find what the first has made. Misfits are logged."""
    code = "from minivllm.compilation.compiler import prepare_inductor; prepare_inductor()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "cannot be changed" not in done.stderr
