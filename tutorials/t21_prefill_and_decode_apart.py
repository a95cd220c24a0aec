"""21 · Prefill and decode apart:
a second engine computes the prompts, and the tail of the gaps goes with them.

Chapter 7 cut long prompts into chunks, so that streams wait no longer than a full step takes. They still
wait: most gaps between two tokens are short, and each prompt brings a few long ones. Readers notice those.
*Disaggregated* serving gives the prompts to another engine, and brings the keys and values from there
(chapter 20). What does it change, and who pays? (DistServe, Zhong et al. 2024; Splitwise, Patel et al. 2024.)
"""

# %% [markdown]
# ## A clock for the scheduler
# As in chapter 7 a step of n tokens is assumed to take 32 + n: the weights, and the tokens. Four streams are
# written; every 1,600 a prompt of 480 tokens arrives, which wants an answer of 8. A gap is the time between
# two tokens of a stream. Half of all gaps are no longer than the one called p50, and 99 of 100 no longer than
# p99.

# %%
from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

from minivllm import LLM, SamplingParams
from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival, made_up_output
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
WEIGHTS, STREAMS, PROMPT, ANSWER = 32, 4, 480, 8
EVERY, END = 1600, 48_000
WAY = 0.1
"""Time that a token's keys and values take from engine to engine, against 1 for computing it."""


