"""The sampler against plain Python and transformers, row by row and in any batch."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels_triton_free.sampling.noise import gumbel_noise
from minivllm.compilation.compiler import RegionCompiler, cannot_compile_reason
from minivllm.compilation.packaged.region_packages import PackagedRegionCompiler
from minivllm.compilation.regions import Region, Size, TensorSpec
from minivllm.messages import EngineRequest, PositionLogprobs
from minivllm.sampling.sampler import Sampler, _compiled_draws, prompt_logprobs
from minivllm.sampling.sampling_state import SamplingState
from minivllm.sampling_params import SamplingParams

EOS = 2
GREEDY = {"temperature": 0.0}


def make_request(
    prompt: tuple[int, ...] = (5, 6, 7),
    seed: int = 0,
    bad_words: list[list[int]] | None = None,
    **params: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=[EOS],
        bad_words_token_ids=bad_words or [],
        max_tokens=16,
        arrival_time=0.0,
    )


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


class Bench:
    """A sampler with requests at slots 0, 1, …"""

    def __init__(
        self,
        vocab_size: int,
        *requests: EngineRequest,
        outputs: tuple[int, ...] = (),
        masks: Sequence[Any] = (),
    ) -> None:
        self.state = SamplingState(max(len(requests), 1) + 1, vocab_size, "cpu")
        for slot, request in enumerate(requests):
            self.state.add(slot, request, list(outputs))
        self.sampler = Sampler(self.state, masks)

    def sample(self, logits: torch.Tensor, slots: Any = None, positions: Any = None) -> list[int]:
        slots = np.arange(len(logits)) if slots is None else np.asarray(slots)
        positions = np.full(len(logits), 3) if positions is None else positions
        return self.sampler(logits, slots, positions).token_ids.tolist()


VARIETY: list[dict[str, Any]] = [
    GREEDY,
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5},
    {"temperature": 2.0, "top_p": 0.95},
    {"min_p": 0.1},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.4, "temperature": 0.0},
    {"logit_bias": {9: 30.0, 3: -5.0}, "top_p": 0.7},
    {"allowed_token_ids": [4, 8, 15, 16, 23, 42]},
    {"bad_words": [[7, 11], [12]]},
    {"min_tokens": 4, "max_tokens": 9, "temperature": 0.0},
    {"logprobs": 3, "top_k": 300, "top_p": 0.99},
]


def variety_request(index: int) -> EngineRequest:
    return make_request(seed=100 + index, **VARIETY[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_request_gets_the_same_tokens_whatever_rows_are_beside_it(dtype):
    vocab_size = 1003
    count = len(VARIETY)
    bench = Bench(vocab_size, *(variety_request(i) for i in range(count)), outputs=(8, 8, 9))
    logits = random_logits(count, vocab_size).to(dtype)
    positions = np.arange(count) * 13 + 5
    alone = [bench.sampler(logits[i : i + 1], np.array([i]), positions[i : i + 1]) for i in range(count)]
    generator = np.random.default_rng(0)
    for size in (1, 2, 3, 7, count, count, count):
        rows = generator.permutation(count)[:size]
        together = bench.sampler(logits[rows], rows, positions[rows])
        assert together.token_ids.tolist() == [int(alone[row].token_ids) for row in rows]
        assert together.logprobs == [alone[row].logprobs[0] for row in rows]


def only(kind: type[RegionCompiler], *names: str) -> type[RegionCompiler]:
    """A compiler that leaves regions of all other names uncompiled: a CPU's compiler takes half a minute for
    a draw, and more than a minute for a truncated one."""

    class Only(kind):  # type: ignore[misc, valid-type]
        def __call__(self, region: Region) -> Callable[..., Any]:
            return super().__call__(region) if region.name in names else region.function

    return Only


@pytest.mark.skipif(cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler")
@pytest.mark.parametrize("names", [(), pytest.param(("draw",), marks=pytest.mark.slow)])
def test_draws_that_nothing_edits_are_compiled_on_a_gpu(names: tuple[str, ...]) -> None:
    """Here on a CPU, and the tokens are those that are drawn uncompiled, alone and beside others."""
    vocab_size, dtype = 1003, torch.bfloat16
    requests = [make_request(seed=i, **({}, {"min_p": 0.1, "temperature": 0.6})[i % 2]) for i in range(4)]
    requests += [variety_request(2), variety_request(12), GREEDY_REQUEST, variety_request(8)]
    plain, compiled = Bench(vocab_size, *requests), Bench(vocab_size, *requests)
    spec = TensorSpec((Size("rows", 5, single=1), vocab_size), dtype, torch.device("cpu"))
    draws, drawn = _compiled_draws(only(RegionCompiler, *names)(enabled=True, single_rows=True), spec), []

    def watched(index: int) -> Callable[..., torch.Tensor]:
        return lambda logits, *rest: drawn.append((index, len(logits))) or draws[index](logits, *rest)

    compiled.sampler._draws = [watched(0), watched(1)]
    compiled.sampler._drawn_dtype = dtype
    logits = random_logits(8, vocab_size).to(dtype)
    steps = [[0], [1], [0, 1, 2, 3], [6, 1], [3, 3, 3], [4], [5, 5], [0, 6, 4, 1, 5], [6], [6, 7], [0, 1, 7]]
    for rows in steps:
        args = logits[rows], rows, np.array(rows) * 13 + 5
        assert compiled.sample(*args) == plain.sample(*args)
    assert drawn == [(0, 1), (0, 1), (0, 4), (0, 2), (0, 3), (1, 1), (1, 2), (1, 5)], (
        "not greedy ones alone, nor edited"
    )
    assert compiled.sample(logits[:2].float()) == plain.sample(logits[:2].float()) and len(drawn) == 8


def test_slots_are_interchangeable_and_positions_may_be_a_tensor():
    logits = random_logits(1, 200)
    first, second = Bench(200, make_request(seed=9)), Bench(200, GREEDY_REQUEST, make_request(seed=9))
    assert first.sample(logits) == second.sample(
        logits, slots=[1], positions=torch.tensor([3], dtype=torch.int32)
    )


GREEDY_REQUEST = make_request(**GREEDY)


class EveryThird:
    """A mask for some slots that lets a third of the tokens pass, others at every position."""

    is_empty = False

    def __init__(self, *slots: int) -> None:
        self.slots = slots

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return np.isin(slots, self.slots)

    def apply(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        for row in np.flatnonzero(self.touches(slots)):
            logits[row, (torch.arange(logits.shape[1]) + int(positions[row])) % 3 > 0] = -torch.inf


@pytest.mark.slow
@pytest.mark.skipif(cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_draws_that_nothing_edits_are_compiled_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those that are drawn uncompiled, whatever is beside them, of edited rows too; only those that
    need more candidates go on uncompiled."""
    vocab_size, dtype = 3 * 512, torch.bfloat16
    requests = [variety_request(index) for index in (0, 1, 2, 3, 5, 12, 8)]
    requests += [make_request(seed=3, temperature=30.0, top_p=0.99), make_request(seed=4, top_k=1500)]
    needs_more = [5, 7, 8]  # more than 256 tokens are kept
    requests += [make_request(seed=5, temperature=0.7, top_k=9, repetition_penalty=1.2, prompt=(1, 2, 2))]
    plain, compiled = (Bench(vocab_size, *requests, masks=[EveryThird(0, 1, 3, 6)]) for _ in range(2))
    compiler = PackagedRegionCompiler(tmp_path)
    compiled.sampler.use_regions(compiler, dtype)
    compiler.build()
    uncompiled: list[int] = []
    draw_truncated = compiled.sampler._draw_truncated

    def watched(scaled: torch.Tensor, slots: np.ndarray, *given: Any) -> torch.Tensor:
        uncompiled.extend(slots.tolist())
        return draw_truncated(scaled, slots, *given)

    monkeypatch.setattr(compiled.sampler, "_draw_truncated", watched)
    choose = np.random.default_rng(0)
    logits = random_logits(len(requests), vocab_size).to(dtype)
    steps = [[row] for row in range(len(requests))]
    steps += [choose.permutation(len(requests))[: choose.integers(2, 9)].tolist() for _ in range(30)]
    with torch.inference_mode():
        for step, rows in enumerate(steps):
            places = np.array(rows) * 13 + step
            for positions in (places, torch.from_numpy(places).int()):
                args = logits[rows], rows, positions
                uncompiled.clear()
                assert compiled.sample(*args) == plain.sample(*args)
                if max(rows) > 0:  # otherwise nothing is drawn
                    assert sorted(uncompiled) == sorted(row for row in rows if row in needs_more)
        assert compiled.sample(logits[:2].float(), [1, 2]) == plain.sample(logits[:2].float(), [1, 2])
        dead = torch.full((3, vocab_size), -torch.inf, dtype=dtype)
        assert compiled.sample(dead) == plain.sample(dead) == [0, 0, 0]


