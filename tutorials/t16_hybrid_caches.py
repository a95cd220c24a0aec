"""16 · Hybrid caches: layers that forget leave room for more than four times as many tokens in the same
bytes.

Many models look far back in a few layers only. In Gemma 3 five layers of six have a sliding window: a token
sees the 1,024 tokens up to itself, and what lies further back is never read again there. A cache that keeps
it all the same wastes most of its memory.
"""

# %% [markdown]
# ## Count by hand
# Gemma 3 4B has 34 layers with 4 KV heads of 256 dimensions. A token takes 2 · 4 · 256 values of 2 bytes in
# each layer: 4,096 bytes. The layers 5, 11, 17, 23 and 29 see everything; the other 29 have a window.
#
# A request of 32,768 tokens needs a place for every token in the layers that see everything. In the others it
# needs those of its window. The window of 1,024 tokens moves on token by token, and blocks have 64: as soon
# as it begins in the middle of a block, it touches 17.
#
# No weights are needed to check that. A configuration is enough: the engine describes the layers, and
# ``kv_groups`` says which of them share a pool.

# %%
from __future__ import annotations

from typing import Any

import torch

from minivllm import LLM, SamplingParams
from minivllm.batch.layer_caches import kv_groups
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.kv_cache.group_manager import FullAttentionManager, SlidingWindowManager, make_group
from minivllm.kv_cache.manager import KVCacheManager
from minivllm.kv_cache.sizing import PoolLimits, fit_pools
from minivllm.kv_cache.specs import GroupSpec, one_group
from minivllm.models.decoder import Decoder
from minivllm.simulation.steps import Arrival
from tutorials.lesson import Lesson
from tutorials.small_model import SHAPE, engine_arguments, model_folder

lesson = Lesson(__doc__)
LENGTH, WINDOW, BLOCK, BYTES = 32_768, 1024, 64, 2 * 4 * 256 * 2
GEMMA_3_4B = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 34,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": WINDOW,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}


def layers_of(entries: dict[str, Any]) -> Decoder:
    """A decoder without weights, on PyTorch's ``meta`` device: all of its layers, none of their memory."""
    config = read_decoder_config(model_folder(entries))
    dtype, device = torch.bfloat16, torch.device("meta")
    return Decoder(config, dtype=dtype, attention_dtype=dtype, device=device, max_model_len=LENGTH)


def held(group: GroupSpec) -> int:
    """Bytes that a decoding request of LENGTH tokens holds in the pool of a group."""
    return group.max_blocks(LENGTH, longest_chunk=1) * group.block_bytes


lesson.heading("One request of 32,768 tokens")
lesson.predict(
    "layers of each group", {"full attention": 5, "sliding window of 1024": 29}, "every sixth sees everything"
)
lesson.predict("bytes if all layers keep everything", 34 * LENGTH * BYTES, "34 layers, every token")
lesson.predict(
    "bytes of each group", [5 * LENGTH * BYTES, 29 * 17 * BLOCK * BYTES], "5 layers; 29 layers, 17 blocks"
)
decoder = layers_of(GEMMA_3_4B)
two = kv_groups(decoder, BLOCK, LENGTH)
one = kv_groups(decoder, BLOCK, LENGTH, may_drop=False)
lesson.measure("layers of each group", {group.name: len(group.layers) for group in two})
lesson.measure("bytes if all layers keep everything", held(one[0]))
lesson.measure("bytes of each group", [held(group) for group in two])
lesson.bars(
    "t16_bytes",
    "One request of 32,768 tokens",
    {"all layers keep everything": held(one[0]) / 2**30, "windows forget": sum(map(held, two)) / 2**30},
    "GiB",
)

# %% [markdown]
# ## One pool per kind
# The two kinds live and die differently, so each has a pool of blocks of its own: the block table of a
# request is a list per group. How large should the pools be? If all requests were long, the windows would
# need little: 17 blocks for every 512 of the others. But most requests are short, and a short one needs as
# many tokens here as there. So the engine gives the windows half as much memory as the first pool
# (``LOCAL_SHARE``), unless that is more than ``max_num_seqs`` requests and their retained prefixes can use.
#
# Predict the number of tokens in 16 GiB. With one pool: 16 GiB over 34 layers. With two: two thirds of it for
# 5 layers. That makes 34 / 5 · 2 / 3 ≈ 4.5 times as many.

