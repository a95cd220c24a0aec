"""Noise, penalties, truncation, draws and log-probabilities, judged by plain Python,
float64 and transformers."""

import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels_triton_free.compiler.quick_log import quick_log, quick_log1p_of_minus
from kernels_triton_free.sampling import noise as sampling_noise
from kernels_triton_free.sampling.bisection import sortable, unsorted
from kernels_triton_free.sampling.draw import (
    MAX_RUN,
    MIN_RUN,
    apply_penalties,
    bisected_threshold,
    draw_from_candidates,
    draw_from_vocabulary,
    draw_truncated,
    likeliest,
    scale_by_temperature,
    token_logprobs,
    top_candidates,
    truncation_threshold,
)
from kernels_triton_free.sampling.noise import gumbel_noise, gumbel_noise_at, noise_bits, row_keys
from minivllm.compilation.inductor_options import find_cpp_compiler

WORD = 0xFFFFFFFF
INT64 = st.integers(-(2**63), 2**63 - 1)
EXTREMES = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -(2**32)]


def assert_fits(observed: torch.Tensor, expected: torch.Tensor, sigmas: float = 4.5) -> None:
    """Pearson's chi-square test; the quantile by Wilson and Hilferty's cube-root approximation."""
    observed, expected = observed.double(), expected.double()
    assert float(expected.min()) >= 5.0, "every bin needs enough expected draws"
    statistic = float(((observed - expected) ** 2 / expected).sum())
    freedom = observed.numel() - 1
    limit = freedom * (1 - 2 / (9 * freedom) + sigmas * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (
        f"chi-square {statistic:.1f} exceeds {limit:.1f} at {freedom} degrees of freedom"
    )


def python_noise_bits(seed: int, position: int, token_id: int) -> int:
    """The hash in Python's unbounded integers."""

    def mix(x: int, middle: int = 0, first_shift: int = 16) -> int:
        x ^= x >> first_shift
        x = (x * 0x21F0AAAD) & WORD
        x ^= middle
        x ^= x >> 15
        x = (x * 0x735A2D97) & WORD
        return x ^ (x >> 15)

    keys = []
    for key in (0x6A09E667, 0xBB67AE85):
        for word in (seed & WORD, (seed >> 32) & WORD, position & WORD, (position >> 32) & WORD):
            key = (mix((key + word) & WORD) + 0x9E3779B9) & WORD
        keys.append(key)
    return mix((token_id * 0x9E3779B9 & WORD) ^ keys[0], middle=keys[1])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(INT64 | st.sampled_from(EXTREMES), INT64), min_size=1, max_size=4))
def test_noise_bits_are_the_hash_of_seed_position_and_token(rows):
    token_ids = torch.tensor([0, 1, 2, 1000, 49151, 151935, 2**31 - 1])
    seeds, positions = (torch.tensor(column) for column in zip(*rows))
    bits = noise_bits(seeds, positions, token_ids)
    assert bits.dtype == torch.int32
    expected = [[python_noise_bits(s, p, t) for t in token_ids.tolist()] for s, p in rows]
    assert (bits.long() & WORD).tolist() == expected


