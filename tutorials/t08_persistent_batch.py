"""08 · The persistent batch: what a step sends is what changed, however long the conversations are.

A GPU is expensive while it waits. If the CPU rebuilds the input of every step from scratch, the GPU is idle
meanwhile, and the more so the longer the sequences. So the worker remembers, and the scheduler only sends
differences.
"""

# %% [markdown]
# ## Two borders
# A step crosses two: from the scheduler to the worker, as a message, and from the host to the device, as
# copies. Both can be counted without a GPU. The message is msgpack: take its length. For the copies
# ``PersistentBatch`` is built on PyTorch's ``meta`` device, which has no memory at all, and every copy that
# leaves for it is weighed.

# %%
from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.batch.persistent_batch import PersistentBatch
from minivllm.config import SchedulerConfig
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_cache.specs import one_group
from minivllm.messages import ModelRunnerOutput, SchedulerOutput
from minivllm.scheduler.scheduler import Scheduler
from minivllm.scheduler.steps.step_plan import StepPlan
from minivllm.simulation.steps import Arrival
from tutorials.lesson import Lesson

lesson = Lesson(__doc__)
BLOCK, MAX_LEN = 16, 4096


class Scales(TorchDispatchMode):
    """Weighs every copy from the host to the device [bytes]."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten._to_copy.default and not args[0].is_meta:
            self.total += args[0].nbytes
        return func(*args, **(kwargs or {}))


class Worker:
    """A scheduler and a persistent batch without a model between them:
    every request gets a token per step."""

    def __init__(self, num_requests: int, prompt_len: int) -> None:
        blocks = num_requests * MAX_LEN // BLOCK + 1
        config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=64 * MAX_LEN, max_model_len=MAX_LEN)
        self.scheduler = Scheduler(config, KVCacheManager([FullAttentionManager(blocks, BLOCK)], MAX_LEN))
        group = one_group(1, BLOCK, num_blocks=blocks)
        self.batch = PersistentBatch(64, MAX_LEN, [group], torch.device("meta"))
        for number in range(num_requests):
            self.scheduler.add_request(Arrival(f"R{number:02}", prompt_len, 1000).request())

    def step(self) -> tuple[int, int]:
        """One step: (bytes of the scheduler's message, bytes that went to the device)."""
        plan = self.scheduler.schedule()
        with Scales() as scales:
            self.batch.apply(plan)
            for name in plan.num_scheduled_tokens:
                self.batch.append_tokens(self.batch.requests[name], [7])
            self.batch.flush()
        sampled = {name: [7] for name in plan.num_scheduled_tokens}
        self.scheduler.update_from_output(plan, ModelRunnerOutput(sampled_token_ids=sampled))
        return len(msgspec.msgpack.encode(plan)), scales.total

    def rebuilt(self) -> int:
        """Bytes of the control: all token ids, block tables and positions, sent anew."""
        requests = self.batch.requests.values()
        return sum(4 * (r.num_tokens + -(-r.num_tokens // BLOCK) + 1) for r in requests)


# %% [markdown]
# ## Predict
# When no request needs a new block, a decode step sends one token per request: its id, 4 bytes, and its
# place, 8 bytes. When a block is full, each request also sends the block's id (again 4 + 8) and which
# positions it holds (16 of them).

# %%
lesson.heading("32 requests decode")
USERS = 32
worker = Worker(USERS, prompt_len=64)
first_message, first_bytes = worker.step()
lesson.say(
    f"  the first step brings everything: a message of {first_message:,} bytes, {first_bytes:,} bytes to the "
    "device"
)
lesson.predict(
    "bytes to the device, new block",
    USERS * (12 + 12 + 12 * BLOCK),
    "token, block id, 16 positions, each 4 + 8",
)
lesson.predict("bytes to the device, same block", USERS * 12, "one token each, 4 + 8")
with_block, same_block = worker.step(), worker.step()
lesson.measure("bytes to the device, new block", with_block[1])
lesson.measure("bytes to the device, same block", same_block[1])
lesson.say(
    f"  the scheduler's messages: {with_block[0]} and {same_block[0]} bytes; rebuilding: "
    f"{worker.rebuilt():,} bytes"
)

# %% [markdown]
# ## The surprise: length does not matter
# Thirty times the context, the same bytes, at both borders.
# The control, which rebuilds, grows with every token of the conversations.

# %%
lesson.heading("The same step at any length")
lengths = [64, 256, 1024, 3072]
persistent, rebuilt, messages = [], [], []
for length in lengths:
    worker = Worker(USERS, prompt_len=length)
    worker.step()
    worker.step()
    message, sent = worker.step()
    messages.append(message)
    persistent.append(sent)
    rebuilt.append(worker.rebuilt())
lesson.predict("bytes to the device at 64 to 3,072 tokens", [USERS * 12] * 4, "as before")
lesson.measure("bytes to the device at 64 to 3,072 tokens", persistent)
lesson.check(len(set(messages)) == 1, f"the scheduler's message has {messages[0]} bytes at every length")
lesson.curves(
    "t08_bytes",
    "32 requests, one decode step",
    lengths,
    {"persistent batch": persistent, "rebuilt from scratch": rebuilt},
    "tokens per request, bytes to the device",
    log=True,
)
lesson.say(f"  at 3,072 tokens: {rebuilt[-1] / persistent[-1]:,.0f} times less")

# %% [markdown]
# ## Stable slots
# A request keeps its row, its *batch slot*, for as long as it runs. When a request leaves, nothing is moved
# up to close the gap; a step gathers the rows it needs. So leaving costs nothing at all, and a new request
# takes the slot over.

# %%
lesson.heading("One request leaves, another one comes")
worker = Worker(4, prompt_len=64)
worker.step()
slots = {name: request.slot for name, request in worker.batch.requests.items()}
lesson.predict(
    "slots after R01 left and R99 came", {**slots, "R99": slots["R01"]} | {"R01": -1}, "only R99 moves in"
)
worker.scheduler.abort_requests(["R01"])
worker.scheduler.add_request(Arrival("R99", 64, 1000).request())
worker.step()
found = {name: request.slot for name, request in worker.batch.requests.items()}
lesson.measure("slots after R01 left and R99 came", {**slots, **found} | {"R01": -1})
lesson.cells(
    "t08_slots",
    "Slots before and after",
    {
        "before": [(next(n for n, s in slots.items() if s == slot), "decode") for slot in range(4)],
        "after": [
            (name := next(n for n, s in found.items() if s == slot), "prompt" if name == "R99" else "decode")
            for slot in range(4)
        ],
    },
    legend={"decode": "stays", "prompt": "newcomer"},
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "A preempted request comes back. What does the scheduler send of its tokens, and what does the worker "
    "copy?"
)
def resumed() -> str:
    worker = Worker(1, prompt_len=64)
    worker.step()
    for _ in range(20):
        worker.step()
    request = worker.scheduler.running[0]
    worker.scheduler._preempt(request, 0, plan := StepPlan(0, 0))
    worker.batch.apply(SchedulerOutput(preempted_request_ids=plan.preempted))
    message, sent = worker.step()
    assert message < first_message and sent > 12 * 84
    return (
        f"a message of {message} bytes without any token, since the worker remembers them; {sent:,} bytes to "
        "the device"
    )


@lesson.exercise(
    "From how many tokens per request on is rebuilding worse than the persistent batch at its worst (a new "
    "block)?"
)
def crossover() -> str:
    worst = 12 + 12 + 12 * BLOCK
    length = next(n for n in range(1, MAX_LEN) if 4 * (n + -(-n // BLOCK) + 1) > worst)
    assert length < 64
    return f"from {length} tokens on, and it happens in one of {BLOCK} steps only"


lesson.passed(
    f"a decode step of {USERS} requests sends {USERS * 12} bytes at any length",
    f"rebuilding would send {rebuilt[-1]:,} at 3,072 tokens",
    "no slot changes when other requests come and go",
)
