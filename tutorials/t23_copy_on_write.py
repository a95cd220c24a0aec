"""23 · Copy-on-write: texts share a block until one of them differs.

Eight answers to one prompt have the prompt in common, and so has every beam of a beam search. Chapter 6
shares whole blocks by their hashes. But a prompt rarely ends where a block does. What happens to the block in
which texts part?
"""

# %% [markdown]
# ## Share, write, copy
# PagedAttention, and with it vLLM V0, shared *all* blocks of a sequence that was forked, and counted the
# users of each. A block with several users must not be written. So a sequence that appends a token looks at
# its last block:
#
# 1. The block is full: take a new one.
# 2. It has one user: write into it.
# 3. It has several: **copy** it, write into the copy, and give up the shared one.
#
# Below is that rule over the block pool of this engine.
# A dictionary stands for the memory: block id -> tokens.

# %%
from __future__ import annotations

from minivllm import LLM, SamplingParams
from minivllm.config import SchedulerConfig
from minivllm.kv_cache.blocks.block_pool import BlockPool
from minivllm.kv_cache.blocks.free_queue import KVCacheBlock
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import BlockCopy, SchedulerOutput
from minivllm.profiling.spans import listen
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival, made_up_output
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import SHAPE, engine_arguments

lesson = Lesson(__doc__)
BLOCK = 4


class Sequences:
    """Sequences that fork: their block tables, over one pool and one memory."""

    def __init__(self) -> None:
        self.pool = BlockPool(65)
        self.memory: dict[int, list[int]] = {}
        self.tables: dict[str, list[KVCacheBlock]] = {}
        self.num_copies = 0

    def append(self, name: str, token: int) -> None:
        table = self.tables.setdefault(name, [])
        if not table or len(self.memory[table[-1].block_id]) == BLOCK:
            table += self.pool.get_new_blocks(1)
            self.memory[table[-1].block_id] = []
        elif table[-1].ref_count > 1:
            self._copy_last(table)
        self.memory[table[-1].block_id].append(token)

    def _copy_last(self, table: list[KVCacheBlock]) -> None:
        [copy] = self.pool.get_new_blocks(1)
        self.memory[copy.block_id] = list(self.memory[table[-1].block_id])
        self.pool.free_blocks([table[-1]])
        table[-1] = copy
        self.num_copies += 1

    def fork(self, parent: str, child: str) -> None:
        self.pool.touch(self.tables[parent])
        self.tables[child] = list(self.tables[parent])

    def free(self, name: str) -> None:
        self.pool.free_blocks(reversed(self.tables.pop(name)))

    def text(self, name: str) -> list[int]:
        return [token for block in self.tables[name] for token in self.memory[block.block_id]]

    def rows(self) -> dict[str, list[Cell]]:
        return {name: [self._cell(block) for block in table] for name, table in self.tables.items()}

    def _cell(self, block: KVCacheBlock) -> Cell:
        return (
            f"{block.block_id}: {self.memory[block.block_id]}",
            "cached" if block.ref_count > 1 else "prompt",
        )


LEGEND = {"cached": "shared", "prompt": "of one sequence"}

# %% [markdown]
# Three answers, A, B and C, to a prompt of seven tokens: one block of four, and one that has room for a
# fourth token. Each appends a different token, in this order. Who copies?

# %%
lesson.heading("A prompt of 7 tokens, forked twice")
lesson.predict("users after the forks", [3, 3], "nothing is copied when a sequence forks")
lesson.predict("copies by A, B, C", [1, 1, 0], "C is the last user of the old block, and may write into it")
lesson.predict("blocks in use", 4, "1 shared, 3 of one sequence each; 6 without sharing")
forks = Sequences()
for token in range(1, 8):
    forks.append("A", token)
for child in ("B", "C"):
    forks.fork("A", child)
lesson.measure("users after the forks", [block.ref_count for block in forks.tables["A"]])
lesson.cells("t23_shared", "After the forks, block id: tokens", forks.rows(), LEGEND)
copies = []
for number, name in enumerate(("A", "B", "C")):
    before = forks.num_copies
    forks.append(name, 70 + number)
    copies.append(forks.num_copies - before)
lesson.measure("copies by A, B, C", copies)
lesson.measure("blocks in use", forks.pool.num_blocks - 1 - forks.pool.num_free_blocks)
lesson.cells("t23_written", "After one token each", forks.rows(), LEGEND)
texts_agree = all(forks.text(name) == [*range(1, 8), 70 + n] for n, name in enumerate(("A", "B", "C")))
lesson.check(texts_agree, "each sequence reads its own text")

# %% [markdown]
# Whether forks happen at the end of a block or inside one decides everything: *n* sequences make *n* - 1
# copies inside a block, and none at its end, since then all of them take a new block anyway.

