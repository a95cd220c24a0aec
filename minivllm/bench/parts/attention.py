"""``minivllm bench attention``: decode attention against a copy of memory, and the kernel options that suit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Better, Measurement, OutputOptions, make_report, publish
from minivllm.cli.engine.options import with_options
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from minivllm.attention.decode_options import TunedCase
    from minivllm.bench.parts.decode_attention import DecodeCase

BACKENDS = ("flex", "gather")
PAGE_SIZES = (16, 32, 64, 128, 256)

START: dict[str, dict[str, int]] = {"cuda": {}, "cpu": {"PARTITION_SIZE": 1}}
"""Device -> what tuning starts from; an option that is missing is FlexAttention's own choice."""


@dataclass(frozen=True)
class Tuned:
    """The best setting of one case. tried: settings that ran; failed: those that did not, with the reason."""

    setting: dict[str, int]
    seconds: float
    untuned_seconds: float
    tried: int
    failed: dict[str, str]


@with_options
def attention(
    args: EngineArgs,
    output: OutputOptions,
    batch: Annotated[str, typer.Option(help="Requests that decode together, separated by commas.")] = "1,16",
    context: Annotated[str, typer.Option(help="Tokens of each request, separated by commas.")] = "512,4096",
    page: Annotated[str, typer.Option(help="Page sizes, separated by commas.")] = "64",
    backend: Annotated[str, typer.Option(help="flex (compiled FlexAttention) or gather (gather and SDPA).")] = "flex",
    calls: Annotated[int, typer.Option(min=1, help="Calls to measure for each case.")] = 30,
    tune: Annotated[
        bool, typer.Option("--tune", help="Search for the fastest options; engines on this GPU use them from then on.")
    ] = False,
    probe_mib: Annotated[
        int | None, typer.Option(min=1, help="Memory that is copied to compare with. [default: 512; on a GPU 4096]")
    ] = None,
) -> None:
    """Measure decode attention of one layer: bytes of KV read per second, against a copy of memory.

    The heads are those of the model; its weights are not loaded. --tune tries options one after the other and keeps
    what is faster: on a GPU BLOCK_N, SPLIT_KV, num_warps and num_stages, in the table that `minivllm env` names. On a
    CPU, where there is no such choice, it finds the best size of pages.

    Example: minivllm bench attention --batch 1,64 --context 4096 --tune
    """
    import torch

    from minivllm.bench.parts import decode_attention
    from minivllm.bench.parts.bounds import copy_bandwidth
    from minivllm.engine.resolve import resolve

    if backend not in BACKENDS:
        raise ConfigError(f"--backend is {backend!r}, but must be {' or '.join(BACKENDS)}.")
    if tune and backend != "flex":
        raise ConfigError("--tune tries options of FlexAttention: leave --backend out.")
    sizes = [parse_sizes(name, text) for name, text in (("batch", batch), ("context", context), ("page", page))]
    config, decoder = resolve(args)
    device, cache_dtype = torch.device(config.device), getattr(torch, config.cache.dtype)
    # As the engine does: a CPU attends in the dtype of the pages.
    dtype = getattr(torch, config.dtype) if device.type == "cuda" else cache_dtype
    heads = decode_attention.Heads(decoder.num_kv_heads, decoder.query_group, decoder.head_dim, dtype, cache_dtype)
    copy = copy_bandwidth(device, (probe_mib or (4096 if device.type == "cuda" else 512)) * 2**20)
    measurements = [_row("machine", "copy", "GB/s", "neither", [copy / 1e9])]
    found_on_gpu: list[TunedCase] = []
    notes: list[str] = []

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
        if not tune:
            continue

        def run(
            setting: Mapping[str, int], requests: int = requests, length: int = length, own: int = page_size
        ) -> float:
            options = dict(setting)
            tried = decode_attention.make_case(heads, requests, length, options.pop("page_size", own), device)
            return median(decode_attention.time_attention(tried, attend(tried, options), calls))

        start = START[device.type] | ({} if device.type == "cuda" else {"page_size": page_size})
        found = search(run, start, allowed(device.type, page_size))
        rate = case.bytes_read / found.seconds
        measurements.append(_row(name, "tuned, share of a copy", "share", "higher", [rate / copy]))
        gain = found.untuned_seconds / found.seconds
        if device.type == "cuda":
            options = " ".join(f"{option}={value}" for option, value in found.setting.items()) or "PyTorch's own"
            found_on_gpu.append(tuned_case(case, found))
        else:
            options = f"--block-size {found.setting['page_size']}"
        notes.append(
            f"{name}: {options} is best, {gain:.2f} × as fast as untuned; {found.tried} settings ran"
            + "".join(f"; {setting} did not: {reason}" for setting, reason in found.failed.items())
            + "."
        )
    if found_on_gpu:
        notes.append(
            f"Engines on this GPU use this from now on: {keep(torch.cuda.get_device_name(device), found_on_gpu)}."
        )
    configuration = {"model": args.model, "backend": backend, "device": str(device), "dtype": str(cache_dtype)}
    publish(make_report("attention", configuration, measurements, notes=notes), output)


def parse_sizes(name: str, text: str) -> list[int]:
    """ "1,16" -> [1, 16]. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.isdecimal() and 0 < int(part) <= 2**20 for part in parts):
        raise ConfigError(f"--{name} is {text!r}, but must be whole numbers above 0, separated by commas.")
    return [int(part) for part in parts]


def allowed(device_type: str, page_size: int) -> dict[str, tuple[int, ...]]:
    """Option -> values to try. Blocks of keys divide a page, or they would reach into other requests' pages.

    page_size is the engine's block_size, everything else a kernel option.
    """
    from minivllm.attention.decode_options import CHOICES

    if device_type == "cpu":
        return {"page_size": PAGE_SIZES}
    return CHOICES | {"BLOCK_N": tuple(value for value in CHOICES["BLOCK_N"] if page_size % value == 0)}


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


def tuned_case(case: DecodeCase, found: Tuned) -> TunedCase:
    """What the table holds of a case that was tuned."""
    from minivllm.attention.decode_options import TunedCase

    batch, kv_heads, group, head_dim = case.q.shape
    return TunedCase(
        dtype=str(case.k_cache.dtype).removeprefix("torch."),
        head_dim=head_dim,
        batch_kv_heads=batch * kv_heads,
        group=group,
        context=case.context,
        page_size=case.k_cache.shape[1],
        options=found.setting,
        gb_per_second=case.bytes_read / found.seconds / 1e9,
        untuned_gb_per_second=case.bytes_read / found.untuned_seconds / 1e9,
    )


def keep(device_name: str, cases: list[TunedCase]) -> Path:
    """Put the cases into the device's table and return its path. Raises ModelError."""
    from minivllm.attention.decode_options import add_to_table, table_path

    try:
        return add_to_table(device_name, cases)
    except OSError as error:
        raise ModelError(f"{table_path(device_name)} cannot be written: {error.strerror}.") from None


def _row(case: str, metric: str, unit: str, better: Better, samples: list[float]) -> Measurement:
    return Measurement(case=case, side="minivllm", metric=metric, unit=unit, better=better, samples=samples)
