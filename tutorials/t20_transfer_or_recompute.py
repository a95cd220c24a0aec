"""20 · Transfer or recompute: keys and values are worth bringing if a byte comes faster than its operations
are done.

Keys and values that were computed once can be kept in host memory, in a directory, or in another engine, and
brought back when a prompt begins with the same tokens. They can also be computed again: that is always
possible, and needs no way at all. Which is faster? Three numbers decide: bytes per token, operations per
token, and how fast both go here.
"""

# %% [markdown]
# ## Operations per byte
# Chapter 2 counted what a token leaves behind: a key and a value of ``head_dim`` numbers, for each layer and
# KV head. Chapter 13 counted what it costs: 2 operations per weight, and attention. A prompt of *n* tokens
# has about n²/2 pairs of a query and a key, each 4 · ``head_dim`` operations in every head and layer.
#
# A machine that does F operations per second, and a way that carries B bytes per second, are equally fast if
# B = F · bytes / operations. That is the *border*: a faster way pays, a slower one does not.

# %%
from __future__ import annotations

import socket
import tempfile
import time
from dataclasses import dataclass
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from minivllm import LLM, SamplingParams, register_connector
from minivllm.kv_transfer.connectors.shared_storage import (
    SharedStorageConnector,
    SharedStorageOptions,
    SharedStorageWorker,
)
from minivllm.kv_transfer.connectors.worker_side import CacheBlocks
from minivllm.kv_transfer.lookup.pipe import Pipe
from minivllm.simulation.bounds import copy_bandwidth
from tutorials.lesson import Cell, Lesson
from tutorials.small_model import SHAPE, engine_arguments, model_folder

lesson = Lesson(__doc__)


