"""17 · Experts: a token reads a few of them, a batch soon reads nearly all.

A mixture of experts has many small MLPs in a layer, and a router that sends each token to a few of them
(Shazeer et al. 2017). One token is cheap: Qwen3-30B-A3B has 30 billion weights and uses 3 of them per token.
Chapter 13 showed that a batch is nearly free, since every weight is read once per step. Is it still, when
each token wants other weights?
"""

# %% [markdown]
# ## How many different experts?
# A token picks *k* of *E* experts.
# If all are equally likely, an expert is missed by one token with probability
# 1 − k/E, and by B tokens with (1 − k/E)^B.
# So a batch is expected to hit E · (1 − (1 − k/E)^B) different ones.
#
# Predict that for 128 experts and 8 per token,
# and let the engine's own ``route`` choose for random router logits.

# %%
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_triton_free.activation import gated_activation
from kernels_triton_free.experts.products import gathered_product, loop, weighted_sum
from kernels_triton_free.experts.routing import Routing, route
from minivllm import LLM, SamplingParams
from tutorials.lesson import Lesson
from tutorials.small_model import SHAPE, engine_arguments, model_folder

lesson = Lesson(__doc__)
EXPERTS, TOP_K, LAYERS, HIDDEN, INNER = 128, 8, 48, 2048, 768  # Qwen3-30B-A3B
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
generator = torch.Generator().manual_seed(0)


def expected(batch: int, experts: int = EXPERTS, top_k: int = TOP_K) -> float:
    return experts * (1 - (1 - top_k / experts) ** batch)


def hit(batch: int, experts: int = EXPERTS, top_k: int = TOP_K, trials: int = 200) -> float:
    """Different experts of a batch, on average over some random ones."""
    logits = torch.randn(trials, batch, experts, generator=generator)
    return sum(len(route(one, Routing(top_k=top_k))[0].unique()) for one in logits) / trials


lesson.heading("Different experts of a batch")
for batch in (1, 16, 64):
    lesson.predict(f"experts hit by {batch}", round(expected(batch), 1), "128 · (1 − (1 − 8/128)^B)")
measured = {batch: hit(batch) for batch in BATCHES}
for batch in (1, 16, 64):
    lesson.measure(f"experts hit by {batch}", round(measured[batch], 1), within=0.02)

# %% [markdown]
# ## What a step reads
# An expert of that model is three matrices of 2,048 · 768 values of 2 bytes: 9.4 MB, in each of 48 layers. A
# dense model with the same work per token has eight of them, always the same ones: it reads 3.6 GB per step
# whatever the batch. The mixture reads as much for one token, and then more and more, up to 58 GB.

# %%
lesson.heading("Bytes of expert weights per step")
GIGABYTE, EXPERT = 1e9, 3 * HIDDEN * INNER * 2
dense = TOP_K * EXPERT * LAYERS / GIGABYTE
step_bytes = [measured[batch] * EXPERT * LAYERS / GIGABYTE for batch in BATCHES]
lesson.curves(
    "t17_bytes",
    "Qwen3-30B-A3B",
    BATCHES,
    {"experts": step_bytes, "a dense model with the same work": [dense] * len(BATCHES)},
    "batch, GB of expert weights per step",
    log=True,
)
gain = {batch: batch * dense / read for batch, read in zip(BATCHES, step_bytes)}
lesson.predict(
    "times as many tokens per byte at batch 16",
    round(16 * TOP_K / expected(16), 2),
    "16 · 8 choices share 82 experts",
)
lesson.measure("times as many tokens per byte at batch 16", round(gain[16], 2), within=0.02)
lesson.say(
    f"  A dense model gains 16. At batch 256 the mixture gains {gain[256]:.0f} and reads everything: from "
    "there on "
    "every further token is nearly free."
)

# %% [markdown]
# That is the surprise of this chapter: among few users a mixture gains next to nothing from a batch. It wants
# large ones. That is why such models are served on many devices for many users at once, each device with some
# of the experts.
#
# ## The same in the engine
# A small random model with 16 experts, 2 per token. The operator that multiplies experts is watched: which
# experts the router really hit, and how many bytes their matrices have.
#
# Real routers have favourites. Let expert *e* be chosen by a token with probability p(e). Then the batch is
# expected to hit Σ 1 − (1 − p(e))^B of them, which is less than the formula above says for any p but the even
# one. How often a token chooses each expert is counted over 40 requests, and predicts what batches of other
# requests read.


