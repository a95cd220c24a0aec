"""``minivllm bench model``: decode and prefill speed, and its ratio to other engines on the same token ids."""

from __future__ import annotations

import contextlib
import json
import platform
import random
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from minivllm.cli.bench.sides import Side, parse_side
from minivllm.cli.engine_options import ModelArgument
from minivllm.errors import ConfigError, ModelError

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Case:
    """decode: tokens per second after the first one, for ``batch`` requests together. prefill: prompt tokens per
    second up to the first token."""

    kind: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def name(self) -> str:
        if self.kind == "prefill":
            return f"prefill {self.prompt_tokens}"
        return f"decode {self.new_tokens}, batch {self.batch}, prompt {self.prompt_tokens}"


@dataclass(frozen=True)
class Measurement:
    """One engine's figures of one case: tokens per second of every repetition, and their median."""

    engine: str
    case: str
    tokens_per_second: float
    repetitions: list[float]
    peak_bytes: int


def parse_case(text: str) -> Case:
    """ "decode:16", "decode:16:300" (prompt tokens), "prefill:512". Raises ConfigError for anything else."""
    kind, *sizes = text.split(":")
    numbers = [int(size) for size in sizes if size.isdigit()]
    if kind == "decode" and len(sizes) == len(numbers) in (1, 2) and min(numbers) > 0:
        return Case("decode", numbers[0], numbers[1] if len(numbers) > 1 else 128, 64)
    if kind == "prefill" and len(sizes) == len(numbers) == 1 and numbers[0] > 0:
        return Case("prefill", 1, numbers[0], 1)
    raise ConfigError(f"The case {text!r} must be decode:BATCH, decode:BATCH:PROMPT_TOKENS or prefill:PROMPT_TOKENS.")