@dataclass
class Engine:
    """The engine's own scheduler and a clock. came: when each token of a request came.
    strip: tokens of the steps."""

    budget: int = 512
    now: float = 0.0
    busy: float = 0.0
    came: dict[str, list[float]] = field(default_factory=dict)
    strip: list[dict[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SchedulerConfig(max_num_batched_tokens=self.budget, max_model_len=4096)
        manager = KVCacheManager([FullAttentionManager(4000, 16)], max_model_len=4096)
        self.scheduler = Scheduler(config, manager)

    def add(self, name: str, prompt: int, answer: int) -> None:
        self.came[name] = []
        self.scheduler.add_request(Arrival(name, prompt, answer).request())

    def run(self, until: float) -> Engine:
        while self.now < until:
            if not self.scheduler.has_unfinished_requests():
                self.now = until
                break
            step = self.scheduler.schedule()
            output = made_up_output(self.scheduler, step)
            self.scheduler.update_from_output(step, output)
            seconds = WEIGHTS + step.total_num_scheduled_tokens
            self.now, self.busy = self.now + seconds, self.busy + seconds
            self.strip.append(step.num_scheduled_tokens)
            for name in output.sampled_token_ids:
                self.came[name].append(self.now)
        return self

    def gaps(self) -> list[float]:
        """Of all streams, from the first arrival on."""
        return [
            later - before
            for name, times in self.came.items()
            if name.startswith("S")
            for before, later in pairwise(times)
            if before >= EVERY
        ]


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def streams(engine: Engine, count: int = STREAMS) -> Engine:
    for number in range(count):
        engine.add(f"S{number}", 4, 3000)
    return engine


def together(budget: int, every: int = EVERY, count: int = STREAMS) -> Engine:
    """One engine does everything."""
    engine = streams(Engine(budget), count)
    for arrival in range(EVERY, END, every):
        engine.run(arrival).add(f"P{arrival}", PROMPT, ANSWER)
    return engine.run(END)


def apart(every: int = EVERY, way: float = WAY) -> tuple[Engine, Engine]:
    """A prefill engine, and a decode engine that gets a prompt but for its last token."""
    prefill, decode = Engine(), streams(Engine())
    for arrival in range(EVERY, END, every):
        prefill.run(arrival).add(f"P{arrival}", PROMPT, 1)
    prefill.run(END)
    for name, came in prefill.came.items():
        if came:
            decode.run(came[0] + way * PROMPT).add(name, 1, ANSWER)
    return prefill, decode.run(END)


def waits_of(engine: Engine) -> list[float]:
    """From the arrival of each prompt to its first token, in the order of arrival."""
    return [
        times[0] - float(name[1:]) for name, times in engine.came.items() if name.startswith("P") and times
    ]


def first_token(engine: Engine) -> float:
    """The median wait."""
    return percentile(waits_of(engine), 0.5)


BUDGET = 128
chunks = -(-PROMPT // (BUDGET - STREAMS))
lesson.heading(f"One engine with a budget of {BUDGET}, against 1P1D: a prefill and a decode engine")
lesson.predict("p50 of one engine", WEIGHTS + STREAMS, "most steps have no chunk")
lesson.predict("p99 of one engine", WEIGHTS + BUDGET, "a full step; more than 1 gap in 100 is one")
lesson.predict("p50 of 1P1D", WEIGHTS + STREAMS, "the same")
lesson.predict("p99 of 1P1D", WEIGHTS + STREAMS + 1, "the streams, and an answer that has begun")
waits = (WEIGHTS + STREAMS) / 2
begun = waits + chunks * (WEIGHTS + STREAMS) + PROMPT
lesson.predict("first token, one engine", begun, "half a step, then four chunks")
brought = WEIGHTS + PROMPT + WAY * PROMPT + waits + WEIGHTS + STREAMS + 1
lesson.predict("first token, 1P1D", brought, "the prompt, the way, half a step, and a decode step")
one, (prefill, decode) = together(BUDGET), apart()
for name, engine in (("one engine", one), ("1P1D", decode)):
    lesson.measure(f"p50 of {name}", percentile(engine.gaps(), 0.5))
    lesson.measure(f"p99 of {name}", percentile(engine.gaps(), 0.99))
    lesson.measure(f"first token, {name}", first_token(engine), within=0.05)


def strip(engine: Engine, rows: Sequence[str], start: int) -> dict[str, list[Cell]]:
    kinds = {1: "decode"}
    shown = engine.strip[start : start + 12]
    found = {}
    for row in rows:
        counts = [sum(n for name, n in step.items() if name.startswith(row)) for step in shown]
        most = [max([n for name, n in step.items() if name.startswith(row)], default=0) for step in shown]
        found[row] = [
            (str(n) if n else "", kinds.get(m, "prompt") if n else "") for n, m in zip(counts, most)
        ]
    return found


begin = next(number for number, step in enumerate(one.strip) if f"P{EVERY}" in step)
lesson.cells(
    "t21_together", "One engine: tokens of streams (S) and of prompts (P)", strip(one, "SP", begin - 2)
)
begin = next(number for number, step in enumerate(decode.strip) if f"P{EVERY}" in step)
lesson.cells("t21_apart", "The decode engine", strip(decode, "SP", begin - 2))

# %% [markdown]
# The middle of the gaps is what it was, and so is the first token of a prompt. What has gone is the tail: the
# decode engine never computes a chunk.
#
# ## Is that not what small chunks are for?
# A smaller budget shortens the tail of one engine, too. Predict p99 for budgets from 512 down to 40, and look
# at the first token of a prompt, which has to pay for it.

# %%
lesson.heading("p99 for each budget of one engine")
budgets = [40, 64, 128, 256, 512]
lesson.predict("p99 for each budget", [WEIGHTS + min(b, STREAMS + PROMPT) for b in budgets], "one full step")
served = [together(budget) for budget in budgets]
tails = [percentile(engine.gaps(), 0.99) for engine in served]
lesson.measure("p99 for each budget", tails)
tail = percentile(decode.gaps(), 0.99)
lesson.curves(
    "t21_tail",
    "The tail",
    budgets,
    {"one engine": tails, "1P1D": [tail] * len(budgets)},
    "token budget, p99 of gaps",
)
firsts = [first_token(engine) for engine in served]
lesson.curves(
    "t21_first",
    "The first token",
    budgets,
    {"one engine": firsts, "1P1D": [first_token(decode)] * len(budgets)},
    "token budget, time to the first token",
)
is_worse = tails[0] > 1.9 * tail and firsts[0] > 1.5 * first_token(decode)
lesson.check(is_worse, "a budget of 40 has a longer tail and a later first token than 1P1D")

# %% [markdown]
# One engine can have a short tail or an early first token.
# Apart they have both, since no step holds both kinds of work.
#
# ## The bill
# There are two engines now, with the weights in both. What does the prefill engine do with its time? And what
# would two engines do of which each has half of the streams and half of the prompts, with a budget of 128?

# %%
lesson.heading("Two machines")
lesson.predict("busy share of the prefill engine", (WEIGHTS + PROMPT) / EVERY, "a prompt, every 1,600")
lesson.predict(
    "p99 of two engines that do everything", WEIGHTS + BUDGET, "each has half of the prompts, so long gaps"
)
lesson.measure("busy share of the prefill engine", prefill.busy / (END - EVERY), within=0.05)
half = together(BUDGET, every=2 * EVERY, count=STREAMS // 2)
lesson.measure("p99 of two engines that do everything", percentile(half.gaps(), 0.99))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


lesson.bars(
    "t21_bill",
    "Mean gap",
    {"one engine": mean(one.gaps()), "two engines": mean(half.gaps()), "1P1D": mean(decode.gaps())},
    "time",
)
lesson.say(
    "  Two machines shorten the mean gap either way, and by how much depends on the load. Only one way "
    "shortens the "
    "tail."
)

# %% [markdown]
# For two thirds of the time the prefill engine is idle here; with more prompts it is the first tokens that
# wait for it. Engines that do everything have no such gap: any of them takes what comes. So separate prefill
# buys tail latency, not throughput, and it needs the two kinds of work in the proportion of the machines.
#
# ## The same with engines
# Now two engines compute. A random model; streams, and prompts of 481 tokens. The prefill engine saves the 30
# full blocks of each prompt in a directory (``SharedStorageConnector``, as producer), and the decode engine,
# a consumer, loads them and computes the last token. A server would send them over a socket: ``minivllm serve
# --disaggregated 1P1D``. Counted is what the engine computes between two tokens of a stream; that depends on
# no clock. Milliseconds do: both engines share the cores of this machine, so they are shown and not checked.
#
# With ``TUTORIAL_MODEL=smollm2`` in the environment a real model is asked instead.

# %%
BLOCK, LONG, BOOKS, BOOK_EVERY = 16, 481, 3, 24
NAMED = os.environ.get("TUTORIAL_MODEL")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def start(directory: str = "", role: str = "") -> LLM:
    config = {
        "kv_connector": "SharedStorageConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": directory},
    }
    given: dict[str, Any] = {
        "max_num_batched_tokens": BUDGET,
        "max_model_len": 2048,
        "num_gpu_blocks_override": 600,
    }
    if NAMED is not None:
        given |= {"model": NAMED, "load_format": "auto", "enforce_eager": False}
        given |= {"compile_in_background": False}
    return LLM(**engine_arguments(**given, kv_transfer_config=config if role else None))


def prompt(number: int, tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [(31 * number + 7 * i + i * i) % 400 + 20 for i in range(tokens)]}


@dataclass
class Served:
    """gaps: seconds between tokens of the streams, while prompts come.
    counts: tokens computed in those steps. answers: tokens by request."""

    gaps: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    answers: dict[str, list[int]] = field(default_factory=dict)


def serve(llm: LLM, prefill: LLM | None = None, directory: str = "") -> Served:
    """Streams from the start, and books one after the other, until all books have their answers."""
    engine, served, ready, readers = llm.llm_engine, Served(), deque[int](), list[Thread]()
    for number in range(STREAMS):
        engine.add_request(f"S{number}", prompt(number, 8), SamplingParams(max_tokens=1800, **GREEDY))

    def read(number: int) -> None:
        """What the prefill engine does with a book."""
        if prefill is not None:
            prefill.generate(
                prompt(100 + number, LONG), SamplingParams(max_tokens=1, **GREEDY), use_tqdm=False
            )
            while len(list(Path(directory).rglob("[0-9a-f]*.safetensors"))) < (number + 1) * (LONG // BLOCK):
                time.sleep(0.001)
        ready.append(number)

    last, computed, steps, num_read = dict[str, float](), llm.get_metrics().num_computed_tokens, 0, 0
    while num_read < BOOKS:
        if steps % BOOK_EVERY == 4 and len(readers) == num_read:  # one at a time
            readers.append(Thread(target=read, args=(len(readers),)))
            readers[-1].start()
        while ready:
            number = ready.popleft()
            engine.add_request(
                f"B{number}", prompt(100 + number, LONG), SamplingParams(max_tokens=ANSWER, **GREEDY)
            )
        outputs, now = engine.step(), time.perf_counter()
        steps += 1
        for output in outputs:
            if output.request_id.startswith("S"):
                if output.request_id in last and readers:
                    served.gaps.append(now - last[output.request_id])
                last[output.request_id] = now
            elif output.finished:
                served.answers[output.request_id] = list(output.outputs[0].token_ids)
                num_read += 1
        before, computed = computed, llm.get_metrics().num_computed_tokens
        if readers:
            served.counts.append(computed - before)
    engine.abort_request([f"S{number}" for number in range(STREAMS)])
    return served


lesson.heading("Tokens that are computed between two tokens of a stream, at most")
lesson.predict("one engine", BUDGET, "a full step")
lesson.predict("decode engine", STREAMS + 1, "the streams, and the last token of a prompt, or of its answer")
lesson.predict("blocks that came", BOOKS * (LONG // BLOCK), "30 of each prompt")
with start() as llm:
    at_once = serve(llm)
lesson.measure("one engine", max(at_once.counts))
with (
    tempfile.TemporaryDirectory(prefix="minivllm-tutorial-") as directory,
    start(directory, "kv_producer") as producer,
    start(directory, "kv_consumer") as consumer,
):
    split = serve(consumer, producer, directory)
    [tier] = consumer.get_metrics().kv_transfer
lesson.measure("decode engine", max(split.counts))
lesson.measure("blocks that came", tier.num_loaded_blocks)
lesson.check(at_once.answers == split.answers, "the answers are the same")
lesson.bars(
    "t21_gaps",
    "Gaps of the streams while prompts come",
    {
        f"{share} of {name}": 1000 * percentile(served.gaps, value)
        for name, served in (("one engine", at_once), ("1P1D", split))
        for share, value in (("p50", 0.5), ("p99", 0.99))
    },
    "ms",
)

# %% [markdown]
# ``minivllm bench disaggregated smollm2`` measures this with servers and a proxy, in turn with one engine:
# TTFT by the length of the prompt, and gaps under a load of prompts. On one host the two engines share cores
# and memory bandwidth, so a prompt that is computed next door still slows the streams; only the chunks in
# their own steps have gone.
#
# ## Exercises


# %%
@lesson.exercise(
    "Prompts come every 480. How long does the last one wait, apart, and with two engines that do everything?"
)
def too_many() -> str:
    behind, decode = apart(every=PROMPT)
    half = together(BUDGET, every=2 * PROMPT, count=STREAMS // 2)
    late, own = waits_of(behind), waits_of(half)
    assert late[-1] > 3 * late[0] and max(own) < 2 * own[0]
    return (
        f"{late[-1]:,.0f} apart, and it grows by 32 with each prompt, since one takes 512; {own[-1]:,.0f} "
        "with two "
        f"engines, whose mean gap is {mean(half.gaps()):.0f} against {mean(decode.gaps()):.0f}"
    )


@lesson.exercise("The way is as slow as computing, WAY = 1. What changes?")
def slow_way() -> str:
    _, slow = apart(way=1.0)
    assert percentile(slow.gaps(), 0.99) == tail
    later = first_token(slow) - first_token(decode)
    assert 0.8 < later / (0.9 * PROMPT) < 1.2
    return (
        f"no gap; first tokens come {later:.0f} later, as 0.9 of 480 says. Chapter 20 says when that still "
        "pays"
    )


@lesson.exercise(
    "Which gap would the decode engine have if a prompt's last block, up to 16 tokens, were not full?"
)
def last_block() -> str:
    decode = streams(Engine())
    for arrival in range(EVERY, END, EVERY):
        decode.run(arrival).add(f"P{arrival}", BLOCK, ANSWER)
    found = percentile(decode.run(END).gaps(), 0.99)
    assert found == WEIGHTS + STREAMS + BLOCK
    return (
        f"{found:.0f}: whole blocks travel, and what is behind them is computed where the answer is written"
    )


lesson.passed(
    f"one engine: p99 is a full step, {WEIGHTS + BUDGET}; apart it is {tail:.0f}, with the same p50",
    "the first token is as early as before; a second machine pays for the tail",
    "engines compute at most one token beside those of the streams, and answer the same",
)
