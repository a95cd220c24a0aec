"""Gated delta rule and Mamba2 over packed rows of several requests,
against token-by-token recursions in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_triton_free.state.gated_delta import gated_delta
from kernels_triton_free.state.mamba2 import mamba2
from kernels_triton_free.state.tiles import TILE, ScanPlan, plan_scan

HEADS, SHARED, KEY, VALUE = 4, 2, 8, 6
Inputs = tuple[Tensor, ...]
Kernel = Callable[..., Tensor]


def delta_inputs(tokens: int, generator: torch.Generator, shared: int = SHARED) -> Inputs:
    """q, k, v, log decay, rate; some tokens forget nearly everything."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    log_decay = -F.softplus(3 * draw(HEADS) - 2)
    return (
        F.normalize(draw(shared, KEY), dim=-1),
        F.normalize(draw(shared, KEY), dim=-1),
        draw(HEADS, VALUE),
        log_decay,
        draw(HEADS).sigmoid(),
    )


def mamba_inputs(tokens: int, generator: torch.Generator, shared: int = SHARED) -> Inputs:
    """x, step size, log decay, b, c."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator)

    step_size = F.softplus(2 * draw(HEADS) - 2)
    return (
        draw(HEADS, VALUE),
        step_size,
        step_size * -torch.rand(HEADS) * 4,
        draw(shared, KEY),
        draw(shared, KEY),
    )


def delta_by_token(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """One request, float64: each token forgets, corrects and reads."""
    state, out = state.double(), []
    for q, k, v, log_decay, rate in zip(*(x.double() for x in inputs)):
        q, k = (x.repeat_interleave(len(v) // len(x), dim=0) for x in (q, k))
        state = state * log_decay.exp()[:, None, None]
        answer = torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, rate[:, None] * (v - answer))
        out.append(torch.einsum("hkv,hk->hv", state, q))
    return torch.stack(out), state


def mamba_by_token(inputs: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    state, out = state.double(), []
    for x, step_size, log_decay, b, c in zip(*(x.double() for x in inputs)):
        b, c = (y.repeat_interleave(len(x) // len(y), dim=0) for y in (b, c))
        state = state * log_decay.exp()[:, None, None] + torch.einsum("hs,hd->hsd", b, step_size[:, None] * x)
        out.append(torch.einsum("hsd,hs->hd", state, c))
    return torch.stack(out), state


KERNELS: dict[str, tuple[Kernel, Callable[..., Inputs], Callable[..., Any]]] = {
    "gated delta": (gated_delta, delta_inputs, delta_by_token),
    "mamba2": (mamba2, mamba_inputs, mamba_by_token),
}
kernels = pytest.mark.parametrize("name", KERNELS)
LENGTHS = st.sampled_from([0, 1, 1, 2, 3, 63, 64, 65, 127, 128, 129, 200])


def assert_near(value: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Within a part of the largest number, as sums of numbers of all sizes are."""
    largest = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(value.double(), expected.double(), rtol=0.0, atol=tolerance * largest)


def plan_of(*counts: int) -> ScanPlan | None:
    return plan_scan(torch.tensor(counts, dtype=torch.int64))


@kernels
@given(st.lists(LENGTHS, min_size=1, max_size=6).filter(any), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=25)
def test_rows_of_any_lengths_equal_a_recursion_token_by_token(
    name: str, lengths: list[int], in_place: bool, seed: int
) -> None:
    """Non-zero states in scattered slots, written where they were or elsewhere;
    other slots are not touched."""
    kernel, make, by_token = KERNELS[name]
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    inputs = make(tokens, generator, shared=(1, 2, 4)[seed % 3])
    states = torch.randn(13, HEADS, KEY, VALUE, generator=generator)
    slots = torch.randperm(13, generator=generator, dtype=torch.int32)
    read = slots[: len(lengths)]
    write = read if in_place else slots[6 : 6 + len(lengths)]
    after = states.clone()
    out = kernel(*inputs, after, read, write, plan_of(*lengths))
    assert out.shape == (tokens, HEADS, VALUE)
    expected_states, start = states.double(), 0
    for before, behind, length in zip(read.tolist(), write.tolist(), lengths):
        expected_states[behind] = states[before]
        if length:
            own = slice(start, start + length)
            expected, expected_states[behind] = by_token(tuple(x[own] for x in inputs), states[before])
            assert_near(out[own], expected)
        start += length
    assert_near(after, expected_states)
    untouched = [slot for slot in range(13) if slot not in write.tolist()]
    assert torch.equal(after[untouched], states[untouched])


