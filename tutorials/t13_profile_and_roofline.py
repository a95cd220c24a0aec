"""13 · Reading a profile: what a step must do at least, where its time goes, and how far the two are apart.

"Is it fast?" has an answer without rivals. A step must read certain bytes and do certain multiplications; a
machine can read so many bytes and do so many multiplications in a second. The larger of the two quotients is
a time that no program can beat: the roofline (Williams et al. 2009). This chapter counts both, for one step,
and then looks where the rest of the time went.
"""

# %% [markdown]
# ## Counting by hand
# Per token every weight is multiplied once and added once: 2 operations per weight, plus attention. Per
# *step*, however many tokens it has, every weight is read once. That asymmetry is all there is to know about
# batching.
#
# ``simulation/bounds.py`` has the formulas that ``minivllm bench roofline`` uses. Do not believe them:
# PyTorch can count the operations that are really dispatched.

# %%
from __future__ import annotations

import time
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minivllm import LLM, SamplingParams
from minivllm.bench.parts.parts import timed_spans
from minivllm.simulation.bounds import kv_bytes_per_token, weight_bytes
from tutorials.lesson import Lesson
from tutorials.small_model import engine_arguments, small_decoder

lesson = Lesson(__doc__)
config = small_decoder().config
layer = config.layers[0]
HIDDEN, INNER, LAYERS, VOCAB = config.hidden_size, layer.mlp.inner, config.num_layers, config.vocab_size
HEADS, KV_HEADS, DIM = layer.mixer.heads, layer.mixer.kv_heads, layer.mixer.head_dim
LAYER_WEIGHTS = HIDDEN * (HEADS + 2 * KV_HEADS) * DIM + HEADS * DIM * HIDDEN + 3 * HIDDEN * INNER


