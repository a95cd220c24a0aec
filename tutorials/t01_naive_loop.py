"""01 · The naive loop: without a memory, every new token pays for all tokens before it.

A language model maps a sequence of tokens to a guess of the next one. To write text, ask again and again.
This chapter does exactly that with the engine's own ``Decoder``, and counts what it costs. Everything that
follows in the other chapters is a way not to pay it.

Run it top to bottom, or cell by cell in an editor that knows ``# %%``.
"""

# %% [markdown]
# ## The model as a function
# The engine's decoder is cut into regions at attention (chapter 10 says why), so attention is handed in from
# outside. On its way the decoder notes down a key and a value for every token. Here the notes live in a scrap
# of memory that is thrown away after each call: the model is a pure function from tokens to logits.

# %%
from __future__ import annotations

import time

import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from minivllm import LLM, SamplingParams
from minivllm.batch.layer_caches import allocate_caches
from minivllm.models.model import TokenInputs
from tutorials.lesson import Lesson
from tutorials.small_model import engine_arguments, small_decoder

lesson = Lesson(__doc__)
decoder = small_decoder()
tokens_computed = 0


@torch.inference_mode()
def next_token(token_ids: list[int]) -> int:
    """The likeliest next token, computed from nothing but the tokens."""
    global tokens_computed
    tokens_computed += len(token_ids)
    notes = allocate_caches(decoder, num_blocks=1, block_size=len(token_ids))
    places = torch.arange(len(token_ids), dtype=torch.int32)

    def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        block = torch.zeros(1, dtype=torch.int64)
        return gathered_sdpa_attention(q, *notes[layer][:2], block, 0, scale=decoder.attention_specs[0].scale)

    tokens, placed = TokenInputs(places), [note.at(places) for note in notes]
    hidden = decoder.forward(torch.tensor(token_ids), tokens, placed, attend)
    last = torch.tensor([len(token_ids) - 1])
    return int(decoder.logits(hidden, last, tokens).argmax())


# %% [markdown]
# ## The loop
# This is the whole of text generation. There is nothing wrong with it, except the bill.


# %%
def generate(prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


# %% [markdown]
# ## Predict, then measure
# Step *i* sends the prompt and the *i* tokens written so far through the model. For a prompt of P tokens and
# N new ones that is P + (P + 1) + … + (P + N − 1) = N·P + N(N − 1)/2: it grows with the square of N.

# %%
lesson.heading("What one answer costs")
P, N = 16, 48
prompt = [(7 * i + 3) % 512 for i in range(P)]
lesson.predict("tokens computed", N * P + N * (N - 1) // 2, f"N·P + N(N-1)/2 with P = {P}, N = {N}")
started = time.perf_counter()
answer = generate(prompt, N)
lesson.measure("tokens computed", tokens_computed)
lesson.say(f"  (that took {time.perf_counter() - started:.2f} s here; times are shown, never asserted)")

# %% [markdown]
# ## The surprise
# How much of it was new? Of all tokens that went through the model only P + N − 1 were ever different. The
# rest is the same question asked again. And twice the answer costs more than twice as much, in the long run
# four times:

# %%
lesson.heading("Twice the length")
new = P + N - 1
lesson.say(
    f"  {new} of {tokens_computed:,} tokens were new: {1 - new / tokens_computed:.1%} of the work was "
    "repetition"
)
before = tokens_computed
lesson.predict("tokens computed for 2N", 2 * N * P + N * (2 * N - 1), "the same formula with 2N")
tokens_computed = 0
longer = generate(prompt, 2 * N)
lesson.measure("tokens computed for 2N", tokens_computed)
lesson.say(f"  twice the answer, {tokens_computed / before:.2f} times the work")
lesson.check(longer[:N] == answer, "the first half of the longer answer is the shorter answer")

# %% [markdown]
# ## The same answer from the engine
# Is the loop even right? The engine, with everything in it that this book is about, must say the same. It
# computes each token once; how, is chapter 2.

# %%
lesson.heading("The engine says the same")
lesson.predict("tokens the engine computes", P + N - 1, "every token once; the last one is never sent back")
with LLM(**engine_arguments()) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=N, ignore_eos=True)
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    lesson.check(output.outputs[0].token_ids == answer, f"all {N} tokens agree with the naive loop")
    lesson.measure("tokens the engine computes", llm.get_metrics().num_computed_tokens)

lengths = list(range(8, 129, 8))
lesson.curves(
    "t01_naive_loop",
    "Tokens that go through the model",
    lengths,
    {
        "naive loop": [n * P + n * (n - 1) // 2 for n in lengths],
        "each token once": [P + n - 1 for n in lengths],
    },
    "tokens written, tokens computed",
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Attention compares every token with all before it. Count the comparisons of the naive loop: which power?"
)
def comparisons() -> str:
    def compared(n: int) -> int:
        return sum(length * (length + 1) // 2 for length in range(P, P + n))

    ratio = compared(4000) / compared(2000)
    assert 7.5 < ratio < 8.0
    return f"twice the answer costs {ratio:.2f} times the comparisons: attention grows with the cube"


@lesson.exercise(
    "How many tokens must an answer have before more than nine tenths of the work is repetition?"
)
def mostly_repetition() -> str:
    n = next(n for n in range(1, 1000) if P + n - 1 < (n * P + n * (n - 1) // 2) / 10)
    assert n == 13, "so few, since the prompt is repeated from the second token on"
    return f"{n} tokens after a prompt of {P}: {n * P + n * (n - 1) // 2} computed, {P + n - 1} of them new"


lesson.passed(
    "the naive loop computes N·P + N(N-1)/2 tokens",
    f"{1 - new / before:.0%} of them were computed before",
    "the engine gives the same answer from P + N - 1",
)
