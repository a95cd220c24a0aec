"""A · Worked example, a new attention variant:
ALiBi and a sliding window with sinks, each a line, in the engine.

FlexAttention takes two functions: one may change a score, one says whether a key is visible. Everything else
(tiles, blocks, block tables) is given. So a new variant is a function of a query's and a key's position, and
nothing else.
"""

# %% [markdown]
# ## The variants
# **ALiBi** (Press et al. 2022) subtracts slope · distance from every score; each head has a slope of its own.
# **A window with sinks** (StreamingLLM, Xiao et al. 2024) sees the last W positions and the first S of all:
# without those, a model that was trained with full attention falls apart. ``tutorials/attention_variants.py``
# holds both. This is all that a variant is:
#
#     def fade_by_distance(score, head, query, key):
#         return score - torch.exp2(-8.0 * (head + 1) / HEADS) * (query - key)
#
#     def alibi(context):
#         return rule_attention(context, AttentionRule(score_change=fade_by_distance))
#
# The engine calls ``alibi`` when it starts. ``rule_attention`` makes of the rule a backend over the paged
# cache: compiled FlexAttention, and where nothing is compiled its reference, which calls the same functions.

# %%
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm import LLM, SamplingParams, register_attention
from minivllm.models.model import TokenInputs
from minivllm.specs.caches import LayerCache
from tutorials import attention_variants
from tutorials.attention_variants import (
    SINKS,
    WINDOW,
    fade_by_distance,
    same_chunk,
    soft_cap,
    window_with_sinks,
)
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import engine_arguments, small_decoder

lesson = Lesson(__doc__)
BLOCK, NEW_TOKENS = 16, 4
choose = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(2, 512, (length,), generator=choose).tolist() for length in (3, 30, 45, 21, 17)]

# %% [markdown]
# ## In the engine
# ``attention_backend`` names a backend: one that ``register_attention`` knows, in this process, or one that
# can be imported as ``"package.module:factory"``, in an engine process too. Both are used below, in the
# default engine, with everything compiled. Five requests of different lengths are answered together: prompts
# in query tiles of many queries, answers token by token, each from the blocks of its own block table.

# %%
register_attention("window_with_sinks", attention_variants.sinks)
NAMES = {"ALiBi": "tutorials.attention_variants:alibi", "window with sinks": "window_with_sinks"}


def in_engine(backend: str, **arguments: object) -> list[list[dict[int, float]]]:
    """Log-probabilities of the likeliest tokens, for every token of every answer."""
    settings = {
        "enforce_eager": False,
        "compile_in_background": False,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,
        "dtype": "float32",
    }
    with LLM(**engine_arguments(attention_backend=backend, **(settings | arguments))) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    return [
        [
            {token: entry.logprob for token, entry in place.items()}
            for place in output.outputs[0].logprobs or ()
        ]
        for output in outputs
    ]


# %% [markdown]
# ## The judge
# The definitions of the papers, written with loops, in float64, over contiguous keys. No blocks, no tiles, no
# heads packed, no compiler. The rest of the model is the same, so every difference is one of attention.

# %%
Weights = Callable[[Tensor, int, int], Tensor]
"""(scores of the keys that are not behind the query, float64; head; position of the query) -> weights."""


def alibi_weights(scores: Tensor, head: int, query: int) -> Tensor:
    slope = 2.0 ** (-8 * (head + 1) / 4)
    return torch.softmax(scores - slope * torch.tensor([float(query - key) for key in range(query + 1)]), 0)


def sink_weights(scores: Tensor, head: int, query: int) -> Tensor:
    hidden = [key for key in range(query + 1) if key >= SINKS and key <= query - WINDOW]
    scores[hidden] = -torch.inf
    return torch.softmax(scores, 0)


def causal_weights(scores: Tensor, head: int, query: int) -> Tensor:
    return torch.softmax(scores, 0)


def by_definition(token_ids: list[int], weights: Weights) -> Tensor:
    """Log-probabilities [512] of the next token."""
    decoder, length = small_decoder(), len(token_ids)
    caches = [LayerCache(*torch.zeros(2, 1, length, 2, 16)) for _ in decoder.layers]

    def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        k, v = (cache[0, :length].double() for cache in caches[layer][:2])
        out = torch.zeros(q.shape, dtype=torch.float64)
        for query in range(length):
            for head in range(4):
                kv_head, member = divmod(head, 2)
                scores = (
                    k[: query + 1, kv_head]
                    @ q[query, kv_head, member].double()
                    * decoder.attention_specs[0].scale
                )
                out[query, kv_head, member] = weights(scores, head, query) @ v[: query + 1, kv_head]
        return out.to(q.dtype)

    positions = torch.arange(length, dtype=torch.int32)
    tokens, placed = TokenInputs(positions), [cache.at(positions) for cache in caches]
    ids = torch.tensor(token_ids, dtype=torch.int32)
    hidden = decoder.forward(ids, tokens, placed, attend)
    return decoder.logits(hidden, positions[-1:], tokens)[0].log_softmax(-1)