@pytest.mark.skipif(cannot_compile_reason(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_compiled_code_finds_the_first_of_the_greatest_logits(tmp_path: Path) -> None:
    vocab_size, rows = 3 * 512, 5
    bench = Bench(vocab_size, *[GREEDY_REQUEST] * rows)
    compiler = only(PackagedRegionCompiler, "likeliest tokens")(tmp_path)
    bench.sampler.use_regions(compiler, torch.bfloat16)
    compiler.build()
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for count in [1, 2, 3, 5] * 5:
            logits = torch.randint(-9, 9, (count, vocab_size), generator=generator).bfloat16()
            logits[:, torch.randperm(vocab_size, generator=generator)[:1000]] = -torch.inf
            wide = torch.cat([logits, logits], 1)
            expected = [row.index(max(row)) for row in logits.tolist()]
            for given_logits in (
                logits,
                logits.float(),
                wide[:, :vocab_size],
            ):  # only the first are what was declared
                assert bench.sample(given_logits) == expected
        for unusable in (-torch.inf, torch.nan):
            logits[0] = unusable
            first, *others = bench.sample(logits)
            assert 0 <= first < vocab_size and others == expected[1:]


def test_the_same_seed_repeats_and_another_seed_or_position_does_not():
    logits = torch.zeros(64, 500)
    positions = np.arange(64)
    streams = [
        Bench(500, make_request(seed=seed)).sample(logits, slots=np.zeros(64, int), positions=positions)
        for seed in (1, 1, 2)
    ]
    assert streams[0] == streams[1]
    for other in (streams[2], streams[0][1:] + streams[0][:1]):
        assert sum(a == b for a, b in zip(streams[0], other)) < 8
    assert len(set(streams[0])) > 48


def test_several_rows_of_one_slot_are_drawn_by_their_positions():
    logits = random_logits(1, 300)
    bench = Bench(300, make_request(seed=3, top_k=50))
    each = [bench.sample(logits, slots=[0], positions=np.array([p]))[0] for p in range(6)]
    assert bench.sample(logits.expand(6, -1), slots=[0] * 6, positions=np.arange(6)) == each


def test_greedy_rows_take_the_argmax_of_untouched_logits():
    logits = random_logits(8, 700).bfloat16()
    before = logits.clone()
    bench = Bench(700, *(make_request(**GREEDY) for _ in range(8)))
    assert bench.sample(logits) == logits.argmax(-1).tolist()
    assert torch.equal(logits, before)


def test_only_greedy_rows_that_nothing_edits_need_no_stage():
    params = [
        *VARIETY,
        {**GREEDY, "logprobs": 0},
        {**GREEDY, "logit_bias": {3: 1.0}},
        {**GREEDY, "min_tokens": 4},
    ]
    bench = Bench(64, *(make_request(seed=1, **own) for own in params))
    assert not bench.state.is_plain[-1], "an empty slot"
    assert bench.state.is_plain[: len(params)].tolist() == [own == GREEDY for own in params]
    for slot in (0, 2):
        bench.state.remove(slot)
        assert not bench.state.is_plain[slot]
        bench.state.add(slot, make_request(seed=1, **params[2 - slot]), [])
    assert bench.state.is_plain[[0, 2]].tolist() == [False, True]


def test_a_plain_greedy_batch_makes_no_wide_copy(monkeypatch):
    bench = Bench(700, GREEDY_REQUEST, GREEDY_REQUEST)
    monkeypatch.setattr(Sampler, "_process", lambda *_: pytest.fail("nothing needs processing"))
    monkeypatch.setattr(torch.Tensor, "float", lambda *_: pytest.fail("no copy in float32 is needed"))
    bench.sample(random_logits(2, 700))


@pytest.mark.parametrize("count", [1, len(VARIETY)])
def test_sampling_leaves_the_logits_as_they_were(count):
    bench = Bench(1003, *(variety_request(len(VARIETY) - 1 - i) for i in range(count)))
    logits = random_logits(count, 1003)
    before = logits.clone()
    bench.sample(logits)
    assert torch.equal(logits, before)


def test_random_rows_follow_the_order_of_transformers_warpers():
    """Repetition penalty, temperature, top-k, top-p; the same noise then picks the same token."""
    rows, vocab_size = 40, 120
    logits = random_logits(rows, vocab_size)
    prompt = (5, 6, 7, 20, 21)
    params = {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "repetition_penalty": 1.3}
    bench = Bench(vocab_size, make_request(prompt, seed=77, **params), outputs=(40, 41))
    positions = np.arange(rows)
    ids = torch.tensor([[*prompt, 40, 41]]).expand(rows, -1)
    scores = logits
    for processor in (
        RepetitionPenaltyLogitsProcessor(1.3),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(30),
        TopPLogitsWarper(0.9),
    ):
        scores = processor(ids, scores)
    noise = gumbel_noise(torch.full((rows,), 77), torch.from_numpy(positions), vocab_size)
    assert bench.sample(logits, slots=[0] * rows, positions=positions) == (scores + noise).argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [300, 9000])
def test_flat_rows_reach_past_the_candidates_and_stay_exact(vocab_size):
    """Top-p keeps most of the vocabulary: the draw is the one of a full sort."""
    rows = 12
    logits = random_logits(rows, vocab_size, scale=0.3)
    bench = Bench(vocab_size, make_request(seed=1, top_p=0.8))
    positions = np.arange(rows)
    kept = TopPLogitsWarper(0.8)(torch.zeros(rows, 1, dtype=torch.long), logits.clone())
    noise = gumbel_noise(torch.full((rows,), 1), torch.from_numpy(positions), vocab_size)
    assert bench.sample(logits, slots=[0] * rows, positions=positions) == (kept + noise).argmax(-1).tolist()


def test_draws_follow_the_softmax_of_penalised_logits():
    draws, vocab_size = 20_000, 12
    logits = random_logits(1, vocab_size, scale=1.0)
    params = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {3: 1.0}, "temperature": 0.9}
    bench = Bench(vocab_size, make_request(seed=5, **params), outputs=(1, 1, 4))
    tokens = bench.sample(logits.expand(draws, -1), slots=np.zeros(draws, int), positions=np.arange(draws))
    target = logits[0].double()
    target[3] += 1.0
    target[1] -= 0.5 + 0.3 * 2
    target[4] -= 0.5 + 0.3
    expected = torch.softmax(target / 0.9, -1) * draws
    observed = torch.bincount(torch.tensor(tokens), minlength=vocab_size)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    # The 99.999 % quantile of chi-square at 11 degrees of freedom.
    assert float(expected.min()) > 5 and statistic < 43.2


