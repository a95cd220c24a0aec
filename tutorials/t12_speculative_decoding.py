"""12 · Speculative decoding: guess several tokens, check them in one step,
and lose nothing when a guess is wrong.

Chapter 2 ended with a complaint: a decode step reads all weights to write one token. Checking five tokens
reads them once as well. So let something cheap guess, and let the model check (Leviathan et al. 2023). To the
scheduler of chapter 5 that is nothing new: a request with four guesses lacks five tokens.
"""

# %% [markdown]
# ## A drafter that is as good as we like
# ``Drafter`` is the extension point: it sees the tokens so far and proposes some. This one has read the
# answer in advance, and forgets it with a given probability, position by position. It shows how much a
# drafter is worth.

# %%
from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minivllm import LLM, Drafter, DraftTask, SamplingParams, register_drafter
from minivllm.messages import SchedulerStats
from minivllm.spec_decode.adaptive import StepCost
from tutorials.lesson import Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
PROMPT, N, K = [(11 * i + 5) % 512 for i in range(20)], 120, 4


class Oracle(Drafter):
    """Knows the answer, but is wrong where ``is_wrong`` says so."""

    cost_per_token = 0.0

    def __init__(self, answer: Sequence[int], is_wrong: np.ndarray) -> None:
        self.answer, self.is_wrong = answer, is_wrong

    def propose(self, tasks: Sequence[DraftTask]) -> dict[str, list[int]]:
        guesses = {}
        for task in tasks:
            start = len(task.token_ids) - len(PROMPT)
            places = range(start, start + task.max_tokens)
            guesses[task.request_id] = [(self.answer[p] + int(self.is_wrong[p])) % 512 for p in places]
        return guesses

    def finish(self, request_id: str, output_token_ids: Sequence[int], cache_salt: str | None = None) -> None:
        pass


def generate(drafter: Drafter | None, params: SamplingParams) -> tuple[list[int], SchedulerStats]:
    speculative = None
    if drafter is not None:
        register_drafter("oracle", lambda context: drafter)
        # The engine learns how many guesses pay.
        # Where checking costs nothing it is always K, to be predictable.
        speculative = {"method": "oracle", "num_speculative_tokens": K, "verification_cost": 0.0}
    with LLM(**engine_arguments(), speculative_config=speculative) as llm:
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
        return list(output.outputs[0].token_ids), llm.get_metrics()


# %% [markdown]
# ## Predict the steps
# After the prompt one token is known. Every step checks up to K = 4 guesses. The guesses before the first
# wrong one are accepted, and one token more is always written: the right one in place of the wrong one, or a
# bonus behind the last.


# %%
def predicted(is_wrong: np.ndarray) -> tuple[int, list[int]]:
    """Steps, and how many guesses each check accepts."""
    written, steps, accepted = 1, 1, []
    while written < N:
        guesses = min(K, N - written - 1)
        run = next((i for i in range(guesses) if is_wrong[written + i]), guesses)
        written, steps = written + run + 1, steps + 1
        accepted += [run] if guesses else []
    return steps, accepted


greedy = SamplingParams(temperature=0.0, max_tokens=N, ignore_eos=True)
answer, alone = generate(None, greedy)
lesson.heading(f"{N} tokens with a drafter of any quality")
qualities = [1.0, 0.8, 0.5, 0.0]
wrong = {a: np.random.default_rng(3).random(N + K) >= a for a in qualities}
lesson.predict("steps without", N, "one token each")
lesson.predict(
    "steps at quality 1, 0.8, 0.5, 0", [predicted(wrong[a])[0] for a in qualities], "the loop above"
)
runs = {a: generate(Oracle(answer + [0] * K, wrong[a]), greedy) for a in qualities}
lesson.measure("steps without", alone.num_steps)
lesson.measure("steps at quality 1, 0.8, 0.5, 0", [runs[a][1].num_steps for a in qualities])
lesson.bars(
    "t12_steps",
    f"Steps for {N} tokens",
    {"none": N} | {f"{a:.0%} right": runs[a][1].num_steps for a in qualities},
    "steps",
)

# %% [markdown]
# ## The histogram
# How often is the first guess accepted, the second, …? A guess only counts if all before it were right: with
# quality a, the k-th is accepted with probability a^k. The tokens per step add up to 1 + a + a² + a³ + a⁴.