def largest_difference(answers: list[list[dict[int, float]]], weights: Weights) -> float:
    """Of any log-probability, following the tokens that the engine chose."""
    worst = 0.0
    for prompt, answer in zip(PROMPTS, answers):
        token_ids = list(prompt)
        for likeliest in answer:
            expected = by_definition(token_ids, weights)
            worst = max(worst, *(abs(float(expected[token]) - value) for token, value in likeliest.items()))
            token_ids.append(max(likeliest, key=lambda token: likeliest[token]))
    return worst


lesson.heading("Against float64")
DEFINITIONS: dict[str, Weights] = {"ALiBi": alibi_weights, "window with sinks": sink_weights}
lesson.predict("variants that agree with float64", list(NAMES), "the same definitions")
with torch.inference_mode():
    answers = {name: in_engine(backend) for name, backend in NAMES.items()}
    differences = {name: largest_difference(answers[name], DEFINITIONS[name]) for name in NAMES}
    from_causal = {name: largest_difference(answers[name], causal_weights) for name in NAMES}
lesson.measure(
    "variants that agree with float64", [name for name, error in differences.items() if error < 1e-4]
)
lesson.say(
    f"  largest differences: {', '.join(f'{name} {error:.0e}' for name, error in differences.items())}"
)
lesson.check(
    min(from_causal.values()) > 10 * max(differences.values()),
    "and both differ from causal attention by more",
)

# %% [markdown]
# ## What is seen
# The blocks that a decode step must read follow from the rule as well: with a window of 8, two sinks and
# blocks of 4, the last query needs the first block and the last ones, whatever the length. The middle of a
# long text could be freed.

# %%
lesson.heading("Keys that the queries see")
LENGTH, QUERIES, SMALL_BLOCK = 30, 6, 4


def seen_keys(query: int) -> list[int]:
    return [key for key in range(LENGTH) if bool(window_with_sinks(torch.tensor(query), torch.tensor(key)))]


picture: dict[str, list[Cell]] = {"position": [(str(p % 10), "") for p in range(LENGTH)]}
for query in range(LENGTH - QUERIES, LENGTH):
    seen = seen_keys(query)
    picture[f"query {query}"] = [
        ("x", "cached" if key < SINKS else "prompt") if key in seen else ("", "") for key in range(LENGTH)
    ]
lesson.cells(
    "e01_sinks",
    "Window of 8 with 2 sinks",
    picture,
    legend={"cached": "sink", "prompt": "window"},
    narrow=True,
)
lesson.predict(
    "blocks the last query needs", 1 + 3, "the sinks' block, and positions 22 to 29 in blocks 5, 6 and 7"
)
lesson.measure("blocks the last query needs", len({key // SMALL_BLOCK for key in seen_keys(LENGTH - 1)}))

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Soft-capping (Gemma 2): scores become c · tanh(score / c). Write it, with c = 0.1, and compare."
)
def soft_capping() -> str:
    def weights(scores: Tensor, head: int, query: int) -> Tensor:
        return torch.softmax(0.1 * torch.tanh(scores / 0.1), 0)

    with torch.inference_mode():
        worst = largest_difference(
            in_engine("tutorials.attention_variants:capped", enforce_eager=True), weights
        )
    assert worst < 1e-4
    assert float(soft_cap(*torch.tensor([5.0, 0.0, 0.0, 0.0]))) < 0.1 + 1e-6
    return f"one line; the largest difference is {worst:.0e}"


@lesson.exercise(
    "Chunked local attention (Llama 4): a query sees only keys of its own chunk of 8. What do query 24 and "
    "29 see?"
)
def chunked() -> str:
    def weights(scores: Tensor, head: int, query: int) -> Tensor:
        scores[: query // 8 * 8] = -torch.inf
        return torch.softmax(scores, 0)

    with torch.inference_mode():
        worst = largest_difference(
            in_engine("tutorials.attention_variants:chunked", enforce_eager=True), weights
        )
    assert worst < 1e-4
    keys = torch.arange(LENGTH)
    assert keys[same_chunk(torch.tensor(24), keys)].tolist() == [24]
    assert keys[same_chunk(torch.tensor(29), keys)].tolist() == list(range(24, 30))
    return (
        "query 24 begins a chunk and sees itself only, so its output is its own value; query 29 sees 24 to 29"
    )


slopes = [float(-fade_by_distance(*torch.tensor([0.0, head, 1.0, 0.0]))) for head in range(4)]
assert slopes == [0.25, 0.0625, 0.015625, 0.00390625]
lesson.passed(
    "ALiBi and a window with sinks are a line each, and run compiled in the default engine",
    f"they agree with float64 to {max(differences.values()):.0e}",
)
