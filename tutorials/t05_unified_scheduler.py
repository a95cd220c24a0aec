"""05 · The unified scheduler: there is no prefill and no decode,
only requests that catch up with their tokens.

Older engines had a phase for prompts and a phase for answers, and a bug for every way the two could meet.
vLLM V1 asks one question per step: how many more tokens do we compute, for whom? The answer is a dictionary.
"""

# %% [markdown]
# ## The figure of the articles
# A budget of 10 tokens per step, three prompts of 3, 5 and 12 tokens. ``trace.simulated_steps`` runs the real
# ``Scheduler`` and ``KVCacheManager`` against a worker without a model. Running requests are served first, in
# order; then waiting ones, while budget is left.
# So the first step takes R1 and R2 whole, and what is left of the budget goes to R3:

# %%
from __future__ import annotations

import inspect
import random

from minivllm.cli.trace.command import Workload, simulated_steps
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import TraceStep
from tutorials.lesson import Cell, Lesson

lesson = Lesson(__doc__)


def heat_strip(steps: list[TraceStep], num_requests: int) -> dict[str, list[Cell]]:
    """A row per request, a column per step, in each cell the number of tokens."""

    def cell(step: TraceStep, name: str) -> Cell:
        if name in step.preempted:
            return "x", "preempted"
        if name not in step.num_scheduled_tokens:
            return "", ""
        return str(step.num_scheduled_tokens[name]), "decode" if name in step.decoding else "prompt"

    names = [f"R{number}" for number in range(1, num_requests + 1)]
    columns: list[Cell] = [(str(step.step), "") for step in steps]
    return {"step": columns, **{name: [cell(step, name) for step in steps] for name in names}}


lesson.heading("Budget 10, prompts of 3, 5 and 12")
lesson.predict("step 0", {"R1": 3, "R2": 5, "R3": 2}, "3 + 5 leave 2 of 10")
lesson.predict("step 1", {"R1": 1, "R2": 1, "R3": 8}, "two answers leave 8")
lesson.predict("step 2", {"R1": 1, "R2": 1, "R3": 2}, "12 - 2 - 8 = 2 remain of the prompt")
lesson.predict("step 3", {"R1": 1, "R2": 1, "R3": 1}, "all have caught up: one each")
steps = list(simulated_steps(Workload(budget=10, prompt_lens=[3, 5, 12], max_tokens=4)))
for number in range(4):
    lesson.measure(f"step {number}", steps[number].num_scheduled_tokens)
lesson.cells("t05_figure", "The articles' figure", heat_strip(steps, 3))

# %% [markdown]
# ## The whole idea in one function
# If the rule is that simple, it can be written down from memory. Here it is, for a cache that never fills up.
# The engine's ``Scheduler`` is longer because of everything else: memory, preemption, prefix hits, drafts,
# aborts, steps in flight. How much longer is counted below.


# %%
def predicted_steps(
    budget: int, prompts: list[int], max_tokens: int, max_num_seqs: int
) -> list[dict[str, int]]:
    lacking = {f"R{i}": tokens for i, tokens in enumerate(prompts, 1)}  # known tokens that are not computed
    written = dict.fromkeys(lacking, 0)
    running: list[str] = []
    steps = []
    while lacking:
        left, step = budget, {}
        waiting = [name for name in lacking if name not in running]
        for name in running + waiting[: max_num_seqs - len(running)]:
            if left > 0:
                step[name] = min(lacking[name], left)
                left -= step[name]
        running += [name for name in step if name not in running]
        for name, count in step.items():
            lacking[name] -= count
            if lacking[name] == 0:  # caught up: a new token is known
                lacking[name], written[name] = 1, written[name] + 1
        done = [name for name in running if written[name] == max_tokens]
        running = [name for name in running if name not in done]
        lacking = {name: count for name, count in lacking.items() if name not in done}
        steps.append(step)
    return steps


lines = [len(inspect.getsource(part).splitlines()) for part in (predicted_steps, Scheduler)]
lesson.heading(f"{lines[0]} lines against the real scheduler of {lines[1]}")
draw = random.Random(0)
workloads = [
    (
        draw.randint(1, 24),
        [draw.randint(1, 40) for _ in range(draw.randint(1, 8))],
        draw.randint(1, 6),
        draw.randint(1, 8),
    )
    for _ in range(200)
]
predicted = [predicted_steps(*workload) for workload in workloads]
lesson.predict("steps of 200 random workloads", sum(map(len, predicted)), "the function above")
measured = [
    [
        step.num_scheduled_tokens
        for step in simulated_steps(Workload(budget=b, prompt_lens=p, max_tokens=m, max_num_seqs=s))
    ]
    for b, p, m, s in workloads
]
lesson.measure("steps of 200 random workloads", sum(map(len, measured)))
lesson.check(measured == predicted, "every one of those dictionaries is the same, entry by entry")