# %%
lesson.heading("n = 8, prompts of 5 to 12 tokens")


def copies_of(num_sequences: int, length: int) -> int:
    sequences = Sequences()
    for token in range(length):
        sequences.append("S0", token)
    for number in range(1, num_sequences):
        sequences.fork("S0", f"S{number}")
    for number in range(num_sequences):
        sequences.append(f"S{number}", 100 + number)
    return sequences.num_copies


lengths = list(range(5, 13))
lesson.predict(
    "copies", [0 if length % BLOCK == 0 else 7 for length in lengths], "n - 1, but none at the end of a block"
)
lesson.measure("copies", [copies_of(8, length) for length in lengths])

# %% [markdown]
# ## The same without forks
# V1 has no forks: the answers of *n* = 8 are eight requests with the same prompt, and the prefix cache finds
# what they have in common. That alone shares whole blocks, and computes the rest eight times. This engine
# also keeps an index of how texts go on inside a block (``kv_cache/blocks/continuations.py``), and copies
# **when a request is admitted**: the copy is ordered before the first write, by the scheduler, so no step
# looks at user counts before it writes.
#
# It needs no parent either. A retry, the next turn of a conversation and a stranger's request with the same
# system prompt find the block in the same way.
#
# One token of every request must be computed, to have logits. So of a prompt of *p* tokens at most *p* - 1
# are reused. With blocks of 64 and *n* = 8:

# %%
SIZE, N = 64, 8


def admitted(
    prompts: list[list[int]], to_the_token: bool = True, max_tokens: int = 1
) -> tuple[int, list[BlockCopy]]:
    """(tokens computed, blocks copied) by the real scheduler for requests that come together."""
    least = 8 if to_the_token else None
    manager = KVCacheManager([FullAttentionManager(400, SIZE)], max_model_len=4096, min_copied_tokens=least)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=4096, max_model_len=4096), manager)
    for number, prompt in enumerate(prompts):
        scheduler.add_request(Arrival(f"R{number}", prompt, max_tokens).request())
    copied: list[BlockCopy] = []
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        copied += step.block_copies
        scheduler.update_from_output(step, made_up_output(scheduler, step))
    return scheduler.stats().num_computed_tokens, copied


lesson.heading("Tokens computed for 8 answers to one prompt")
inside, border = list(range(100)), list(range(128))
whole = [100 + 7 * (100 - 64), 128 + 7 * (128 - 64)]
lesson.predict(
    "whole blocks, prompts of 100 and 128", whole, "7 requests compute what is after the last whole block"
)
lesson.predict("to the token", [100 + 7, 128 + 7], "7 requests compute one token")
lesson.predict(
    "copies", [7, 7], "as in V0 inside a block; at a border too, since the last token must run again"
)
blocks_only = [admitted([prompt] * N, to_the_token=False)[0] for prompt in (inside, border)]
lesson.measure("whole blocks, prompts of 100 and 128", blocks_only)
found = [admitted([prompt] * N) for prompt in (inside, border)]
lesson.measure("to the token", [computed for computed, _ in found])
lesson.measure("copies", [len(copied) for _, copied in found])
sources = {copy.source for copy in found[0][1]}
lesson.check(
    len(sources) == 1, "all seven copies are of one block: that of the request that computed the prompt"
)
lesson.bars(
    "t23_tokens",
    "Prompt of 100, 8 answers",
    {"nothing shared": 800, "whole blocks": whole[0], "to the token": found[0][0]},
    "tokens computed",
)

# %% [markdown]
# The seven wait one step: a block cannot be copied before it is computed. They are set aside in the step that
# computes the prompt, and join in the next one. That trades one step of delay for 7 · 35 tokens.
#
# ## In the engine, in bytes
# A copy moves a whole block of every layer, whatever the number of tokens that are wanted: keys and values,
# for each KV head. The small model of these chapters has 2 layers, 2 KV heads of 16 numbers, and float32.

# %%
lesson.heading("n = 8 in the engine")
head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
per_token = SHAPE["num_hidden_layers"] * 2 * SHAPE["num_key_value_heads"] * head_dim * 4
NEW = 6
lesson.predict(
    "bytes of a block", SIZE * per_token, "64 tokens · 2 layers · K and V · 2 heads · 16 numbers · 4 bytes"
)
lesson.predict("bytes copied", 7 * SIZE * per_token, "7 blocks, although 35 tokens of each are wanted")
lesson.predict(
    "tokens computed, n = 8", 107 + N * (NEW - 1), "the prompt once, 7 last tokens, and the answers"
)
answers: list[list[list[int]]] = []
num_copied = 0


def count_copies(name: str, step: object) -> None:
    global num_copied
    num_copied += len(step.block_copies) if isinstance(step, SchedulerOutput) else 0


