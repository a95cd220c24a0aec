"""02 · The KV cache: keep the notes, and every token is computed once,
for memory that grows with every token.

Chapter 1 threw away a key and a value per token and layer after every step, and computed them again. A
token's key and value depend only on the tokens before it, and those never change. So keep them.
"""

# %% [markdown]
# ## One function, two ways to call it
# ``step`` computes the tokens from position ``start`` on, reading the notes of everything before from
# ``notes``. With ``start = 0`` and fresh notes it is chapter 1, which stays here as the control.

# %%
from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from minivllm.batch.layer_caches import allocate_caches, block_bytes
from minivllm.models.model import TokenInputs
from minivllm.specs.caches import LayerCache
from tutorials.lesson import Lesson
from tutorials.small_model import small_decoder

lesson = Lesson(__doc__)
decoder = small_decoder()
CAPACITY = 256
tokens_computed = 0


def fresh_notes() -> list[LayerCache]:
    """Keys and values of up to CAPACITY tokens, for each layer."""
    return allocate_caches(decoder, num_blocks=1, block_size=CAPACITY)


@torch.inference_mode()
def step(token_ids: list[int], start: int, notes: list[LayerCache]) -> Tensor:
    """Logits [vocab] after the last of ``token_ids``,
    of which those before ``start`` are in the notes already."""
    global tokens_computed
    tokens_computed += len(token_ids) - start
    places = torch.arange(start, len(token_ids), dtype=torch.int32)

    def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        block = torch.zeros(1, dtype=torch.int64)
        return gathered_sdpa_attention(
            q, *notes[layer][:2], block, start, scale=decoder.attention_specs[0].scale
        )

    tokens, placed = TokenInputs(places), [note.at(places) for note in notes]
    hidden = decoder.forward(torch.tensor(token_ids[start:]), tokens, placed, attend)
    return decoder.logits(hidden, torch.tensor([len(token_ids) - start - 1]), tokens)[0]


def generate(prompt: list[int], num_tokens: int, keep_notes: bool) -> list[int]:
    token_ids, notes, start = list(prompt), fresh_notes(), 0
    for _ in range(num_tokens):
        if not keep_notes:  # chapter 1
            notes, start = fresh_notes(), 0
        logits = step(token_ids, start, notes)
        start = len(token_ids)
        token_ids.append(int(logits.argmax()))
    return token_ids[len(prompt) :]


# %% [markdown]
# ## Predict, then measure
# Now the first step computes the prompt and every later one a single token.
# The last token is never sent back.

# %%
lesson.heading("Work, with and without notes")
P, N = 16, 64
prompt = [(7 * i + 3) % 512 for i in range(P)]
lesson.predict("tokens computed without notes", N * P + N * (N - 1) // 2, "chapter 1")
lesson.predict("tokens computed with notes", P + N - 1, "every token once, but the last")
naive = generate(prompt, N, keep_notes=False)
lesson.measure("tokens computed without notes", tokens_computed)
tokens_computed = 0
cached = generate(prompt, N, keep_notes=True)
lesson.measure("tokens computed with notes", tokens_computed)
lesson.check(cached == naive, f"all {N} tokens are the same")

# %% [markdown]
# ## What it costs
# The bill is now paid in memory. Per token: a key and a value, in each layer, for each KV head, ``head_dim``
# numbers each. That is all the "KV cache" is. Grouped-query attention (4 query heads share 2 KV heads here)
# exists to make it smaller.

# %%
lesson.heading("The price of a token, in bytes")
config = decoder.config
mixer = config.layers[0].mixer
per_token = 2 * config.num_layers * mixer.kv_heads * mixer.head_dim * 4
lesson.predict("bytes per token", per_token, "2 (K, V) x layers x kv_heads x head_dim x 4 bytes")
notes = fresh_notes()
lesson.measure("bytes per token", sum(cache.k.nbytes + cache.v.nbytes for cache in notes) // CAPACITY)
lesson.check(
    block_bytes(decoder, CAPACITY) == per_token * CAPACITY, "the engine sizes its blocks by the same formula"
)

# %% [markdown]
# ## The surprise
# A decode step reads all weights once to make one token: that is why decoding is bound by memory, not by
# arithmetic. But it reads the whole cache too. There is a length from which on the cache is more than the
# model.

# %%
lesson.heading("When the notes outweigh the model")
weights = [tensor for layer in decoder.layers for linear in layer.linears for tensor in linear.tensors]
weight_bytes = sum(tensor.nbytes for tensor in weights) + decoder.head.tensors[0].nbytes
crossing = -(-weight_bytes // per_token)
lesson.predict(
    "tokens until the cache is larger", crossing, f"{weight_bytes:,} bytes of weights / {per_token} bytes"
)
length = 1
while block_bytes(decoder, length) < weight_bytes:
    length += 1
lesson.measure("tokens until the cache is larger", length)
lesson.say(
    "  SmolLM2-135M: 270 MB of bfloat16 weights, 46 KB per token in float32: about 5,900 tokens, or 16 users "
    "of 370"
)
lengths = [0, crossing // 4, crossing // 2, 3 * crossing // 4, crossing, 5 * crossing // 4, 3 * crossing // 2]
lesson.curves(
    "t02_kv_cache",
    "What one decode step reads",
    lengths,
    {"weights": [weight_bytes] * len(lengths), "KV cache": [per_token * n for n in lengths]},
    "tokens in the sequence, bytes",
)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "The prompt can be taken in by any portions. Show that 16 at once, 5 + 5 + 6 and one by one agree."
)
def portions() -> str:
    def logits_after(portions: list[int]) -> Tensor:
        notes, start, logits = fresh_notes(), 0, torch.empty(0)
        for count in portions:
            logits = step(prompt[: start + count], start, notes)
            start += count
        return logits

    whole = logits_after([16])
    for split in ([5, 5, 6], [1] * 16):
        torch.testing.assert_close(logits_after(split), whole, rtol=1e-5, atol=1e-6)
    return "the logits agree in float32: this is what makes chunked prefill (chapter 7) possible"


@lesson.exercise(
    "Spoil the note of one early token and generate again. From which token on does the answer change?"
)
def spoilt() -> str:
    notes = fresh_notes()
    step(prompt, 0, notes)
    notes[0].v.view(CAPACITY, -1)[3] += 5.0
    token_ids, start = [*prompt, naive[0]], len(prompt)
    for _ in range(N - 1):
        logits = step(token_ids, start, notes)
        start = len(token_ids)
        token_ids.append(int(logits.argmax()))
    changed = next(i for i in range(N) if token_ids[P + i] != naive[i])
    return (
        f"token {changed} differs: to hand out the notes of another text (chapter 6) corrupts answers "
        "silently"
    )


@lesson.exercise(
    "How much smaller is the cache because 4 query heads share 2 KV heads? Build the other model and see."
)
def without_sharing() -> str:
    mha = small_decoder(num_key_value_heads=4)
    factor = block_bytes(mha, 1) / block_bytes(decoder, 1)
    assert factor == 2
    return f"{factor:g} times smaller; with 32 query heads on 8 KV heads, as in Llama 3 8B, 4 times"


lesson.passed(
    f"{P + N - 1} tokens computed instead of {N * P + N * (N - 1) // 2:,}, the same answer",
    f"a token costs {per_token} bytes",
    f"from {crossing} tokens on the cache outweighs the model",
)