# %%
class ExpertReads(TorchDispatchMode):
    """Notes the choices of every layer [tokens, k], and the bytes of an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[Tensor] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.kernels_triton_free.expert_loop.default:
            self.choices.append(args[1].clone())
            self.bytes = sum(tensor[0].nbytes for tensor in args[3])
        return func(*args, **(kwargs or {}))


SMALL = {
    **SHAPE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
}
STEPS = 24


def decode(llm: LLM, batch: int) -> tuple[list[list[Tensor]], int]:
    """(choices [batch, k] of each layer in each of STEPS decode steps, bytes of an expert)."""
    for number in range(1000 * batch, 1000 * batch + batch):
        prompt = {"prompt_token_ids": [(37 * number + 11 * i) % 512 for i in range(9)]}
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=STEPS + 1, ignore_eos=True)
        llm.llm_engine.add_request(f"R{number}", prompt, params)
    llm.llm_engine.step()  # the prompts
    steps = []
    for _ in range(STEPS):
        with ExpertReads() as reads:
            llm.llm_engine.step()
        steps.append([choice[:batch] for choice in reads.choices])
    assert not llm.llm_engine.has_unfinished_requests()
    return steps, reads.bytes


lesson.heading("Bytes that a decode step reads")
with LLM(**engine_arguments(model=str(model_folder(SMALL)))) as llm:
    alone, expert_bytes = decode(llm, 40)
    layers = len(alone[0])
    lesson.predict("bytes of an expert", 3 * 64 * 32 * 4, "three matrices of 64 · 32, 4 bytes each")
    lesson.measure("bytes of an expert", expert_bytes)
    counts = [
        torch.cat([step[layer] for step in alone]).flatten().bincount(minlength=16) for layer in range(layers)
    ]
    share = [count / (STEPS * 40) for count in counts]
    sizes = [2, 4, 8, 16, 32]
    predicted = [
        sum(float((1 - (1 - of_layer) ** batch).sum()) for of_layer in share) * expert_bytes
        for batch in sizes
    ]
    found = []
    for batch, read in zip(sizes, predicted):
        lesson.predict(f"bytes at batch {batch}", round(read), "Σ 1 − (1 − p)^B experts, two layers")
        steps, _ = decode(llm, batch)
        found.append(sum(len(choice.unique()) for step in steps for choice in step) / STEPS * expert_bytes)
        lesson.measure(f"bytes at batch {batch}", round(found[-1]), within=0.1)
even = [layers * expected(batch, 16, 2) * expert_bytes for batch in sizes]
lesson.check(
    all(a < b for a, b in zip(found[2:], even[2:])),
    "favourites: less is read than if all were equally likely",
)
lesson.bars(
    "t17_favourites",
    "How often a token chooses each expert of the first layer",
    {f"expert {expert}": float(100 * share[0][expert]) for expert in range(16)},
    "%",
)

# %% [markdown]
# ## Three ways to multiply
# Which experts are hit is known only when the router has run.
#
# - ``loop``: the host looks, and multiplies each hit expert by its tokens. Every hit expert is read once.
#   A GPU would
#   wait for the host in every layer.
# - *grouped*: tokens are sorted by expert, and one kernel multiplies all groups; the host never looks.
# - *gathered*: every choice reads the matrices of its expert by itself.
#   Nothing is sorted, nothing is looked at, and a
#   matrix that two tokens want is read twice.
#
# Gathering reads B · k experts where the others read the different ones. For one token these are the same, so
# it costs nothing. Predict by what factor it reads more.


# %%
def gathered(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As GroupedExperts does for a single token; here for any number of them."""
    choices = ids.flatten()
    rows = x.repeat_interleave(ids.shape[1], 0)
    inner = gated_activation(gathered_product(rows, gate_up[choices], None), "silu")
    return weighted_sum(gathered_product(inner, down[choices], None), weights)


