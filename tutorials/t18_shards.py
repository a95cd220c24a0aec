"""18 · Shards: workers that divide every layer exchange tensors twice in each, of known size.

A model that is too large or too slow for one device can be cut through its layers: every worker has a part of
each matrix, a *shard*, and all of them compute for the same token at the same time. Parts of a product have
to be put together again. Where, how often, and how many bytes is that? (Megatron-LM, Shoeybi et al. 2019.)
"""

# %% [markdown]
# ## Cut twice, add once
# The first products of an MLP are cut by their *outputs*: a worker computes some of the values between the
# products, from the whole input. The second product is cut by its *inputs*: it takes just these values. So
# nothing has to be exchanged in between, and each worker ends with a tensor of full size that is only a part
# of the sum. Attention is cut in the same way: heads are its values in between. One sum after attention and
# one after the MLP, that is all.
#
# A ``Communicator`` adds such parts. Its workers need one method to do so, ``exchange``: give a tensor, get
# those of all. Here workers are threads, and lay their tensors into a list: ``ThreadCommunicator`` of
# ``minivllm/simulation``. Two lists alternate: a worker that writes into one has seen that all have written
# into the other one, and so have read what was there before.

# %%
from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.distributed.communicator import Communicator
from minivllm.distributed.segment import open_segment
from minivllm.distributed.shard import Shard
from minivllm.distributed.shared_memory import SharedMemoryCommunicator
from minivllm.engine.core import EngineCore
from minivllm.engine.resolve import resolve
from minivllm.engine_process.client import InProcessClient
from minivllm.errors import ConfigError
from minivllm.frontend.llm_engine import LLMEngine
from minivllm.models.decoder import Decoder
from minivllm.models.shards import check_layout, own_heads, own_inner
from minivllm.simulation.ranks import ThreadCommunicator, VirtualShards, communicators, together
from minivllm.specs.layers import SelfAttentionSpec
from tutorials.lesson import Lesson
from tutorials.small_model import SHAPE, engine_arguments, model_folder, plans, printed

lesson = Lesson(__doc__)
generator = torch.Generator().manual_seed(0)


