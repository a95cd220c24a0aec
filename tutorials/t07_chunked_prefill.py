"""07 · Chunked prefill: the token budget of a step decides how long a long prompt may make the others wait.

Four people are reading answers as they are written. A fifth one pastes a book. In a step that takes in the
whole book no reader gets a token before the book is read. The budget of chapter 5 cuts it into chunks by
itself
(Sarathi-Serve, Agrawal et al. 2024); what remains to be decided is a single number.
"""

# %% [markdown]
# ## A step has a price
# Time is counted in a unit that every machine has: the time to compute one token. Reading all weights costs
# something even for a single token. How much differs between machines: on one that is bound by memory it can
# be the time of hundreds of tokens. This chapter *assumes* 32, which it does not measure: a step of n tokens
# takes 32 + n. Another number moves the knee below, and nothing else.

# %%
from __future__ import annotations

from minivllm import LLM, SamplingParams
from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival, TraceStep, run
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
WEIGHTS, BOOK, READERS = 32, 480, 4


def price(step: TraceStep) -> int:
    return WEIGHTS + step.num_tokens


def serve(budget: int) -> list[TraceStep]:
    """Four readers with answers of 200 tokens; the book comes before step 5 and wants an answer of 8."""
    config = SchedulerConfig(max_num_batched_tokens=budget, max_model_len=512)
    scheduler = Scheduler(
        config, KVCacheManager([FullAttentionManager(num_blocks=257, block_size=16)], max_model_len=512)
    )
    readers = [Arrival(f"R{number}", 4, 200) for number in range(1, READERS + 1)]
    return run(scheduler, [*readers, Arrival("book", BOOK, 8, step=5)])


def longest_gap(steps: list[TraceStep], name: str) -> int:
    """Most time between two tokens of one request."""
    gaps, waited = [], None
    for step in steps:
        if waited is not None:
            waited += price(step)
        if name in step.answered:
            gaps.append(waited or 0)
            waited = 0
    return max(gaps)


def time_to_first_token(steps: list[TraceStep], name: str, arrival: int) -> int:
    last = next(number for number, step in enumerate(steps) if name in step.answered)
    return sum(price(step) for step in steps[arrival : last + 1])


# %% [markdown]
# ## Predict, for every budget
# The readers come first in every step, and take 4 tokens. The book gets what is left, budget - 4, until all
# 480 are in. The longest gap is the price of one full step.

