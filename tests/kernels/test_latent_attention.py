"""Absorbed attention over a latent cache against uncompressed keys and values, query by query in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from kernels_triton_free.latent_attention import latent_attention

LATENT, ROTATED, NOPE, VALUE = 12, 4, 6, 5
"""Sizes of the latent, of the rotated part of keys, of their other part, and of the values of a head."""


@dataclass(frozen=True)
class Shape:
    """spans: of each tile, position of its first query and their number.
    queries: of a tile, padding included."""

    spans: tuple[tuple[int, int], ...]
    queries: int = 4
    heads: int = 3
    block_size: int = 4
    blocks_at_once: int = 2
    seed: int = 0


def check(shape: Shape, dtype: torch.dtype = torch.float64, tolerance: float = 1e-12) -> None:
    generator = torch.Generator().manual_seed(shape.seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    tiles, size = len(shape.spans), shape.block_size
    to_key, to_value = random(shape.heads, NOPE, LATENT) / 3, random(shape.heads, VALUE, LATENT) / 3
    q_nope, q_rotated = (
        random(tiles, shape.queries, shape.heads, NOPE),
        random(tiles, shape.queries, shape.heads, ROTATED),
    )
    width = max(-(-(start + count) // size) for start, count in shape.spans)
    num_blocks = 1 + tiles * width
    # Behind the end of a context there are large numbers, and blocks that no tile owns hold NaN.
    cache = torch.full((num_blocks, size, 1, LATENT + ROTATED), torch.nan, dtype=torch.float64)
    cache[0] = 1e3
    free = (1 + torch.randperm(num_blocks - 1, generator=generator)).tolist()
    table = torch.zeros(tiles, width, dtype=torch.int32)
    q_position = torch.full((tiles, shape.queries), -1, dtype=torch.int32)
    expected = torch.zeros(tiles, shape.queries, shape.heads, VALUE, dtype=torch.float64)
    scale = 0.4
    for tile, (start, count) in enumerate(shape.spans):
        vectors = random(start + count, LATENT + ROTATED).to(dtype).double()
        for index in range(-(-(start + count) // size)):
            block, own = free.pop(), vectors[index * size : (index + 1) * size]
            table[tile, index] = block
            cache[block] = 1e3
            cache[block, : len(own), 0] = own
        q_position[tile, :count] = torch.arange(start, start + count)
        for query in range(count):
            for head in range(shape.heads):
                seen = vectors[: start + query + 1]
                latent, rotated = seen.split([LATENT, ROTATED], dim=1)
                keys, values = latent @ to_key[head].T, latent @ to_value[head].T
                scores = keys @ q_nope[tile, query, head] + rotated @ q_rotated[tile, query, head]
                expected[tile, query, head] = (scores * scale).softmax(0) @ values
    absorbed = torch.einsum("tqhn,hnl->tqhl", q_nope, to_key)
    o = latent_attention(
        torch.cat([absorbed, q_rotated], dim=-1).to(dtype),
        cache.to(dtype),
        table,
        q_position,
        value_dim=LATENT,
        scale=scale,
        blocks_at_once=shape.blocks_at_once,
    )
    assert o.shape == (tiles, shape.queries, shape.heads, LATENT) and o.dtype == dtype
    out = torch.einsum("tqhl,hvl->tqhv", o.double(), to_value)
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    assert not o[q_position < 0].any(), "padding is zero"


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    queries, block_size, at_once = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from([1, 4, 8])),
        draw(st.integers(1, 4)),
    )
    piece = block_size * at_once
    # Contexts that end with a block or a piece, one token before and one behind.
    borders = [max(0, end + change) for end in (block_size, piece, 2 * piece) for change in (-1, 0, 1)]
    start = st.one_of(st.integers(0, 40), st.sampled_from(borders))
    spans = draw(st.lists(st.tuples(start, st.integers(0, queries)), min_size=1, max_size=4))
    if not any(sum(span) for span in spans):
        spans.append((0, 1))
    return Shape(
        tuple(spans), queries, draw(st.integers(1, 4)), block_size, at_once, draw(st.integers(0, 999))
    )


@settings(max_examples=100, deadline=None)
@given(shape=shapes())
def test_absorbed_attention_equals_uncompressed_attention(shape: Shape) -> None:
    check(shape)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-2)])
def test_sums_are_as_exact_as_float32_and_products_as_the_queries(
    dtype: torch.dtype, tolerance: float
) -> None:
    check(Shape(((37, 1), (200, 3), (0, 4)), blocks_at_once=5), dtype, tolerance)


def test_large_scores_do_not_overflow() -> None:
    """Scores beyond what exp holds, growing from piece to piece and falling again."""
    cache = (
        torch.tensor([0.0, 50.0, 5000.0, 9000.0, 100.0, -9000.0])
        .view(6, 1, 1, 1)
        .expand(6, 1, 1, 2)
        .contiguous()
    )
    q, position = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2), torch.tensor([[4]])
    o = latent_attention(
        q, cache, torch.tensor([[1, 2, 3, 4, 5]]), position, value_dim=1, scale=1.0, blocks_at_once=1
    )
    assert o.item() == 9000.0


def test_it_is_traced_as_one_graph_that_asks_the_device_nothing() -> None:
    """As a compiler for a GPU wants it: shapes follow from shapes, and no value is looked at."""
    q, cache = torch.randn(2, 3, 4, 16), torch.randn(9, 4, 1, 16)
    table, position = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[8, 9, 10], [2, -1, -1]])

    def attend(*tensors: Tensor) -> Tensor:
        return latent_attention(*tensors, value_dim=12, scale=0.3, blocks_at_once=2)

    traced = torch.compile(attend, backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(q, cache, table, position), attend(q, cache, table, position))
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in (q, cache, table, position)]
        assert attend(*fake).shape == (2, 3, 4, 12)


def test_memory_does_not_grow_with_the_context() -> None:
    """Whatever is gathered at a time has as many blocks as were asked for."""
    sizes = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not function.is_view:
                sizes.append(result.numel())
            return result

    cache, table = torch.zeros(300, 4, 1, 16), torch.arange(1, 299, dtype=torch.int32)[None]
    with Watched():
        latent_attention(
            torch.zeros(1, 1, 2, 16), cache, table, torch.tensor([[1191]]), value_dim=12, scale=1.0
        )
    assert max(sizes) == 16 * 4 * 16
