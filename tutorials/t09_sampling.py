"""09 · Sampling: from a row of logits to one token, the same one whatever else is in the batch.

The model ends with a number for every token of the vocabulary. Which token to take is a matter of taste
(temperature, top-p), of rules (a grammar), and of chance. Chance is the hardest part: it must be random, and
the same every time.
"""

# %% [markdown]
# ## A vocabulary of eight
# The engine's ``Sampler`` knows requests by their batch slot. Here a few get their parameters by hand, and a
# vocabulary of eight tokens is small enough to see everything. Several rows may share one slot; their
# *position* in the sequence tells them apart, so 20,000 rows with positions 0, 1, 2, … are 20,000 draws.

# %%
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm import LLM, SamplingParams
from minivllm.messages import EngineRequest
from minivllm.sampling.sampler import Sampler
from minivllm.sampling.sampling_state import SamplingState
from tutorials.lesson import Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -6.0])
DRAWS = 20_000


def enter(state: SamplingState, slot: int, seed: int = 0, **params: Any) -> None:
    data = EngineRequest(
        request_id=f"slot {slot}",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=[],
        bad_words_token_ids=[],
        max_tokens=16,
        arrival_time=0.0,
    )
    state.add(slot, data, [])


def draw(count: int = DRAWS, logits: Tensor = LOGITS, **params: Any) -> list[int]:
    """``count`` tokens of one request, at positions 0, 1, 2, …"""
    state = SamplingState(1, len(logits), "cpu")
    enter(state, 0, **params)
    rows = logits.expand(count, -1).contiguous()
    return Sampler(state)(rows, np.zeros(count, dtype=np.int64), np.arange(count)).token_ids.tolist()


# %% [markdown]
# ## Temperature
# Dividing the logits by T and taking the softmax gives the probabilities. 20,000 draws come close to them, by
# about one standard deviation, sqrt(p(1 - p) / 20000) < 0.0036.

# %%
lesson.heading("Temperature")
for temperature in (0.5, 1.0, 2.0):
    share = float(torch.softmax(LOGITS.double() / temperature, dim=-1)[0])
    lesson.predict(f"share of token 0 at T = {temperature}", share, "softmax(logits / T)")
    lesson.measure(
        f"share of token 0 at T = {temperature}", draw(temperature=temperature).count(0) / DRAWS, within=0.03
    )
exact = torch.softmax(LOGITS.double(), dim=-1) * DRAWS
counts = np.bincount(draw(temperature=1.0, seed=1), minlength=8)
chi_square = float(((torch.from_numpy(counts) - exact) ** 2 / exact).sum())
lesson.check(
    chi_square < 24.3, f"all eight shares: chi² = {chi_square:.1f}, below 24.3 in 999 of 1,000 fair trials"
)
lesson.bars(
    "t09_temperature",
    "Shares of 20,000 draws at T = 1",
    {f"token {i}": n / 200 for i, n in enumerate(counts)},
    "%",
)

# %% [markdown]
# ## The order of the stages
# top-p keeps the likeliest tokens until they have 80 % of the mass. But the mass of what? Temperature comes
# first, so the same top-p lets more tokens live when it is hot. Count how many different tokens ever appear.

# %%
lesson.heading("How many tokens survive top_p = 0.8")


def survivors(temperature: float, top_p: float) -> int:
    probabilities = torch.softmax(LOGITS.double() / temperature, dim=-1)  # sorted already, likeliest first
    before = probabilities.cumsum(-1) - probabilities
    return int((before < top_p).sum())


temperatures = [0.5, 1.0, 2.0, 5.0]
lesson.predict(
    "different tokens", [survivors(t, 0.8) for t in temperatures], f"at T = {temperatures}, from the softmax"
)
lesson.measure("different tokens", [len(set(draw(temperature=t, top_p=0.8))) for t in temperatures])

# %% [markdown]
# ## Chance without state
# A random number generator has a state, and a batch shares it: add a request, and the random numbers of all
# others change. Preempt one, and its answer changes. The engine has no generator. The noise for a token is a
# *hash* of the request's seed, the position and the token id; the token with the largest logit + noise wins
# (Gumbel-max), which is exactly a draw from the softmax. The control draws with ``torch.multinomial``, as one
# would.

