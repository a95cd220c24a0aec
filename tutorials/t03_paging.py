"""03 · Paging: the length of an answer is unknown, so memory is handed out in small blocks,
and a table finds them.

Chapter 2 set aside room for the longest possible sequence. With many users that is nearly all waste.
Operating systems met the problem sixty years ago; PagedAttention (Kwon et al. 2023) took their answer over.
"""

# %% [markdown]
# ## The parts
# ``BlockPool`` owns the blocks, ``KVCacheManager`` gives them to requests as they grow. Neither touches a
# tensor: a block is a number. (Block 0 is the null block: padding is written there, and nothing reads it.)

# %%
from __future__ import annotations

import random

import numpy as np
import torch

from kernels_triton_free.attention import gathered_sdpa_attention
from kernels_triton_free.paged_cache import write_kv
from minivllm.attention.lists.bounds import bounds_of
from minivllm.attention.lists.tile_lists import blocks_read, new_lists, write_lists
from minivllm.kv_cache.group_manager import FullAttentionManager
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.messages import EngineRequest
from minivllm.request import Request
from minivllm.sampling_params import SamplingParams
from minivllm.specs.attention import Reach
from tutorials.lesson import Cell, Lesson

lesson = Lesson(__doc__)
BLOCK, MAX_LEN, NUM_BLOCKS = 16, 512, 257


def request(name: str, num_tokens: int) -> Request:
    return Request(
        EngineRequest(
            request_id=name,
            prompt_token_ids=list(range(num_tokens)),
            sampling_params=SamplingParams(),
            max_tokens=1,
            seed=0,
            arrival_time=0.0,
            cache_salt=name,  # nothing is shared: that is chapter 6
        )
    )


# %% [markdown]
# ## How many users fit?
# Requests of 20 to 200 tokens arrive until the memory of 256 blocks of 16 tokens is full. A plain tensor
# ``[batch, max_len]`` reserves 512 tokens for each of them: 4,096 tokens are room for eight.

