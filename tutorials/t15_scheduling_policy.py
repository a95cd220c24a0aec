"""15 · Add a scheduling policy: vLLM V0's order, measured against V1's.

Which request comes first? V0 said: victims of a preemption, then newcomers, then those that are running, so
that the batch is large. V1 turned it round. Both are short, since everything else (memory, chunks,
preemption, results) stays.
"""

# %% [markdown]
# ## The policy
# A scheduling policy decides three things: the queue of the requests that wait, the victim when memory is
# short, and the turns of a step. V1's turns are: serve the running requests, then admit waiting ones. V0's
# order is the other way round, and a step that admits a request serves no other: prompts and answers never
# mix. Preempted requests stand at the front of the waiting queue already.

# %%
from __future__ import annotations

from itertools import pairwise

from minivllm import LLM, SamplingParams, SchedulingPolicy, SortedQueue, register_policy
from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.scheduler.policy import Turns
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival, TraceStep, run
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)


class NewcomersFirst(SchedulingPolicy):
    """V0's order: preempted requests, then new ones, then those that run."""

    def take_turns(self, turns: Turns) -> None:
        turns.admit_waiting()
        if turns.num_scheduled_requests == 0:
            turns.serve_running()


register_policy("v0", NewcomersFirst)

# %% [markdown]
# That is the whole policy, and ``scheduling_policy="v0"`` now names it. (V0 never cut a prompt; here that
# holds as long as prompts fit into the budget.)
#
# ## The measuring stick
# As in chapter 7 a step of n tokens takes 32 + n. Four readers have been reading for a while.
# From step 5 on a
# new request comes in every step, ten in all, each with a prompt of 100 tokens and an answer of 20.

# %%
WEIGHTS, READERS, RUSH, PROMPT = 32, 4, 10, 100


def serve(policy: str, num_blocks: int = 513) -> list[TraceStep]:
    config = SchedulerConfig(max_num_batched_tokens=512, max_model_len=512, policy=policy)
    scheduler = Scheduler(config, KVCacheManager([FullAttentionManager(num_blocks, 16)], max_model_len=512))
    readers = [Arrival(f"R{number}", 4, 60) for number in range(READERS)]
    newcomers = [Arrival(f"N{number}", PROMPT, 20, step=5 + number) for number in range(RUSH)]
    return run(scheduler, [*readers, *newcomers])


def clock(steps: list[TraceStep]) -> list[int]:
    """Time at which each step ends."""
    now, ends = 0, []
    for step in steps:
        now += WEIGHTS + step.num_tokens
        ends.append(now)
    return ends


def token_times(steps: list[TraceStep], name: str) -> list[int]:
    return [end for step, end in zip(steps, clock(steps)) if name in step.answered]


def first_token_after(steps: list[TraceStep], number: int) -> int:
    """TTFT of a newcomer, from the beginning of the step that could first take it in."""
    return token_times(steps, f"N{number}")[0] - clock(steps)[5 + number - 1]


def longest_gap(steps: list[TraceStep], name: str) -> int:
    times = token_times(steps, name)
    return max(later - earlier for earlier, later in pairwise(times))


# %% [markdown]
# ## Predict: time to first token
# V0 gives a newcomer a step of its own: 32 + 100. V1 gives every running request a token in the same step, so
# the last newcomer, the tenth, pays for 4 readers and 9 others besides.

# %%
lesson.heading("Time to first token (TTFT) of the ten newcomers")
lesson.predict("TTFT, V0", [WEIGHTS + PROMPT] * RUSH, "a step of its own")
lesson.predict(
    "TTFT, V1", [WEIGHTS + PROMPT + READERS + n for n in range(RUSH)], "4 readers and who came before"
)
v0, v1 = serve("v0"), serve("fcfs")
lesson.measure("TTFT, V0", [first_token_after(v0, n) for n in range(RUSH)])
lesson.measure("TTFT, V1", [first_token_after(v1, n) for n in range(RUSH)])

# %% [markdown]
# ## The surprise: what those few units cost
# V0 wins, by a tenth at most. Now look at the readers. As long as a request comes in every step, no reader
# gets a token: the gap grows with the number of *arrivals*, which no setting bounds.
# V1's longest gap is one step.

# %%
lesson.heading("Longest gap between two tokens (ITL) of a reader")
lesson.predict(
    "gap, V0", RUSH * (WEIGHTS + PROMPT) + WEIGHTS + READERS + RUSH, "ten prompts, then a step for all 14"
)
lesson.predict("gap, V1", WEIGHTS + PROMPT + READERS + RUSH - 1, "the step of the tenth newcomer")
lesson.measure("gap, V0", longest_gap(v0, "R0"))
lesson.measure("gap, V1", longest_gap(v1, "R0"))


