"""``minivllm simulate``: what routing policies would do with many engines, without running any."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from minivllm.bench.engines import parse_loads
from minivllm.bench.reports.figures import Figure, error_figures, latency_figures, rate_figures
from minivllm.bench.reports.report import (
    Comparison,
    Measurement,
    OutputOptions,
    Report,
    compared,
    make_report,
    publish,
    read_report,
)
from minivllm.bench.requests.workloads import ARRIVAL_FORMS, FORMS, arrive, make_workload
from minivllm.bench.rounds.side_processes import Side
from minivllm.bench.sides.drive import Answer, Task
from minivllm.bench.simulation.check import measure_step_time, real_engines, verdicts
from minivllm.bench.simulation.cluster import Cluster, Failure, Outcome, run_cluster
from minivllm.bench.simulation.step_time import StepTime, fit_step_time, parse_step_time
from minivllm.cli.engine.options import with_options
from minivllm.config import SchedulerConfig
from minivllm.errors import ConfigError
from minivllm.plugins.points import POLICIES, ROUTING
from minivllm.scheduler.policy import make_policy

VOCAB_SIZE = 2**31
"""Token ids mean nothing to a simulation: those of any model's trace will do."""


ONE = "one engine"


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """The engines and what they are sent."""

    workload: Annotated[
        str, typer.Option(help="Requests: " + "; ".join(f"{form} ({text})" for form, text in FORMS.items()))
    ] = "multi-turn:64:4:128:64"
    arrivals: Annotated[
        str | None,
        typer.Option(help="When, in place of the workload's own times: " + "; ".join(ARRIVAL_FORMS)),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            help="Poisson arrivals per second, one rate after the other, ascending; --png draws the curves."
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="data_parallel_policy, repeatable; the others are compared with the first. [default: all]"
        ),
    ] = None
    scheduling_policy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Who comes first in each engine: {', '.join(POLICIES.known)}, or package.module:Class "
            "(repeatable). "
            "[default: fcfs]"
        ),
    ] = None
    data_parallel_size: Annotated[int, typer.Option(min=1, max=4096, help="Engines.")] = 2
    fit: Annotated[
        Path | None,
        typer.Option(
            help="JSON of bench model with decode:1, decode:16 and prefill:512: how long steps take."
        ),
    ] = None
    step_ms: Annotated[
        str | None,
        typer.Option(
            help="In place of --fit, milliseconds of a step, of a prompt token, of a request that decodes."
        ),
    ] = None
    failure: Annotated[
        list[str] | None,
        typer.Option(
            help="ENGINE:AT:SECONDS: it dies at a time, and serves again so many seconds later (repeatable)."
        ),
    ] = None
    check: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL[,ARGUMENT=VALUE,…]",
            help="Also start real engines, send them the same requests at the same times, and print what was "
            "measured "
            "beside what was predicted. Without --fit and --step-ms their steps are timed first.",
        ),
    ] = None
    max_num_seqs: Annotated[
        int, typer.Option(min=1, help="Requests that run at the same time, of each engine.")
    ] = 64
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 2048
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block of the KV cache.")] = 64
    num_blocks: Annotated[int, typer.Option(min=2, help="Blocks of the KV cache of each engine.")] = 1024

    def loads(self) -> list[tuple[str, str | None, float | None]]:
        """(name of a case, arrivals in place of the workload's own, place on the axis).
        Raises ConfigError."""
        if self.rates is None:
            name = self.workload if self.arrivals is None else f"{self.workload}, {self.arrivals}"
            return [(name, self.arrivals, None)]
        if self.arrivals is not None:
            raise ConfigError("--rates and --arrivals exclude each other: give one of them.")
        rates = parse_loads("--rates", self.rates)
        return [(f"{self.workload} at {rate:g}/s", f"poisson:{rate}", rate) for rate in rates]

    def tasks(self, arrivals: str | None, vocab_size: int = VOCAB_SIZE) -> list[Task]:
        """Raises ConfigError for what is no workload, or does not fit into the cache of an engine."""
        tasks = make_workload(self.workload, vocab_size, self.seed)
        longest = max(len(task.prompt) + task.max_tokens for task in tasks)
        if longest > (self.num_blocks - 1) * self.block_size:
            raise ConfigError(
                f"The longest request has {longest} tokens, but the KV cache of an engine only "
                f"{(self.num_blocks - 1) * self.block_size}: give it more --num-blocks."
            )
        return tasks if arrivals is None else arrive(tasks, arrivals, self.seed)

    def step_time(self) -> StepTime | None:
        """None if real engines are there to be timed. Raises ConfigError unless exactly one source is given,
        RequestError for a report that tells too little."""
        if self.fit is None and self.step_ms is None and self.check is not None:
            return None
        if (self.fit is None) == (self.step_ms is None):
            raise ConfigError("How long steps take must be told: give either --fit or --step-ms.")
        return (
            fit_step_time(read_report(self.fit))
            if self.fit is not None
            else parse_step_time(str(self.step_ms))
        )

    @property
    def scheduling_policies(self) -> list[str]:
        return self.scheduling_policy or ["fcfs"]

    def cluster(self, step_time: StepTime, tasks: Sequence[Task]) -> Cluster:
        """With the first scheduling policy.
        Raises ConfigError for a failure that cannot be, or an unknown policy."""
        for name in self.scheduling_policies:
            make_policy(name)
        limits = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max(len(task.prompt) + task.max_tokens for task in tasks),
            policy=self.scheduling_policies[0],
        )
        return Cluster(
            num_engines=self.data_parallel_size,
            step_time=step_time,
            scheduler=limits,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            failures=[_failure(text, self.data_parallel_size) for text in self.failure or ()],
        )