@kernels
@given(st.lists(st.integers(1, 150), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=20)
def test_a_sequence_cut_into_any_steps_is_the_whole(name: str, cuts: list[int], seed: int) -> None:
    """Another request, of another length, is always beside it."""
    kernel, make, _ = KERNELS[name]
    generator = torch.Generator().manual_seed(seed)
    length = sum(cuts)
    inputs = make(length, generator)
    first = torch.randn(2, HEADS, KEY, VALUE, generator=generator)
    whole_states, own = first.clone(), torch.tensor([1])
    whole = kernel(*inputs, whole_states, own, own, plan_of(length))
    states, parts, position = first.clone(), [], 0
    for cut in cuts:
        beside = cut // 2 + 1
        step = tuple(
            torch.cat([y, x[position : position + cut]]) for x, y in zip(inputs, make(beside, generator))
        )
        parts.append(kernel(*step, states, torch.arange(2), torch.arange(2), plan_of(beside, cut))[beside:])
        position += cut
    assert_near(torch.cat(parts), whole)
    assert_near(states[1], whole_states[1])


@kernels
def test_a_row_with_a_bad_number_leaves_the_others_alone(name: str) -> None:
    kernel, make, by_token = KERNELS[name]
    inputs = make(140, torch.Generator().manual_seed(3))
    for x in inputs:
        x[:70] = torch.nan
    states, slots = torch.zeros(2, HEADS, KEY, VALUE), torch.arange(2)
    out = kernel(*inputs, states, slots, slots, plan_of(70, 70))
    expected, state = by_token(tuple(x[70:] for x in inputs), torch.zeros(HEADS, KEY, VALUE))
    assert_near(out[70:], expected)
    assert_near(states[1], state)
    assert out[:70].isnan().all()


@kernels
def test_strong_decay_neither_overflows_nor_divides_by_zero(name: str) -> None:
    """A tile over which a state fades to 1e-1000: only ratios of decays up to 1 are ever made."""
    kernel, make, by_token = KERNELS[name]
    inputs = list(make(130, torch.Generator().manual_seed(4)))
    decay = 3 if kernel is gated_delta else 2
    inputs[decay] = torch.full_like(inputs[decay], -40.0)
    states, slots = torch.ones(1, HEADS, KEY, VALUE), torch.tensor([0])
    expected, _ = by_token(tuple(inputs), states[0])
    assert_near(kernel(*inputs, states, slots, slots, plan_of(130)), expected)


@given(st.lists(st.integers(0, 200), max_size=8))
def test_every_token_has_one_place_and_levels_begin_with_the_longest(lengths: list[int]) -> None:
    plan = plan_of(*lengths)
    if plan is None:
        assert set(lengths) <= {1}
        return
    assert plan.single_rows.tolist() == [row for row, length in enumerate(lengths) if length == 1]
    tokens = plan.single_tokens.tolist()
    if plan.tiles is not None:
        rows, in_tiles, is_token, levels = plan.tiles
        tokens += in_tiles[is_token].tolist()
        assert in_tiles.shape == is_token.shape == (sum(levels), TILE)
        tiles_of = [-(-lengths[row] // TILE) for row in rows.tolist()]
        assert levels == tuple(sum(tiles > level for tiles in tiles_of) for level in range(tiles_of[0]))
        assert tiles_of == sorted(tiles_of, reverse=True)
    assert sorted(tokens) == list(range(sum(lengths)))
    assert len(set(plan.places.tolist())) == sum(lengths)


@pytest.mark.slow
@kernels
def test_dynamo_traces_the_whole_function(name: str) -> None:
    """No graph break, with single tokens and with tiles."""
    kernel, make, _ = KERNELS[name]
    lengths = (1, 70, 1, 5)
    inputs = make(sum(lengths), torch.Generator().manual_seed(5))
    states, slots = torch.randn(5, HEADS, KEY, VALUE), torch.arange(4, dtype=torch.int32)
    traced_states, plan = states.clone(), plan_of(*lengths)
    traced = torch.compile(kernel, backend="aot_eager", fullgraph=True)(
        *inputs, traced_states, slots, slots, plan
    )
    assert_near(traced, kernel(*inputs, states, slots, slots, plan), 1e-6)
    assert_near(traced_states, states, 1e-6)
