"""``minivllm simulate --check``:
the same requests at the same times, on real engines and on simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from minivllm.bench.reports.figures import Figure, decode_speed, median
from minivllm.bench.requests.workloads import make_workload
from minivllm.bench.rounds.side_processes import SideSpec, parse_sides
from minivllm.bench.sides.drive import Answer, Task
from minivllm.bench.simulation.cluster import Cluster
from minivllm.bench.simulation.step_time import StepTime, fit_points
from minivllm.errors import ConfigError, ModelError

DECODES, PROMPT, NEW_TOKENS, PREFILL = (1, 8), 32, 48, 256
"""Requests of every engine that decode together while its steps are timed, their tokens;
tokens of a prompt."""
ROUNDS = 3
COMPARED = ("TTFT", "ITL", "E2E", "requests", "output", "prefix cache hits")


class Engines(Protocol):
    """The engines that are measured: a ``Side``."""

    def run(self, tasks: Sequence[Task]) -> Answer:
        """Run the requests, each when it is due, on engines whose prefix caches are empty."""


@dataclass(frozen=True)
class Room:
    """Tokens of the longest request there is, and of all that run at the same time in one engine."""

    longest: int
    tokens: int


CALIBRATION = Room(
    max(PROMPT + NEW_TOKENS, PREFILL + 1), max(max(DECODES) * (PROMPT + NEW_TOKENS), PREFILL + 1)
)


def real_engines(text: str, cluster: Cluster, policy: str) -> SideSpec:
    """The engines of a cluster as they are started. text: "MODEL" or "MODEL,ARGUMENT=VALUE,…".
    Raises ConfigError."""
    model, *pairs = text.split(",")
    if not model or "=" in model:
        raise ConfigError(f"--check is {text!r}, but must be MODEL or MODEL,ARGUMENT=VALUE,…")
    [given] = parse_sides([",".join(["minivllm", *pairs])])
    fixed: dict[str, Any] = {
        "model": model,
        "data_parallel_size": cluster.num_engines,
        "data_parallel_policy": policy,
        "scheduling_policy": cluster.scheduler.policy,
        "max_num_seqs": cluster.scheduler.max_num_seqs,
        "max_num_batched_tokens": cluster.scheduler.max_num_batched_tokens,
        "max_model_len": max(cluster.scheduler.max_model_len, CALIBRATION.longest),
        "block_size": cluster.block_size,
        "num_gpu_blocks_override": cluster.num_blocks,
    }
    if both := sorted(fixed.keys() & given.arguments.keys()):
        raise ConfigError(f"--check names {both[0]}, which has an option of its own here: use that.")
    if cluster.failures:
        raise ConfigError("--failure goes without --check: nobody kills real engines.")
    if CALIBRATION.tokens > (cluster.num_blocks - 1) * cluster.block_size:
        raise ConfigError(
            f"--check needs a KV cache of {CALIBRATION.tokens} tokens: give it more --num-blocks."
        )
    return SideSpec("measured", "minivllm", given.arguments | fixed)


def measure_step_time(
    engines: Engines,
    num_engines: int,
    budget: int,
    vocab_size: int,
    say: Callable[[str], None] = lambda what: None,
) -> StepTime:
    """How long steps of these engines take while all of them work, and while only one does:
    they share a machine.

    Raises ModelError if they answer too little to tell.
    """

    def run(requests: int, prompt: int, new_tokens: int, repetition: int) -> Answer:
        text = f"fixed:{requests}:{prompt}:{new_tokens}"
        answer = engines.run(make_workload(text, vocab_size, repetition=repetition))
        if any(len(record.token_ids) < new_tokens for record in answer.records):
            raise ModelError(f"The engines did not answer {text}, so how long their steps take is not known.")
        return answer

    def decode_seconds(requests: int) -> float:
        say(f"steps of {requests} requests in all")
        run(requests, PROMPT, 4, -1)
        speeds = [
            speed
            for repetition in range(ROUNDS)
            for speed in decode_speed(run(requests, PROMPT, NEW_TOKENS, repetition).records)
        ]
        if not speeds:
            raise ModelError("The engines never decoded together, so how long their steps take is not known.")
        return requests / median(speeds)

    def prompt_seconds(requests: int) -> float:
        say(f"{requests} prompts at the same time")
        run(requests, PREFILL, 1, -1)
        prompts = [run(requests, PREFILL, 1, repetition) for repetition in range(ROUNDS)]
        return median([record.times[0] - record.arrival for answer in prompts for record in answer.records])

    decodes = [(batch, decode_seconds(batch * num_engines)) for batch in DECODES]
    together = fit_points(decodes, PREFILL, prompt_seconds(num_engines), budget)
    if num_engines == 1:
        return together
    # One request is what can be had of a single engine; larger batches are taken to be slowed as much.
    share = decode_seconds(1) / decodes[0][1]
    alone = [(batch, share * seconds) for batch, seconds in decodes]
    return replace(together, alone=fit_points(alone, PREFILL, prompt_seconds(1), budget))


def verdicts(predicted: Sequence[Figure], measured: Sequence[Figure]) -> list[str]:
    """A sentence for each figure that both have: the medians, and their ratio."""
    by_name = {figure.metric: figure for figure in measured}
    sentences = []
    for figure in predicted:
        other = by_name.get(figure.metric)
        if figure.metric not in COMPARED or other is None or not figure.samples or not other.samples:
            continue
        ours, theirs = median(figure.samples), median(other.samples)
        ratio = f": {ours / theirs:.2f} ×" if theirs else ""
        sentences.append(
            f"{figure.metric}: predicted {ours:.3g} {figure.unit}, measured {theirs:.3g} "
            f"{figure.unit}{ratio}."
        )
    return sentences