# %%
lesson.heading("The same request, alone and in company")
ROWS = 64
state = SamplingState(ROWS, 8, "cpu")
for slot in range(ROWS):
    enter(state, slot, seed=slot, temperature=1.5)
rows, positions = LOGITS.expand(ROWS, -1).contiguous(), np.arange(ROWS) + 100
sampler = Sampler(state)
together = sampler(rows, np.arange(ROWS), positions).token_ids
alone = torch.cat(
    [sampler(rows[i : i + 1], np.array([i]), positions[i : i + 1]).token_ids for i in range(ROWS)]
)
backwards = sampler(rows, np.arange(ROWS)[::-1].copy(), positions[::-1].copy()).token_ids.flip(0)
lesson.predict("tokens that change in other company", [0, 0], "alone, and with the batch turned round")
lesson.measure(
    "tokens that change in other company", [int((together != other).sum()) for other in (alone, backwards)]
)
probabilities = torch.softmax(rows / 1.5, dim=-1)
generator = torch.Generator().manual_seed(0)
control = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
generator.manual_seed(0)
shifted = torch.multinomial(probabilities[1:], 1, generator=generator)[:, 0]
lesson.say(
    f"  control: when the first of 64 leaves, {int((control[1:] != shifted).sum())} of 63 others get another "
    "token"
)

prompts = [{"prompt_token_ids": [n + 1, 2 * n + 3, 77]} for n in range(6)]
params = [SamplingParams(temperature=1.0, seed=n, max_tokens=24, ignore_eos=True) for n in range(6)]
with LLM(**engine_arguments()) as llm:
    company = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    solo = [llm.generate(p, q, use_tqdm=False)[0].outputs[0].token_ids for p, q in zip(prompts, params)]
with LLM(**engine_arguments(num_gpu_blocks_override=5, max_model_len=64)) as llm:
    squeezed = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    preemptions = llm.get_metrics().num_preemptions
lesson.check(
    company == solo == squeezed and preemptions > 0,
    f"in the engine too: alone, together, {preemptions} preemptions",
)

# %% [markdown]
# ## Log-probabilities
# They are taken from the raw logits, before temperature and truncation: what the model thinks, not what we
# made of it. So they do not move when the temperature does.

# %%
lesson.heading("Log-probabilities")
state = SamplingState(2, 8, "cpu")
enter(state, 0, temperature=0.2, logprobs=3)
enter(state, 1, temperature=5.0, top_p=0.5, logprobs=3)
entries = Sampler(state)(LOGITS.expand(2, -1).contiguous(), np.array([0, 1]), np.array([1, 1])).logprobs
raw = torch.log_softmax(LOGITS, dim=-1)
lesson.predict(
    "three likeliest, rounded", [round(float(x), 4) for x in raw[:3]], "log_softmax of the raw logits"
)
assert entries[0] is not None and entries[1] is not None
lesson.measure("three likeliest, rounded", [round(x, 4) for x in entries[0].logprobs[1:]])
lesson.check(
    entries[0].logprobs[1:] == entries[1].logprobs[1:], "the same at T = 0.2 and at T = 5 with top-p"
)

# %% [markdown]
# ## Grammar masks, and the surprise
# A grammar forbids tokens: their logits become minus infinity, and what remains is scaled up. That is a stage
# of the sampler like any other (``PositionMask``; the engine's own masks come from llguidance, see
# ``structured_output/``). Let the rule be "AB or CD", and let the model like A first (90 %), but hate B after
# it (1 %); after C it is nearly sure of D (99 %). What will a masked model write?
#
# Asking until an answer fits gives P(AB) = 0.9 · 0.01 / (0.9 · 0.01 + 0.1 · 0.99) = 8 %. A mask does not ask
# again. When A is written there is no way back, and B is forced, however unlikely: P(AB) = 90 %.

# %%
lesson.heading("AB or CD")
A, B, C, D = range(4)
START = torch.log(torch.tensor([0.9, 0.0001, 0.1, 0.0001]))
AFTER = {
    A: torch.log(torch.tensor([0.33, 0.01, 0.33, 0.33])),
    C: torch.log(torch.tensor([0.003, 0.003, 0.004, 0.99])),
}
ALLOWED = {None: [A, C], A: [B], C: [D]}