@dataclass(frozen=True)
class Model:
    """weights: multiplied with each token, so without embedding and head.
    value_bytes: of a number in the cache."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    weights: float
    value_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.value_bytes

    def operations(self, tokens: float) -> float:
        return 2 * self.weights * tokens + 2 * self.layers * self.heads * self.head_dim * tokens**2

    def border(self, tokens: float, rate: float) -> float:
        """Bytes per second of a way that is as fast as computing. rate: operations per second."""
        return rate * self.token_bytes * tokens / self.operations(tokens)


MODELS = {
    "SmolLM2-135M": Model(30, 9, 3, 64, 0.106e9, 4),
    "Llama 2 7B": Model(32, 32, 32, 128, 6.48e9),
    "Llama 3.1 8B": Model(32, 32, 8, 128, 6.98e9),
    "Llama 3.1 70B": Model(80, 64, 8, 128, 68.45e9),
    "Qwen3-30B-A3B": Model(48, 32, 4, 128, 2.73e9),
}
lesson.heading("Bytes of a token, on paper")
for name, expected in (("SmolLM2-135M", 46_080), ("Llama 3.1 8B", 131_072)):
    lesson.predict(
        f"bytes of a token of {name}", expected, "2 · layers · KV heads · head_dim · bytes of a number"
    )
    lesson.measure(f"bytes of a token of {name}", MODELS[name].token_bytes)
lesson.bars(
    "t20_intensity",
    "Operations saved by a byte, prompt of 1,000 tokens",
    {name: model.operations(1000) / model.token_bytes / 1e6 for name, model in MODELS.items()},
    "thousand",
)

# %% [markdown]
# So a *larger* model is easier to feed: from 8B to 70B the weights grow tenfold, but keys and values only
# 2.5-fold. KV heads that four query heads share help fourfold, from Llama 2 7B to Llama 3.1 8B. A mixture of
# experts (chapter 17) is cheap to compute, but its keys and values are no smaller: there the way must be
# faster.
#
# ## The border moves with the length
# Bytes grow with n, attention with n². So long prompts are worth bringing over ways that do not pay for short
# ones. The border has fallen to half where attention costs as much as the weights: predict that length. Then
# draw the map for a GPU that does 400 · 10¹² operations per second, which is what an H100 may reach in
# practice.

# %%
lesson.heading("Llama 3.1 8B at 400 Tops/s")
RATE = 400e12
llama = MODELS["Llama 3.1 8B"]
half = llama.weights / (llama.layers * llama.heads * llama.head_dim)
lesson.predict("tokens at which the border is half", round(half), "weights / (layers · heads · head_dim)")
found = next(n for n in range(1, 10**6, 10) if llama.border(n, RATE) <= llama.border(1, RATE) / 2)
lesson.measure("tokens at which the border is half", found, within=0.01)
LENGTHS = [1000 * 2**power for power in range(8)]
WAYS = {
    "disk, 0.5 GB/s": 0.5e9,
    "Ethernet, 10 Gbit/s": 1.25e9,
    "SSD, 5 GB/s": 5e9,
    "network, 100 Gbit/s": 12.5e9,
    "PCIe 5.0, 50 GB/s": 50e9,
}


def draw_map(name: str, title: str, lengths: list[str], gains: dict[str, list[float]]) -> None:
    """gains: way -> for each length how many times faster bringing is than computing."""
    rows: dict[str, list[Cell]] = {"tokens": [(length, "") for length in lengths]}
    for way, values in gains.items():
        rows[way] = [(f"{gain:.2g}", "cached" if gain >= 1 else "wasted") for gain in values]
    lesson.cells(
        name, f"{title}: times that bringing is faster", rows, {"cached": "bring", "wasted": "compute"}
    )


draw_map(
    "t20_paper",
    "On paper",
    [f"{n // 1000}k" for n in LENGTHS],
    {name: [way / llama.border(n, RATE) for n in LENGTHS] for name, way in WAYS.items()},
)
lesson.curves(
    "t20_border",
    "The border at 400 Tops/s",
    LENGTHS,
    {name: [MODELS[name].border(n, RATE) / 1e9 for n in LENGTHS] for name in list(MODELS)[1:]},
    "tokens of the prompt, GB/s",
    log=True,
)

# %% [markdown]
# Ten times as fast a GPU needs ten times as fast a way, and on a slow one nearly every way pays. "Does it
# pay?" is thus no question about a connector; it is one about a machine.
#
# ## The same in the engine
# A random model of four layers. First the numbers that no clock decides. A pool of 33 blocks holds one prompt
# of 513 tokens, 32 full blocks and a token. A second prompt evicts it. ``OffloadingConnector`` has copied
# every full block to host memory, so the first prompt comes back without being computed, but for its last
# token: one must run to give logits.
#
# Without a connector the prompt is computed again. The engine's attention without compiling, as here,
# multiplies all pairs and masks half of them. What follows the attention of the last layer runs for one row,
# padded to two (chapter 13); a step of a single token is not padded here.

# %%
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 384, 1024, 4, 6, 2, 64, 512, 16
ENTRIES = {
    **SHAPE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}
QKV, BEHIND = HIDDEN * (HEADS + 2 * KV_HEADS) * DIM, HEADS * DIM * HIDDEN + 3 * HIDDEN * INNER
small = Model(LAYERS, HEADS, KV_HEADS, DIM, LAYERS * QKV + (LAYERS - 1) * BEHIND, 4)
FOLDER = str(model_folder(ENTRIES))
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class AttentionPairs(TorchDispatchMode):
    """Operations of attention, from the shapes of queries [1, heads, rows, head_dim] and keys."""

    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            _, heads, rows, dim = args[0].shape
            self.operations += 4 * heads * rows * args[1].shape[2] * dim
        return func(*args, **(kwargs or {}))


def prompt(number: int, tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [number, *((7 * number + 3 * i) % VOCAB for i in range(1, tokens))]}


def connected(connector: str | None, **extra: Any) -> dict[str, Any]:
    config = {"kv_connector": connector, "kv_connector_extra_config": extra} if connector else None
    return {"max_model_len": 33 * BLOCK, "num_gpu_blocks_override": 1 + 33, "kv_transfer_config": config}


def start(connector: str | None = None, **extra: Any) -> LLM:
    return LLM(**engine_arguments(model=FOLDER, **connected(connector, **extra)))


def generate(llm: LLM, number: int, tokens: int) -> tuple[int, int, int]:
    """(first token of the answer, prompt tokens that were not computed, operations)."""
    with FlopCounterMode(display=False) as flops, AttentionPairs() as pairs:
        [output] = llm.generate(prompt(number, tokens), ONE_TOKEN, use_tqdm=False)
    products = sum(
        count for name, count in flops.get_flop_counts()["Global"].items() if str(name).endswith("mm")
    )
    return output.outputs[0].token_ids[0], output.num_cached_tokens, products + pairs.operations


lesson.heading("A prompt of 513 tokens, evicted, and asked for again")
LONG = 513
last_rows = 2 * 2 * (BEHIND + HIDDEN * VOCAB)
again = 2 * LONG * int(small.weights) + 4 * LAYERS * HEADS * DIM * LONG**2 + last_rows
lesson.predict(
    "operations of computing it", again, "2 per weight and token, 4 · 64 per pair, the end for 2 rows"
)
lesson.predict("bytes of a token", small.token_bytes, "2 · 4 layers · 2 KV heads · 64 · 4 bytes")
lesson.predict("blocks that come back", 32, "all that were full")
lesson.predict("products of a single token", 2 * int(small.weights) + last_rows // 2, "every weight once")
with start() as llm:
    plain = [generate(llm, number, LONG) for number in (1, 2, 1)]
with start("OffloadingConnector") as llm:
    offloaded = [generate(llm, number, LONG) for number in (1, 2, 1)]
    [tier] = llm.get_metrics().kv_transfer
lesson.measure("operations of computing it", plain[2][2])
lesson.measure("bytes of a token", tier.block_bytes // BLOCK)
lesson.measure("blocks that come back", tier.num_loaded_blocks)
single = offloaded[2][2] - 4 * LAYERS * HEADS * DIM * LONG
lesson.measure("products of a single token", single)
lesson.check([one[0] for one in plain] == [one[0] for one in offloaded], "the answers are the same")
lesson.check(
    (plain[2][1], offloaded[2][1]) == (0, 512), "without a connector nothing is found, with it 512 tokens"
)

# %% [markdown]
# ## Ways of this machine
# Now the clock. Three ways: a plain copy in memory; a socket between two threads, by the pipe of
# ``LookupBufferConnector``, a block after the other; and a directory as ``SharedStorageConnector`` reads it,
# a file per block, each held against its digest. Times depend on the machine and on what else it does, so
# they are shown and not checked.
#
# How many operations per second the engine does is taken from one prompt of 513 tokens.

# %%
lesson.heading("Bytes per second")
PROMPTS = [33, 65, 129, 257, 513]  # 62 full blocks: as many as the directory's queue takes at once
SIZE = BLOCK * small.token_bytes


def socket_bandwidth(blocks: int = 100) -> float:
    ends = [Pipe(one) for one in socket.socketpair()]
    block, key, deadline = torch.ones(SIZE, dtype=torch.uint8), bytes(32), time.monotonic() + 60

    def send() -> None:
        for _ in range(blocks):
            ends[0].send_tensor(key, block, deadline)

    sender, arrived = Thread(target=send), torch.empty_like(block)
    started = time.perf_counter()
    sender.start()
    for _ in range(blocks):
        ends[1].receive_tensor(key, arrived, deadline)
    seconds = time.perf_counter() - started
    sender.join()
    for end in ends:
        end.close()
    assert torch.equal(arrived, block)
    return blocks * SIZE / seconds


def seconds_to_answer(llm: LLM, tokens: int, tries: int = 1) -> float:
    """Until the first token, the prefix cache of the device being empty; the best of some tries."""
    seconds = []
    for _ in range(tries):
        assert llm.reset_prefix_cache()
        started = time.perf_counter()
        llm.generate(prompt(tokens % VOCAB, tokens), ONE_TOKEN, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


directory = tempfile.TemporaryDirectory(prefix="minivllm-tutorial-")
with start() as llm:
    seconds_to_answer(llm, 33)
    floor = seconds_to_answer(llm, 1, tries=5)
    computed = {tokens: seconds_to_answer(llm, tokens, tries=2) for tokens in PROMPTS}
rate = small.operations(LONG) / max(computed[LONG] - floor, 1e-6)
with start("SharedStorageConnector", shared_storage_path=directory.name) as llm:
    for tokens in PROMPTS:
        seconds_to_answer(llm, tokens)
lesson.predict(
    "blocks found by another engine", sum(tokens // BLOCK for tokens in PROMPTS), "all full blocks"
)
with start("SharedStorageConnector", shared_storage_path=directory.name) as llm:
    brought = {tokens: seconds_to_answer(llm, tokens) for tokens in PROMPTS}
    [tier] = llm.get_metrics().kv_transfer
lesson.measure("blocks found by another engine", tier.num_loaded_blocks)
border = small.border(LONG, rate)
lesson.bars(
    "t20_ways",
    f"Ways, and the border of 513 tokens at {rate / 1e9:.0f} Gops/s",
    {
        "copy": copy_bandwidth(torch.device("cpu"), 2**24)
        / 2e9,  # it counts what is read and what is written
        "socket": socket_bandwidth() / 1e9,
        "directory": tier.num_loaded_blocks * tier.block_bytes / max(tier.load_seconds, 1e-9) / 1e9,
        "border": border / 1e9,
    },
    "GB/s",
)
lesson.curves(
    "t20_directory",
    "Until the first token",
    PROMPTS,
    {
        "computed": [1000 * computed[tokens] for tokens in PROMPTS],
        "from a directory": [1000 * brought[tokens] for tokens in PROMPTS],
    },
    "tokens of the prompt, milliseconds",
    log=True,
)

# %% [markdown]
# A load also costs what no bandwidth says: a look-up, a thread that wakes, a file per block. That is why
# short prompts gain less than long ones.
#
# ## The map, measured
# On a CPU all of these ways may be far above the border. So let them be slower: a connector of our own waits
# for each block as long as its bytes would take. Its bandwidths are that of the border, half of it, and more.
# The formula from above predicts the map; a prompt that is brought, and one that is computed, both pay for a
# step besides, measured with a prompt of one token. Then the engine answers each prompt over each way.


# %%
class SlowOptions(SharedStorageOptions, kw_only=True, forbid_unknown_fields=True):
    """bytes_per_second: of the way."""

    bytes_per_second: float


class SlowWorker(SharedStorageWorker):
    """Brings a block no faster than the way allows."""

    def load_block(self, key: bytes, source: int, blocks: CacheBlocks) -> Tensor | None:
        started, options = time.perf_counter(), self.context.transfer.options
        data = super().load_block(key, source, blocks)
        left = self.context.transfer.block_bytes / options.bytes_per_second - (time.perf_counter() - started)
        time.sleep(max(left, 0.0))
        return data


class SlowConnector(SharedStorageConnector):
    """The directory at the end of a slow line."""

    Options = SlowOptions
    worker_side = SlowWorker


register_connector("SlowConnector", SlowConnector)
lesson.heading(f"Prompts of {', '.join(map(str, PROMPTS))} tokens over ways of different speed")
predicted: dict[str, list[float]] = {}
measured: dict[str, list[float]] = {}
loaded = []
lesson.predict("blocks over each way", [2 * 62] * 5, "everything, twice; only the time differs")
for factor in (0.5, 1.0, 2.0, 4.0, 8.0):
    way = factor * border
    label = f"{way / 1e6:,.1f} MB/s"
    predicted[label] = [
        (floor + small.operations(tokens) / rate) / (floor + tokens // BLOCK * SIZE / way)
        for tokens in PROMPTS
    ]
    with start("SlowConnector", shared_storage_path=directory.name, bytes_per_second=way) as llm:
        measured[label] = [computed[tokens] / seconds_to_answer(llm, tokens, tries=2) for tokens in PROMPTS]
        loaded.append(llm.get_metrics().kv_transfer[0].num_loaded_blocks)
lesson.measure("blocks over each way", loaded)
for name, title, gains in (("predicted", "Predicted", predicted), ("measured", "Measured", measured)):
    draw_map(f"t20_{name}", title, [str(tokens) for tokens in PROMPTS], gains)
same = sum((a >= 1) == (b >= 1) for label in predicted for a, b in zip(predicted[label], measured[label]))
lesson.say(
    f"  {same} of 25 places are on the predicted side. On the border either may win, and short prompts lose "
    "to "
    "what a load costs besides."
)

# %% [markdown]
# Computing fills the machine; bringing leaves it to other requests. So a way that is a little slower than the
# border can still pay for a server that is busy, which this map of a single request does not show.
#
# ## Exercises


# %%
@lesson.exercise(
    "Keys and values of Llama 3.1 8B in 8 bits in place of 16, or weights in 4: what moves the border?"
)
def smaller() -> str:
    eight = Model(32, 32, 8, 128, 6.98e9, value_bytes=1)
    assert eight.border(1000, RATE) == llama.border(1000, RATE) / 2
    return (
        "a cache in 8 bits halves it, to "
        f"{eight.border(1000, RATE) / 1e9:.1f} GB/s for 1,000 tokens; weights in 4 bits take as many "
        "operations for a "
        "prompt as before, so they move it only as far as they change the rate"
    )


@lesson.exercise(
    "A network of 100 Gbit/s takes 20 ms before the first byte. From which length on does it pay for Llama "
    "3.1 8B?"
)
def latency() -> str:
    way = WAYS["network, 100 Gbit/s"]
    shortest = next(
        n for n in range(1, 10_000) if 0.02 + n * llama.token_bytes / way < llama.operations(n) / RATE
    )
    estimate = 0.02 / (2 * llama.weights / RATE - llama.token_bytes / way)
    assert 0.9 * estimate < shortest < estimate
    return (
        f"from {shortest:,} tokens on, {estimate:,.0f} if attention is left out; without the wait it always "
        "pays"
    )


@lesson.exercise(
    "Why not both: compute a prompt from its beginning while its end is brought? 32,000 tokens of Llama 3.1 "
    "8B, over a "
    "way that is exactly as fast as computing. (Jin et al. 2024. The engine here does one or the other.)"
)
def both() -> str:
    tokens = 32_000
    way = llama.border(tokens, RATE)
    alone = llama.operations(tokens) / RATE

    def seconds(first: int) -> float:
        """The first ones are computed, the rest comes meanwhile."""
        return max(llama.operations(first) / RATE, (tokens - first) * llama.token_bytes / way)

    best = min(range(0, tokens + 1, 10), key=seconds)
    assert best > tokens / 2 and 0.4 < seconds(best) / alone < 0.5
    return (
        f"{best:,} are computed and the others brought, in {seconds(best) / alone:.0%} of the time: less "
        "than half, "
        "since early tokens have few keys to attend to"
    )


directory.cleanup()
lesson.passed(
    "a way pays if it is faster than operations per second over operations per byte",
    f"attention makes long prompts worth bringing: at {half:,.0f} tokens the border of Llama 3.1 8B is half",
    "what comes back answers as what was computed, for the operations of a single token",
)