class PlainPython:
    """Greedy sampling of one request with every stage before temperature, written out on lists."""

    def __init__(self, request: EngineRequest) -> None:
        self.request, self.output = request, []

    def choose(self, logits: list[float]) -> int:
        params, tokens = self.request.sampling_params, [*self.request.prompt_token_ids, *self.output]
        stop = {*self.request.eos_token_ids, *params.stop_token_ids}
        scores = []
        for token, score in enumerate(logits):
            if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
                score = -math.inf
            for word in self.request.bad_words_token_ids:
                prefix = word[:-1]
                if token == word[-1] and (not prefix or tokens[-len(prefix) :] == prefix):
                    score = -math.inf
            if token in stop and len(self.output) < params.min_tokens:
                score = -math.inf
            score += (params.logit_bias or {}).get(token, 0.0)
            if token in tokens:
                r = params.repetition_penalty
                score = score / r if score > 0 else score * r
            score -= params.frequency_penalty * self.output.count(token)
            score -= params.presence_penalty * (token in self.output)
            scores.append(score)
        return max(range(len(scores)), key=scores.__getitem__)


REQUESTS = st.builds(
    make_request,
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=5).map(tuple),
    temperature=st.just(0.0),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 11), st.integers(-3, 3).map(float), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(3, 11), min_size=6, max_size=9, unique=True),
    bad_words=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(st.integers(0, 2), max_size=2),
)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=4), seed=st.integers(0, 10**6), preempt=st.integers(0, 9)
)
def test_greedy_generation_matches_plain_python_across_preemption(requests, seed, preempt):
    bench = Bench(12, *requests)
    references = [PlainPython(request) for request in requests]
    slots = np.arange(len(requests))
    for step in range(10):
        if step == preempt:
            # The first request leaves and returns to another slot with what it generated so far.
            bench.state.remove(int(slots[0]))
            slots[0] = len(requests)
            bench.state.add(int(slots[0]), requests[0], references[0].output)
        logits = random_logits(len(requests), 12, seed=seed + step)
        tokens = bench.sample(logits, slots=slots)
        assert tokens == [reference.choose(row.tolist()) for reference, row in zip(references, logits)]
        bench.state.append(slots, tokens)
        for reference, token in zip(references, tokens):
            reference.output.append(token)