@pytest.mark.slow
@pytest.mark.skipif(find_cpp_compiler() is None, reason="no C++ compiler")
def test_compiled_noise_of_a_vocabulary_is_the_hash_and_stays_in_vectors() -> None:
    seeds, positions, vocab_size = torch.tensor([-5, 2**40 + 1]), torch.tensor([3, 0]), 4096

    def whole(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return noise_bits(seeds, positions, torch.arange(vocab_size, dtype=torch.int32))

    bits, [code] = run_and_get_code(torch.compile(whole, dynamic=False), seeds, positions)
    assert torch.equal(bits, noise_bits(seeds, positions, torch.arange(vocab_size)))
    assert "Vectorized<int32_t>::arange" in code
    assert [python_noise_bits(-5, 3, token) for token in range(vocab_size)] == (
        bits[0].long() & WORD
    ).tolist()


def bits_along(axis: str, count: int, seed: int = 11) -> torch.Tensor:
    """noise_bits [count] int64 in [0, 2^32) with one of seed, position and token running from 0."""
    running, fixed = torch.arange(count), torch.tensor([seed])
    if axis == "token":
        return noise_bits(fixed, torch.tensor([7]), running)[0].long() & WORD
    seeds = running if axis == "seed" else fixed.expand(count)
    positions = running if axis == "position" else fixed.expand(count)
    return noise_bits(seeds, positions, torch.tensor([5]))[:, 0].long() & WORD


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_noise_bytes_are_uniform_along_every_axis(axis, shift):
    count = 1 << 16
    histogram = torch.bincount((bits_along(axis, count) >> shift) & 255, minlength=256)
    assert_fits(histogram, torch.full((256,), count / 256))


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("lag", [1, 2, 3, 64, 256, 1024, 4096])
def test_neighbours_along_every_axis_are_independent(axis, lag):
    """Pairs (x[i], x[i + lag]) fill a 32 x 32 table evenly."""
    count = 1 << 17
    level = bits_along(axis, count + lag) >> 26
    pairs = (level[:-lag] >> 1) * 32 + (level[lag:] >> 1)
    assert_fits(torch.bincount(pairs, minlength=1024), torch.full((1024,), count / 1024))


def test_rows_with_close_seeds_and_positions_are_independent():
    vocab_size = 1 << 16
    seeds, positions = torch.tensor([3, 3, 4, 4, 3 + (1 << 32)]), torch.tensor([8, 9, 8, 9, 8])
    noise = gumbel_noise(seeds, positions, vocab_size).double()
    correlation = torch.corrcoef(noise) - torch.eye(5, dtype=torch.float64)
    assert float(correlation.abs().max()) < 4.5 / math.sqrt(vocab_size)


def test_swapping_seed_and_position_gives_other_noise():
    keys = row_keys(torch.tensor([1, 2]), torch.tensor([2, 1]))
    assert all(int(key[0]) != int(key[1]) for key in keys)


def test_every_input_bit_changes_half_of_the_output_bits():
    generator = torch.Generator().manual_seed(0)
    seeds, positions = (torch.randint(-(2**62), 2**62, (512,), generator=generator) for _ in range(2))
    tokens = torch.randint(0, 2**17, (512, 1), generator=generator)

    def share_of_changed_bits(bits: torch.Tensor) -> float:
        changed = (bits ^ noise_bits(seeds, positions, tokens)).long() & WORD
        return sum(int(((changed >> i) & 1).sum()) for i in range(32)) / (32 * 512)

    flips = [noise_bits(seeds ^ (1 << bit), positions, tokens) for bit in range(63)]
    flips += [noise_bits(seeds, positions ^ (1 << bit), tokens) for bit in range(63)]
    flips += [noise_bits(seeds, positions, tokens ^ (1 << bit)) for bit in range(17)]
    for flipped in flips:
        assert share_of_changed_bits(flipped) == pytest.approx(0.5, abs=0.03)


def test_gumbel_noise_has_the_gumbel_distribution():
    noise = gumbel_noise(torch.arange(8), torch.arange(8), 1 << 15).double()
    uniform = torch.exp(-torch.exp(-noise))
    histogram = torch.bincount((uniform * 200).long().clamp(max=199).flatten(), minlength=200)
    assert_fits(histogram, torch.full((200,), noise.numel() / 200))
    # The upper tail decides how often unlikely tokens are drawn: P(noise > x) is exp(-x) there.
    assert int((noise > 8).sum()) == pytest.approx(noise.numel() * math.exp(-8), rel=0.4)


def test_quick_logarithms_are_those_of_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    steps = torch.rand(200_000, generator=generator)
    v = torch.cat([steps, 2.0 ** (-31 * steps), 1 - 2.0 ** (-24 * steps)]).clamp(2.0**-32, 1 - 2.0**-24)
    below_one = torch.log1p(-v.double())
    assert (quick_log1p_of_minus(v) / below_one - 1).abs().max() < 4e-7
    x = torch.cat([2.0 ** (250 * steps - 125), 1 + (steps - 0.5) * 2.0 ** (-20 * steps)])
    error = (quick_log(x) - x.double().log()).abs()
    assert (error <= 4e-7 * torch.maximum(x.double().log().abs(), (x.double() - 1).abs())).all()


def test_quick_gumbel_noise_is_the_same_noise() -> None:
    seeds, positions = torch.arange(40) * 2**33, torch.arange(40)
    difference = gumbel_noise(seeds, positions, 1 << 15, quick=True) - gumbel_noise(seeds, positions, 1 << 15)
    assert difference.abs().max() < 2e-6


def test_gumbel_noise_is_finite_for_every_extreme_hash(monkeypatch):
    extremes = torch.tensor(
        [[0, 1, 2**31 - 1, 2**31 - 2, 2**31 - 129, -1, -(2**31), -(2**31) + 1]], dtype=torch.int32
    )
    monkeypatch.setattr(sampling_noise, "noise_bits", lambda *_: extremes)
    noise = gumbel_noise_at(torch.tensor([0]), torch.tensor([0]), torch.arange(8))
    assert bool(noise.isfinite().all())
    assert float(noise.max()) == pytest.approx(32 * math.log(2), abs=1e-4)
    assert float(noise.min()) > -2.9


@pytest.mark.parametrize("vocab_size", [1, 7, 1001, 4099])
def test_noise_of_a_row_does_not_depend_on_the_batch(vocab_size):
    seeds, positions = torch.arange(-4, 5), torch.arange(9) * 31
    together = gumbel_noise(seeds, positions, vocab_size)
    for row in range(9):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], vocab_size)
        assert torch.equal(alone[0], together[row])