# %%
lesson.heading("Users in the same memory")
draw = random.Random(0)
lengths = [draw.randint(20, 200) for _ in range(100)]
slots = (NUM_BLOCKS - 1) * BLOCK
contiguous = slots // MAX_LEN
needed = [-(-n // BLOCK) for n in lengths]
paged = max(k for k in range(101) if sum(needed[:k]) <= NUM_BLOCKS - 1)
lesson.say(f"  reserving {MAX_LEN} tokens for each: {slots} / {MAX_LEN} = {contiguous} users")
lesson.predict("users with paging", paged, "as long as the sum of ceil(length / 16) is at most 256")

manager = KVCacheManager([FullAttentionManager(NUM_BLOCKS, BLOCK)], MAX_LEN)
served: list[Request] = []
for index, length in enumerate(lengths):
    newcomer = request(f"R{index}", length)
    hits, _ = manager.get_computed_blocks(newcomer)
    if manager.allocate_slots(newcomer, length, 0, hits) is None:
        break
    newcomer.num_computed_tokens = length
    served.append(newcomer)
lesson.measure("users with paging", len(served))

# %% [markdown]
# What is lost is only the unfilled end of each request's last block:
# on average half a block, never a whole one.

# %%
reserved = sum(len(manager.get_block_ids(r.request_id)[0]) * BLOCK for r in served)
lost = sum(-n % BLOCK for n in lengths[: len(served)])
lesson.predict("cache slots that hold nothing", lost, "the sum of -length mod 16")
lesson.measure("cache slots that hold nothing", reserved - sum(r.num_tokens for r in served))
used = sum(lengths[:contiguous])
lesson.bars(
    "t03_users",
    "Share of the memory that holds tokens",
    {"contiguous": 100 * used / slots, "paged": 100 * (reserved - lost) / slots},
    "%",
)

# %% [markdown]
# ## Block tables
# Blocks come back in any order, so a request's blocks lie anywhere. The block table says where. Here six
# requests come, three of them leave, and two new ones move in where they were.

# %%
lesson.heading("Memory after some coming and going")
manager = KVCacheManager([FullAttentionManager(25, 4)], 64)
names = {}
for index in range(6):
    names[f"R{index}"] = request(f"R{index}", 12 + index % 3 * 2)
for newcomer in names.values():
    manager.allocate_slots(newcomer, newcomer.num_tokens, 0, manager.get_computed_blocks(newcomer)[0])
    newcomer.num_computed_tokens = newcomer.num_tokens
for name in ("R0", "R2", "R4"):
    manager.free(names.pop(name))
for name, length in (("R6", 30), ("R7", 9)):
    names[name] = newcomer = request(name, length)
    assert manager.allocate_slots(newcomer, length, 0, manager.get_computed_blocks(newcomer)[0]) is not None
    newcomer.num_computed_tokens = length
tables = {name: manager.get_block_ids(name)[0] for name in names}
owner = {block: name for name, table in tables.items() for block in table}
kinds = dict(zip(names, ["prompt", "decode", "cached", "other", "wasted"]))
cells: list[Cell] = [("null", "idle")]
cells += [(owner.get(b, ""), kinds.get(owner.get(b, ""), "")) for b in range(1, 25)]
legend = {"idle": "the null block"} | {kind: f"a block of {name}" for name, kind in kinds.items()}
numbers: list[Cell] = [(str(b), "") for b in range(25)]
memory = {"block": numbers, "owner": cells}
lesson.cells("t03_blocks", "Physical blocks 0 to 24 and which request has them", memory, legend=legend)
for name, table in tables.items():
    lesson.say(f"  block table of {name}: {table}")
lesson.check(tables["R6"] != sorted(tables["R6"]), "the blocks of R6 are neither neighbours nor in order")

# %% [markdown]
# ## The surprise: attention does not care
# Attention is a sum over keys, each of which knows its position from the rotary embedding. Gather the blocks
# in the order of the table, and the result is the same to the last bit, wherever they lie.

# %%
lesson.heading("Scattered or not: the same bits")
torch.manual_seed(0)
table, length = tables["R6"], 30
k, v, q = torch.randn(length, 2, 16), torch.randn(length, 2, 16), torch.randn(1, 2, 2, 16)
outputs = []
for blocks in (table, list(range(1, 1 + len(table)))):
    k_cache, v_cache = torch.zeros(25, 4, 2, 16), torch.zeros(25, 4, 2, 16)
    slot_mapping = torch.tensor([blocks[p // 4] * 4 + p % 4 for p in range(length)])
    write_kv(k_cache, v_cache, k, v, slot_mapping)
    outputs.append(gathered_sdpa_attention(q, k_cache, v_cache, torch.tensor(blocks), length - 1, scale=0.25))
lesson.check(
    torch.equal(*outputs), "attention over scattered blocks equals attention over neighbours, bit for bit"
)

# %% [markdown]
# ## The block mask
# The compiled engine does not gather.
# It gives FlexAttention the *physical* cache and, for every query tile, the
# list of blocks to read: all queries of the tile see all of a **wholly visible** block, a **partial** one is
# masked inside. Everything else is never touched. ``write_lists`` makes these lists from the block tables;
# here they are for one step that decodes R1 and takes in a chunk of R6, and the rule that must come out: a
# query at position p sees
# (p + 1) // 4 wholly visible blocks, and one more, partially, if p + 1 is no multiple of 4.

# %%
lesson.heading("Which blocks a step reads")
decode_at, chunk = len(names["R1"].all_token_ids) - 1, range(8, 24)
table = np.zeros((2, 16), dtype=np.int32)  # R1 has batch slot 0, R6 has batch slot 1
table[0, : len(tables["R1"])], table[1, : len(tables["R6"])] = tables["R1"], tables["R6"]
first_queries, last_queries = np.array([8, 16]), np.array([15, 23])
lists = new_lists(tiles=2, width=16)
first_sees, last_sees = bounds_of(first_queries, Reach()), bounds_of(last_queries, Reach())
write_lists(lists, blocks_read(first_sees, last_sees, block_size=4), table, np.array([1, 1]))
decode = new_lists(tiles=1, width=16)
decode_sees = bounds_of(np.array([decode_at]), Reach())
ranges = blocks_read(decode_sees, decode_sees, block_size=4, tells_full=False)  # as on a GPU
write_lists(decode, ranges, table, np.array([0]))
picture: dict[str, list[Cell]] = {"block": [(str(block), "") for block in range(25)]}
seen: list[tuple[int, int]] = []
for tile, positions in enumerate((chunk[:8], chunk[8:])):
    full = lists.full[tile, : lists.full_count[tile]].tolist()
    partial = lists.partial[tile, : lists.partial_count[tile]].tolist()
    seen.append((len(full), len(partial)))
    row: list[Cell] = [
        ("F", "cached") if p in full else ("P", "decode") if p in partial else ("", "") for p in range(25)
    ]
    picture[f"R6, queries {positions[0]}-{positions[-1]}"] = row
decode_blocks = decode.partial[0, : decode.partial_count[0]].tolist()
picture[f"R1, query {decode_at}"] = [("P", "decode") if p in decode_blocks else ("", "") for p in range(25)]
first, second = chunk[:8], chunk[8:]
rule = [
    ((a + 1) // 4, b // 4 + 1 - (a + 1) // 4) for a, b in ((first[0], first[-1]), (second[0], second[-1]))
]
lesson.predict("(full, partial) blocks of the two tiles", rule, "(a + 1) // 4 full, up to b // 4 partial")
lesson.measure("(full, partial) blocks of the two tiles", seen)
lesson.cells(
    "t03_block_mask",
    "Blocks of the cache, and the query tiles that read them",
    picture,
    legend={"cached": "F: full, read whole", "decode": "P: partial, masked inside"},
)
lesson.check(
    decode_blocks == tables["R1"], "a decoding request reads exactly the blocks of its own block table"
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Smaller blocks waste less. What speaks for larger ones? Count table entries for 64 users of 1,000 "
    "tokens."
)
def block_sizes() -> str:
    found = {}
    for size in (1, 16, 64, 256):
        blocks = 64 * -(-1000 // size)
        found[size] = (blocks, blocks * size - 64 * 1000)
    assert found[1][1] == 0 and found[1][0] == 64_000
    return (
        f"block size: (table entries, wasted cache slots): {found}; large blocks also read memory in long "
        "runs"
    )


@lesson.exercise("What does allocate_slots do when there is no room? Check that it leaves no trace.")
def no_trace() -> str:
    before = manager.pools[0].num_free_blocks
    newcomer = request("large", 60)
    assert manager.allocate_slots(newcomer, 60, 0, manager.get_computed_blocks(newcomer)[0]) is None
    assert manager.pools[0].num_free_blocks == before
    manager.check_integrity(names.values())
    return (
        f"it returns None, {before} blocks stay free, and the integrity check passes: the scheduler can retry"
    )


lesson.passed(
    f"{paged} users fit where {contiguous} did",
    f"{lost} of {reserved:,} cache slots are lost to rounding",
    "attention over scattered blocks is bit-identical",
    "the block mask has (a + 1) // block size wholly visible blocks",
)