def test_bad_words_and_min_tokens_mask_what_transformers_masks():
    prompt, vocab_size = (5, 6, 7), 40
    logits = random_logits(1, vocab_size)
    bad_words = [[7, 11], [12], [6, 7, 13], [5, 14]]
    bench = Bench(vocab_size, make_request(prompt, bad_words=bad_words, min_tokens=2))
    ids = torch.tensor([prompt])
    expected = NoBadWordsLogitsProcessor(bad_words, eos_token_id=EOS)(ids, logits)
    expected = MinNewTokensLengthLogitsProcessor(3, 2, EOS)(ids, expected)
    ours = logits.clone()
    bench.state.constraints.apply(ours, np.array([0]))
    assert torch.equal(ours, expected)


def test_the_end_is_masked_until_min_tokens_and_free_afterwards():
    logits = torch.zeros(1, 10)
    logits[0, EOS], logits[0, 4], logits[0, 1] = 9.0, 8.0, 1.0
    bench = Bench(10, make_request(min_tokens=2, stop_token_ids=[4], **GREEDY))
    chosen = []
    for _ in range(3):
        chosen += bench.sample(logits)
        bench.state.append([0], chosen[-1:])
    assert chosen == [1, 1, EOS]


def test_allowed_ids_outrank_min_tokens_and_bad_words_that_would_leave_nothing():
    logits = random_logits(1, 10)
    request = make_request(min_tokens=3, allowed_token_ids=[EOS, 9], bad_words=[[9]], **GREEDY)
    assert Bench(10, request).sample(logits)[0] in (EOS, 9)