# %% [markdown]
# ## When memory runs out: preemption
# Four blocks of 4 tokens are 16 tokens, for three prompts of 4 that want to grow to 4 + 8. One has to go. To
# *preempt* a request is to take all its blocks: the request that came last loses them, and waits at the front
# of the queue. Its answer so far is not lost. These tokens are *known*, and are computed again later as if
# they were a prompt. To the scheduler it is a request that lacks more tokens than before.

# %%
lesson.heading("Preemption")
lesson.predict(
    "first preemption (step, who)",
    (1, ["R3"]),
    "after step 0 three blocks are full, one is left, R1 takes it",
)
crowded = Workload(budget=16, prompt_lens=[4, 4, 4], max_tokens=8, block_size=4, num_blocks=5)
steps = list(simulated_steps(crowded))
lesson.cells("t05_preemption", "Four blocks for three requests (x: preempted)", heat_strip(steps, 3))
lesson.measure(
    "first preemption (step, who)", next((s.step, s.preempted[-1:]) for s in steps if "R3" in s.preempted)
)
lesson.check(
    all(
        not s.preempted or set(s.num_scheduled_tokens) <= set(steps[i - 1].num_scheduled_tokens)
        for i, s in enumerate(steps)
    ),
    "a step that preempts admits no new request",
)

# %% [markdown]
# ## The surprise: urgent is not first
# With ``policy="priority"`` the waiting queue and the choice of the victim follow the priority. R3 arrives
# late, but is urgent. It preempts no other request to get in: admission only takes what is free. But when the
# blocks run out later, the request to go is not the last one, as before, but the least important one,
# wherever it stands in the queue.

# %%
lesson.heading("Priority")
late = {
    "budget": 16,
    "prompt_lens": [4, 4, 4],
    "max_tokens": 8,
    "block_size": 4,
    "num_blocks": 7,
    "arrivals": [0, 0, 2],
}
lesson.predict("who is preempted, first come first served", {"R3"}, "the last one")
lesson.predict("who is preempted, by priority", {"R2"}, "the one with the worst priority")
fair = list(simulated_steps(Workload(**late)))
urgent = list(simulated_steps(Workload(**late, policy="priority", priorities=[1, 2, 0])))
lesson.cells("t05_fcfs", "First come, first served", heat_strip(fair, 3))
lesson.cells("t05_priority", "R3 is urgent (priority 0), R2 is not (2)", heat_strip(urgent, 3))
lesson.measure(
    "who is preempted, first come first served", {name for step in fair for name in step.preempted}
)
lesson.measure("who is preempted, by priority", {name for step in urgent for name in step.preempted})


def finished_at(steps: list[TraceStep], name: str) -> int:
    return next(step.step for step in steps if name in step.finished)


lesson.say(f"  R3 is done in step {finished_at(urgent, 'R3')} instead of {finished_at(fair, 'R3')},")
lesson.say(f"  R2 in step {finished_at(urgent, 'R2')} instead of {finished_at(fair, 'R2')}")
lesson.check(
    all("R3" not in step.num_scheduled_tokens for step in urgent[:2])
    and "R3" in urgent[2].num_scheduled_tokens,
    "R3 got in as soon as it came, since a block was free",
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Cap a long prompt's share: with threshold=4, when do R1 and R2 of the figure finish, and when does R3?"
)
def threshold() -> str:
    capped = list(simulated_steps(Workload(budget=10, prompt_lens=[3, 5, 12], max_tokens=4, threshold=4)))
    assert max(max(step.num_scheduled_tokens.values()) for step in capped) == 4
    return (
        f"done in steps {[finished_at(capped, f'R{i}') for i in (1, 2, 3)]}, no request computes more than 4 "
        "in a step"
    )


@lesson.exercise(
    "How many blocks does the preemption example need so that no request is ever preempted? Find the "
    "smallest number."
)
def enough_blocks() -> str:
    for blocks in range(5, 20):
        steps = simulated_steps(
            Workload(budget=16, prompt_lens=[4, 4, 4], max_tokens=8, block_size=4, num_blocks=blocks)
        )
        if not any(step.preempted for step in steps):
            break
    assert blocks == 10, "3 requests x ceil((4 + 8 - 1) / 4) blocks, and the null block"
    return (
        f"{blocks}: three requests of 11 tokens are 9 blocks (the last token is never stored), and the null "
        "block"
    )


lesson.passed(
    "the articles' figure comes out of the real scheduler",
    f"{lines[0]} lines predict 200 random workloads",
    "the last one to come is preempted first, or the least important one",
    "a step that preempts admits no new request",
)