def test_noise_of_chosen_tokens_is_the_same_as_within_the_vocabulary():
    seeds, positions = torch.tensor([5, -6]), torch.tensor([0, 99])
    chosen = torch.tensor([[9, 3, 500], [0, 1, 999]])
    assert torch.equal(
        gumbel_noise_at(seeds, positions, chosen), gumbel_noise(seeds, positions, 1000).gather(1, chosen)
    )


def random_penalty_inputs(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, vocab_size = 4, 23
    logits = torch.randn(rows, vocab_size, generator=generator) * 4
    logits[0, 3] = -torch.inf
    return {
        "logits": logits,
        "prompt_mask": torch.rand(rows, vocab_size, generator=generator) < 0.3,
        "output_counts": torch.randint(0, 4, (rows, vocab_size), generator=generator, dtype=torch.int32),
        "presence": torch.rand(rows, generator=generator) * 4 - 2,
        "frequency": torch.rand(rows, generator=generator) * 4 - 2,
        "repetition": torch.rand(rows, generator=generator) * 2 + 0.1,
    }


@pytest.mark.parametrize("seed", range(5))
def test_penalties_match_plain_python(seed):
    inputs = random_penalty_inputs(seed)
    occurs = (inputs["output_counts"] > 0) | inputs["prompt_mask"]
    rows, tokens = occurs.nonzero(as_tuple=True)
    result = inputs["logits"].clone()
    result[rows, tokens] = apply_penalties(
        inputs["logits"][rows, tokens],
        inputs["output_counts"][rows, tokens],
        *(inputs[name][rows] for name in ("presence", "frequency", "repetition")),
    )
    for row in range(4):
        for token in range(23):
            value = float(inputs["logits"][row, token])
            count = int(inputs["output_counts"][row, token])
            repetition = float(inputs["repetition"][row])
            if count > 0 or bool(inputs["prompt_mask"][row, token]):
                value = value / repetition if value > 0 else value * repetition
            value -= float(inputs["frequency"][row]) * count
            if count > 0:
                value -= float(inputs["presence"][row])
            assert float(result[row, token]) == pytest.approx(value, rel=1e-5, abs=1e-5)


def test_repetition_penalty_matches_transformers():
    inputs = random_penalty_inputs(0)
    ids = torch.randint(0, 23, (4, 6), generator=torch.Generator().manual_seed(1))
    rows, tokens = torch.zeros(4, 23).scatter_(1, ids, 1.0).nonzero(as_tuple=True)
    zero = torch.zeros(len(rows))
    ours = inputs["logits"].clone()
    ours[rows, tokens] = apply_penalties(
        inputs["logits"][rows, tokens], zero.int(), zero, zero, torch.full((len(rows),), 1.3)
    )
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(ids, inputs["logits"])
    torch.testing.assert_close(ours, theirs)


def kept_by_float64(scaled: list[float], top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """Token ids that remain, by definition, and how near top-p came to keeping one more or one less."""
    alive = [
        i for i, x in enumerate(scaled) if x > -math.inf and math.exp(x) >= min_p * math.exp(max(scaled))
    ]
    if 0 < top_k < len(scaled):
        values = sorted((scaled[i] for i in alive), reverse=True)
        alive = [i for i in alive if scaled[i] >= values[min(top_k, len(values)) - 1]]
    margin = 1.0
    if top_p < 1.0:
        total = sum(math.exp(scaled[i]) for i in alive)
        mass, last = 0.0, math.inf
        for value in sorted((scaled[i] for i in alive), reverse=True):
            margin = min(margin, abs(mass / total - top_p))
            if mass / total < top_p:
                last = value
            mass += math.exp(value)
        alive = [i for i in alive if scaled[i] >= last]
    return set(alive), margin


TRUNCATION_CASE = {
    # Quarters make ties frequent; -inf is a masked token.
    "values": st.lists(
        st.integers(-24, 0).map(lambda i: i / 4) | st.just(-math.inf), min_size=1, max_size=40
    ),
    "top_k": st.integers(-1, 45),
    "top_p": st.floats(0.01, 1.0) | st.just(1.0),
    "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 0.99]),
}


def row_of(values: list[float]) -> torch.Tensor:
    """One row [1, V] with the shape that scale_by_temperature gives: its largest entry is 0."""
    return scale_by_temperature(torch.tensor([values]), torch.ones(1))


@settings(max_examples=300, deadline=None)
@given(**TRUNCATION_CASE)
def test_truncation_keeps_the_tokens_of_the_definition(values, top_k, top_p, min_p):
    scaled = row_of(values)
    expected, margin = kept_by_float64(scaled[0].tolist(), top_k, top_p, min_p)
    assume(margin > 1e-5)
    ordered = scaled.sort(descending=True).values
    threshold, exact = truncation_threshold(
        scaled, ordered, torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    kept = (scaled >= threshold) & (scaled > -torch.inf)
    assert bool(exact)
    assert set(kept[0].nonzero()[:, 0].tolist()) == expected
    assert len(expected) >= 1 or max(values) == -math.inf


@settings(max_examples=300, deadline=None)
@given(**TRUNCATION_CASE, num_candidates=st.integers(1, 45), seed=INT64)
def test_a_draw_from_candidates_that_calls_itself_exact_is_the_draw_from_the_vocabulary(
    values, top_k, top_p, min_p, num_candidates, seed
):
    scaled = row_of(values)
    rules = torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    seeds, positions = torch.tensor([seed]), torch.tensor([17])
    token, exact = draw_from_candidates(
        scaled, *top_candidates(scaled, num_candidates), *rules, seeds, positions
    )
    threshold, _ = truncation_threshold(scaled, scaled.sort(descending=True).values, *rules)
    assert 0 <= int(token) < len(values)
    assert bool(exact) or num_candidates < len(values)
    if bool(exact):
        assert int(token) == int(draw_from_vocabulary(scaled, threshold, seeds, positions))


@settings(max_examples=300, deadline=None)
@given(**TRUNCATION_CASE, dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=INT64)
def test_bisection_finds_the_threshold_of_a_sort(values, top_k, top_p, min_p, dtype, seed):
    """Beside a row of other values; infinities of both kinds and NaN are among them."""
    logits = torch.tensor([values, [math.inf, math.nan, *values[2:]][: len(values)]]).to(dtype) * 3.7
    temperature, seeds, positions = torch.tensor([0.6, 1.7]), torch.tensor([seed, 5]), torch.tensor([17, 3])
    rules = torch.tensor([top_k, top_k]), torch.tensor([top_p, top_p]), torch.tensor([min_p, min_p])
    scaled = scale_by_temperature(logits.float(), temperature)
    ordered, is_alive = top_candidates(scaled, len(values)), scaled.amax(-1) == 0.0
    expected, _ = truncation_threshold(scaled, ordered[0], *rules)
    keys = sortable(logits)
    assert torch.equal(unsorted(keys, dtype), torch.where(logits.isnan(), -math.inf, logits))
    assert torch.equal(bisected_threshold(keys, dtype, temperature, *rules)[is_alive], expected[is_alive])
    tokens = draw_truncated(keys, temperature, rules[2], seeds, positions, *rules[:2], dtype=dtype)
    assert torch.equal(tokens, draw_from_candidates(scaled, *ordered, *rules, seeds, positions)[0])


def test_few_candidates_suffice_for_peaked_rows_and_not_for_flat_ones():
    peaked = -torch.arange(1000.0)
    scaled = torch.stack([peaked, torch.linspace(0, -0.1, 1000)])
    rules = torch.tensor([0, 0]), torch.tensor([0.9, 0.9]), torch.tensor([0.0, 0.0])
    _, exact = truncation_threshold(scaled, top_candidates(scaled, 16)[0], *rules)
    assert exact.tolist() == [True, False]


@pytest.mark.parametrize(
    ("warper", "top_k", "top_p", "min_p"),
    [
        (TopKLogitsWarper(7), 7, 1.0, 0.0),
        (TopPLogitsWarper(0.8), 0, 0.8, 0.0),
        (TopPLogitsWarper(0.05), 0, 0.05, 0.0),
        (MinPLogitsWarper(0.1), 0, 1.0, 0.1),
    ],
)
def test_each_truncation_alone_keeps_what_transformers_keeps(warper, top_k, top_p, min_p):
    logits = torch.randn(16, 300, generator=torch.Generator().manual_seed(2)) * 3
    scaled = scale_by_temperature(logits, torch.ones(16))
    rules = torch.full((16,), top_k), torch.full((16,), top_p), torch.full((16,), min_p)
    threshold, _ = truncation_threshold(scaled, scaled.sort(descending=True).values, *rules)
    theirs = warper(torch.zeros(16, 1, dtype=torch.long), logits.clone())
    assert torch.equal(scaled >= threshold[:, None], theirs > -torch.inf)


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 0.7, 1.0, 50.0])
def test_scaling_is_finite_and_keeps_the_order_at_every_temperature(temperature):
    logits = torch.tensor(
        [[3e38, 1.0, -3e38, 0.0], [5.0, 4.0, torch.nan, -torch.inf], [torch.inf, 0.0, 1.0, 2.0]]
    )
    scaled = scale_by_temperature(logits, torch.full((3,), temperature))
    assert not bool(scaled.isnan().any())
    assert scaled.amax(-1).tolist() == [0.0, 0.0, 0.0]
    assert scaled[1, 2:].tolist() == [-torch.inf, -torch.inf]
    assert scaled.argmax(-1).tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_row_without_any_finite_logit_gives_token_zero(value):
    scaled = scale_by_temperature(torch.full((1, 50), value), torch.tensor([0.5]))
    seeds = positions = torch.tensor([1])
    rules = torch.tensor([3]), torch.tensor([0.9]), torch.tensor([0.1])
    token, exact = draw_from_candidates(scaled, *top_candidates(scaled, 8), *rules, seeds, positions)
    assert (int(token), bool(exact)) == (0, True)
    assert int(draw_from_vocabulary(scaled, torch.tensor([-1.0]), seeds, positions)) == 0


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.4, 9, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.5, 12, 0.9, 0.02)],
)
@pytest.mark.parametrize("varying", ["seed", "position"])
def test_draws_have_the_distribution_of_the_truncated_softmax(temperature, top_k, top_p, min_p, varying):
    draws, vocab_size = 50_000, 32
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(4)) * 1.5
    scaled = scale_by_temperature(logits, torch.tensor([temperature]))
    kept, _ = kept_by_float64(scaled[0].tolist(), top_k, top_p, min_p)
    allowed = torch.tensor([token in kept for token in range(vocab_size)])
    target = torch.softmax((logits[0].double() / temperature).masked_fill(~allowed, -torch.inf), -1)

    running, fixed = torch.arange(draws), torch.full((draws,), 3)
    seeds, positions = (running, fixed) if varying == "seed" else (fixed, running)
    rows = scaled.expand(draws, -1)
    rules = (torch.tensor([rule]).expand(draws) for rule in (top_k, top_p, min_p))
    tokens, exact = draw_from_candidates(rows, *top_candidates(rows, vocab_size), *rules, seeds, positions)
    counts = torch.bincount(tokens, minlength=vocab_size)
    assert bool(exact.all())
    assert int(counts[~allowed].sum()) == 0
    # Tokens too rare for the test's approximation share one bin.
    common = target * draws >= 10
    rare = allowed & ~common
    observed, expected = counts[common], target[common] * draws
    if float(target[rare].sum()) * draws >= 5:
        observed = torch.cat([observed, counts[rare].sum()[None]])
        expected = torch.cat([expected, target[rare].sum()[None] * draws])
    assert_fits(observed, expected)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), rows=st.integers(1, 5), vocab_size=st.integers(1, 60), k=st.integers(0, 70))