class OnlyToken:
    """A mask that lets one token pass on slot 0."""

    is_empty = False

    def __init__(self, token: int) -> None:
        self.token = token

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return slots == 0

    def apply(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        for row in np.flatnonzero(slots == 0):
            kept = logits[row, self.token].clone()
            logits[row] = -torch.inf
            logits[row, self.token] = kept


@pytest.mark.parametrize("params", [GREEDY, {"top_p": 0.5}, {"logit_bias": {1: 100.0}}])
def test_masks_of_other_features_come_first(params):
    bench = Bench(30, make_request(**params), GREEDY_REQUEST)
    logits = random_logits(2, 30)
    tokens = Sampler(bench.state, [OnlyToken(17)])(logits, np.array([0, 1]), np.array([1, 1])).token_ids
    assert tokens.tolist() == [17, int(logits[1].argmax())]


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("params", VARIETY)
def test_rows_without_a_usable_logit_give_an_id_in_range_and_leave_their_neighbours_alone(value, params):
    request, neighbour = make_request(**params), make_request(seed=8, top_k=9)
    bench = Bench(60, request, neighbour)
    logits = random_logits(2, 60)
    logits[0] = value
    tokens = bench.sample(logits)
    assert 0 <= tokens[0] < 60
    assert tokens[1] == bench.sample(logits[1:], slots=[1])[0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 0.01])
