"""``minivllm bench attention``: decode attention against a copy of memory, and the kernel options that suit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.cli.bench.report import Better, Measurement, OutputOptions, installed_version, make_report, publish
from minivllm.cli.bench.statistics import median
from minivllm.cli.engine_options import EngineOptions, ModelArgument
from minivllm.cli.option_groups import with_option_groups
from minivllm.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from minivllm.cli.bench.decode_attention import DecodeCase

TABLE_SCHEMA_VERSION = 1
BACKENDS = ("flex", "gather")
CHOICES: dict[str, dict[str, tuple[int, ...]]] = {
    "cuda": {
        "BLOCK_N": (16, 32, 64, 128),
        "SPLIT_KV": (1, 2, 4, 8, 16, 32, 64),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4),
    },
    "cpu": {"page_size": (16, 32, 64, 128, 256), "PARTITION_SIZE": (1, 64, 128, 256)},
}
"""Device -> option -> values to try. page_size is the engine's block_size, the rest are FlexAttention's options."""

START: dict[str, dict[str, int]] = {"cuda": {}, "cpu": {"PARTITION_SIZE": 1}}
"""What the engine uses untuned; an option that is missing is FlexAttention's own choice."""


@dataclass(frozen=True)
class Tuned:
    """The best setting of one case. tried: settings that ran; failed: those that did not, with the reason."""

    setting: dict[str, int]
    seconds: float
    untuned_seconds: float
    tried: int
    failed: dict[str, str]


@with_option_groups
def attention(
    engine: EngineOptions,
    output: OutputOptions,
    model: ModelArgument = "smollm2",
    batch: Annotated[str, typer.Option(help="Requests that decode together, separated by commas.")] = "1,16",
    context: Annotated[str, typer.Option(help="Tokens of each request, separated by commas.")] = "512,4096",
    page: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "64",
    backend: Annotated[str, typer.Option(help="flex (compiled FlexAttention) or gather (gather and SDPA).")] = "flex",
    calls: Annotated[int, typer.Option(min=1, help="Calls to measure for each case.")] = 30,
    tune: Annotated[
        Path | None, typer.Option(help="Search for the best options and write them to this JSON file.")
    ] = None,
    probe_mib: Annotated[
        int | None, typer.Option(min=1, help="Memory that is copied to compare with. [default: 512; on a GPU 4096]")
    ] = None,
) -> None:
    """Measure decode attention of one layer: bytes of KV read per second, against a copy of memory.

    The heads are those of the model; its weights are not loaded. --tune tries options one after the other and keeps
    what is faster: on a GPU BLOCK_N, SPLIT_KV, num_warps and num_stages, on a CPU the sizes of pages and partitions.

    Example: minivllm bench attention --batch 1,64 --context 4096 --tune attention.json
    """
    import torch

    from minivllm.cli.bench import decode_attention
    from minivllm.cli.bench.hardware import copy_bandwidth
    from minivllm.engine.resolve import resolve

    if backend not in BACKENDS:
        raise ConfigError(f"--backend is {backend!r}, but must be {' or '.join(BACKENDS)}.")
    if tune is not None and backend != "flex":
        raise ConfigError("--tune tries options of FlexAttention: leave --backend out.")
    sizes = [parse_sizes(name, text) for name, text in (("batch", batch), ("context", context), ("page", page))]
    config, decoder = resolve(engine.engine_args(model))
    device, dtype = torch.device(config.device), getattr(torch, config.cache.dtype)
    heads = decode_attention.Heads(decoder.num_kv_heads, decoder.query_group, decoder.head_dim, dtype)
    copy = copy_bandwidth(device, (probe_mib or (4096 if device.type == "cuda" else 512)) * 2**20)
    measurements = [_row("machine", "copy", "GB/s", "neither", [copy / 1e9])]
    entries = []

    def attend(case: DecodeCase, options: Mapping[str, int]) -> Callable[[], Any]:
        if backend == "gather":
            return decode_attention.gathered_attention(case)
        return decode_attention.compiled_attention(case, options)

    for requests, length, page_size in product(*sizes):
        case = decode_attention.make_case(heads, requests, length, page_size, device)
        call = attend(case, START[device.type])
        error = decode_attention.largest_error(case, call())
        seconds = decode_attention.time_attention(case, call, calls)
        name = f"batch {requests}, context {length}, page {page_size}"
        rates = [case.bytes_read / value for value in seconds]
        measurements += [
            _row(name, "time", "µs", "lower", [1e6 * value for value in seconds]),
            _row(name, "KV read", "GB/s", "higher", [rate / 1e9 for rate in rates]),
            _row(name, "share of a copy", "share", "higher", [rate / copy for rate in rates]),
            _row(name, "largest error", "absolute", "neither", [error]),
        ]
        if tune is None:
            continue

        def run(
            setting: Mapping[str, int], requests: int = requests, length: int = length, own: int = page_size
        ) -> float:
            options = dict(setting)
            tried = decode_attention.make_case(heads, requests, length, options.pop("page_size", own), device)
            return median(decode_attention.time_attention(tried, attend(tried, options), calls))

        start = START[device.type] | ({"page_size": page_size} if device.type == "cpu" else {})
        found = search(run, start, allowed(CHOICES[device.type], page_size))
        rate = case.bytes_read / found.seconds
        measurements.append(_row(name, "tuned, share of a copy", "share", "higher", [rate / copy]))
        entries.append(
            {
                "head_dim": heads.head_dim,
                "batch_kv_heads": requests * heads.kv_heads,
                "group": heads.group,
                "context": length,
                "page_size": found.setting.get("page_size", page_size),
                "options": {key: value for key, value in found.setting.items() if key != "page_size"},
                "gb_per_second": rate / 1e9,
                "untuned_gb_per_second": case.bytes_read / found.untuned_seconds / 1e9,
                "share_of_copy": rate / copy,
                "tried": found.tried,
                "failed": found.failed,
            }
        )
    notes = []
    if tune is not None:
        write_table(tune, device_name(device), str(dtype).removeprefix("torch."), entries)
        notes.append(f"Wrote the best options of {len(entries)} cases to {tune}.")
    configuration = {"model": model, "backend": backend, "device": str(device), "dtype": str(dtype)}
    publish(make_report("attention", configuration, measurements, notes=notes), output)