def test_logprobs_match_float64_and_ranks_match_counting(seed, rows, vocab_size, k):
    generator = torch.Generator().manual_seed(seed)
    # Halves: ties are frequent.
    logits = (torch.randn(rows, vocab_size, generator=generator) * 8).round() / 2
    chosen = torch.randint(0, vocab_size, (rows,), generator=generator)
    logprobs, ranks, top_ids, top_logprobs = token_logprobs(logits.bfloat16(), chosen, k)
    reference = torch.log_softmax(logits.double(), -1)
    for row in range(rows):
        values = reference[row].tolist()
        token = int(chosen[row])
        assert float(logprobs[row]) == pytest.approx(values[token], abs=1e-5)
        assert int(ranks[row]) == 1 + sum(float(x) > float(logits[row, token]) for x in logits[row])
        best_first = sorted(values, reverse=True)[: min(k, vocab_size)]
        assert top_logprobs[row].tolist() == pytest.approx(best_first, abs=1e-5)
        ids = top_ids[row].tolist()
        assert len(set(ids)) == len(ids) == min(k, vocab_size)
        assert ids == sorted(ids, key=lambda i: (-float(logits[row, i]), i))


def pipeline_inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    rows, vocab_size = 64, 501
    python = random.Random(6)
    return {
        "logits": torch.randn(rows, vocab_size, generator=generator) * 3,
        "temperature": torch.rand(rows, generator=generator) + 0.2,
        "top_k": torch.tensor([python.choice([0, 1, 5, 20, 400]) for _ in range(rows)]),
        "top_p": torch.tensor([python.choice([1.0, 0.95, 0.5]) for _ in range(rows)]),
        "min_p": torch.tensor([python.choice([0.0, 0.05]) for _ in range(rows)]),
        "seeds": torch.randint(-(2**62), 2**62, (rows,), generator=generator),
        "positions": torch.randint(0, 5000, (rows,), generator=generator),
    }