class WeightReads(TorchDispatchMode):
    """Adds up the bytes of the weights that linear layers are given."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.linear.default:
            self.total += args[1].nbytes
        return func(*args, **(kwargs or {}))


def step(llm: LLM) -> tuple[int, int]:
    """One step of the engine: (operations in matrix products, bytes of weights read by them)."""
    with FlopCounterMode(display=False) as flops, WeightReads() as reads:
        llm.llm_engine.step()
    products = {name: count for name, count in flops.get_flop_counts()["Global"].items() if "mm" in str(name)}
    return sum(products.values()), reads.total


def start(llm: LLM, num_requests: int, prompt_len: int) -> None:
    for number in range(num_requests):
        prompt = {"prompt_token_ids": [(7 * number + 3 * i) % 512 for i in range(prompt_len)]}
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        llm.llm_engine.add_request(f"R{number}", prompt, params)


# %% [markdown]
# ## Predict: one decode step
# One request: 2 operations for each weight of the layers and of the head, and their bytes once. With sixteen
# requests the operations grow sixteenfold. The bytes do not grow at all. (The engine pads a single row to
# two, chapter 10; so two requests stand for one here.)

# %%
lesson.heading("A decode step of 2 and of 16 requests")
weights = LAYERS * LAYER_WEIGHTS + HIDDEN * VOCAB
lesson.predict("operations", [2 * 2 * weights, 16 * 2 * weights], "2 per weight and token")
lesson.predict(
    "bytes of weights", [4 * weights, 4 * weights], "each weight once, 4 bytes, whatever the batch"
)
measured = []
for batch in (2, 16):
    with LLM(**engine_arguments()) as llm:
        start(llm, batch, prompt_len=20)
        llm.llm_engine.step()  # the prompts
        measured.append(step(llm))
lesson.measure("operations", [operations for operations, _ in measured])
lesson.measure("bytes of weights", [read for _, read in measured])
norms = 4 * (2 * LAYERS + 1) * HIDDEN
lesson.predict("weight_bytes() of the bench", 4 * weights + norms, "the same, and the norms")
lesson.measure("weight_bytes() of the bench", weight_bytes(small_decoder()))

# %% [markdown]
# ## Predict: a prompt
# A prompt of 200 tokens reads the same weights once and does 200 times the work. Or does it? Only the last
# token needs logits. So the head runs for one row; and since nothing reads the other rows of the last layer's
# *output*, everything behind its attention (output projection and MLP) can run for that one row too. All
# other tokens are done when their keys and values are written. That is why the engine picks rows at the
# beginning of its last region, and with two layers it is no trifle.

# %%
lesson.heading("A prompt of 200 tokens")
PROMPT = 200
QKV = HIDDEN * (HEADS + 2 * KV_HEADS) * DIM
after_attention = LAYER_WEIGHTS - QKV
everything = 2 * PROMPT * LAYERS * LAYER_WEIGHTS + 2 * PROMPT * HIDDEN * VOCAB
for_all = LAYERS * QKV + (LAYERS - 1) * after_attention
lesson.predict(
    "operations of the prompt",
    2 * PROMPT * for_all + 2 * 2 * (after_attention + HIDDEN * VOCAB),
    "the end of the last layer and the head for one row, padded to 2",
)
with LLM(**engine_arguments()) as llm:
    start(llm, 1, PROMPT)
    operations, read = step(llm)
lesson.measure("operations of the prompt", operations)
lesson.say(
    f"  every layer and the head for every token would be {everything:,}, {everything / operations:.1f} "
    "times as many"
)

# %% [markdown]
# ## The surprise: decode is not short of arithmetic
# Operations per byte read: the *intensity*. A machine has one too: its operations per second over its bytes
# per second. Below it a step waits for memory, above it for arithmetic. One user decoding has an intensity of
# 2 operations per weight:
# 0.5 per byte of float32, or 1 of bfloat16. An H100 can do about 300 for every byte it reads. So a single
# user leaves 99.7 % of it idle, and the batch size from which on arithmetic counts is its intensity itself:
# about 300.

# %%
lesson.heading("Operations per byte")
batches = [1, 4, 16, 64, 256, 1024]
CONTEXT, WEIGHTS_8B, KV_8B = 1000, 8.0e9, 131_072  # Llama 3.1 8B: bfloat16, 32 layers x 8 KV heads x 128
H100_OPERATIONS, H100_BYTES = 989e12, 3.35e12
ridge = H100_OPERATIONS / H100_BYTES
without_kv = next(batch for batch in range(1, 10_000) if 2 * WEIGHTS_8B * batch / (2 * WEIGHTS_8B) >= ridge)
lesson.predict(
    "batch from which on an H100 would be busy",
    -(-int(ridge * 10) // 10),
    "989 Tops/s over 3.35 TB/s, bfloat16",
)
lesson.measure("batch from which on an H100 would be busy", without_kv)
intensity = [2 * WEIGHTS_8B * b / (2 * WEIGHTS_8B + KV_8B * CONTEXT * b) for b in batches]
lesson.curves(
    "t13_intensity",
    "Operations per byte of a decode step, Llama 3.1 8B on paper",
    batches,
    {
        "weights only": [float(b) for b in batches],
        "and 1,000 tokens of KV cache each": intensity,
        "what an H100 can do": [ridge] * len(batches),
    },
    "batch, operations per byte",
    log=True,
)
limit = 2 * WEIGHTS_8B / (KV_8B * CONTEXT)
lesson.check(
    max(intensity) < limit < ridge,
    f"with the KV cache it never gets there: the limit is {limit:.0f}, for any batch",
)
lesson.say(
    "  That is why KV caches are shared among heads, quantised, windowed, and why prefixes are read once for "
    "many."
)

# %% [markdown]
# ## Where the time of a step goes
# A profile says which part takes the time. The bench listens to the engine's spans while one looks
# (``timed_spans``). Uncompiled, as here, attention goes request by request, and that is where the time is;
# the compiled engine does a whole batch in one kernel. Times are shown; what is checked is how often each
# part ran.

# %%
lesson.heading("Twenty decode steps of 16 requests, by part")
STEPS = 20
with LLM(**engine_arguments()) as llm:
    start(llm, 16, prompt_len=20)
    llm.llm_engine.step()
    with timed_spans("schedule", "prepare", "attention", "sample", "output") as parts:
        started = time.perf_counter()
        for _ in range(STEPS):
            llm.llm_engine.step()
        whole = time.perf_counter() - started
lesson.predict(
    "calls of each part",
    {**dict.fromkeys(parts, STEPS), "attention": STEPS * LAYERS},
    "attention once per layer",
)
lesson.measure("calls of each part", {name: len(seconds) for name, seconds in parts.items()})
shares = {name: 100 * sum(seconds) / whole for name, seconds in parts.items()}
shares["layers and the rest"] = 100 - sum(shares.values())
lesson.bars("t13_parts", f"Where {1000 * whole / STEPS:.1f} ms of a step go", shares, "%")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "A phone reads 50 GB/s. How many tokens per second can an 8B model in 4 bits write at most? And after "
    "8,000 tokens?"
)
def phone() -> str:
    empty = 50e9 / (8.0e9 / 2)
    later = 50e9 / (8.0e9 / 2 + 8000 * KV_8B)
    assert 12 < empty < 13 and later < 10.5
    return (
        f"{empty:.1f} tokens/s, and {later:.1f} with 8,000 tokens of bfloat16 KV cache: no software can do "
        "better"
    )


@lesson.exercise(
    "From which context on does one user of the small model read more KV cache than weights? Use the bench's "
    "formulas."
)
def crossing() -> str:
    decoder = small_decoder()
    length = -(-weight_bytes(decoder) // kv_bytes_per_token(decoder))
    assert abs(length - 832) <= 5
    return f"{length} tokens; chapter 2 found 832 without the norms"


lesson.passed(
    "a step reads every weight once whatever its batch, and does 2 operations per weight and token",
    "a prompt skips the end of the last layer and the head for all tokens but one",
    f"the KV cache keeps decode below {limit:.0f} operations per byte, for any batch",
)