def parse_sizes(name: str, text: str) -> list[int]:
    """ "1,16" -> [1, 16]. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= 2**20 for part in parts):
        raise ConfigError(f"--{name} is {text!r}, but must be whole numbers above 0, separated by commas.")
    return [int(part) for part in parts]


def allowed(choices: Mapping[str, tuple[int, ...]], page_size: int) -> dict[str, tuple[int, ...]]:
    """Blocks of keys must not be larger than pages, or they would reach into other requests' pages."""
    return {
        name: tuple(value for value in values if name != "BLOCK_N" or value <= page_size)
        for name, values in choices.items()
    }


def search(
    run: Callable[[Mapping[str, int]], float], start: Mapping[str, int], choices: Mapping[str, tuple[int, ...]]
) -> Tuned:
    """Coordinate descent: change one option at a time, keep what is faster, until a round brings nothing.

    run: seconds of a setting; it may raise for one that cannot be compiled, which is then left out.
    """
    times: dict[tuple[tuple[str, int], ...], float | None] = {}
    failed: dict[str, str] = {}

    def seconds_of(setting: Mapping[str, int]) -> float | None:
        key = tuple(sorted(setting.items()))
        if key not in times:
            try:
                times[key] = run(setting)
            except Exception as error:
                times[key] = None
                reason = next((line for line in str(error).splitlines() if line.strip()), "")
                failed[json.dumps(dict(setting))] = f"{type(error).__name__}: {reason}"[:200]
        return times[key]

    untuned = seconds_of(start)
    if untuned is None:
        raise ModelError(f"Decode attention does not run here even untuned: {next(iter(failed.values()))}.")
    best, fastest = dict(start), untuned
    improved = True
    while improved:
        improved = False
        for option, values in choices.items():
            for value in values:
                setting = best | {option: value}
                seconds = seconds_of(setting)
                if seconds is not None and seconds < fastest:
                    best, fastest, improved = setting, seconds, True
    return Tuned(best, fastest, untuned, sum(value is not None for value in times.values()), failed)


def write_table(path: Path, device: str, dtype: str, entries: list[dict[str, Any]]) -> None:
    """The table of options, keyed by device, head_dim and batch times KV heads. Raises ModelError."""
    table = {
        "schema_version": TABLE_SCHEMA_VERSION,
        "device": device,
        "dtype": dtype,
        "torch": installed_version("torch"),
        "entries": entries,
    }
    try:
        path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(f"{path} cannot be written: {error.strerror}.") from None


def device_name(device: Any) -> str:
    """Of the GPU, or of the processor."""
    import torch

    from minivllm.cli.env import collect

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return str(collect()["cpu"]["model"])


def _row(case: str, metric: str, unit: str, better: Better, samples: list[float]) -> Measurement:
    return Measurement(case=case, side="minivllm", metric=metric, unit=unit, better=better, samples=samples)