def test_compiled_draws_are_the_eager_draws():
    def pipeline(logits, temperature, min_p, seeds, positions):
        scaled = scale_by_temperature(logits, temperature)
        return draw_from_vocabulary(scaled, torch.log(min_p), seeds, positions)

    inputs = pipeline_inputs()
    del inputs["top_k"], inputs["top_p"]
    eager = pipeline(**inputs)
    compiled = torch.compile(pipeline, fullgraph=True, dynamic=False)(**inputs)
    assert torch.equal(compiled, eager)


@pytest.mark.slow
def test_compiled_truncation_is_the_eager_truncation():
    def pipeline(logits, temperature, top_k, top_p, min_p, seeds, positions):
        scaled = scale_by_temperature(logits, temperature)
        drawn = draw_from_candidates(
            scaled, *top_candidates(scaled, 32), top_k, top_p, min_p, seeds, positions
        )
        return *drawn, draw_truncated(
            sortable(logits), temperature, min_p, seeds, positions, top_k, top_p, dtype=logits.dtype
        )

    inputs = pipeline_inputs()
    eager = pipeline(**inputs)
    compiled = torch.compile(pipeline, fullgraph=True, dynamic=False)(**inputs)
    assert torch.equal(compiled[1], eager[1])
    assert torch.equal(compiled[0], eager[0])
    assert torch.equal(compiled[2], eager[2])
    assert torch.equal(eager[2][eager[1]], eager[0][eager[1]])
    assert 0 < int(eager[1].sum()) < len(inputs["seeds"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_is_argmax_with_the_smallest_id_among_equals(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 17, 1000, 49_152):
        logits = torch.randint(0, 5, (7, size), generator=generator).to(dtype)
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert likeliest(logits).tolist() == expected


@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    size=st.sampled_from([1, MIN_RUN - 1, MIN_RUN, 3 * MIN_RUN, MAX_RUN + 1, 3 * MAX_RUN]),
    kinds=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_likeliest_is_the_first_of_the_greatest(
    seed: int, rows: int, size: int, kinds: int, dtype: torch.dtype
) -> None:
    """Also where rows are parts of wider ones, and nothing is possible."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randint(-kinds, kinds + 1, (rows, size + 64), generator=generator).to(dtype)
    wide[torch.rand(wide.shape, generator=generator) < 0.5] = -torch.inf
    wide[0] = -torch.inf
    logits = wide[:, :size]
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits).tolist() == expected