def looped(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    def product(matrices: Tensor) -> Callable[[Tensor, int], Tensor]:
        return lambda rows, expert: rows @ matrices[expert].T

    return loop(x, ids, weights, product(gate_up), lambda rows: gated_activation(rows, "silu"), product(down))


def milliseconds(function: Callable[[], Tensor]) -> float:
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return 1000 * min(seconds)


lesson.heading("Gathered products read more than needed")
SIZES = [1, 2, 4, 8, 16, 32]
lesson.predict(
    "times as much",
    [round(b * TOP_K / expected(b), 1) for b in SIZES],
    "B · k choices over the different experts",
)
lesson.measure("times as much", [round(b * TOP_K / measured[b], 1) for b in SIZES])
wide, narrow = 128, 64
gate_up = torch.randn(EXPERTS, 2 * narrow, wide, generator=generator) / wide**0.5
down = torch.randn(EXPERTS, wide, narrow, generator=generator) / narrow**0.5
times: dict[str, list[float]] = {"gathered": [], "one expert after the other": []}
for batch in SIZES:
    x = torch.randn(batch, wide, generator=generator)
    ids, weights = route(
        torch.randn(batch, EXPERTS, generator=generator), Routing(top_k=TOP_K, normalized=True)
    )
    results = []
    for name, way in (("gathered", gathered), ("one expert after the other", looped)):
        results.append(way(x, ids, weights, gate_up, down))
        times[name].append(milliseconds(lambda: way(x, ids, weights, gate_up, down)))  # noqa: B023
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
lesson.check(True, "both ways compute the same")
lesson.curves("t17_ways", "128 experts on this machine", SIZES, times, "batch, milliseconds", log=True)

# %% [markdown]
# The times depend on the machine, so they are shown and not checked. A loop pays for every expert that it
# starts, which favours gathering in small batches, until what is read several times costs more. And reading
# is not all: a gathered product multiplies a matrix by a *vector* for each choice, which the matrix units of
# a GPU are no help for. So on a GPU the engine gathers for a single token only, and sorts and groups from two
# tokens on; on a CPU, where the host has to look anyway, it loops.
#
# ## Exercises


# %%
@lesson.exercise(
    "DeepSeek-V3 has 256 experts, 8 per token. From which batch on does a step read 90 % of them?"
)
def deepseek() -> str:
    batch = next(b for b in range(1, 1000) if expected(b, 256, 8) >= 0.9 * 256)
    share = hit(batch, 256, 8, trials=50) / 256
    assert batch == 73 and abs(share - 0.9) < 0.01
    return f"from {batch} tokens on; random routing hits {share:.1%}"


@lesson.exercise(
    "A router sends every token to the same two experts. What does a batch of 64 read, and who would mind?"
)
def favourites() -> str:
    logits = torch.randn(64, 16, generator=generator)
    correction = torch.zeros(16)
    correction[[3, 7]] = 10.0
    ids, _ = route(logits, Routing(top_k=2), correction)
    assert sorted(ids.unique().tolist()) == [3, 7]
    return (
        "two experts, so it is the fastest step there is; but with experts spread over devices all but two "
        "would idle"
    )


@lesson.exercise("What does a weight of an expert that no token chose do to the result? Make them all NaN.")
def untouched() -> str:
    x = torch.randn(4, wide, generator=generator)
    ids, weights = route(torch.randn(4, EXPERTS, generator=generator), Routing(top_k=TOP_K))
    spoiled = torch.full_like(gate_up, torch.nan)
    spoiled[ids.unique()] = gate_up[ids.unique()]
    assert torch.equal(looped(x, ids, weights, spoiled, down), looped(x, ids, weights, gate_up, down))
    return f"nothing: {EXPERTS - len(ids.unique())} of {EXPERTS} experts are never read"


lesson.passed(
    f"a batch of 16 hits {measured[16]:.0f} of {EXPERTS} experts, so it reads "
    f"{step_bytes[4] / step_bytes[0]:.0f} "
    "times as much as one token",
    "what a step of the engine reads follows from how often each expert is chosen",
    f"gathered products read what is needed for one token, and {32 * TOP_K / measured[32]:.1f} times as much "
    "for 32",
)
