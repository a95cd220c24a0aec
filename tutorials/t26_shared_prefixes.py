"""26 · Shared prefixes: what many requests read, and how to read it once.

Ten users with one system prompt have its blocks in common (chapter 6), so these are stored once. But
attention of each user still reads all of them in every step. Cascade attention, which vLLM had and removed,
reads the common part once for all. What does that save, and when?
"""

# %% [markdown]
# ## Bytes, if nothing is remembered
# A decoding row reads the keys and values of its whole context in every layer. Ten users with 10,240 common
# tokens and 192 each, in blocks of 64; a token of SmolLM2-135M keeps 3 KV heads of 64 keys and 64 values of 2
# bytes in a layer.

# %%
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

from minivllm import LLM, SamplingParams
from minivllm.attention.lists.bounds import bounds_of
from minivllm.attention.lists.key_groups import KeyGroups, bundles_of, groups_of_step
from minivllm.attention.lists.pair_lists import list_pairs
from minivllm.attention.lists.shared_prefixes import block_by_block, find_shared
from minivllm.attention.lists.tile_lists import CutTiles, cut_tiles
from minivllm.specs.attention import Reach
from tutorials.lesson import Lesson
from tutorials.small_model import engine_arguments

lesson = Lesson(__doc__)
BLOCK = 64


def block_tables(users: int, shared: int, own: int) -> np.ndarray:
    """int32 [users, shared + own]: physical blocks, of which the first ``shared`` are the same for all."""
    table = 1 + shared + np.arange(users * (shared + own), dtype=np.int32).reshape(users, -1)
    table[:, :shared] = 1 + np.arange(shared)
    return table


lesson.heading("What a layer reads in one step")
USERS, SHARED, OWN = 10, 160, 3
token_bytes = 3 * 2 * 64 * 2
lesson.predict("MB, each user for itself", 80.1, "10 · (10,240 + 192) tokens · 768 bytes")
lesson.predict("MB, the common part once", 9.3, "(10,240 + 10 · 192) tokens · 768 bytes")
table = block_tables(USERS, SHARED, OWN)
lesson.measure("MB, each user for itself", round(table.size * BLOCK * token_bytes / 1e6, 1))
lesson.measure("MB, the common part once", round(len(np.unique(table)) * BLOCK * token_bytes / 1e6, 1))

# %% [markdown]
# ## Who shares what
# Two rows share a block if they share all blocks before it: the block tables form a tree. Sorted by their
# block tables, the readers of a block stand side by side, so a first and a last row say who reads it, however
# deep the tree is. Four agents with the same tools (2 blocks), two of which have the same notes (1 block
# more):

# %%
lesson.heading("A tree of prefixes")
agents = np.array([[1, 2, 3, 10], [1, 2, 20, 21], [1, 2, 3, 30], [1, 2, 40, 41]], dtype=np.int32)
lesson.predict("blocks with several readers", [1, 2, 3], "tools, and the notes")
lesson.predict("readers of each", [4, 4, 2], "all agents, and the two with notes")
found = find_shared(agents, np.full(4, 4))
lesson.measure("blocks with several readers", found.blocks.tolist())
lesson.measure("readers of each", (found.last - found.first + 1).tolist())

# %% [markdown]
# ## Decoding: the order is enough
# On a CPU this engine computes attention of single tokens in pairs: a row, and a block that it reads. A pair
# is computed by itself, and the pairs of a row are put together afterwards, so *any* order of pairs gives the
# same result, bit for bit. Row by row, ten rows read 163 blocks each; a core's cache of 1 MB holds 21 blocks
# and has forgotten the first one when the next row wants it. Block by block, the ten readers of a block
# follow one another. How many blocks come from memory?

# %%
lesson.heading("Blocks from memory, with a cache of 1 MB")


def misses(blocks: Iterable[int], room: int) -> int:
    """How often a cache of so many blocks that forgets what was used longest ago lacks one."""
    kept: OrderedDict[int, None] = OrderedDict()
    missed = 0
    for block in blocks:
        missed += block not in kept
        kept[block] = None
        kept.move_to_end(block)
        if len(kept) > room:
            kept.popitem(last=False)
    return missed


