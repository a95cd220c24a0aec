"""How many tokens are guessed: work counts against drafters of known quality."""

from __future__ import annotations

import random

import pytest

from minivllm.spec_decode.adaptive import LONGEST_PAUSE, DraftLengths, StepCost

CHEAP = StepCost(verify_fixed=0.02, verify_token=0.05)
FREE = StepCost(verify_fixed=0.0, verify_token=0.0)


def drive(
    lengths: DraftLengths, acceptance: float, num_steps: int, batch_size: int = 1, seed: int = 0
) -> tuple[int, int, float]:
    """Let every drafted token be accepted with a chance. Returns (tokens, drafted tokens, time in steps)."""
    rng = random.Random(seed)
    tokens = drafted = 0
    time = 0.0
    for _ in range(num_steps):
        k = lengths.choose("a", batch_size)
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        if k > 0:
            lengths.record("a", k, accepted)
        tokens, drafted = tokens + 1 + accepted, drafted + k
        time += lengths.cost.relative(k, batch_size)
    return tokens, drafted, time


def test_a_perfect_drafter_is_asked_for_all_it_can_guess() -> None:
    lengths = DraftLengths(7, CHEAP)
    drive(lengths, 1.0, 20)
    assert [lengths.choose("a", 1) for _ in range(5)] == [7] * 5


def test_a_hopeless_drafter_is_turned_off_and_probed_ever_more_rarely() -> None:
    lengths = DraftLengths(7, CHEAP)
    drive(lengths, 0.0, 100)
    tokens, drafted, time = drive(lengths, 0.0, 10 * LONGEST_PAUSE)
    assert tokens == 10 * LONGEST_PAUSE
    assert 0 < drafted <= 3 * 15
    assert tokens / time > 0.99


def test_a_hopeless_drafter_costs_little_from_the_first_token_on() -> None:
    tokens, _, time = drive(DraftLengths(7, CHEAP), 0.0, 128)
    assert tokens / time > 0.97


def test_a_drafter_that_becomes_good_is_used_again() -> None:
    lengths = DraftLengths(7, CHEAP)
    drive(lengths, 0.0, 2000)
    tokens, _, _ = drive(lengths, 1.0, LONGEST_PAUSE + 40)
    assert tokens > 40 * 6
    assert lengths.choose("a", 1) == 7


@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.3])
def test_the_gain_is_near_that_of_the_best_fixed_length(acceptance: float, cost: float) -> None:
    step = StepCost(verify_fixed=0.02, verify_token=cost)
    rates = [
        sum(acceptance**i for i in range(k + 1)) / step.relative(k, 1)  # expected tokens per unit of time
        for k in range(8)
    ]
    runs = [drive(DraftLengths(7, step), acceptance, 500, seed=seed) for seed in range(8)]
    assert sum(tokens for tokens, _, _ in runs) / sum(time for _, _, time in runs) > 0.93 * max(rates)


def test_drafting_pays_less_in_a_large_batch() -> None:
    alone, crowded = DraftLengths(7, CHEAP), DraftLengths(7, CHEAP)
    drive(alone, 0.5, 200, batch_size=1)
    drive(crowded, 0.5, 200, batch_size=64)
    assert sum(alone.choose("a", 1) for _ in range(50)) > sum(crowded.choose("a", 64) for _ in range(50))
    assert CHEAP.relative(1, 64) > CHEAP.relative(1, 1)


def test_requests_are_judged_one_by_one_and_forgotten_when_they_leave() -> None:
    lengths = DraftLengths(7, CHEAP)
    first = lengths.choose("b", 1)
    drive(lengths, 0.0, 50)
    assert lengths.choose("b", 1) == first
    lengths.forget("a")
    lengths.forget("never seen")
    assert lengths.choose("a", 1) == first


def test_where_verification_is_free_everything_is_guessed() -> None:
    lengths = DraftLengths(5, FREE)
    drive(lengths, 0.5, 100)
    assert lengths.choose("a", 8) == 5