# %%
lesson.heading("Which guesses are accepted, at quality 0.8")
stats = runs[0.8][1]
per_position = [sum(run > place for run in predicted(wrong[0.8])[1]) for place in range(K)]
lesson.predict("accepted at position 1, 2, 3, 4", per_position, "from the same loop")
lesson.measure("accepted at position 1, 2, 3, 4", stats.num_accepted_tokens_per_position)
shares = [100 * count / stats.num_drafts for count in stats.num_accepted_tokens_per_position]
lesson.curves(
    "t12_acceptance",
    "Accepted guesses by position",
    list(range(1, K + 1)),
    {"measured": shares, "0.8^k": [100 * 0.8**k for k in range(1, K + 1)]},
    "position, % of the checks",
)

# %% [markdown]
# ## The surprise: a drafter cannot change the answer
# Not even one that is always wrong. The answer is the same token by token, because the model itself samples
# every token; a guess is accepted only if it *is* that token. It holds for random sampling as well: the noise
# depends on seed and position (chapter 9), not on how many tokens a step checks. What a bad drafter does cost
# is work, and with it time: the wrong guesses were computed.

# %%
lesson.heading("The same answer, whoever guesses")
lesson.check(all(tokens == answer for tokens, _ in runs.values()), "greedy: four drafters, one answer")
random_params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=N, ignore_eos=True)
sampled, _ = generate(None, random_params)
for quality in (0.8, 0.0):
    tokens, _ = generate(Oracle(sampled + [0] * K, wrong[quality]), random_params)
    lesson.check(
        tokens == sampled and tokens != answer, f"temperature 1, quality {quality:g}: the same random answer"
    )
drafted = sum(min(K, N - written - 1) for written in range(1, N))
lesson.predict(
    "tokens computed with guesses that are all wrong",
    len(PROMPT) + N - 1 + drafted,
    "4 guesses a step for nothing",
)
lesson.measure("tokens computed with guesses that are all wrong", runs[0.0][1].num_computed_tokens)

# %% [markdown]
# ## A real drafter
# ``{"method": "ngram"}`` looks up the last tokens in the text so far and proposes what followed them then. It
# is free, and good where answers repeat: a greedy answer of a small model goes round in circles sooner or
# later.

# %%
lesson.heading("Prompt lookup")
config = {"method": "ngram", "num_speculative_tokens": 7}
with LLM(**engine_arguments(speculative_config=config)) as llm:
    [output] = llm.generate({"prompt_token_ids": PROMPT}, greedy, use_tqdm=False)
    stats = llm.get_metrics()
lesson.check(list(output.outputs[0].token_ids) == answer, "the same answer again")
lesson.check(stats.num_steps + stats.num_accepted_tokens == N, "every accepted guess saves a step")
lesson.say(
    f"  {stats.num_steps} steps, {stats.num_accepted_tokens} of {stats.num_draft_tokens} guesses accepted"
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "If checking a guess costs 5 % of a step, how many guesses pay at quality 0.5, 0.8, 0.95? And in a batch "
    "of 32?"
)
def how_many() -> str:
    cost = StepCost(verify_fixed=0.0, verify_token=0.05)

    def best(a: float, batch: int) -> int:
        return max(range(16), key=lambda k: sum(a**i for i in range(k + 1)) / cost.relative(k, batch))

    found = {a: (best(a, 1), best(a, 32)) for a in (0.5, 0.8, 0.95)}
    assert found[0.5][0] < found[0.8][0] < found[0.95][0] and all(
        alone > batch for alone, batch in found.values()
    )
    return (
        f"quality: (alone, batch of 32): {found}; a batch is bound by arithmetic, where guesses are not free"
    )


@lesson.exercise(
    "Tokens per step cannot exceed 1 / (1 - a), however many guesses. Check it for a = 0.8 with 200 long "
    "runs."
)
def bound() -> str:
    draws = np.random.default_rng(0).random((200, 1000)) < 0.8
    rates = []
    for k in (1, 4, 16, 64):
        runs = [next((i for i in range(k) if not row[i]), k) for row in draws]
        rates.append(1 + float(np.mean(runs)))
    assert all(rate < 5.0 * 1.1 for rate in rates)
    return (
        f"1, 4, 16, 64 guesses: {', '.join(f'{rate:.2f}' for rate in rates)} tokens per step, never much "
        "above 5"
    )


lesson.passed(
    f"{N} tokens in {', '.join(str(runs[a][1].num_steps) for a in qualities)} steps, as predicted",
    "the answer is the same with any drafter, greedy and sampled",
    "every accepted guess saves one step",
)