class Noting(ThreadCommunicator):
    """given: bytes of every exchange. results: its sums, and what was put side by side."""

    def __init__(self, rank: int, barrier: threading.Barrier, lists: Sequence[list[Any]]) -> None:
        super().__init__(rank, barrier, lists)
        self.given: list[int] = []
        self.results: list[Tensor] = []

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.given.append(x.nbytes)
        return super().exchange(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        self.results.append(super().all_reduce(x))
        return self.results[-1].clone()

    def gather_columns(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.results.append(super().gather_columns(x, widths))
        return self.results[-1].clone()


HIDDEN, INNER = 144, 384
x = torch.randn(5, HIDDEN, generator=generator)
gate, up = (torch.randn(INNER, HIDDEN, generator=generator) / HIDDEN**0.5 for _ in range(2))
down = torch.randn(HIDDEN, INNER, generator=generator) / INNER**0.5


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def divided(communicator: Communicator) -> Tensor:
    own = own_inner(INNER, Shard(communicator.rank, communicator.size))
    return communicator.all_reduce(mlp(x, gate[own], up[own], down[:, own]))


lesson.heading("An MLP on two workers")
lesson.predict("bytes that a worker gives", [5 * HIDDEN * 4], "one sum: 5 tokens, 144 values of 4 bytes")
pair = communicators(2, Noting)
results = together(divided, pair)
lesson.measure("bytes that a worker gives", pair[0].given)
torch.testing.assert_close(results[0], mlp(x, gate, up, down), rtol=1e-4, atol=1e-5)
lesson.check(True, "the sum is what one worker computes, but for rounding")

# %% [markdown]
# ## The surprise: whose part comes first?
# All workers go on with the sum, and each samples by itself: no worker tells another which token it was. That
# works only if all of them have the very same bits. But a sum of floats depends on its order: (a + b) + c is
# rounded in other places than (c + a) + b.
#
# It is tempting to begin with one's own part, which is at hand, and to add those of the others in order of
# rank. Predict how many *different* sums there are among 2, 3 and 4 workers. Only the first addition may be
# turned around.


# %%
class OwnFirst(ThreadCommunicator):
    """Adds up in an order of its own."""

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.exchange(x)
        total = parts.pop(self.rank)
        for part in parts:
            total = total + part
        return total


def different(kind: type[ThreadCommunicator], size: int) -> int:
    """How many different results all_reduce has for random parts."""
    parts = torch.randn(size, 4096, generator=generator)
    sums = together(lambda one: one.all_reduce(parts[one.rank]), communicators(size, kind))
    return len({total.numpy().tobytes() for total in sums})


lesson.heading("Different sums")
lesson.predict(
    "own part first, 2, 3 and 4 workers", [1, 2, 3], "a + b is b + a; from the third on all are different"
)
lesson.predict("order of rank, 2, 3 and 4 workers", [1, 1, 1], "all add in the same order")
lesson.measure("own part first, 2, 3 and 4 workers", [different(OwnFirst, size) for size in (2, 3, 4)])
lesson.measure(
    "order of rank, 2, 3 and 4 workers", [different(ThreadCommunicator, size) for size in (2, 3, 4)]
)
lesson.say("  Two workers would never have shown it.")

# %% [markdown]
# ## Ranges that are not equal
# SmolLM2-135M has 9 query heads and 3 KV heads, three of the one for each of the other. A KV head and its
# query heads stay together, so that a worker finds in its own cache what its heads attend to. Two workers get
# two KV heads and one: 6 and 3 query heads. vLLM refuses 9 heads on two workers, since it divides evenly;
# ranges need not be equal.
#
# More workers than KV heads? Then some keep the *same* KV head, and divide its query heads. That makes sense
# only if all KV heads are kept equally often, and as long as there is a query head for everyone. Predict
# which numbers of workers up to 12 will do.

# %%
SMOLLM2 = {
    **SHAPE,
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
smollm2 = read_decoder_config(model_folder(SMOLLM2))
attention = smollm2.layers[0].mixer
assert isinstance(attention, SelfAttentionSpec)


def heads_of(size: int) -> list[tuple[int, int]]:
    """(query heads, KV heads) of each worker."""
    assert isinstance(attention, SelfAttentionSpec)
    own = [own_heads(attention, Shard(rank, size)) for rank in range(size)]
    return [(one.heads.stop - one.heads.start, one.kv_heads.stop - one.kv_heads.start) for one in own]


def is_possible(size: int) -> bool:
    try:
        check_layout(smollm2, size, None, None)
    except ConfigError:
        return False
    return True


lesson.heading("Heads of SmolLM2-135M")
lesson.predict(
    "query and KV heads of two workers", [(6, 2), (3, 1)], "whole KV heads, three query heads for each"
)
lesson.predict("query and KV heads of three", [(3, 1)] * 3, "one KV head each")
lesson.predict(
    "query and KV heads of six", [(2, 1), (1, 1)] * 3, "two workers have the same KV head: 3 = 2 + 1"
)
for name, size in (("two workers", 2), ("three", 3), ("six", 6)):
    lesson.measure(f"query and KV heads of {name}", heads_of(size))
lesson.predict(
    "numbers of workers", [1, 2, 3, 6, 9], "up to 3 KV heads, then multiples of 3 up to 9 query heads"
)
lesson.measure("numbers of workers", [size for size in range(1, 13) if is_possible(size)])
rows = {}
for rank in range(6):
    own = own_heads(attention, Shard(rank, 6))
    queries = [(f"q{head}", "prompt") if head in range(9)[own.heads] else ("", "") for head in range(9)]
    keys = [(f"kv{head}", "decode") if head in range(3)[own.kv_heads] else ("", "") for head in range(3)]
    rows[f"worker {rank}"] = [*queries, *keys]
lesson.cells(
    "t18_heads", "Six workers", rows, {"prompt": "query heads", "decode": "KV heads, each kept twice"}
)

# %% [markdown]
# The worker with the most sets the pace. Values of the MLP are divided in units of 32, tokens of the
# vocabulary in units of 64, and both can be divided evenly here; so it is attention only that is uneven. The
# slower of two workers reads 6/9 of its weights, and half of everything else. Predict the share of all
# weights that it reads for a token.
#
# The engine's own decoder tells. On PyTorch's ``meta`` device it has all of its layers and none of their
# memory.

# %%
lesson.heading("Weights that a worker reads")
LAYERS, WIDTH, KEYS = 30, 576, 192
in_attention, in_mlp, in_head = 2 * WIDTH * (WIDTH + KEYS), 3 * WIDTH * 1536, WIDTH * 49_152
weights = LAYERS * (in_attention + in_mlp) + in_head
of_two = LAYERS * (in_attention * 2 / 3 + in_mlp / 2) + in_head / 2
of_six = LAYERS * (2 * WIDTH * (WIDTH * 2 / 9 + KEYS / 3) + in_mlp / 6) + in_head / 6
lesson.predict("most of two workers", round(of_two / weights, 3), "2/3 of attention, 1/2 of the rest")
lesson.predict("most of three workers", round(1 / 3, 3), "everything can be divided by three")
lesson.predict(
    "most of six workers", round(of_six / weights, 3), "2/9 of the query heads, 1/3 of the keys and values"
)


def read_by(communicator: Communicator) -> int:
    """Weights that this worker multiplies for a token."""
    settings: Any = {"dtype": torch.bfloat16, "attention_dtype": torch.bfloat16, "max_model_len": 2048}
    decoder = Decoder(smollm2, communicator=communicator, device=torch.device("meta"), **settings)
    return decoder.weights_per_token


most = {size: max(map(read_by, communicators(size))) / weights for size in (2, 3, 6)}
for name, size in (("two", 2), ("three", 3), ("six", 6)):
    lesson.measure(f"most of {name} workers", round(most[size], 3))
lesson.say(
    f"  As far as weights go, two workers are {1 / most[2]:.2f} times as fast as one, six {1 / most[6]:.2f} "
    "times."
)

# %% [markdown]
# ## Where workers meet
# The engine has one list of pieces and seams for any number of workers. ``fuse`` drops the exchanges that a
# single worker need not do. So the program of two workers, without its exchanges, must be that of one.
# Predict how many sums a step of a model of four layers has, and how many times columns are put side by side.

# %%
lesson.heading("Exchanges of a step, four layers")
LAYERS = 4
lesson.predict("sums and gathers", [2 * LAYERS + 1, 1], "two in a layer; the embedding; the logits")
[one], [two] = plans(LAYERS), plans(LAYERS, ranks=2)
steps = [type(step).__name__ for part in (two.body, two.tail) if part for step in part.steps]
lesson.measure("sums and gathers", [steps.count("Sum"), steps.count("Gather")])
exchanges = ("Sum", "Gather")
for line in printed(two)[:10]:
    lesson.say(f"  {line.region:8} {'— ' + line.what + ' —' if line.is_seam else line.what:16} {line.gives}")
lesson.check(
    [line.what for line in printed(one)]
    == [line.what for line in printed(two) if line.what not in exchanges],
    "but for the exchanges, both programs are the same list",
)

# %% [markdown]
# ## A whole engine of shards
# What the engine core knows of its workers is an ``Executor``. ``minivllm/simulation/ranks.py`` has a short
# one, ``VirtualShards``: a real ``Worker`` for each thread, all of them given the same steps. Workers in
# processes of their own do the same with shared memory in place of lists.
#
# The model is small and random, with the heads of SmolLM2: 9 and 3, of 16 dimensions each, in 2 layers.


# %%
VOCABULARY, SMALL_LAYERS, DIM = 448, 2, 16
SMALL = {**SHAPE, "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY}
SMALL |= {"num_hidden_layers": SMALL_LAYERS, "num_attention_heads": 9, "num_key_value_heads": 3}
ARGUMENTS = engine_arguments(model=str(model_folder(SMALL)))


def engine(ranks: Sequence[Communicator]) -> tuple[LLM, VirtualShards]:
    config, facts = resolve(EngineArgs(**ARGUMENTS, tensor_parallel_size=len(ranks)))
    executor = VirtualShards(config, facts, [ranks])
    client = InProcessClient(EngineCore(config, executor), facts.vocab_size, facts.eos_token_ids)
    return LLM(engine=LLMEngine(client, None)), executor


lesson.heading("Bytes of a block of 16 tokens")
head_bytes = 16 * 2 * DIM * 4 * SMALL_LAYERS
lesson.predict(
    "two workers", [2 * head_bytes, head_bytes], "two KV heads and one; 2 · 16 values of 4 bytes per token"
)
lesson.predict("six workers", [head_bytes] * 6, "one KV head each: the cache exists twice")
two, three, six = (communicators(size, Noting) for size in (2, 3, 6))
engines = {size: engine(ranks) for size, ranks in ((2, two), (3, three), (6, six))}
for name, size in (("two", 2), ("six", 6)):
    executor = engines[size][1]
    num_blocks = executor.kv_groups[0].num_blocks
    memory = executor.collective("memory_bytes")
    lesson.measure(f"{name} workers", [worker["kv_cache"] // num_blocks for worker in memory])

# %% [markdown]
# ## What a step moves
# Three prompts of 9, 20 and 31 tokens come in one step. Predict every exchange of it, in order.
#
# - *embed*: a worker has the rows of some tokens of the vocabulary, and zeros for the others:
#   one sum of 60 · 144.
# - *attention*, *MLP*: a sum of 60 · 144 each.
#   But behind the last layer's attention only those tokens go on that a new
#   token is sampled from, and these are three.
# - *head*: a worker has the logits of its part of the vocabulary.
#   They are not added, but put side by side. 448 tokens are 7 units of 64. Two workers have 4 and 3 of them,
#   three have 3, 2 and 2, and narrow parts are filled up to the widest: 3 rows of 256 or of 192 values.
#
# A decode step is the same with three tokens instead of 60.

# %%
PROMPTS = [
    [(37 * number + 11 * i) % VOCABULARY for i in range(length)] for number, length in enumerate((9, 20, 31))
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=1),
]


def answers(llm: LLM, ranks: Sequence[Noting] = ()) -> tuple[list[Any], list[list[int]]]:
    """(tokens and logprobs of each request, bytes of each exchange of each step)."""
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS)):
        llm.llm_engine.add_request(f"R{number}", {"prompt_token_ids": prompt}, params)
    moved, finished = [], {}
    for communicator in ranks:
        communicator.results.clear()
    while llm.llm_engine.has_unfinished_requests():
        for communicator in ranks:
            communicator.given.clear()
        finished |= {output.request_id: output.outputs[0] for output in llm.llm_engine.step()}
        moved += [list(communicator.given) for communicator in ranks[:1]]
    return [(one.token_ids, one.logprobs) for _, one in sorted(finished.items())], moved


def exchanges(tokens: int, widest: int, sampled: int = 3) -> list[int]:
    """Bytes of each in a step: embed, the layers but the last one's, behind its attention, logits."""
    whole = [tokens * HIDDEN * 4] * (1 + 2 * (SMALL_LAYERS - 1))
    return [*whole, *[sampled * HIDDEN * 4] * 2, sampled * widest * 4]


lesson.heading("Bytes that a worker gives")
lesson.predict(
    "60 tokens of prompts, two workers", exchanges(60, 256), "three sums of 60 rows, two of 3, the logits"
)
lesson.predict("3 tokens decoded, two workers", exchanges(3, 256), "3 rows everywhere")
lesson.predict("3 tokens decoded, three workers", exchanges(3, 192), "narrower logits, and the same sums")
of_two_workers, moved = answers(engines[2][0], two)
lesson.measure("60 tokens of prompts, two workers", moved[0])
lesson.measure("3 tokens decoded, two workers", moved[1])
of_three_workers, by_three = answers(engines[3][0], three)
lesson.measure("3 tokens decoded, three workers", by_three[1])
lesson.check(all(step == moved[1] for step in moved[1:]), "every decode step moves the same")
lesson.bars(
    "t18_bytes",
    "What one of two workers gives in a step",
    {
        "60 tokens of prompts: sums": sum(moved[0][:-1]) / 1024,
        "60 tokens of prompts: logits": moved[0][-1] / 1024,
        "3 tokens decoded: sums": sum(moved[1][:-1]) / 1024,
        "3 tokens decoded: logits": moved[1][-1] / 1024,
    },
    "KiB",
)
one_token = (2 * LAYERS + 1) * WIDTH * 2, 49_152 // 2 * 2
lesson.say(
    f"  SmolLM2-135M in bfloat16 on two workers: {one_token[0]:,} bytes of sums and {one_token[1]:,} of "
    "logits for a "
    f"token, while the slower one reads {2 * max(map(read_by, two)) // 10**6} MB of weights."
)

# %% [markdown]
# Sums do not get smaller with more workers: each of them gives a tensor of full size and reads those of all
# others. The bytes are few all the same. What costs time is that all wait for the slowest, 2 · layers + 2
# times in every step.
#
# ## The same bits, the same tokens
# All sums and logits of all steps were kept. How many different ones has an exchange among its workers? One,
# or they would sample different tokens sooner or later. Against *one* worker the bits differ, since sums are
# rounded in other places. In float32 that is too little to change a token.

# %%
lesson.heading("Shards against one worker")
lesson.predict("different results of an exchange", {1}, "all add the same parts in the same order")
lesson.predict(
    "requests with the tokens of one worker", {2: 3, 3: 3, 6: 3}, "all, greedy or drawn with a seed"
)
of_six_workers, _ = answers(engines[6][0], six)
results_of_ranks = [
    exchanged
    for ranks in (two, three, six)
    for exchanged in zip(*(one.results for one in ranks), strict=True)
]
lesson.measure(
    "different results of an exchange",
    {len({result.numpy().tobytes() for result in exchanged}) for exchanged in results_of_ranks},
)
with LLM(**ARGUMENTS) as llm:
    expected, _ = answers(llm)
given_by = {2: of_two_workers, 3: of_three_workers, 6: of_six_workers}
lesson.measure(
    "requests with the tokens of one worker",
    {
        size: sum(tokens == other for (tokens, _), (other, _) in zip(given, expected))
        for size, given in given_by.items()
    },
)


def logprobs(answer: list[Any]) -> Tensor:
    """Of the tokens that were chosen."""
    return torch.tensor(
        [step[token].logprob for tokens, steps in answer for token, step in zip(tokens, steps)]
    )


gap = max(float((logprobs(given) - logprobs(expected)).abs().max()) for given in given_by.values())
lesson.check(gap < 1e-4, f"log probabilities differ by {gap:.0e} at most")

# %% [markdown]
# ## Exercises


# %%
@lesson.exercise(
    "Shared memory, which worker processes use, instead of lists: which bits of the answers change?"
)
def shared_memory() -> str:
    memory, events = open_segment(3)
    llm, _ = engine([SharedMemoryCommunicator(rank, memory, events) for rank in range(3)])
    with llm:
        assert answers(llm)[0] == of_three_workers
    for descriptor in [memory, *(event for row in events for event in row if event >= 0)]:
        os.close(descriptor)
    return (
        "none, also of the log probabilities: a communicator only says how tensors get across; adding them "
        "up is the "
        "same code"
    )


@lesson.exercise(
    "Cut an MLP the other way around, the first products by their inputs. What has to be exchanged?"
)
def the_other_way() -> str:
    def other_way(communicator: Communicator) -> Tensor:
        shard = Shard(communicator.rank, communicator.size)
        columns = shard.own(HIDDEN)
        inner = F.silu(communicator.all_reduce(x[:, columns] @ gate[:, columns].T))
        inner = inner * communicator.all_reduce(x[:, columns] @ up[:, columns].T)
        ranges = [Shard(rank, shard.size).own(HIDDEN) for rank in range(shard.size)]
        return communicator.gather_columns(inner @ down[columns].T, [own.stop - own.start for own in ranges])

    ranks = communicators(2, Noting)
    for result in together(other_way, ranks):
        torch.testing.assert_close(result, mlp(x, gate, up, down), rtol=1e-4, atol=1e-5)
    times = sum(ranks[0].given) / pair[0].given[0]
    assert round(times, 2) == round((2 * INNER + HIDDEN / 2) / HIDDEN, 2)
    return (
        "a part of a sum cannot pass through an activation, so both products are added up before it, and the "
        "outputs "
        f"are put side by side: {times:.1f} times as many bytes, in three exchanges instead of one"
    )


@lesson.exercise(
    "A model has 8 query heads and one KV head. What do four workers divide, and what do they not?"
)
def one_kv_head() -> str:
    entries = {**SHAPE, "num_attention_heads": 8, "num_key_value_heads": 1}
    spec = read_decoder_config(model_folder(entries)).layers[0].mixer
    assert isinstance(spec, SelfAttentionSpec)
    own = [own_heads(spec, Shard(rank, 4)) for rank in range(4)]
    assert [one.heads for one in own] == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 8)]
    assert {(one.kv_heads.start, one.kv_heads.stop) for one in own} == {(0, 1)}
    return (
        "two query heads each, and all of the rest; but every worker keeps the KV head, so four of them "
        "cache no more "
        "tokens than one in the same memory per worker"
    )


for llm, _ in engines.values():
    llm.close()
lesson.passed(
    f"two workers give {sum(moved[0]):,} bytes each for a step of 60 tokens, and {sum(moved[1]):,} for one "
    "of 3",
    f"of SmolLM2-135M the slower of two workers reads {most[2]:.0%} of the weights, since it has 6 of 9 "
    "heads",
    "all workers have the same bits, and in float32 the tokens of one worker",
)
