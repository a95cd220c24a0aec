"""10 · Compiled regions and graphs: how often a model is compiled, and what a replay costs.

torch.compile turns Python into fast kernels, seconds at a time. A serving engine sees a new batch size every
few milliseconds; if each is compiled anew, it never serves. So the question of this chapter is not how fast,
but how *often*.
"""

# %% [markdown]
# ## Counting graphs
# The engine's ``Decoder`` is cut at attention: a first region, one between every two attentions, and a last
# one. Each goes through a ``compile_region``; in the engine that is ``RegionCompiler``. Here it is a subclass
# whose backend counts the graphs that Dynamo hands over and runs them as they are, so that counting takes no
# seconds.

# %%
from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.attention import gathered_sdpa_attention
from kernels_triton_free.norm import rms_norm
from minivllm import LLM, SamplingParams
from minivllm.batch.layer_caches import allocate_caches
from minivllm.compilation.compiler import RegionCompiler
from minivllm.device.policy import DevicePolicy
from minivllm.graphs.graph_capture import GraphCapture
from minivllm.graphs.step_graphs import GraphChoice, bucket_for, decode_buckets, token_buckets
from minivllm.models.decoder import Decoder
from minivllm.models.decoder.program import decoder_program
from minivllm.models.model import TokenInputs
from minivllm.program.fuse import FusedPieces
from minivllm.program.program import Piece, Program
from minivllm.program.seams import Pick
from tutorials.lesson import Cell, Lesson
from tutorials.recorded_graphs import RecordedGraphs
from tutorials.small_model import build_regions, engine_arguments, plans, small_decoder

lesson = Lesson(__doc__)
CPU = torch.device("cpu")