params = SamplingParams(n=N, temperature=1.0, seed=7, max_tokens=NEW, ignore_eos=True)
for reuse in (True, False):
    with (
        LLM(**engine_arguments(block_size=SIZE, reuse_partial_blocks=reuse)) as llm,
        listen(count_copies, ["dispatch"]),
    ):
        core = llm.llm_engine.client.core  # type: ignore[attr-defined]
        [output] = llm.generate({"prompt_token_ids": inside}, params, use_tqdm=False)
        answers.append([list(one.token_ids) for one in output.outputs])
        if reuse:
            [block_bytes] = core.executor.block_bytes
            lesson.measure("bytes of a block", block_bytes)
            lesson.measure("bytes copied", num_copied * block_bytes)
            lesson.measure("tokens computed, n = 8", llm.get_metrics().num_computed_tokens)
lesson.check(num_copied == 7, "without reuse to the token nothing more is copied")
lesson.check(
    answers[0] == answers[1], "the eight answers are those of an engine that shares whole blocks only"
)
lesson.check(
    len({tuple(answer) for answer in answers[0]}) == N, "and they differ: no request writes into another"
)

# %% [markdown]
# When does it pay? A block of an 8B model (32 layers, 8 KV heads of 128, bfloat16) has 64 · 131,072 bytes =
# 8.4 MB, which is read and written. Computing a token reads 16 GB of weights, shared by all tokens of a step.
# Copies cost launches as well, so this engine computes fewer than 8 tokens again instead of copying their
# block.
#
# In vLLM: V0's ``BlockTable.fork`` and ``CopyOnWriteTracker`` did the above. V1 shares whole blocks by their
# hashes (``vllm/v1/core/kv_cache_manager.py``).
#
# ## Exercises


# %%
@lesson.exercise(
    "Beam search forks in every step: one of four beams survives and is forked into four. Count copies for 8 "
    "steps."
)
def beams() -> str:
    sequences, found = Sequences(), []
    for token in range(6):
        sequences.append("0.0", token)
    names = ["0.0"]
    for step in range(1, 9):
        survivor, before = names[0], sequences.num_copies
        children = [f"{step}.{beam}" for beam in range(4)]
        for child in children:
            sequences.fork(survivor, child)
        for name in names:
            sequences.free(name)
        for beam, child in enumerate(children):
            sequences.append(child, 100 * step + beam)
        found.append(sequences.num_copies - before)
        names = children
    assert found == [3, 3, 0, 3, 3, 3, 0, 3]
    return (
        f"copies per step: {found}: three inside a block, none where a block is full. The dead free their "
        "blocks"
    )


@lesson.exercise(
    "Leave the copy out. Which text does each of the three sequences read afterwards, and why all the same?"
)
def without_the_copy() -> str:
    class WritesIntoShared(Sequences):
        def _copy_last(self, table: list[KVCacheBlock]) -> None:
            """The mistake."""

    sequences = WritesIntoShared()
    for token in range(1, 7):
        sequences.append("A", token)
    for child in ("B", "C"):
        sequences.fork("A", child)
    for number, name in enumerate(("A", "B")):
        sequences.append(name, 70 + number)
    texts = [sequences.text(name) for name in ("A", "B", "C")]
    assert texts == [[1, 2, 3, 4, 5, 6, 70, 71]] * 3
    return f"all read {texts[0]}: a block that is shared and written gives the words of one user to another"


@lesson.exercise(
    "A second turn sends 300 prompt tokens, the answer of 50, and 20 new ones. How many are computed?"
)
def second_turn() -> str:
    found = {}
    for least in (None, 8):
        manager = KVCacheManager(
            [FullAttentionManager(400, SIZE)], max_model_len=4096, min_copied_tokens=least
        )
        scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=4096, max_model_len=4096), manager)
        first = list(range(300))
        for name, prompt, max_tokens in (("1", first, 50), ("2", [*first, *[0] * 50, *range(900, 920)], 1)):
            before = scheduler.stats().num_computed_tokens
            scheduler.add_request(Arrival(name, prompt, max_tokens).request())
            while scheduler.has_unfinished_requests():
                step = scheduler.schedule()
                scheduler.update_from_output(step, made_up_output(scheduler, step))
            found[least] = scheduler.stats().num_computed_tokens - before
    assert found == {None: 370 - 320, 8: 370 - 349}
    return f"50 by whole blocks, 21 to the token: {found}. The last token of the answer was never computed"


lesson.passed(
    "n sequences copy n - 1 blocks where they part inside one, and none at its end",
    f"8 answers to 100 tokens compute {found[0][0]} tokens instead of {whole[0]} by whole blocks",
    "the copy is a matter of admission: no step counts users before it writes",
)