def _failure(text: str, num_engines: int) -> Failure:
    engine, _, rest = text.partition(":")
    at, _, seconds = rest.partition(":")
    try:
        failure = Failure(int(engine), float(at), float(seconds))
        if not (0 <= failure.engine < num_engines and 0 <= failure.time < 1e9 and 0 <= failure.seconds < 1e9):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--failure is {text!r}, but must be ENGINE:AT:SECONDS with an engine below {num_engines}, such "
            "as 0:10:30."
        ) from None
    return failure


@with_options
def simulate(options: SimulationOptions, output: OutputOptions) -> None:
    """Simulate engines that share requests: real schedulers, prefix caches and routing, no model.

    Step times are those of a line through measured steps, which --fit reads from a report of bench model.
    Contexts, network and frontend have no effect, so compare policies with it, not machines. A single engine
    is simulated for comparison: its cache hits show the loss by routing. --check measures the error of the
    simulation on this machine.

    Example: minivllm simulate --data-parallel-size 64 --workload multi-turn:400:4:256:64 --arrivals
    poisson:40 --step-ms 20,1.7,2.3

    Latency against load: minivllm simulate --workload poisson:200:1:32:256 --rates 0.5,1,2,4 --step-ms
    20,1.7,2.3 --png load.png

    Scheduling by response ratio: minivllm simulate --data-parallel-size 1 --policy round_robin
    --workload prefix-groups:20:50:1024:64:16 --arrivals poisson:2 --block-size 16 --num-blocks 400
    --max-num-seqs 8 --scheduling-policy fcfs --scheduling-policy response-ratio --step-ms 20,1,1

    A dead engine: minivllm simulate --data-parallel-size 4 --failure 0:10:30 --step-ms 20,1.7,2.3

    Fitted: minivllm bench model --case decode:1 --case decode:16 --case prefill:512 --json speed.json, then
    minivllm simulate --fit speed.json

    Against two real engines: minivllm simulate --check smollm2 --workload multi-turn:8:3:64:16 --arrivals
    poisson:1
    """
    step_time, loads = options.step_time(), options.loads()
    tasks = [options.tasks(arrivals) for _, arrivals, _ in loads]
    cluster = options.cluster(step_time or StepTime(0.0, 0.0, 0.0), tasks[0])
    if options.check is not None:
        report = _checked(options, cluster, step_time)
    else:
        report = _simulated(options, cluster, loads, tasks)
    publish(report, output)


