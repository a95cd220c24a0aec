"""19 · Pipelines: stages compute side by side only if each has requests of its own.

A model that is too large for one device can be cut between its layers: the first stage has the first layers,
the next stage the next ones, and a tensor goes from one to the other. That is simple, and nothing has to be
added up. But a token passes through all stages one after the other, so who keeps them busy? A stage without
work is a *bubble*. (GPipe, Huang et al. 2019. For inference there is no way back to wait for, but the next
token waits for the last stage.)
"""

# %% [markdown]
# ## Stages without a model
# The engine's own scheduler decides here who computes in a step. Every stage takes one tick for a step: at a
# tick a step enters the first stage, and all others move on by one. A request gets its token when its step
# leaves the last stage, and can be in the next step only then.
#
# Predict what share of the ticks a stage works for, with one request and four stages.

# %%
from __future__ import annotations

from collections import deque

from minivllm.config import SchedulerConfig
from minivllm.distributed.stage import divide_layers
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.program.fuse import FusedPieces, Plan
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import plans

lesson = Lesson(__doc__)
STAGES, TICKS = 4, 64


class Pipeline:
    """The scheduler before ``num_stages`` stages. shares: whether it knows of them.
    late: ticks until it has heard of a result."""

    def __init__(
        self,
        num_stages: int,
        *,
        shares: bool = True,
        budget: int = 256,
        late: int = 0,
        is_async: bool = False,
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=budget, max_model_len=1024, num_stages=num_stages if shares else 1
        )
        manager = KVCacheManager([FullAttentionManager(2000, 16)], max_model_len=1024)
        self.scheduler = Scheduler(config, manager, async_scheduling=is_async)
        self.num_stages = num_stages
        self.entered: list[SchedulerOutput] = []
        self._under_way: deque[SchedulerOutput] = deque([SchedulerOutput()] * (num_stages - 1 + late))

    def tick(self) -> None:
        """A step enters, maybe an empty one, and what has left the last stage is heard of."""
        step = self.scheduler.schedule()
        self.entered.append(step)
        self._under_way.append(step)
        left = self._under_way.popleft()
        if left.num_scheduled_tokens:
            known = self.scheduler.recent_steps(0)
            [recent] = [one for one in known if one.num_scheduled_tokens is left.num_scheduled_tokens]
            sampled = {
                name: [0] for name in left.num_scheduled_tokens if name not in recent.unfinished_prompts
            }
            self.scheduler.update_from_output(left, ModelRunnerOutput(sampled_token_ids=sampled))

    def run(self, requests: int, ticks: int = TICKS) -> float:
        """Share of the ticks, after the first few, in which a stage works."""
        for number in range(requests):
            self.scheduler.add_request(Arrival(f"R{number}", 1, 900).request())
        for _ in range(3 * self.num_stages + ticks):
            self.tick()
        return sum(bool(step.num_scheduled_tokens) for step in self.entered[-ticks:]) / ticks


def strip(pipeline: Pipeline, ticks: int = 14) -> dict[str, list[Cell]]:
    """What each stage computes in the last ticks: requests of the step, and how many there are."""
    entered = pipeline.entered[-ticks - pipeline.num_stages :]
    rows: dict[str, list[Cell]] = {}
    for stage in range(pipeline.num_stages):
        steps = [entered[tick + pipeline.num_stages - stage] for tick in range(ticks)]
        counts = [len(step.num_scheduled_tokens) for step in steps]
        rows[f"stage {stage}"] = [
            (str(count) if count else "", "decode" if count else "") for count in counts
        ]
    return rows


lesson.heading("One request, four stages")
lesson.predict("work of a stage", 1 / STAGES, "the request is in one stage at a time")
alone = Pipeline(STAGES)
lesson.measure("work of a stage", alone.run(1))
lesson.cells("t19_alone", "One request: who computes, tick by tick", strip(alone), {})

# %% [markdown]
# ## More requests do not help by themselves
# Twelve requests. A scheduler that does not know of the stages does what it always does: it puts all that can
# compute into one step. Then no request is left for the next one. Predict the share of work, for twelve
# requests in one step.
#
# The engine's scheduler is told how many stages there are. A step samples for no more than its share of the
# running requests (``stage_share``), ⌈12 / 4⌉ = 3, so four steps of three follow one another.

# %%
lesson.heading("Twelve requests, four stages")
lesson.predict("work, if one step takes all", 1 / STAGES, "as with one request, only a larger one")
lesson.predict("work, if steps share", 1.0, "four steps of three requests")
greedy, sharing = Pipeline(STAGES, shares=False), Pipeline(STAGES)
lesson.measure("work, if one step takes all", greedy.run(12))
lesson.measure("work, if steps share", sharing.run(12))
lesson.cells("t19_greedy", "One step takes all", strip(greedy), {})
lesson.cells("t19_sharing", "Steps share", strip(sharing), {})
sizes = {len(step.num_scheduled_tokens) for step in sharing.entered[-TICKS:]}
lesson.check(sizes == {3}, "every step has three of the twelve requests")

# %% [markdown]
# ## How many requests does it take?
# One for each stage, as far as bubbles go: with fewer, R of S stages work.

# %%
lesson.heading("Requests against stages")
counts = [1, 2, 3, 4, 6, 8, 12]
expected = [min(1.0, count / STAGES) for count in counts]
lesson.predict("work of a stage for each number of requests", expected, "R / S, up to 1")
found = [Pipeline(STAGES).run(count) for count in counts]
lesson.measure("work of a stage for each number of requests", found)
unaware = [Pipeline(STAGES, shares=False).run(count) for count in counts]
lesson.curves(
    "t19_requests",
    f"{STAGES} stages",
    counts,
    {"steps share": found, "one step takes all": unaware},
    "requests, share of the ticks in which a stage works",
)