class CountingCompiler(RegionCompiler):
    """Compiles nothing, but notes how many graphs there would be to compile."""

    graphs = 0

    def _compile_graph(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        self.graphs += 1
        return graph.forward


@torch.inference_mode()
def run(decoder: Decoder, num_tokens: int, num_rows: int = 2) -> Tensor:
    """A step of ``num_tokens`` tokens of one request; logits of its last rows."""
    caches = allocate_caches(decoder, num_blocks=64, block_size=16)
    positions = torch.arange(num_tokens, dtype=torch.int32)
    tokens = TokenInputs(positions)
    placed = [cache.at(positions + 16) for cache in caches]  # block 0 is the null block

    def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        blocks = torch.arange(1, 2 + num_tokens // 16)
        return gathered_sdpa_attention(
            q, *caches[layer][:2], blocks, 0, scale=decoder.attention_specs[0].scale
        )

    hidden = decoder.forward(positions, tokens, placed, attend)
    return decoder.logits(hidden, torch.arange(num_tokens - num_rows, num_tokens, dtype=torch.int32), tokens)


def graphs_of(num_layers: int, sizes: Sequence[int]) -> int:
    """Graphs of a model of ``num_layers`` layers after steps of these sizes."""
    decoder, compiler = (
        small_decoder.__wrapped__(num_hidden_layers=num_layers),
        CountingCompiler(enabled=True),
    )
    build_regions(decoder, compiler)
    for size in sizes:
        run(decoder, size)
    return compiler.graphs


# %% [markdown]
# ## Predict
# Three regions. One "between" serves all layers, since a region is a function of tensors: the weights are
# arguments, and a layer is nothing else than its weights. And the number of tokens is *dynamic*: declared
# once, compiled once.

# %%
lesson.heading("Graphs of a model")
lesson.predict("graphs of 2, 4, 8 layers", [3, 3, 3], "first, between, last, however many layers")
lesson.measure("graphs of 2, 4, 8 layers", [graphs_of(layers, [5]) for layers in (2, 4, 8)])
sizes = [5, 2, 17, 64, 3, 200, 31, 128]
lesson.predict(f"graphs after steps of {sizes} tokens", 3, "the number of tokens is declared dynamic")
lesson.measure(f"graphs after steps of {sizes} tokens", graphs_of(4, sizes))
eager = run(small_decoder(num_hidden_layers=4), 17)
compiled = small_decoder.__wrapped__(num_hidden_layers=4)
build_regions(compiled, CountingCompiler(enabled=True))
lesson.check(
    torch.allclose(run(compiled, 17), eager, atol=1e-6), "the logits are those of the uncompiled decoder"
)

# %% [markdown]
# ## Fusing by hand
# Where do these regions come from? The decoder is a list of *pieces*, arithmetic of one worker, and of
# *seams*, where that arithmetic ends: attention, and what workers exchange. Neighbouring pieces are joined,
# up to the next seam that is real. A single worker exchanges nothing, so there only attention cuts. That is a
# loop of eight lines; the engine's ``fuse`` does the same, and also finds out what each region reads and
# gives.
#
# Predict how many regions a step calls for a model of four layers: on one worker, and where two workers
# divide each layer and add up their parts after the embedding, after each attention and after each MLP.


# %%
def fused_by_hand(program: Program, ranks: int) -> list[list[str]]:
    """The codes of each region."""
    regions: list[list[str]] = [[]]
    for item in program:
        if isinstance(item, Piece):
            regions[-1].append(type(item.code).__name__)
        elif item.is_real(ranks) and not isinstance(item, Pick):  # a Pick only says which rows go on
            regions.append([])
    return [region for region in regions if region]


lesson.heading("Regions of a step, four layers")
LAYERS = 4
lesson.predict("regions for 1 worker, for 2", [LAYERS + 1, 3 * LAYERS + 2], "cuts: attention; sums as well")
whole = small_decoder(num_hidden_layers=LAYERS)
program = decoder_program(whole, whole.layers, [whole.vocab_size])
lesson.measure("regions for 1 worker, for 2", [len(fused_by_hand(program, ranks)) for ranks in (1, 2)])
for ranks in (1, 2):
    [plan] = plans(LAYERS, ranks)
    steps = [*plan.body.steps, *(plan.tail.steps if plan.tail else ())]
    fused = [step for step in steps if isinstance(step, FusedPieces) and step.is_compiled]
    codes = [[type(piece.code).__name__ for piece in region.pieces] for region in fused]
    without_picks = [[code for code in region if code != "PickRows"] for region in codes]
    lesson.check(without_picks == fused_by_hand(program, ranks), f"the engine fuses so too, for {ranks}")
    names = list(dict.fromkeys(region.name for region in fused))
    lesson.say(f"  {ranks} worker(s): {', '.join(names)}")

# %% [markdown]
# ## The surprise: a number is a constant
# Dynamo burns Python values into the graph and guards them. So one innocent ``self.layer`` read in a layer's
# code means a graph per layer, and a batch size that was not declared dynamic a graph per size. Both are
# invisible until a server stutters. Here are the two mistakes and the cures, on a toy.

# %%
lesson.heading("Two ways to compile too often")


class Layer:
    """A norm that knows which layer it is."""

    def __init__(self, index: int) -> None:
        self.index, self.weight = index, torch.ones(8)


def count(calls: Callable[[Callable], None], function: Callable) -> int:
    graphs = 0

    def backend(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> Callable:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64):
        calls(torch.compile(function, backend=backend, fullgraph=True))
    return graphs


def reads_its_number(x: Tensor, layer: Layer) -> Tensor:
    return rms_norm(x, layer.weight, 1e-6) * (layer.index + 1)


def takes_tensors(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return rms_norm(x, weight, 1e-6) * scale


def for_all_layers(compiled: Callable) -> None:
    for index in range(12):
        compiled(torch.ones(4, 8), Layer(index))


def for_all_layers_as_tensors(compiled: Callable) -> None:
    for index in range(12):
        compiled(torch.ones(4, 8), Layer(index).weight, torch.tensor(index + 1.0))


def for_sizes(compiled: Callable) -> None:
    for size in range(2, 12):
        compiled(torch.ones(size, 8), torch.ones(8), torch.tensor(1.0))


def for_marked_sizes(compiled: Callable) -> None:
    for size in range(2, 12):
        x = torch.ones(size, 8)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
        compiled(x, torch.ones(8), torch.tensor(1.0))


ways = {
    "12 layers, number read": (12, for_all_layers, reads_its_number),
    "12 layers, tensors only": (1, for_all_layers_as_tensors, takes_tensors),
    "10 sizes, as they come": (10, for_sizes, takes_tensors),
    "10 sizes, declared": (1, for_marked_sizes, takes_tensors),
}
lesson.predict(
    "graphs",
    {name: expected for name, (expected, _, _) in ways.items()},
    "one per value of what is a constant",
)
found = {name: count(calls, function) for name, (_, calls, function) in ways.items()}
lesson.measure("graphs", found)
lesson.bars("t10_graphs", "Graphs to compile, several seconds each", found, "graphs")

# %% [markdown]
# ## Graphs that are replayed
# Compiled regions are fast on the device, but Python still launches them one by one. A CUDA graph records the
# launches of a whole step and repeats them with a single call. The engine's ``GraphCapture`` does so through
# a backend: on a GPU ``CudaGraphs``, here ``RecordedGraphs``, which notes every tensor operation and runs it
# again on the same tensors.
#
# Two forms, as in vLLM V1. *Full*: one graph from token ids to logits. *Piecewise*: attention, whose shape
# changes with every prompt, stays outside, between the graphs.

# %%
lesson.heading("What is captured")
decoder = small_decoder(num_hidden_layers=4)
token_ids, positions = torch.zeros(5, dtype=torch.int32), torch.arange(5, dtype=torch.int32)


@torch.inference_mode()
def captured(breaks_at_attention: bool) -> tuple[GraphCapture, Tensor]:
    """A step of five tokens, captured; the logits that a replay overwrites."""
    caches = allocate_caches(decoder, num_blocks=2, block_size=16)
    tokens, placed = TokenInputs(positions), [cache.at(positions + 16) for cache in caches]
    with GraphCapture(RecordedGraphs()) as capture:

        def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
            o = torch.empty_like(q)

            def compute() -> None:
                blocks = torch.tensor([1])
                o.copy_(
                    gathered_sdpa_attention(
                        q, *caches[layer][:2], blocks, 0, scale=decoder.attention_specs[0].scale
                    )
                )

            if breaks_at_attention:
                capture.run_between(compute)
            else:
                compute()
            return o

        hidden = decoder.forward(token_ids, tokens, placed, attend)
        logits = decoder.logits(hidden, torch.tensor([3, 4]), tokens)
    return capture, logits


lesson.predict(
    "graphs of 4 layers, full and piecewise", [1, 5], "piecewise: one more than there are attentions"
)
full, full_logits = captured(breaks_at_attention=False)
piecewise, piecewise_logits = captured(breaks_at_attention=True)
lesson.measure("graphs of 4 layers, full and piecewise", [full.num_graphs, piecewise.num_graphs])

token_ids.copy_(positions)  # other tokens, in the buffer that was captured
with torch.inference_mode():
    full.replay()
    piecewise.replay()
expected = run(decoder, 5)
for name, logits in (("full", full_logits), ("piecewise", piecewise_logits)):
    lesson.check(
        torch.allclose(logits, expected, atol=1e-5), f"a {name} replay computes what is in the buffers now"
    )

# %% [markdown]
# The price: whatever Python computed while recording is frozen, and a tensor that was replaced instead of
# overwritten is not seen. This is why the engine keeps the inputs of a step in buffers that never move.

# %%
x, factor = torch.ones(1), 2.0
with torch.inference_mode(), GraphCapture(RecordedGraphs()) as capture:
    y = x * factor
x.fill_(5.0)
factor = 3.0
lesson.predict(
    "5 times a factor that Python changed from 2 to 3", 10.0, "the 2 was recorded, the 5 is read anew"
)
with torch.inference_mode():
    capture.replay()
lesson.measure("5 times a factor that Python changed from 2 to 3", y.item())

# %% [markdown]
# ## Padding: the other price
# A graph has one fixed shape. So 13 decodes run in the graph of the next larger size that was captured, and
# its empty rows are computed for nothing. Capturing every size wastes none, and takes memory and minutes;
# powers of two waste up to half. The engine's ``decode_buckets`` are 1, 2, 4, 8, and then every eighth.

# %%
lesson.heading("Padding waste for batches of 1 to 64")
powers = DevicePolicy(type="cuda").decode_batches(64)
buckets = {"powers of two": powers, "decode_buckets": decode_buckets(64), "all": list(range(1, 65))}


def formula(sizes: list[int]) -> int:
    """Empty rows over all batches: in a bucket of size b after one of size a, 0 + 1 + … + (b - a - 1)."""
    return sum((b - a) * (b - a - 1) // 2 for a, b in zip([0, *sizes], sizes))


def padded(batch: int, sizes: list[int]) -> int:
    size = bucket_for(batch, sizes)
    assert size is not None
    return size


lesson.predict(
    "empty rows over all batches", [formula(sizes) for sizes in buckets.values()], "a triangle per bucket"
)
waste = {name: sum(padded(batch, sizes) - batch for batch in range(1, 65)) for name, sizes in buckets.items()}
lesson.measure("empty rows over all batches", list(waste.values()))
rows: dict[str, list[Cell]] = {}
for name, sizes in buckets.items():
    shares = [(padded(batch, sizes) - batch) / padded(batch, sizes) for batch in range(1, 65)]
    kinds = ["cached" if share == 0 else "decode" if share < 0.25 else "wasted" for share in shares]
    rows[f"{name} ({len(sizes)})"] = [
        ("·" if kind == "cached" else "+" if kind == "decode" else "#", kind) for kind in kinds
    ]
legend = {"cached": "fits", "decode": "less than a quarter empty", "wasted": "a quarter or more"}
lesson.cells(
    "t10_padding", "Batches of 1 to 64, by captured sizes (how many)", rows, legend=legend, narrow=True
)

# %% [markdown]
# ## The engine replays
# Now the whole engine, with the graphs it would have on a GPU. Five prompts of 59 tokens together are one
# step, then five requests decode, and end one after the other. Each step takes the smallest of the
# ``token_buckets`` that holds it.

# %%
lesson.heading("Five requests in an engine with piecewise graphs")
lengths, answers = [5, 9, 30, 12, 3], [4, 7, 5, 9, 11]
prompts = [{"prompt_token_ids": [3 + index] * length} for index, length in enumerate(lengths)]
params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in answers]
arguments = engine_arguments(max_num_seqs=16, max_num_batched_tokens=64)
steps = [sum(lengths), *(sum(count > number for count in answers) for number in range(1, max(answers)))]
by_bucket = Counter(padded(count, token_buckets(64)) for count in steps)
empty = {
    size: sum(size - count for count in steps if padded(count, token_buckets(64)) == size)
    for size in by_bucket
}
lesson.predict("replays by bucket", dict(sorted(by_bucket.items())), f"steps of {steps} tokens")
lesson.predict("empty rows by bucket", dict(sorted(empty.items())), "what is left of each bucket")

with LLM(**arguments) as llm:
    without = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
with LLM(**arguments) as llm:
    runner = llm.llm_engine.client.core.executor.worker.runner
    with torch.inference_mode():
        runner.capture_graphs("piecewise", RecordedGraphs())
    graphs, choose, taken = runner.graphs, runner.graphs.choose, []

    def noting(counts: list[int], **options: bool) -> GraphChoice | None:
        choice = choose(counts, **options)
        taken.append((sum(counts), choice.num_tokens))
        return choice

    graphs.choose = noting
    answers_with = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

replays = {choice.num_tokens: count for choice, count in graphs.num_replays.items()}
lesson.measure("replays by bucket", dict(sorted(replays.items())))
found = {size: sum(bucket - count for count, bucket in taken if bucket == size) for size in replays}
lesson.measure("empty rows by bucket", dict(sorted(found.items())))
lesson.check(answers_with == without, "the answers are those of the engine without graphs")
strip: dict[str, list[Cell]] = {
    f"{count} in {bucket}": [("+", "decode") if index < count else ("#", "wasted") for index in range(bucket)]
    for count, bucket in dict.fromkeys(taken)
}
named = {"decode": "tokens", "wasted": "computed for nothing"}
lesson.cells("t10_replays", "Steps and the graphs they replay", strip, legend=named, narrow=True)

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "SmolLM3 leaves out the rotary embedding in every fourth layer. How many graphs is such a model?"
)
def two_kinds() -> str:
    from minivllm.checkpoints.hf_config import build_decoder_config
    from tutorials.small_model import SHAPE

    entries = {
        **SHAPE,
        "architectures": ["SmolLM3ForCausalLM"],
        "num_hidden_layers": 8,
        "no_rope_layer_interval": 4,
    }
    config = build_decoder_config({**entries, "tie_word_embeddings": False}, {}, "this exercise")
    assert len({layer.mixer.rotary for layer in config.layers[1:]}) == 2
    return (
        "four: first, last, and a between for each of the two kinds of layer; six more layers would change "
        "nothing"
    )


@lesson.exercise(
    "Why must a step of a single token be padded to two? Declare a size dynamic and compile it with 1."
)
def one_is_special() -> str:
    logging.getLogger("torch._guards").setLevel(logging.CRITICAL)  # the error is expected here
    x = torch.ones(1, 8)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0, min=2, max=4096)
    try:
        torch.compile(takes_tensors, backend="eager", fullgraph=True)(x, torch.ones(8), torch.tensor(1.0))
    except Exception as error:
        return f"{type(error).__name__}: 0 and 1 are always constants, since a size of 1 broadcasts"
    raise AssertionError("a size of 1 was accepted as dynamic")


@lesson.exercise(
    "Which 10 sizes waste least for batches of 1 to 64, if all batches are equally likely? Search, and "
    "compare."
)
def best_sizes() -> str:
    best: dict[tuple[int, int], tuple[int, list[int]]] = {(0, 0): (0, [])}
    for number in range(1, 11):
        for last in range(number, 65):
            options = [
                (
                    best[number - 1, before][0] + (last - before) * (last - before - 1) // 2,
                    best[number - 1, before][1] + [last],
                )
                for before in range(last)
                if (number - 1, before) in best
            ]
            best[number, last] = min(options)
    rows, sizes = best[10, 64]
    assert rows < formula(buckets["decode_buckets"])
    return f"{sizes}: {rows} empty rows; small batches are what a server mostly has, hence 2, 4, 8"


lesson.passed(
    "a model is three graphs between its attentions, whatever its depth and the size of a step",
    "a number read in a layer costs a graph per layer, an undeclared size one per size",
    "a full graph is one, a piecewise one is a graph more than there are layers; both compute from the "
    "buffers of now",
    f"empty rows by captured sizes: {waste}",
    f"an engine with graphs answers the same, with {sum(found.values())} empty rows in {len(taken)} steps",
)