def test_tiny_temperatures_approach_greedy(temperature):
    logits = random_logits(1, 100)
    assert Bench(100, make_request(temperature=temperature)).sample(logits) == [int(logits.argmax())]


def test_ids_outside_the_vocabulary_touch_nothing():
    request = make_request(
        (5, 999),
        seed=2**64 + 5,
        presence_penalty=1.0,
        stop_token_ids=[77],
        min_tokens=2,
        logit_bias={88: 5.0},
        allowed_token_ids=[3, 4, 99],
        bad_words=[[66], [5, 10_000]],
        top_k=10**12,
    )
    bench = Bench(20, request, outputs=(500,))
    assert bench.sample(random_logits(1, 20))[0] in (3, 4)
    bench.state.append([0], [1000])
    assert bench.sample(random_logits(1, 20, seed=1))[0] in (3, 4)


def test_logits_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"12 columns.*made for 10"):
        Bench(10, GREEDY_REQUEST).sample(torch.zeros(1, 12))


@pytest.mark.parametrize("seed", range(4))
def test_penalties_count_what_is_generated(seed: int) -> None:
    """Against counts over the whole vocabulary, for rows of several slots, some of them twice."""
    vocab_size, generator = 400, np.random.default_rng(seed)
    prompts = [tuple(generator.integers(0, vocab_size, count).tolist()) for count in (1, 60, 300)]
    penalty = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    bench = Bench(vocab_size, *(make_request(prompt, **penalty) for prompt in prompts), GREEDY_REQUEST)
    counts = torch.zeros(4, vocab_size)
    for _ in range(200):
        tokens = generator.integers(0, vocab_size, 3)
        bench.state.append([0, 1, 2], tokens)
        counts[[0, 1, 2], tokens] += 1
    occurs = counts > 0
    for row, prompt in enumerate(prompts):
        occurs[row, list(prompt)] = True
    slots = np.array([2, 3, 0, 0, 1])
    logits = random_logits(len(slots), vocab_size, seed)
    wanted = torch.where(logits > 0, logits / 1.5, logits * 1.5)
    wanted = torch.where(occurs[slots], wanted, logits) - 0.25 * counts[slots] - 0.5 * (counts[slots] > 0)
    bench.state.penalties.apply(logits, slots)
    torch.testing.assert_close(logits, wanted)


def test_wide_state_exists_only_for_slots_that_need_it_and_is_freed():
    bench = Bench(50, GREEDY_REQUEST, make_request(top_p=0.5, seed=1), make_request(presence_penalty=1.0))
    penalties, constraints = bench.state.penalties, bench.state.constraints
    assert list(penalties._occurring) == [2]
    assert not constraints._of_slot
    bench.state.remove(2)
    assert not penalties._occurring
    bench.state.add(2, make_request(allowed_token_ids=[1], min_tokens=1), [])
    bench.state.add(3, make_request(min_tokens=1), [])
    assert set(constraints._of_slot) == {2, 3}
    bench.state.append([2, 3], [1, 1])
    assert set(constraints._of_slot) == {2}, "min_tokens alone is dropped once it is reached"
    bench.state.remove(2)
    bench.state.remove(2)
    assert not constraints._of_slot