class Grammar:
    """AB or CD, as a stage of the sampler: each slot knows what it has written."""

    is_empty = False

    def __init__(self, num_slots: int) -> None:
        self.written: list[int | None] = [None] * num_slots

    def touches(self, slots: np.ndarray) -> np.ndarray:
        return np.ones(len(slots), dtype=np.bool_)

    def apply(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> None:
        for row, slot in enumerate(slots.tolist()):
            allowed = ALLOWED[self.written[slot]]
            kept = logits[row, allowed].clone()
            logits[row] = -torch.inf
            logits[row, allowed] = kept


def write(num_strings: int, masked: bool) -> list[str]:
    state, grammar = SamplingState(num_strings, 4, "cpu"), Grammar(num_strings)
    for slot in range(num_strings):
        enter(state, slot, seed=slot, temperature=1.0)
    sampler = Sampler(state, masks=[grammar] if masked else [])
    slots = np.arange(num_strings)
    first = sampler(
        START.expand(num_strings, -1).contiguous(), slots, np.full(num_strings, 1)
    ).token_ids.tolist()
    grammar.written = list(first)
    after = torch.stack([AFTER.get(token, torch.zeros(4)) for token in first])
    second = sampler(after, slots, np.full(num_strings, 2)).token_ids.tolist()
    return ["ABCD"[a] + "ABCD"[b] for a, b in zip(first, second)]


masked, free = write(4000, masked=True), write(40_000, masked=False)
fitting = [text for text in free if text in ("AB", "CD")]
lesson.predict("strings that break the rule, masked", 0, "they have no probability")
lesson.predict("P(AB), masked", 0.9, "decided by the first token alone")
lesson.predict("P(AB), asked again until it fits", 0.009 / (0.009 + 0.099), "Bayes")
lesson.measure("strings that break the rule, masked", sum(text not in ("AB", "CD") for text in masked))
lesson.measure("P(AB), masked", masked.count("AB") / len(masked), within=0.02)
lesson.measure("P(AB), asked again until it fits", fitting.count("AB") / len(fitting), within=0.1)
shares = {
    "masked": 100 * masked.count("AB") / len(masked),
    "asked again": 100 * fitting.count("AB") / len(fitting),
}
lesson.bars("t09_grammar", "How often AB is written", shares, "%")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "top_k = 3 and top_p = 0.5 together at T = 1: how many tokens survive? (top-p sees what top-k left.)"
)
def both() -> str:
    probabilities = torch.softmax(LOGITS.double()[:3], dim=-1)
    expected = int((probabilities.cumsum(-1) - probabilities < 0.5).sum())
    assert len(set(draw(temperature=1.0, top_k=3, top_p=0.5))) == expected
    return (
        f"{expected}: the likeliest of three has {float(probabilities[0]):.0%} of their mass, which is "
        "enough alone"
    )


@lesson.exercise(
    "min_p = 0.1 at T = 1 and T = 3: which tokens survive? Why is it called robust against high temperatures?"
)
def min_p() -> str:
    kept = {}
    for temperature in (1.0, 3.0):
        scaled = (LOGITS / temperature - LOGITS[0] / temperature).exp()
        kept[temperature] = int((scaled >= 0.1).sum())
        assert len(set(draw(temperature=temperature, min_p=0.1))) == kept[temperature]
    return f"tokens kept: {kept}; the hopeless one (logit -6) never, since it stays below a tenth of the best"


@lesson.exercise(
    "Draw the same position twice, and with another seed. How often do two seeds agree by chance?"
)
def seeds() -> str:
    first, again, other = (draw(2000, temperature=1.0, seed=seed) for seed in (1, 1, 2))
    agree = sum(a == b for a, b in zip(first, other)) / 2000
    chance = float((torch.softmax(LOGITS, dim=-1) ** 2).sum())
    assert first == again and abs(agree - chance) < 0.04
    return (
        f"the same seed always; two seeds in {agree:.1%} of the draws, sum of p² = {chance:.1%}: by chance "
        "alone"
    )


lesson.passed(
    "shares follow softmax(logits / T)",
    "no token depends on the company, not even after preemptions",
    "a grammar mask is not the same as asking again: 90 % against 8 %",
)