def pair_blocks(table: np.ndarray, shares: bool) -> list[int]:
    """The blocks of all pairs, in the order of computing; rows are at the end of their tables."""
    last = np.full(len(table), table.shape[1] * BLOCK - 1)
    readers = block_by_block(find_shared(table, last // BLOCK)) if shares else None
    pairs = list_pairs(table, np.arange(len(table)), bounds_of(last, Reach()), BLOCK, len(table), readers)
    blocks: list[int] = pairs.blocks[: table.size].tolist()
    return blocks


room = (1 << 20) // (BLOCK * token_bytes)
lesson.predict("row by row", 1630, "10 · 163: every block is forgotten before it is wanted again")
lesson.predict("block by block", 190, "160 common blocks once, and 10 · 3")
by_row, by_block = pair_blocks(table, shares=False), pair_blocks(table, shares=True)
lesson.measure("row by row", misses(by_row, room))
lesson.measure("block by block", misses(by_block, room))
lesson.check(sorted(by_row) == sorted(by_block), "the pairs are the same ones")
bars = {"row by row": misses(by_row, room), "block by block": misses(by_block, room)}
lesson.bars("t26_misses", "Ten users after 10,240 tokens", bars, "blocks")

# %% [markdown]
# An eighth of the bytes is not an eighth of the time. The arithmetic is the same, and on a CPU it is not far
# from the bytes: a key and its value of one KV head are 256 bytes, and three query heads do 768 operations
# with them. ``minivllm bench attention`` measured 0.53 to 0.66 of the time where the prefix (61,000 tokens)
# is larger than all caches of the machine, and no difference where it lies in the last one. A GPU does 295
# operations for a byte, so there the bytes decide, and one pass is worth a kernel.
#
# ## Prompt chunks: the arithmetic as well
# Prompt chunks attend in tiles of 64 queries, whatever part of them is there. Eight users ask 20 tokens each
# after 1,024 common ones. Each for itself, they are eight tiles, of which 44 queries are padding, and every
# tile multiplies with the whole prefix. Where chunks share all but their last keys, they may lie in a tile
# together: it reads the common keys once, and then those of each row, which a mask hides from the others.
# Keys are read in groups of 128.

# %%
lesson.heading("Eight questions of 20 tokens after 1,024")
SIZE = 64


def step(users: int, shared: int, question: int) -> tuple[KeyGroups, CutTiles, CutTiles]:
    """The keys that the step reads; its tiles, each for one row; and its tiles, shared."""
    starts, counts = np.full(users, shared * BLOCK), np.full(users, question)
    tables = block_tables(users, shared, -(-question // BLOCK))
    groups = groups_of_step(tables, starts, starts + counts, [Reach()], 2, BLOCK, by_position=False)
    alone = cut_tiles(starts, counts, SIZE, 1)
    return groups, alone, cut_tiles(starts, counts, SIZE, 1, bundles_of(groups, counts, SIZE))


def groups_read(groups: KeyGroups, cut: CutTiles) -> int:
    """Groups of keys that the tiles multiply with: what the rows of a tile share once, and those of each."""
    total = 0
    for tile in cut.row:
        rows = np.unique(tile)
        total += int(groups.own[rows[0]] + (groups.end[rows] - groups.own[rows]).sum())
    return total


lesson.predict("tiles", [8, 3], "three questions of 20 fit into a tile of 64")
lesson.predict(
    "groups read by all tiles", [8 * (8 + 1), 3 * 8 + 8], "8 of the prefix for each tile, and 1 a row"
)
groups, alone, together = step(8, 16, 20)
lesson.measure("tiles", [len(alone.row), len(together.row)])
lesson.measure("groups read by all tiles", [groups_read(groups, alone), groups_read(groups, together)])
bars = {"each for itself": groups_read(groups, alone), "together": groups_read(groups, together)}
lesson.bars("t26_groups", "Eight questions after 1,024 tokens", bars, "groups of 128 keys")

# %% [markdown]
# 0.44 of the products; ``bench attention --users 8 --prefix 1024`` measured 0.51 of the time. What does the
# mask need to know? A query sees the common groups whole, which are listed as such, and of its row's groups
# the keys up to its position. Those lie in order in the copy that tiles read, so two numbers are enough: the
# first and the last slot of an interval. Here a tile is checked by hand, slot by slot.

# %%
lesson.heading("Two numbers hide the other rows")
keys = 2 * BLOCK
tile = together.row[0][together.is_query[0]]
position = together.position[0][together.is_query[0]]
low = groups.own[tile] * keys - groups.shift[tile]
high = position - groups.shift[tile]
lesson.predict("rows of the first tile", [0, 1, 2], "60 queries of 64")
lesson.predict(
    "keys of its question that the last query of each sees", [20, 20, 20], "a question of 20 tokens"
)
lesson.measure("rows of the first tile", np.unique(tile).tolist())
ends = [int(np.flatnonzero(tile == row)[-1]) for row in np.unique(tile)]
lesson.measure("keys of its question that the last query of each sees", (high[ends] - low[ends] + 1).tolist())
owner = {
    int(group): row
    for row in np.unique(tile)
    for group in groups.group_of[row, groups.own[row] : groups.end[row]]
}
sees_only_its_row = all(
    owner[slot // keys] == row for row, first, last in zip(tile, low, high) for slot in range(first, last + 1)
)
lesson.check(sees_only_its_row, "no query sees a key of another row")

# %% [markdown]
# ## Where it does not pay
# Rows that do not fit into a tile together save nothing, so a row is never cut for it. With windows a query
# does not see the prefix whole, and nothing is shared. And chunks of up to 16 tokens do not take tiles at all
# on a CPU: token by token they cost less than a tile that is nearly empty, and block by block they read the
# prefix once as well.
#
# ## In the engine
# Four requests after one system prompt, alone and together, with random weights: the same tokens.

# %%
lesson.heading("Four questions in one step")
system = list(range(10, 106))
prompts = [[*system, *(200 + 20 * user + np.arange(18)).tolist()] for user in range(4)]
params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
answers: list[list[list[int]]] = []
with LLM(**engine_arguments(block_size=16)) as llm:
    core = llm.llm_engine.client.core  # type: ignore[attr-defined]

    def ask(prompts: list[list[int]]) -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    alone_answers = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        alone_answers += ask([prompt])
    llm.reset_prefix_cache()
    ask([system])
    before = llm.get_metrics().num_computed_tokens
    lesson.predict("tokens computed together", 4 * (18 + 3), "the questions, and 3 of 4 answered tokens")
    together_answers = ask(prompts)
    lesson.measure("tokens computed together", llm.get_metrics().num_computed_tokens - before)
lesson.check(alone_answers == together_answers, "each answers as it does alone")

# %% [markdown]
# In vLLM: ``use_cascade_attention`` (vllm/v1/attention/backends/flash_attn.py, up to 0.31) took two kernels,
# one for a prefix that *all* running requests share and one for the rest, and merged them by their
# log-sum-exp. It was switched off by default and then removed. FlashInfer has the same as
# ``MultiLevelCascadeAttentionWrapper``.
#
# ## Exercises


# %%
@lesson.exercise("Users ask 40 tokens each. How many tiles are there, and how many groups do they read?")
def two_do_not_fit() -> str:
    groups, alone, together = step(8, 16, 40)
    read = groups_read(groups, alone), groups_read(groups, together)
    assert len(alone.row) == len(together.row) == 8 and read == (72, 72)
    return f"eight tiles and {read[1]} groups, as without sharing: two questions of 40 do not fit into 64"


@lesson.exercise("How many blocks must a cache hold for row by row to miss as few as block by block?")
def enough_room() -> str:
    rooms = [room for room in range(20, 400) if misses(by_row, room) == misses(by_block, room)]
    assert rooms[0] == 163
    return f"{rooms[0]} blocks, 8 MB for one layer: the prefix, and the three blocks of one row"


@lesson.exercise(
    "Answer n = 8 times to one prompt of 4,096 tokens. Which part of the bytes is left 64 tokens on?"
)
def samples() -> str:
    table = block_tables(8, 64, 1)
    share = misses(pair_blocks(table, True), 21) / misses(pair_blocks(table, False), 21)
    assert round(share, 2) == 0.14
    return f"{share:.2f}: (64 + 8) of 8 · 65 blocks"


lesson.passed(
    "a prefix that ten users share is read once: 190 blocks instead of 1,630",
    "in the order of blocks decoding computes the same bits",
    "eight short questions take three tiles instead of eight, and two numbers keep them apart",
)