def strip(steps: list[TraceStep]) -> dict[str, list[Cell]]:
    rows: dict[str, list[Cell]] = {}
    for name in ("R0", "N0", "N4", "N9"):
        counts = [step.num_scheduled_tokens.get(name, 0) for step in steps[3:20]]
        rows[name] = [(str(n), "prompt" if n > 1 else "decode") if n else ("", "") for n in counts]
    return rows


lesson.cells("t15_v0", "V0: newcomers first", strip(v0))
lesson.cells("t15_v1", "V1: who is running first", strip(v1))

# %% [markdown]
# ## Fairness
# How much longer than alone does each request take? Jain's index is 1 if that factor is the same for all, and
# 1/n if one bears it all. And the total? Fewer, larger steps read the weights less often, so one might expect
# V0's batches to pay off.

# %%
lesson.heading("Fairness and total")


def slowdowns(steps: list[TraceStep]) -> list[float]:
    found = []
    for name, arrival, prompt, answer in [
        *((f"R{n}", 0, 4, 60) for n in range(READERS)),
        *((f"N{n}", 5 + n, PROMPT, 20) for n in range(RUSH)),
    ]:
        alone = answer * (WEIGHTS + 1) + prompt - 1
        came = clock(steps)[arrival - 1] if arrival else 0
        found.append((token_times(steps, name)[-1] - came) / alone)
    return found


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


gaps = {"V0": longest_gap(v0, "R0"), "V1": longest_gap(v1, "R0")}
lesson.bars("t15_gap", "Longest gap of a reader", gaps, "tokens")
for name, steps in (("V0", v0), ("V1", v1)):
    lesson.say(
        f"  {name}: Jain's index {jain(slowdowns(steps)):.3f}, {len(steps)} steps, time {clock(steps)[-1]:,}"
    )
tokens = READERS * (4 + 59) + RUSH * (PROMPT + 19)
lesson.predict("tokens computed, V0 and V1", [tokens, tokens], "the order changes no work")
lesson.measure("tokens computed, V0 and V1", [sum(step.num_tokens for step in steps) for steps in (v0, v1)])
lesson.check(
    clock(v1)[-1] < clock(v0)[-1], "V1 is done earlier: a mixed step reads the weights once for both"
)

# %% [markdown]
# ## In the engine
# A policy changes which request waits, never what it is answered. An engine takes any policy by its name.

# %%
lesson.heading("The same answers")
prompts = [{"prompt_token_ids": [(13 * n + 7 * i) % 512 for i in range(10 + n)]} for n in range(6)]
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
answers = []
for policy in ("fcfs", "v0"):
    with LLM(**engine_arguments(), scheduling_policy=policy) as llm:
        answers.append(
            [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        )
lesson.check(answers[0] == answers[1], "six answers are the same under both policies")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Give both too little memory (30 blocks). How often does each preempt, and how many tokens are computed "
    "twice?"
)
def little_memory() -> str:
    found = {}
    for policy in ("v0", "fcfs"):
        steps = serve(policy, num_blocks=31)
        preempted = sum(len(step.preempted) for step in steps)
        found[policy] = (preempted, sum(step.num_tokens for step in steps) - tokens)
    assert all(extra >= 0 for _, extra in found.values())
    return f"(preemptions, tokens computed again): {found}"


@lesson.exercise(
    "Write a third policy: shortest prompt first. Only its queue differs: see minivllm.SortedQueue."
)
def shortest_first() -> str:
    class ShortestFirst(SchedulingPolicy):
        def make_queue(self) -> SortedQueue:
            return SortedQueue(lambda request: request.num_tokens)

    register_policy("shortest_first", ShortestFirst)
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=512, max_model_len=512, policy="shortest_first"
    )
    scheduler = Scheduler(config, KVCacheManager([FullAttentionManager(513, 16)], max_model_len=512))
    steps = run(scheduler, [Arrival("long", 100, 2), Arrival("short", 3, 2), Arrival("middle", 50, 2)])
    order = list(dict.fromkeys(name for step in steps for name in step.num_scheduled_tokens))
    assert order == ["short", "middle", "long"]
    return f"served in the order {order}; a stream of short ones would starve the long one"


lesson.passed(
    "V0's order is one method of a policy",
    f"it saves at most {READERS + RUSH - 1} of {WEIGHTS + PROMPT + READERS + RUSH - 1} units of TTFT",
    f"and stretches the longest gap from {gaps['V1']} to {gaps['V0']:,}",
)
