"""06 · Prefix caching: computed blocks are reused, and found by a hash of all tokens up to their end.

System prompts, conversations and retries start with the same tokens over and over. Chapter 3 gave the blocks
back when a request was done; but their contents are still there. So do not forget them before the memory is
needed.
"""

# %% [markdown]
# ## A chain of hashes
# The key and value of a token depend on *all* tokens before it. So a block is named by the hash of its own
# tokens and of the name of the block before: same name, same prefix. (SHA-256: with a weak hash, a crafted
# collision would hand one user's notes to another.)

# %%
from __future__ import annotations

from minivllm import LLM, SamplingParams
from minivllm.config import SchedulerConfig
from minivllm.kv_cache.blocks.hashing import hash_block
from minivllm.kv_cache.group_manager import FullAttentionManager, SingleGroupManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.scheduler.scheduler import Scheduler
from minivllm.simulation.steps import Arrival, run
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
BLOCK = 4


def chain(tokens: list[int]) -> list[str]:
    names, parent = [], b""
    for start in range(0, len(tokens) - len(tokens) % BLOCK, BLOCK):
        parent = hash_block(parent, tokens[start : start + BLOCK])
        names.append(parent.hex()[:6])
    return names


lesson.heading("What a change does to the names")
text = list(range(16))
variants = {
    "original": text,
    "last token": [*text[:15], 99],
    "token 5": [*text[:5], 99, *text[6:]],
    "first": [99, *text[1:]],
}
same = {name: sum(a == b for a, b in zip(chain(text), chain(tokens))) for name, tokens in variants.items()}
lesson.predict("blocks that keep their name", [4, 3, 1, 0], "only blocks before the changed one")
lesson.measure("blocks that keep their name", list(same.values()))
lesson.cells(
    "t06_chain",
    "Names of the four blocks, after changing one token",
    {
        name: [(h, "cached" if h == o else "wasted") for h, o in zip(chain(tokens), chain(text))]
        for name, tokens in variants.items()
    },
    legend={"cached": "found in the cache", "wasted": "must be computed"},
)

# %% [markdown]
# So put what all users share *first*: a system prompt that begins with the time of day caches nothing.
#
# ## A conversation, with and without
# Every turn sends the whole conversation again. Turn *n* of a chat with 32 new tokens per turn has 32·n
# tokens, of which all but the last turn's are in the cache. The engine counts what it computes. One token at
# least must always be computed, to have logits, and only full blocks are found.

# %%
lesson.heading("A conversation of 8 turns in the engine")
TURNS, NEW, REPLY, SIZE = 8, 24, 8, 16
prompts, computed_without, computed_with = [], 0, 0
lengths = [NEW + turn * (NEW + REPLY) for turn in range(TURNS)]
for length in lengths:
    computed_without += length + REPLY - 1
    found = (
        (length - NEW - 1) // SIZE * SIZE if length > NEW else 0
    )  # the last reply token was never computed
    computed_with += length + REPLY - 1 - found
lesson.predict("tokens computed without", computed_without, "every turn from its beginning")
lesson.predict(
    "tokens computed with", computed_with, "full blocks of earlier turns; copies would find the rest"
)
replies = []
for caching in (False, True):
    with LLM(**engine_arguments(enable_prefix_caching=caching, reuse_partial_blocks=False)) as llm:
        conversation: list[int] = []
        for turn in range(TURNS):
            conversation += [(31 * turn + 7 * i) % 512 for i in range(NEW)]
            params = SamplingParams(temperature=0.0, max_tokens=REPLY, ignore_eos=True)
            [output] = llm.generate({"prompt_token_ids": conversation}, params, use_tqdm=False)
            conversation = conversation + list(output.outputs[0].token_ids)
        replies.append(conversation)
        lesson.measure(
            f"tokens computed {'with' if caching else 'without'}", llm.get_metrics().num_computed_tokens
        )
lesson.check(replies[0] == replies[1], "the conversations are the same, token by token")

# %% [markdown]
# ## Who is forgotten first
# Blocks that no request uses wait in a queue. New blocks are taken from its front, freed ones are put at its
# back, so the front is what was not used for the longest time: LRU, for the price of a linked list. A request
# gives its blocks back **tail first**. Why that matters is the surprise of this chapter. Four users take
# turns with prompts of 17 tokens: 4 full blocks each, which can be found again, and a fifth with a single
# token. 4·4 + 1 = 17 blocks hold all of it. What happens with fewer?
#
# The control is a manager that gives blocks back head first; ``KVCacheManager`` takes it as an argument.