def steady_pool(cases: list[Case], block_size: int) -> int:
    """Blocks for twice the largest case and the null block: warm-up touches all of them, and repetitions measure the
    steady state of a long-lived engine, not the operating system handing out memory."""
    longest = max(case.prompt_tokens + case.new_tokens for case in cases) + 64
    return 2 * max(case.batch for case in cases) * -(-longest // block_size) + 1


def measure(side: Side, case: Case, repetition: int, vocab_size: int) -> tuple[float, list[list[int]], int]:
    """One repetition: (tokens per second, generated ids, peak memory of the process in bytes)."""
    first = side.run(fresh_prompts(case, f"{repetition}/first", vocab_size), 1)
    if case.kind == "prefill":
        return case.batch * case.prompt_tokens / first["seconds"], first["token_ids"], first["peak_bytes"]
    # Other prompts of the same length: a prefix cache must not spare one of the two runs its prefill, for then the
    # difference would not be decoding alone.
    whole = side.run(fresh_prompts(case, f"{repetition}/whole", vocab_size), case.new_tokens)
    seconds = whole["seconds"] - first["seconds"]
    return case.batch * (case.new_tokens - 1) / seconds, whole["token_ids"], whole["peak_bytes"]


def fresh_prompts(case: Case, seed: str, vocab_size: int) -> list[list[int]]:
    """Random token ids, the same for every engine and different for every seed."""
    source = random.Random(f"{case.name}/{seed}")
    return [[source.randrange(vocab_size) for _ in range(case.prompt_tokens)] for _ in range(case.batch)]


def model(
    model: ModelArgument = "smollm2",
    engine: Annotated[
        str, typer.Option(help="What is measured: minivllm, or minivllm,ARGUMENT=VALUE,… for other settings.")
    ] = "minivllm",
    vs: Annotated[
        list[str] | None,
        typer.Option(
            help="Another engine, measured in turn: transformers, or minivllm,ARGUMENT=VALUE,… for other settings. "
            "Repeatable.",
        ),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(help="decode:BATCH[:PROMPT_TOKENS] or prefill:PROMPT_TOKENS. Repeatable."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Weights and activations of all engines.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each case, after one warm-up.")] = 5,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure decode and prefill speed, alone or against other engines in turn.

    Every engine runs in a process of its own and generates from the same token ids.

    Example: minivllm bench model --vs transformers --case decode:1 --case decode:16 --case prefill:512
    """
    cases = [parse_case(text) for text in case or ["decode:1", "decode:16", "prefill:512"]]
    names = [engine, *(vs or [])]
    if len(set(names)) < len(names):
        raise ConfigError(f"An engine is compared with itself in {', '.join(names)}: give it other settings.")
    sides_to_start = [parse_side(text, model, dtype) for text in names]
    for kind, arguments in sides_to_start:
        if kind == "minivllm":
            arguments.setdefault("max_model_len", max(c.prompt_tokens + c.new_tokens for c in cases) + 64)
            if not {"num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization"} & set(arguments):
                arguments["num_gpu_blocks_override"] = steady_pool(cases, arguments.get("block_size", 64))
    results: list[Measurement] = []
    agreement: dict[str, float] = {}
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(console=console, disable=not console.is_terminal))
        task = progress.add_task("starting", total=len(cases) * (repeats + 1) * len(names))
        sides = []
        for name, (kind, arguments) in zip(names, sides_to_start):
            progress.update(task, description=f"starting {name}")
            sides.append(stack.enter_context(Side(name, kind, arguments)))
        vocab_size = min(side.ready["vocab_size"] for side in sides)
        for one in cases:
            speeds: dict[str, list[float]] = {name: [] for name in names}
            peaks: dict[str, int] = {}
            same: dict[str, list[bool]] = {name: [] for name in names[1:]}
            for repetition in range(-1, repeats):
                outputs: dict[str, list[list[int]]] = {}
                # The order alternates, so that no engine always runs on the warmer or busier machine.
                for side in sides if repetition % 2 else reversed(sides):
                    progress.update(task, description=f"{one.name}: {side.name}", advance=1)
                    speed, outputs[side.name], peaks[side.name] = measure(side, one, repetition, vocab_size)
                    if repetition >= 0:
                        speeds[side.name].append(speed)
                for name in names[1:]:
                    same[name] += [ours == theirs for ours, theirs in zip(outputs[names[0]], outputs[name])]
            for name in names:
                results.append(Measurement(name, one.name, median(speeds[name]), speeds[name], peaks[name]))
            for name in names[1:]:
                agreement[f"{one.name} / {name}"] = sum(same[name]) / len(same[name])
    _print_table(names, cases, results, agreement)
    if json_file is not None:
        _write_json(json_file, model, results, agreement)


def _print_table(names: list[str], cases: list[Case], results: list[Measurement], agreement: dict[str, float]) -> None:
    table = Table(title="tokens per second, median of repetitions in turn")
    table.add_column("case")
    for name in names:
        table.add_column(name, justify="right")
        if name != names[0]:
            table.add_column("ratio", justify="right")
            table.add_column("same text", justify="right")
    by_key = {(result.case, result.engine): result for result in results}
    for one in cases:
        ours = by_key[one.name, names[0]].tokens_per_second
        row = [one.name, f"{ours:.1f}"]
        for name in names[1:]:
            theirs = by_key[one.name, name].tokens_per_second
            row += [f"{theirs:.1f}", f"{ours / theirs:.2f} ×", f"{agreement[f'{one.name} / {name}']:.0%}"]
        table.add_row(*row)
    console = Console()
    console.print(table)
    for name in names:
        peak = max(result.peak_bytes for result in results if result.engine == name)
        console.print(f"peak memory of {name}: {peak / 2**20:.0f} MiB")


def _write_json(path: Path, model: str, results: list[Measurement], agreement: dict[str, float]) -> None:
    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    content: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "command": sys.argv[1:],
        "model": model,
        "machine": {"processor": platform.processor() or platform.machine(), "system": platform.platform()},
        "versions": {package: installed(package) for package in ("minivllm", "torch", "transformers")},
        "measurements": [asdict(result) for result in results],
        "agreement": agreement,
    }
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}.") from None