def test_a_slot_forgets_the_request_before():
    bench = Bench(50, make_request(presence_penalty=2.0, logit_bias={4: 50.0}, logprobs=2, temperature=0.0))
    logits = random_logits(1, 50)
    assert bench.sample(logits) == [4]
    bench.state.remove(0)
    bench.state.add(0, GREEDY_REQUEST, [])
    result = bench.sampler(logits, np.array([0]), np.array([1]))
    assert result.token_ids.tolist() == [int(logits.argmax())]
    assert result.logprobs == [None]


def expected_logprobs(logits: torch.Tensor, token: int, k: int) -> PositionLogprobs:
    reference = torch.log_softmax(logits.double(), -1)
    best = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    ids = [token, *best[:k]]
    rank = 1 + int((reference > reference[token]).sum())
    return PositionLogprobs(ids, [float(reference[i]) for i in ids], rank)


def assert_same_logprobs(ours: PositionLogprobs, reference: PositionLogprobs) -> None:
    assert (ours.token_ids, ours.rank) == (reference.token_ids, reference.rank)
    assert ours.logprobs == pytest.approx(reference.logprobs, abs=1e-5)


def test_logprobs_are_those_of_the_raw_logits_for_rows_that_asked():
    penalised = {"repetition_penalty": 5.0, "logit_bias": {3: 80.0}, "temperature": 0.5}
    asked = [None, 0, 4, 100]
    requests = [make_request(seed=i, logprobs=k, **penalised) for i, k in enumerate(asked)]
    bench = Bench(60, *requests)
    logits = random_logits(4, 60).bfloat16()
    result = bench.sampler(logits, np.arange(4), np.full(4, 3))
    assert result.token_ids.tolist() == [3, 3, 3, 3]
    assert result.logprobs[0] is None
    for row, k in enumerate(asked):
        entry = result.logprobs[row]
        if k is not None:
            assert entry is not None
            assert_same_logprobs(entry, expected_logprobs(logits[row].float(), 3, k))


def test_named_logprobs_replace_the_likeliest_of_their_row_alone() -> None:
    """Ties have equal ranks, and an id may be named twice."""
    named = [59, 3, 3, 17]
    bench = Bench(
        60, make_request(logprob_token_ids=named, allowed_token_ids=[3], **GREEDY), make_request(logprobs=2)
    )
    logits = random_logits(2, 60)
    logits[0, 17] = logits[0, 59]
    result = bench.sampler(logits, np.arange(2), np.full(2, 3))
    one, other = result.logprobs
    assert one is not None and other is not None
    reference = torch.log_softmax(logits[0].double(), -1)
    assert one.token_ids == [3, *named]
    assert one.logprobs == pytest.approx([float(reference[token]) for token in one.token_ids], abs=1e-5)
    assert [one.rank, *one.other_ranks] == [
        1 + int((reference > reference[token]).sum()) for token in one.token_ids
    ]
    assert_same_logprobs(other, expected_logprobs(logits[1], int(result.token_ids[1]), 2))
    bench.state.remove(0)
    assert bench.state.logprob_token_ids == {}


@pytest.mark.parametrize(("positions", "k"), [(0, 3), (1, 0), (150, 5)])
def test_prompt_logprobs_are_those_of_the_next_prompt_tokens(positions, k):
    logits = random_logits(positions, 80)
    tokens = torch.arange(positions, dtype=torch.int32) % 80
    entries = prompt_logprobs(logits, tokens, k)
    assert len(entries) == positions
    for row, entry in itertools.islice(enumerate(entries), 0, None, 7):
        assert_same_logprobs(entry, expected_logprobs(logits[row], int(tokens[row]), k))