# %%
lesson.heading("What 16 GiB hold")
MEMORY = 16 * 2**30
limits = PoolLimits(max_num_seqs=64, max_model_len=LENGTH, longest_chunk=2048)
tokens = [MEMORY // (34 * BYTES), MEMORY * 2 // 3 // (5 * BYTES)]
lesson.predict("tokens of the first pool, one group", tokens[0], "16 GiB, 34 layers")
lesson.predict("tokens of the first pool, two groups", tokens[1], "two thirds of 16 GiB, 5 layers")
sized = [fit_pools(groups, MEMORY, limits) for groups in (one, two)]
found = [(groups[0].num_blocks - 1) * BLOCK for groups in sized]
lesson.measure("tokens of the first pool, one group", found[0], within=0.01)
lesson.measure("tokens of the first pool, two groups", found[1], within=0.01)

# %% [markdown]
# That is arithmetic about arithmetic. So fill the pools: the engine's own manager admits prompts of 32,767
# tokens, in chunks of 2,048, and one token of each answer, until it refuses one. Blocks are numbers to it, so
# 16 GiB of them fit into any laptop.


# %%
def start(groups: list[GroupSpec]) -> KVCacheManager:
    return KVCacheManager([make_group(group, limits.longest_chunk) for group in groups], LENGTH)


def admit(manager: KVCacheManager, number: int) -> list[list[int]] | None:
    """Compute LENGTH tokens of a request, the last one by itself.
    Returns blocks in use in each pool after every step; None if it was refused."""
    request = Arrival(f"R{number}", [number + 1, *range(LENGTH - 1)], max_tokens=1).request()
    hits, in_use = manager.get_computed_blocks(request)[0], []
    for start in range(0, LENGTH, limits.longest_chunk):
        end = min(start + limits.longest_chunk, LENGTH - 1)
        for first, last in ((start, end), (end, LENGTH))[: 1 + (end == LENGTH - 1)]:
            if manager.allocate_slots(request, last - first, 0, None if first else hits) is None:
                return None
            request.num_computed_tokens = last
            in_use.append([pool.num_blocks - 1 - pool.num_free_blocks for pool in manager.pools])
    return in_use


lesson.heading("Requests of 32,768 tokens side by side")
lesson.predict(
    "requests that fit", [count // LENGTH for count in tokens], "whole requests in the tokens above"
)
fitting = []
for groups in sized:
    manager = start(groups)
    fitting.append(next(number for number in range(100) if admit(manager, number) is None))
lesson.measure("requests that fit", fitting)

in_use = admit(start(sized[1]), 0) or []
lengths = [*range(limits.longest_chunk, LENGTH, limits.longest_chunk), LENGTH - 1, LENGTH]
forgetting = [
    sum(blocks * group.block_bytes for blocks, group in zip(counts, two)) / 2**20 for counts in in_use
]
lesson.curves(
    "t16_growth",
    "A prompt in chunks of 2,048 tokens, and one token more",
    lengths,
    {
        "all layers keep everything": [length * 34 * BYTES / 2**20 for length in lengths],
        "windows forget": forgetting,
    },
    "tokens computed, MiB held",
)
last = "blocks of windows, last chunk and last token"
lesson.predict(last, [48, 16], "chunk and window; window, which begins with a block here")
lesson.measure(last, [windows for _, windows in in_use[-2:]])
lesson.say(
    "  A chunk needs its own tokens and the window before it: large chunks cost memory in the pool of "
    "windows."
)

# %% [markdown]
# ## A real model that forgets
# The same with tensors: a small random model of the same build, 5 layers with a window of 32 tokens and one
# without, in blocks of 16. It writes 100 tokens. The control is an engine that must keep everything:
# attention that is given by its path is not the engine's own and may read whatever it likes, so nothing is
# dropped.

# %%
SMALL = {
    **SHAPE,
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 32,
    "tie_word_embeddings": True,
}
FOREIGN = "minivllm.attention:SdpaAttention"
GREEDY = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def write(llm: LLM, prompt: list[int]) -> tuple[list[int], int, list[int]]:
    """(prompt and answer, tokens found in the cache, most blocks in use in each pool)."""
    pools = llm.llm_engine.client.core.scheduler.kv_cache_manager.pools  # type: ignore[attr-defined]
    llm.llm_engine.add_request("R1", {"prompt_token_ids": prompt}, GREEDY)
    most, outputs = [0] * len(pools), []
    while llm.llm_engine.has_unfinished_requests():
        outputs += llm.llm_engine.step()
        most = [max(seen, pool.num_blocks - 1 - pool.num_free_blocks) for seen, pool in zip(most, pools)]
    return [*prompt, *outputs[-1].outputs[0].token_ids], outputs[-1].num_cached_tokens, most


lesson.heading("100 tokens of a small model")
prompt = [(7 * i) % 512 for i in range(12)]
written = len(prompt) + 100 - 1  # the last token is never computed
lesson.predict(
    "most blocks in use",
    [[-(-written // 16)], [-(-written // 16), 3]],
    "all of the text; 32 tokens touch 3 blocks",
)
engines = [
    LLM(**engine_arguments(model=str(model_folder(SMALL)), reuse_partial_blocks=False, **differs))
    for differs in ({"attention_backend": FOREIGN}, {})
]
texts, _, most = zip(*(write(llm, prompt) for llm in engines))
lesson.measure("most blocks in use", list(most))
lesson.check(texts[0] == texts[1], "both engines write the same tokens")

# %% [markdown]
# ## The second turn
# A chat sends everything again (chapter 6).
# What was dropped may be gone: does the next turn start from nothing?
# The next token reads only the last 32 tokens in the layers with a window. So a hit needs *all* blocks of
# full attention, but only the *end* of the windows, and the end is what was written last. The search in a
# window goes from right to left, and the answers of all groups are made to agree.
#
# So the second turn finds as much as if nothing had been dropped: all full blocks that were computed. Engines
# that drop blocks without this search compute the whole conversation again.

# %%
lesson.heading("A second turn")
lesson.predict("tokens found", [written // 16 * 16] * 2, "all full blocks, with and without windows")
again = [write(llm, [*text, 5, 6, 7]) for llm, text in zip(engines, texts)]
lesson.measure("tokens found", [cached for _, cached, _ in again])
lesson.check(again[0][0] == again[1][0], "the same tokens again")
for llm in engines:
    llm.close()

# %% [markdown]
# ## The surprise: the end can be found, the middle may be gone
# Dropped blocks go to the free queue with their names on, and are found until they are reused. In a small
# pool that is soon: a long text reuses its own blocks. Then the continuation is found and a *branch* from the
# middle (an edited message) is not, although full attention still has it: one group without an answer is
# enough.

# %%
lesson.heading("A text of 70 tokens, a window of 5, 8 blocks of 2 for it")
manager = KVCacheManager([FullAttentionManager(60, 2), SlidingWindowManager(9, 2, 5, 8)], 200)
request = Arrival("first", list(range(8)), max_tokens=62).request()
hits, _ = manager.get_computed_blocks(request)
manager.allocate_slots(request, 8, 0, hits)
request.num_computed_tokens = 8
for token in range(8, 70):
    request.append_output_token(token)
    manager.allocate_slots(request, 1)
    request.num_computed_tokens += 1
manager.free(request)
lesson.predict("tokens found, continued and branched", [70, 0], "the window before token 40 was overwritten")
asked = {"continued": list(range(75)), "branched": [*range(40), 0, 0, 0]}
lesson.measure(
    "tokens found, continued and branched",
    [manager.get_computed_blocks(Arrival(name, text, 1).request())[1] for name, text in asked.items()],
)
full, window = manager.pools
lesson.cells(
    "t16_found",
    "Blocks of the text that can still be found",
    {
        name: [("■", "cached") if block in kept else ("·", "wasted") for block in range(35)]
        for name, kept in {
            "full attention": set(range(full.num_cached_hashes)),
            "window of 5": set(range(35 - window.num_cached_hashes, 35)),
        }.items()
    },
    legend={"cached": "still there", "wasted": "overwritten"},
    narrow=True,
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "gpt-oss 20B: 24 layers, half of them with a window of 128, 8 KV heads of 64. What does it gain?"
)
def gpt_oss() -> str:
    block_bytes = BLOCK * 2 * 8 * 64 * 2
    everything = one_group(24, BLOCK, 24 * block_bytes)
    half = tuple(range(0, 24, 2)), tuple(range(1, 24, 2))
    full, windows = (
        GroupSpec(kind="full attention", layers=half[1], block_size=BLOCK, block_bytes=12 * block_bytes),
        GroupSpec(
            kind="sliding window", reach=128, layers=half[0], block_size=BLOCK, block_bytes=12 * block_bytes
        ),
    )
    gain = held(everything) / (held(full) + held(windows))
    in_pools = (
        fit_pools([full, windows], MEMORY, limits)[0].num_blocks
        / fit_pools([everything], MEMORY, limits)[0].num_blocks
    )
    assert 1.98 < gain < 2 and 1.9 < in_pools < 2
    return (
        f"a request of 32,768 tokens takes {gain:.2f} times less, never more than the 2 that half the layers "
        "allow; "
        f"and 16 GiB hold {in_pools:.2f} times as many tokens, since so small a window needs less than its "
        "share"
    )


@lesson.exercise("Why 17 blocks for 1,024 tokens? Find by trial the most blocks of 64 that a window touches.")
def seventeen() -> str:
    touched = [last // BLOCK - (last - WINDOW + 1) // BLOCK + 1 for last in range(WINDOW, WINDOW + BLOCK)]
    assert (min(touched), max(touched)) == (16, 17) and touched.count(16) == 1
    return "16 only when the window begins with a block, which is one place in 64; 17 at the 63 others"


@lesson.exercise(
    "Blocks of 4 tokens for full attention, of 6 for a window: after a text of 40 tokens, what is found?"
)
def other_sizes() -> str:
    manager = KVCacheManager([FullAttentionManager(30, 4), SlidingWindowManager(30, 6, 8, 40)], 200)
    request = Arrival("first", list(range(40)), max_tokens=1).request()
    manager.allocate_slots(request, 40, 0, manager.get_computed_blocks(request)[0])
    request.num_computed_tokens = 40
    manager.free(request)
    found = manager.get_computed_blocks(Arrival("again", list(range(50)), 1).request())[1]
    assert (found, manager.hash_block_size) == (36, 2)
    return (
        "36: where blocks of both sizes end, a multiple of 12; tokens are hashed in pieces of 2, which "
        "divide both"
    )


lesson.passed(
    f"16 GiB hold {found[1] / found[0]:.1f} times as many tokens of Gemma 3 4B, {fitting[1]} long requests "
    "and not "
    f"{fitting[0]}",
    "a window needs the same few blocks however long the text is",
    "a second turn finds all of the first one",
)