def _simulated(
    options: SimulationOptions,
    cluster: Cluster,
    loads: Sequence[tuple[str, str | None, float | None]],
    tasks: Sequence[Sequence[Task]],
) -> Report:
    """All policies, and one engine beside them, under all loads."""
    names, orders = options.policy or [*ROUTING.known], options.scheduling_policies
    measurements: list[Measurement] = []
    comparisons: list[Comparison] = []
    notes = []
    for (case, _, x), requests in zip(loads, tasks):
        runs = {
            name if len(orders) == 1 else f"{name}, {order}": (
                replace(cluster, scheduler=replace(cluster.scheduler, policy=order)),
                ROUTING.load(name)(),
            )
            for name in names
            for order in orders
        }
        if options.data_parallel_size > 1:
            runs[ONE] = (replace(cluster, num_engines=1, failures=()), ROUTING.load("round_robin")())
        first = dict[str, Measurement]()
        for side, (simulated, policy) in runs.items():
            started = time.perf_counter()
            outcome = run_cluster(simulated, policy, requests)
            seconds = time.perf_counter() - started
            own = _measurements(case, side, figures_of(outcome), x)
            measurements += own.values()
            if not first:
                first = own
            elif side != ONE:
                comparisons += compared(first, own)
            notes.append(
                f"{side}{'' if x is None else f' at {x:g}/s'}: prefix cache hits {outcome.hit_rate:.1%}, "
                f"{outcome.seconds:,.1f} s simulated in {seconds:.1f} s."
            )
    return make_report("simulate", _configuration(options, cluster), measurements, comparisons, notes)


def _checked(options: SimulationOptions, cluster: Cluster, step_time: StepTime | None) -> Report:
    """One policy, on real engines and on simulated ones.
    Raises ConfigError, or ModelError if they do not start."""
    [name, *others] = options.policy or ["prefix"]
    if others or options.rates is not None or len(options.scheduling_policies) > 1:
        raise ConfigError("--check runs one policy under one load: leave --rates and further policies out.")
    policy = ROUTING.load(name)
    [(case, arrivals, _)] = options.loads()
    console = Console(stderr=True)
    with Side(real_engines(str(options.check), cluster, name)) as engines:
        vocab_size = engines.facts["vocab_size"]
        tasks = options.tasks(arrivals, vocab_size)
        if step_time is None:
            budget = cluster.scheduler.max_num_batched_tokens
            step_time = measure_step_time(engines, cluster.num_engines, budget, vocab_size, console.print)
        console.print("the requests")
        answer = engines.run(tasks)
    cluster = replace(cluster, step_time=step_time)
    predicted, measured = figures_of(run_cluster(cluster, policy(), tasks)), figures_of_answer(answer)
    own = [
        *_measurements(case, "predicted", predicted).values(),
        *_measurements(case, "measured", measured).values(),
    ]
    notes = [*verdicts(predicted, measured), f"A step takes {_said(step_time)}."]
    if step_time.alone is not None:
        notes.append(f"While the other engines are idle, it takes {_said(step_time.alone)}.")
    return make_report("simulate", _configuration(options, cluster), own, notes=notes)


def _said(time: StepTime) -> str:
    return (
        f"{1e3 * time.base:.3g} ms, {1e3 * time.prompt_token:.3g} ms for a prompt token and "
        f"{1e3 * time.decode:.3g} ms "
        "for a request that decodes"
    )


def _configuration(options: SimulationOptions, cluster: Cluster) -> dict[str, Any]:
    given = {**asdict(options), "fit": None if options.fit is None else str(options.fit)}
    return {**given, "step_time": asdict(cluster.step_time)}


def _measurements(
    case: str, side: str, figures: Sequence[Figure], x: float | None = None
) -> dict[str, Measurement]:
    return {
        one.metric: Measurement(case, side, one.metric, one.unit, one.better, one.samples, x)
        for one in figures
    }


def figures_of_answer(answer: Answer) -> list[Figure]:
    """The same of real engines, as far as they tell."""
    good = [record for record in answer.records if record.error is None]
    num_output = sum(len(record.token_ids) for record in good)
    return [
        *latency_figures(answer.records),
        *rate_figures(len(good), 0, num_output, max(answer.seconds, 1e-9))[:2],
        Figure("prefix cache hits", "share", "higher", [answer.counters["cache_hit_rate"]]),
        *error_figures(answer.records),
    ]


def figures_of(outcome: Outcome) -> list[Figure]:
    """Latencies and rates as of a real run, hits, and how evenly the work was spread."""
    good = [record for record in outcome.records if record.error is None]
    num_output = sum(len(record.token_ids) for record in good)
    mean = sum(outcome.computed) / len(outcome.computed)
    return [
        *latency_figures(outcome.records),
        *rate_figures(len(good), 0, num_output, max(outcome.seconds, 1e-9))[:2],
        Figure("prefix cache hits", "share", "higher", [outcome.hit_rate]),
        Figure("busiest engine / mean", "×", "lower", [max(outcome.computed) / mean if mean else 1.0]),
        *error_figures(outcome.records),
    ]