# %% [markdown]
# ## A prompt passes through in chunks
# A prompt alone could fill all stages: its chunks need not wait for any token. Stages take as many ticks for
# a chunk as it has tokens. A prompt of 256 tokens in one step needs 4 · 256 of them. The scheduler gives a
# step a share of the budget, so here 4 chunks of 64 follow one another: the last one enters after three
# others and passes four stages.

# %%
lesson.heading("Ticks until the first token of a prompt of 256")
lesson.predict("in one step", STAGES * 256, "four stages, one after the other")
lesson.predict("in chunks of its share", (4 + STAGES - 1) * 64, "three chunks ahead, then four stages")


def first_token(pipeline: Pipeline) -> int:
    pipeline.scheduler.add_request(Arrival("long", 256, 4).request())
    chunks: list[int] = []
    while sum(chunks) < 256:
        pipeline.tick()
        chunks.append(pipeline.entered[-1].num_scheduled_tokens["long"])
    return (len(chunks) - 1 + pipeline.num_stages) * max(chunks)


lesson.measure("in one step", first_token(Pipeline(STAGES, shares=False)))
lesson.measure("in chunks of its share", first_token(Pipeline(STAGES)))

# %% [markdown]
# ## Stages that are not equal
# The slowest stage sets the pace. The head is one more matrix of the last stage, and no small one: in
# SmolLM2-135M it has 49,152 · 576 weights, as many as eight layers. Half of the 30 layers for each of two
# stages is therefore no good cut. What a token costs in a stage is about the weights that are read for it.

# %%
lesson.heading("Two stages of SmolLM2-135M")
HIDDEN, INNER, KEYS, VOCABULARY = 576, 1536, 192, 49152
layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER
costs = [layer] * 29 + [layer + HIDDEN * VOCABULARY]
halves = max(sum(costs[:15]), sum(costs[15:]))
lesson.predict("layers of the first stage", 19, "(30 + 8) / 2 layers' worth for each")
lesson.predict(
    "speed of two halves, against that", round(19 / 23, 2), "15 layers and a head of 8, against 19"
)
stages = divide_layers(costs, 2)
lesson.measure("layers of the first stage", len(stages[0]))
dearest = max(sum(costs[number] for number in stage) for stage in stages)
lesson.measure("speed of two halves, against that", round(dearest / halves, 2))
lesson.bars(
    "t19_cut",
    "Weights that the slower stage reads for a token",
    {"15 and 15 layers": halves / 1e6, "19 and 11 layers": dearest / 1e6},
    "million",
)

# %% [markdown]
# ## The program of a stage
# A stage runs a part of the same list of pieces. It begins with ``Receive`` instead of the embedding, and
# ends with ``Send`` instead of the head. What is sent is one tensor: the residual stream. So before it, what
# the last MLP gave has to be added to the stream, which in a model in one piece the next norm does on its
# way. Predict how many pieces more two stages have than one.

# %%
lesson.heading("Pieces of two stages of four layers")


def items(plan: Plan) -> list[str]:
    """Codes and seams in their order."""
    steps = [step for part in (plan.body, plan.tail) if part for step in part.steps]
    return [
        type(item).__name__
        for step in steps
        for item in ([piece.code for piece in step.pieces] if isinstance(step, FusedPieces) else [step])
    ]


lesson.predict("pieces more", 1, "the sum before Send")
[whole], parts = plans(4), plans(4, stages=2)
seams = ("Send", "Receive", "Attend")
lesson.measure(
    "pieces more",
    sum(item not in seams for plan in parts for item in items(plan))
    - sum(item not in seams for item in items(whole)),
)
first, last = map(items, parts)
lesson.check(first[-2:] == ["Add", "Send"] and last[0] == "Receive", "the stream is one tensor between them")
layers_of_stages = [found.count("Attend") for found in (first, last)]
lesson.check(sum(layers_of_stages) == 4, f"the stages attend in {layers_of_stages} layers")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Two stages, and the scheduler hears of a token a tick too late. What does async scheduling save?"
)
def late_news() -> str:
    waiting = Pipeline(2, late=1).run(2, ticks=63)
    ahead = Pipeline(2, late=1, is_async=True).run(2, ticks=63)
    assert abs(waiting - 2 / 3) < 0.02 and ahead == 1
    return (
        f"{waiting:.0%} work without it: a request is back after three ticks, and there are two; all of the "
        "time with "
        "it, since the next step is there before the token is known"
    )


@lesson.exercise(
    "Six requests and four stages: what happens if every step takes ⌈6 / 4⌉ of them, as long as there are?"
)
def leaving_some() -> str:
    assert [min(2, max(0, 6 - 2 * step)) for step in range(STAGES)] == [2, 2, 2, 0]
    pipeline = Pipeline(STAGES)
    assert pipeline.run(6) == 1
    sizes = [len(step.num_scheduled_tokens) for step in pipeline.entered[-STAGES:]]
    assert sorted(sizes) == [1, 1, 2, 2]
    return (
        "three steps take two each, and the fourth is a bubble; so the scheduler also leaves enough for the "
        "steps that "
        "can still follow before the oldest is back: 2, 2, 1 and 1"
    )


lesson.passed(
    "one step that takes all leaves all stages but one idle",
    "steps that share fill them, with as many requests as there are stages",
    "the head counts as layers: 19 and 11, not 15 and 15",
)