# %%
lesson.heading("The longest wait between two tokens, and the wait for the book's first")
budgets = [16, 24, 36, 64, 100, 164, 244, 512]
chunks_of = {budget: -(-BOOK // (budget - READERS)) for budget in budgets}
lesson.say(f"  budgets {budgets}: the book takes {list(chunks_of.values())} chunks")
gaps = [WEIGHTS + READERS + min(BOOK, budget - READERS) for budget in budgets]
firsts = [chunks_of[budget] * (WEIGHTS + READERS) + BOOK for budget in budgets]
lesson.predict("longest gaps of a reader", gaps, "one full step")
lesson.predict(
    "time to the book's first token", firsts, "for each chunk the weights and four readers, once the book"
)
served = {budget: serve(budget) for budget in budgets}
gap_of = {budget: longest_gap(steps, "R1") for budget, steps in served.items()}
first_of = {budget: time_to_first_token(steps, "book", 5) for budget, steps in served.items()}
lesson.measure("longest gaps of a reader", list(gap_of.values()))
lesson.measure("time to the book's first token", list(first_of.values()))

# %% [markdown]
# ## The surprise: it is not a trade of equals
# From 512 down to 100 the readers' longest wait falls to a quarter, and the book's first token comes a
# quarter later. From 36 down to 16 the readers gain little, 20 of 68, since half to two thirds of such a step
# is reading weights, and the book waits nearly twice as long. There is a knee, and it lies where a chunk
# costs about as much as the weights.

# %%
lesson.curves(
    "t07_budget",
    "What the budget does",
    budgets,
    {
        "longest gap of a reader": [gap_of[budget] for budget in budgets],
        "first token of the book": [first_of[budget] for budget in budgets],
    },
    "token budget, time [tokens]",
    log=True,
)
lesson.check(
    gap_of[512] / gap_of[100] > 3.5 and first_of[100] / first_of[512] < 1.4,
    "512 -> 100 costs the book little",
)
lesson.check((gap_of[36] - gap_of[16], gap_of[36]) == (20, 68), "36 -> 16: the longest gap falls by 20 of 68")
lesson.check(
    gap_of[36] / gap_of[16] < 1.5 and first_of[16] / first_of[36] > 1.8, "36 -> 16 costs much, brings little"
)


def strip(steps: list[TraceStep]) -> dict[str, list[Cell]]:
    rows: dict[str, list[Cell]] = {}
    for name in ("R1", "R4", "book"):
        counts = [step.num_scheduled_tokens.get(name, 0) for step in steps[3:14]]
        rows[name] = [(str(n), "prompt" if n > 1 else "decode") if n else ("", "") for n in counts]
    return rows


lesson.cells("t07_whole", "Budget 512: the book in one bite", strip(serve(512)))
lesson.cells("t07_chunks", "Budget 100: the book in chunks", strip(serve(100)))

# %% [markdown]
# ## Does a chunk change the answer?
# It must not: chapter 2 showed that keys and values do not mind the portions. Here the real engine does it,
# with a cap on what one request may get per step, and counts its steps.

# %%
lesson.heading("The engine, in one bite and in chunks")
book = [(11 * i + i * i) % 512 for i in range(BOOK)]
params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
answers = []
for cap in (0, 96, 40):
    chunks = 1 if cap == 0 else -(-BOOK // cap)
    lesson.predict(
        f"steps with at most {cap or BOOK} at once",
        chunks - 1 + 8,
        f"{chunks} for the prompt, the last gives a token",
    )
    with LLM(**engine_arguments(long_prefill_token_threshold=cap)) as llm:
        [output] = llm.generate({"prompt_token_ids": book}, params, use_tqdm=False)
        answers.append(output.outputs[0].token_ids)
        lesson.measure(f"steps with at most {cap or BOOK} at once", llm.get_metrics().num_steps)
lesson.check(answers[0] == answers[1] == answers[2], "the answer is the same, however the prompt was cut")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "What is the smallest budget with which the book is ever read while the readers write? Try it, and one "
    "less."
)
def starvation() -> str:
    found = {
        budget: next(i for i, step in enumerate(serve(budget)) if "book" in step.num_scheduled_tokens)
        for budget in (4, 5)
    }
    assert found[5] < 10 and found[4] > 190
    return (
        f"budget 5 starts it in step {found[5]}, one token at a time; with 4 it waits until step {found[4]}"
    )


@lesson.exercise(
    "Let long_prefill_token_threshold cap the book at 60 with a budget of 512. Which gap, and how many "
    "chunks?"
)
def cap() -> str:
    config = SchedulerConfig(max_num_batched_tokens=512, max_model_len=512, long_prefill_token_threshold=60)
    scheduler = Scheduler(
        config, KVCacheManager([FullAttentionManager(num_blocks=257, block_size=16)], max_model_len=512)
    )
    steps = run(scheduler, [Arrival("R1", 4, 40), Arrival("book", BOOK, 8, step=5)])
    chunks = sum(step.num_scheduled_tokens.get("book", 0) == 60 for step in steps)
    assert (longest_gap(steps, "R1"), chunks) == (WEIGHTS + 1 + 60, 8)
    return (
        f"gap {longest_gap(steps, 'R1')}, {chunks} chunks; unlike a budget it leaves room for a second book "
        "beside it"
    )


lesson.passed(
    "the longest gap is the price of one full step",
    f"512 -> 100 tokens: gap {gap_of[512]} -> {gap_of[100]}, first token {first_of[512]} -> {first_of[100]}",
    "chunks do not change the answer",
)
