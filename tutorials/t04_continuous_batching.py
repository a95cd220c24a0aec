"""04 · Continuous batching: a batch is as slow as its longest answer,
unless requests that are done leave at once.

A step reads all weights, whether it writes a token for one request or for sixteen; batching is nearly free.
The question is which requests are in the batch. Orca (Yu et al. 2022) answered it anew in every step.
"""

# %% [markdown]
# ## Static batching, the control
# Sixteen requests, four batch slots, answers of 2 to 20 tokens. A static batch takes four, and takes the next
# four when all of them are done. The engine's scheduler can be made to work like that, by not telling it of
# the others in the meantime.

# %%
from __future__ import annotations

import heapq
import random

from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival, TraceStep, run
from tutorials.lesson import Cell, Lesson

lesson = Lesson(__doc__)
SLOTS = 4
draw = random.Random(4)
answers = [draw.randint(2, 20) for _ in range(16)]


def scheduler() -> Scheduler:
    config = SchedulerConfig(max_num_seqs=SLOTS, max_num_batched_tokens=512, max_model_len=512)
    return Scheduler(
        config, KVCacheManager([FullAttentionManager(num_blocks=129, block_size=16)], max_model_len=512)
    )


def arrivals(lengths: list[int], first: int = 0) -> list[Arrival]:
    return [Arrival(f"R{number}", 8, length) for number, length in enumerate(lengths, first)]


def static_batching(lengths: list[int]) -> list[TraceStep]:
    engine, steps = scheduler(), []
    for first in range(0, len(lengths), SLOTS):
        steps += run(engine, arrivals(lengths[first : first + SLOTS], first))
    return steps


def continuous_batching(lengths: list[int]) -> list[TraceStep]:
    return run(scheduler(), arrivals(lengths))


# %% [markdown]
# ## Predict
# Static: every batch of four takes as many steps as its longest answer. Continuous: the next request takes
# the batch slot that becomes free first, like customers at four counters.

# %%
lesson.heading(f"16 answers of {min(answers)} to {max(answers)} tokens, {SLOTS} slots")
lesson.predict(
    "steps, static", sum(max(answers[i : i + 4]) for i in range(0, 16, 4)), "the longest of each four"
)
free_at = [0] * SLOTS
for length in answers:
    heapq.heapreplace(free_at, free_at[0] + length)
lesson.predict("steps, continuous", max(free_at), "four counters, one queue")

static, continuous = static_batching(answers), continuous_batching(answers)
lesson.measure("steps, static", len(static))
lesson.measure("steps, continuous", len(continuous))

# %% [markdown]
# ## The picture
# A row is a batch slot, a column a step, a letter a request, and a grey cell is a place in the batch that was
# paid for and not used. The lower picture has the same coloured cells: the work is the same, only the holes
# are gone.


# %%
def gantt(steps: list[TraceStep]) -> dict[str, list[Cell]]:
    """Which request has which batch slot: a new one takes the first that is free."""
    slots: list[str | None] = [None] * SLOTS
    rows: dict[str, list[Cell]] = {f"slot {number}": [] for number in range(SLOTS)}
    for step in steps:
        for name in step.num_scheduled_tokens:
            if name not in slots:
                slots[slots.index(None)] = name
        for row, name in zip(rows.values(), slots):
            if name is None or name not in step.num_scheduled_tokens:
                row.append(("-", "idle"))
            else:
                letter = "ABCDEFGHIJKLMNOP"[int(name[1:])]
                row.append((letter, "prompt" if step.num_scheduled_tokens[name] > 1 else "decode"))
        slots = [None if name in step.finished else name for name in slots]
    return rows


lesson.cells("t04_static", "Static batching", gantt(static), narrow=True)
lesson.cells("t04_continuous", "Continuous batching", gantt(continuous), narrow=True)


def utilisation(steps: list[TraceStep]) -> float:
    return sum(len(step.num_scheduled_tokens) for step in steps) / (SLOTS * len(steps))


lesson.check(
    sum(len(step.num_scheduled_tokens) for step in static)
    == sum(len(step.num_scheduled_tokens) for step in continuous)
    == sum(answers),
    f"both write the same {sum(answers)} tokens",
)
lesson.bars(
    "t04_utilisation",
    "Used places in the batch",
    {"static": 100 * utilisation(static), "continuous": 100 * utilisation(continuous)},
    "%",
)

# %% [markdown]
# ## The surprise: one long answer
# Averages hide it. Let fifteen people want 4 tokens, and one of them 100. How much slower does that one
# request make the others? In a static batch three neighbours are done 96 steps before their places are free,
# and all requests behind them wait as well.

# %%
lesson.heading("Fifteen short answers and a long one")
one_long = [100] + [4] * 15


def mean_wait(steps: list[TraceStep]) -> float:
    """Mean step in which the fifteen short ones are done."""
    done = {name: number for number, step in enumerate(steps, 1) for name in step.finished}
    return sum(done[f"R{number}"] for number in range(1, 16)) / 15


# Static: three leave after 4 steps but no other enters before 100; then groups of four at 104, 108 and 112.
lesson.predict(
    "mean steps of a short answer, static", (3 * 4 + 4 * (104 + 108 + 112)) / 15, "groups after the long one"
)
lesson.predict(
    "mean steps of a short answer, continuous", 3 * (4 + 8 + 12 + 16 + 20) / 15, "three slots, five rounds"
)
lesson.measure("mean steps of a short answer, static", mean_wait(static_batching(one_long)))
lesson.measure("mean steps of a short answer, continuous", mean_wait(continuous_batching(one_long)))

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Serve the longest answers first. How close do the four counters come to the bound total / slots?"
)
def longest_first() -> str:
    steps = len(continuous_batching(sorted(answers, reverse=True)))
    bound = -(-sum(answers) // SLOTS)
    assert bound <= steps <= len(continuous)
    return (
        f"{steps} steps, {bound} are the least possible; but the length of an answer is not known in advance"
    )


@lesson.exercise("Sort the requests for static batching too. How many of the lost steps come back?")
def sorted_static() -> str:
    steps = len(static_batching(sorted(answers)))
    assert steps < len(static)
    return (
        f"{steps} steps instead of {len(static)}, continuous takes {len(continuous)} without knowing anything"
    )


@lesson.exercise(
    "Is there a workload for which static batching is as good? Find one, and say why it does not occur."
)
def equal_lengths() -> str:
    same = [20] * 16
    assert len(static_batching(same)) == len(continuous_batching(same)) == 80
    return "answers of equal length that all arrive together: a benchmark, not a service"


lesson.passed(
    f"{len(static)} steps static, {len(continuous)} continuous, for the same tokens",
    f"{utilisation(static):.0%} and {utilisation(continuous):.0%} of the batch were used",
    "one long answer holds up its whole batch, and no longer",
)