# %%
class HeadFirst(FullAttentionManager):
    """Frees the first block of a sequence first, the obvious way."""

    def free(self, request_id: str) -> None:
        table = self.tables.pop(request_id, None)
        if table is not None:
            self.pool.free_blocks(table.blocks)


def hits_per_round(kind: type[SingleGroupManager], usable_blocks: int, users: int = 4) -> int:
    """Tokens found in the cache when every user has asked again, after a few rounds."""
    manager = KVCacheManager([kind(usable_blocks + 1, BLOCK)], max_model_len=64)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), manager)
    for turn in range(5):
        before = manager.prefix_cache_hit_tokens
        for user in range(users):
            run(scheduler, [Arrival(f"turn {turn} of {user}", [user] * 16 + [99], max_tokens=1)])
    return manager.prefix_cache_hit_tokens - before


lesson.heading("One block too few")
sizes = list(range(12, 20))
lesson.predict(
    "tail first",
    [max(0, min(64, 64 - 16 * (17 - size))) for size in sizes],
    "each missing block: 4 users lose one",
)
lesson.predict(
    "head first", [64 if size >= 17 else 0 for size in sizes], "no head, no prefix: nothing can be found"
)
tail, head = ([hits_per_round(kind, size) for size in sizes] for kind in (FullAttentionManager, HeadFirst))
lesson.measure("tail first", tail)
lesson.measure("head first", head)
lesson.curves(
    "t06_lru",
    "Four users in turn",
    sizes,
    {"tail first (the engine)": tail, "head first": head},
    "usable blocks, tokens found per round",
)
lesson.say(
    "  Head first falls off a cliff: one missing block and nothing is ever found. Tail first walks down a "
    "slope."
)

# %% [markdown]
# ## The queue itself
# After one request of 4 full blocks and one with a single token, this is the order in which blocks will be
# reused. The block with a single token has no name: it can never be found, so it goes first.

# %%
lesson.heading("The free queue after one request")
manager = KVCacheManager([FullAttentionManager(9, BLOCK)], max_model_len=64)
scheduler = Scheduler(SchedulerConfig(max_model_len=64), manager)
lesson.predict(
    "order of reuse", [5, 6, 7, 8, 4, 3, 2, 1], "unnamed, then never used, then the tail of the prefix"
)
run(scheduler, [Arrival("R1", [7] * 16 + [99], max_tokens=1)])
queue = list(manager.pools[0].free_queue)
lesson.measure("order of reuse", [block.block_id for block in queue])
cells: list[Cell] = [(str(block.block_id), "cached" if block.block_hash else "idle") for block in queue]
lesson.cells(
    "t06_queue", "Front: reused next", {"block": cells}, legend={"idle": "no name", "cached": "can be found"}
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Two tenants with the same prompt must not learn from timing that the other one asked before. Separate "
    "them."
)
def tenants() -> str:
    with LLM(**engine_arguments()) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        found = []
        for salt in ("a", "b", "a"):
            prompt = {"prompt_token_ids": list(range(40)), "cache_salt": salt}
            [output] = llm.generate(prompt, params, use_tqdm=False)
            found.append(output.num_cached_tokens)
    assert found == [0, 0, 32]
    return (
        f"tokens found for tenants a, b, a: {found}: a salt goes into the first block's hash, and so into all"
    )


@lesson.exercise(
    "Why is a prompt that is entirely in the cache not entirely taken from it? Measure a repeated prompt."
)
def whole_prompt() -> str:
    manager = KVCacheManager([FullAttentionManager(33, BLOCK)], max_model_len=64)
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), manager)
    run(scheduler, [Arrival("first", [5] * 16, max_tokens=1)])
    [step] = run(scheduler, [Arrival("again", [5] * 16, max_tokens=1)])
    assert step.num_scheduled_tokens == {"again": 4}
    return (
        "4 of 16 tokens are computed: the last one must run to give logits, and blocks are found whole or "
        "not at all"
    )


lesson.passed(
    "a changed token renames its block and all behind it",
    f"{computed_with} instead of {computed_without:,} tokens computed in a conversation, the same replies",
    "freed tail first, a cache that is too small loses a little; head first, everything",
)
