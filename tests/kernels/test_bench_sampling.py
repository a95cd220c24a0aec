"""Time of the sampling kernels on one step of 16 rows over a vocabulary of 49,152 (run with
--benchmark-only)."""

from functools import partial

import pytest
import torch

from kernels_triton_free.sampling.draw import (
    apply_penalties,
    draw,
    draw_among_likeliest,
    draw_from_candidates,
    draw_from_vocabulary,
    scale_by_temperature,
    token_logprobs,
    top_candidates,
)
from kernels_triton_free.sampling.noise import gumbel_noise

ROWS, VOCAB_SIZE = 16, 49_152


@pytest.fixture
def logits():
    return torch.randn(ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3


@pytest.fixture
def seeds():
    return torch.arange(ROWS)


def test_bench_gumbel_noise(benchmark, seeds):
    benchmark(gumbel_noise, seeds, seeds, VOCAB_SIZE)


def test_bench_draw_from_vocabulary(benchmark, logits, seeds):
    scaled = scale_by_temperature(logits, torch.ones(ROWS))
    benchmark(draw_from_vocabulary, scaled, torch.full((ROWS,), -torch.inf), seeds, seeds)


def test_bench_compiled_draw(benchmark, logits, seeds):
    compiled = torch.compile(draw, fullgraph=True, dynamic=False)
    benchmark(compiled, logits.bfloat16(), torch.ones(ROWS), torch.zeros(ROWS), seeds, seeds)


def test_bench_compiled_draw_among_likeliest(benchmark, logits, seeds):
    among = partial(draw_among_likeliest, num_candidates=256)
    compiled = torch.compile(among, fullgraph=True, dynamic=False)
    top_k, top_p = torch.full((ROWS,), 50), torch.full((ROWS,), 0.9)
    benchmark(compiled, logits.bfloat16(), torch.ones(ROWS), torch.zeros(ROWS), seeds, seeds, top_k, top_p)


@pytest.mark.parametrize("num_candidates", [256, 4096, VOCAB_SIZE])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_bench_draw_from_candidates(benchmark, logits, seeds, num_candidates, top_p):
    scaled = scale_by_temperature(logits, torch.ones(ROWS))
    top_k, min_p = torch.full((ROWS,), 50), torch.zeros(ROWS)
    mass = None if top_p is None else torch.full((ROWS,), top_p)

    def draw():
        return draw_from_candidates(
            scaled, *top_candidates(scaled, num_candidates), top_k, mass, min_p, seeds, seeds
        )

    benchmark(draw)


def test_bench_penalties(benchmark, logits):
    """Of 2,000 tokens that each row has."""
    rows, tokens = torch.arange(ROWS).repeat_interleave(2000), torch.randint(VOCAB_SIZE, (ROWS * 2000,))
    one = torch.ones(len(rows))

    def penalise():
        logits[rows, tokens] = apply_penalties(logits[rows, tokens], one.int(), one, one, one)

    benchmark(penalise)


def test_bench_token_logprobs(benchmark, logits, seeds):
    benchmark(token_logprobs, logits, seeds, 5)
