"""A · Worked example, a new attention variant: ALiBi and a sliding window with sinks, each in a few lines over pages.

FlexAttention takes two functions: one may change a score, one says whether a key is visible. Everything else (tiles,
pages, block tables) is given. So a new variant is a function of a query's and a key's position, and nothing else.
"""

# %% [markdown]
# ## The variants
# **ALiBi** (Press et al. 2022) subtracts slope · distance from every score; each head has a slope of its own. **A
# window with sinks** (StreamingLLM, Xiao et al. 2024) sees the last W positions and the first S of all: without those,
# a model that was trained with full attention falls apart.

# %%
from __future__ import annotations

import warnings

import torch
from torch import Tensor

from kernels_triton_free.attention import ScoreChange, TileLists, Visibility, pack_tiles, paged_flex_attention
from kernels_triton_free.paged_cache import write_kv
from tutorials.lesson import Cell, Lesson

lesson = Lesson(__doc__)
warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
WINDOW, SINKS, HEADS, KV_HEADS, DIM = 8, 2, 4, 2, 16
SLOPES = torch.tensor([2.0 ** (-8 * (head + 1) / HEADS) for head in range(HEADS)])


def alibi(score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - SLOPES[head] * (query - key)


def window_with_sinks(query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((key > query - WINDOW) | (key < SINKS))


# %% [markdown]
# That is all of both. ``paged_flex_attention``, the engine's own kernel, takes them as ``score_change`` and
# ``visibility``, and translates: a tile's row into a query and its head, a slot of the cache into the position of what
# it holds.
#
# ## A sequence on scattered pages
# 30 tokens on pages of 4, in any order, beside the pages of somebody else. The last 6 are the queries of one tile.
# (Uncompiled, FlexAttention computes the whole square, so somebody else's slots are given a position that nobody sees.)

# %%
PAGE, NUM_PAGES, LENGTH, QUERIES = 4, 16, 30, 6
generator = torch.Generator().manual_seed(0)
table = torch.randperm(NUM_PAGES - 1, generator=generator)[: -(-LENGTH // PAGE)] + 1
k, v = (torch.randn(LENGTH, KV_HEADS, DIM, generator=generator) for _ in range(2))
q = torch.randn(QUERIES, KV_HEADS, HEADS // KV_HEADS, DIM, generator=generator)
k_cache, v_cache = (torch.randn(NUM_PAGES, PAGE, KV_HEADS, DIM, generator=generator) for _ in range(2))
positions = torch.arange(LENGTH)
slots = table[positions // PAGE] * PAGE + positions % PAGE
write_kv(k_cache, v_cache, k, v, slots)
kv_position = torch.full((NUM_PAGES * PAGE,), 1 << 20, dtype=torch.int32)
kv_position[slots] = positions.int()
q_position = torch.arange(LENGTH - QUERIES, LENGTH, dtype=torch.int32)[None]


def paged(visibility: Visibility | None = None, score_change: ScoreChange | None = None) -> Tensor:
    """The engine's kernel on this sequence: one tile, every page of it listed as partial. [queries, kv_heads, G, D]."""
    pages = torch.zeros(1, 1, 1, NUM_PAGES, dtype=torch.int32)
    pages[0, 0, 0, : len(table)] = table
    lists = TileLists(torch.tensor([[[len(table)]]], dtype=torch.int32), pages, None, None)
    tile = pack_tiles(q, torch.arange(QUERIES), QUERIES)
    out = paged_flex_attention(
        tile,
        k_cache,
        v_cache,
        lists,
        q_position,
        kv_position,
        scale=DIM**-0.5,
        visibility=visibility,
        score_change=score_change,
    )
    return out.view(1, KV_HEADS, QUERIES, -1, DIM)[0].transpose(0, 1)


# %% [markdown]
# ## The judge
# The definitions of the papers, written with loops, in float64, over contiguous keys. No pages, no tiles, no heads
# packed.


# %%
def reference(variant: str) -> Tensor:
    out = torch.zeros(QUERIES, HEADS, DIM, dtype=torch.float64)
    for row in range(QUERIES):
        query = LENGTH - QUERIES + row
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            seen = [key for key in range(query + 1) if sees(variant, query, key)]
            scores = k[seen, kv_head].double() @ q[row].reshape(HEADS, DIM)[head].double() / DIM**0.5
            if variant == "ALiBi":
                scores -= 2.0 ** (-8 * (head + 1) / HEADS) * torch.tensor([query - key for key in seen])
            out[row, head] = torch.softmax(scores, dim=0) @ v[seen, kv_head].double()
    return out.view(QUERIES, KV_HEADS, -1, DIM)


def sees(variant: str, query: int, key: int) -> bool:
    return variant != "window with sinks" or key < SINKS or key > query - WINDOW


lesson.heading("Against float64")
variants = {
    "causal": paged(),
    "ALiBi": paged(score_change=alibi),
    "window with sinks": paged(visibility=window_with_sinks),
}
differences = {name: float((out.double() - reference(name)).abs().max()) for name, out in variants.items()}
lesson.predict("variants that agree with float64", list(variants), "the same definitions")
lesson.measure("variants that agree with float64", [name for name, error in differences.items() if error < 1e-5])
lesson.say(f"  largest differences: {', '.join(f'{name} {error:.0e}' for name, error in differences.items())}")
others = [float((variants["causal"] - variants[name]).abs().max()) for name in ("ALiBi", "window with sinks")]
lesson.check(min(others) > 0.01, "and the three differ from one another, so the test can fail")

# %% [markdown]
# ## What is seen
# The pages a decode step must read follow from the rule as well: with a window of 8, two sinks and pages of 4, the last
# query needs the first page and the last ones, whatever the length. The middle of a long text could be freed.

# %%
lesson.heading("Keys that the queries see")
picture: dict[str, list[Cell]] = {"position": [(str(p % 10), "") for p in range(LENGTH)]}
for query in range(LENGTH - QUERIES, LENGTH):
    seen = [bool(window_with_sinks(torch.tensor(query), torch.tensor(key))) for key in range(LENGTH)]
    picture[f"query {query}"] = [
        ("x", "cached" if key < SINKS else "prompt") if s else ("", "") for key, s in enumerate(seen)
    ]
lesson.cells(
    "e01_sinks", "Window of 8 with 2 sinks", picture, legend={"cached": "sink", "prompt": "window"}, narrow=True
)
lesson.predict("pages the last query needs", 1 + 3, "the sinks' page, and positions 22 to 29 on pages 5, 6 and 7")
seen_pages = {key // PAGE for key in range(LENGTH) if sees("window with sinks", LENGTH - 1, key)}
lesson.measure("pages the last query needs", len(seen_pages))

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Soft-capping (Gemma 2): scores become c · tanh(score / c). Write it, with c = 2, and compare with float64."
)
def soft_capping() -> str:
    def capped(score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return 2.0 * torch.tanh(score / 2.0)

    out, worst = paged(score_change=capped), 0.0
    for row in range(QUERIES):
        last = LENGTH - QUERIES + row + 1
        for head in range(HEADS):
            scores = k[:last, head // 2].double() @ q[row].reshape(HEADS, DIM)[head].double() / DIM**0.5
            expected = torch.softmax(2 * torch.tanh(scores / 2), dim=0) @ v[:last, head // 2].double()
            worst = max(worst, float((out[row].reshape(HEADS, DIM)[head] - expected).abs().max()))
    assert worst < 1e-5
    return f"one line; the largest difference is {worst:.0e}"


@lesson.exercise(
    "Chunked local attention (Llama 4): a query sees only keys of its own chunk of 8. What do query 24 and 29 see?"
)
def chunked() -> str:
    def same_chunk(query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 8 == query // 8)

    out = paged(visibility=same_chunk)
    torch.testing.assert_close(out[0], v[24][:, None].expand(-1, 2, -1))
    return "query 24 begins a chunk and sees itself only, so its output is its own value; query 29 sees 24 to 29"


lesson.passed(
    "ALiBi and a window with sinks are three lines each",
    f"they agree with float64 over scattered pages to {max(differences.values()):.0e}",
)
