"""The parts of an engine's step, timed by listening to its spans.

``minivllm bench roofline``: how far decode and prefill are from what this machine can do at best,
and what a step costs outside the model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm.bench.parts.kernels import have_compiled_code_tell, kernel_note, time_kernels
from minivllm.bench.reports.figures import median
from minivllm.bench.reports.report import Better, Measurement, OutputOptions, make_report, publish
from minivllm.cli.engine.options import with_options
from minivllm.config import EngineArgs
from minivllm.errors import ConfigError
from minivllm.profiling.spans import listen

if TYPE_CHECKING:
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.simulation.bounds import Machine


@contextmanager
def timed_spans(*names: str) -> Iterator[dict[str, list[float]]]:
    """Name of a span -> how long each of them takes [seconds], in this process, of whatever engine."""
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def begin(name: str, subject: object) -> Callable[[], None]:
        started = time.perf_counter()
        return lambda: seconds[name].append(time.perf_counter() - started)

    with listen(begin, seconds):
        yield seconds


@dataclass
class StepTimes:
    """Of every step: the whole, and each part of it [seconds].
    A part that a step called several times is summed."""

    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


HOST_PARTS = {
    "schedule": "schedule",
    "follow differences": "apply",
    "build inputs": "prepare",
    "update from output": "output",
    "frontend": "frontend",
}
"""Parts of a step outside the model: name of the part -> its span."""


def engine_core(engine: LLMEngine) -> Any:
    """The core in this process. Raises ConfigError if it lives in another one,
    whose spans are not heard here."""
    core = getattr(engine.client, "core", None)
    if core is None:
        raise ConfigError(
            "This benchmark looks into the engine's parts, so the engine must run in this process."
        )
    return core


def start_decoding(engine: LLMEngine, running: int, prompt_tokens: int, new_tokens: int) -> None:
    """Add requests of random ids and step until all of them decode."""
    from minivllm.sampling_params import OutputKind, SamplingParams

    source = random.Random(0)
    params = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
    )
    for _ in range(running):
        prompt = [source.randrange(engine.client.model_vocab_size) for _ in range(prompt_tokens)]
        engine.add_request(None, {"prompt_token_ids": prompt}, params)
    while engine.stats().num_waiting or engine.stats().num_steps == 0:
        engine.step()


def time_steps(engine: LLMEngine, steps: int, parts: Mapping[str, str] | None = None) -> StepTimes:
    """Run ``steps`` steps and time them and their parts. parts: name -> span, as in HOST_PARTS."""
    parts = parts or {}
    times = StepTimes(parts={name: [] for name in parts})
    with timed_spans(*parts.values()) as spans:
        for _ in range(steps):
            started = time.perf_counter()
            engine.step()
            times.whole.append(time.perf_counter() - started)
            for name, span in parts.items():
                times.parts[name].append(sum(spans[span]))
                spans[span].clear()
    return times


def decode_args(args: EngineArgs, running: int, length: int) -> EngineArgs:
    """The arguments with room for ``running`` requests of ``length`` tokens where the user left it open, of
    an engine that waits until the model is compiled."""
    from dataclasses import replace

    return replace(
        args,
        max_num_seqs=args.max_num_seqs or running,
        max_model_len=args.max_model_len or length,
        compile_in_background=bool(args.compile_in_background),
    )


SETTLING_STEPS = 5
"""Steps that decode already and are not measured."""


@with_options
def roofline(
    args: EngineArgs,
    output: OutputOptions,
    batch: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt before decoding.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps to measure.")] = 60,
    prefill: Annotated[
        int, typer.Option(min=1, help="Tokens of the prompt whose prefill is measured.")
    ] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Prefills to measure.")] = 5,
    probe_mib: Annotated[
        int | None,
        typer.Option(min=1, help="Memory that the bandwidth probes touch. [default: 512; on a GPU 4096]"),
    ] = None,
    probe_width: Annotated[
        int | None,
        typer.Option(min=16, help="Width of the matrices of the probe. [default: 2048; on a GPU 8192]"),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="List the kernels of a decode step; on a CPU the model is compiled again."
        ),
    ] = False,
) -> None:
    """Measure this machine's memory bandwidth and matrix peak, the share of them that the engine reaches, and
    the parts of a step outside the model: scheduling, input preparation, output processing.

    Decode is bound by reading: (weights + KV) / bandwidth.
    Prefill is bound by computing: operations / matrix peak.

    Example: minivllm bench roofline --batch 1

    Overhead of many requests: minivllm bench roofline --batch 64 --context 64 --steps 100

    The kernels of a step: minivllm bench roofline --batch 16 --kernels
    """
    import torch

    from minivllm.device.policy import DevicePolicy
    from minivllm.engine.resolve import resolve_device
    from minivllm.frontend.llm_engine import LLMEngine
    from minivllm.simulation import bounds
    from minivllm.simulation.bounds import measure_machine

    if kernels:
        have_compiled_code_tell()
    device = torch.device(resolve_device(args.device))
    on_cuda = device.type == "cuda"
    size, width = probe_mib or (4096 if on_cuda else 512), probe_width or (8192 if on_cuda else 2048)
    # A CPU without products of bfloat16 takes a minute for this one (two cores of Zen 3),
    # in which no prompt attends.
    dtype = DevicePolicy.of(device).prompt_attention_dtype(torch.bfloat16)
    machine = measure_machine(device, dtype, size * 2**20, width)
    new_tokens = (2 if kernels else 1) * steps + SETTLING_STEPS + 8
    args = decode_args(args, batch, max(context + new_tokens, prefill + 1))
    with LLMEngine.from_args(args) as started:
        executor = engine_core(started).executor
        if not hasattr(executor, "worker"):
            raise ConfigError(
                "roofline looks into the worker, which lives in another process with these settings: leave "
                "them out, "
                "or measure the way to workers with minivllm bench overhead."
            )
        runner = executor.worker.runner
        prefills = [prefill_seconds(started, prefill, repetition) for repetition in range(-1, repeats)][1:]
        start_decoding(started, batch, context, new_tokens)
        time_steps(started, SETTLING_STEPS)
        before = mean_context(started)
        times = time_steps(started, steps, HOST_PARTS | {"attention": "attention"})
        length = (before + mean_context(started)) / 2
        kernel_times = time_kernels(started, steps) if kernels else None
        model = runner.model
        weights = bounds.weight_bytes(model, batch)
        kv = int(batch * bounds.kv_tokens_read(model.config, length) * bounds.kv_bytes_per_token(model))
        flops = bounds.prefill_flops(model.config, prefill)
        decode_flops = batch * bounds.prefill_flops(model.config, 1)
    decode_case = f"decode, batch {batch}, context {length:.0f}"
    prefill_case = f"prefill {prefill}"
    host = {name: times.parts[name] for name in HOST_PARTS}
    overheads = [sum(parts) for parts in zip(*host.values())]
    shares = [part / whole for part, whole in zip(overheads, times.whole)]
    bound, copied = (weights + kv) / machine.bandwidth, (weights + kv) / machine.copy
    computed = decode_flops / machine.flops

    def row(case: str, metric: str, unit: str, better: Better, samples: list[float]) -> Measurement:
        return Measurement(
            case=case, side="minivllm", metric=metric, unit=unit, better=better, samples=samples
        )

    measurements = [
        row("machine", "copy", "GB/s", "neither", [machine.copy / 1e9]),
        row("machine", "read", "GB/s", "neither", [machine.read / 1e9]),
        row("machine", "matrix product", "TFLOP/s", "neither", [machine.flops / 1e12]),
        *(
            row(decode_case, name, "ms", "lower", [1e3 * value for value in parts])
            for name, parts in host.items()
        ),
        row(decode_case, "overhead", "ms", "lower", [1e3 * value for value in overheads]),
        row(decode_case, "step", "ms", "lower", [1e3 * value for value in times.whole]),
        row(decode_case, "overhead / step", "share", "lower", shares),
        row(
            decode_case,
            "share of the bandwidth bound",
            "share",
            "higher",
            [bound / value for value in times.whole],
        ),
        row(
            decode_case,
            "share of reading and then computing",
            "share",
            "higher",
            [(bound + computed) / value for value in times.whole],
        ),
        row(
            decode_case,
            "share of the copy bandwidth",
            "share",
            "higher",
            [copied / value for value in times.whole],
        ),
        row(prefill_case, "time to first token", "ms", "lower", [1e3 * value for value in prefills]),
        row(
            prefill_case,
            "share of the matrix peak",
            "share",
            "higher",
            [flops / machine.flops / s for s in prefills],
        ),
    ]
    notes = [
        decode_note(decode_case, times, weights, kv, machine),
        f"{decode_flops / 1e9:.3g} GFLOP take at least {1e3 * computed:.3g} ms more where nothing is "
        "computed while it "
        f"is read: {(bound + computed) / median(times.whole):.0%} of both together.",
        missing_note(times, weights, kv, machine, complete=not on_cuda),
        f"Overhead is {median(shares):.1%} of a step with {batch} running requests.",
        f"{prefill_case}: {flops / 1e9:.3g} GFLOP at {machine.flops / 1e12:.3g} TFLOP/s take at least "
        f"{1e3 * flops / machine.flops:.3g} ms; measured {1e3 * median(prefills):.3g} ms: "
        f"{flops / machine.flops / median(prefills):.0%} of the matrix peak.",
    ]
    if kernel_times is not None:
        notes.append(kernel_note(*kernel_times))
    configuration = {
        "model": args.model,
        "engine": asdict(args),
        "weight_bytes": weights,
        "kv_bytes": kv,
        "prefill_flops": flops,
        "probe_mib": size,
        "probe_width": width,
        "probe_dtype": str(dtype).removeprefix("torch."),
    }
    publish(make_report("roofline", configuration, measurements, notes=notes), output)


def prefill_seconds(engine: LLMEngine, tokens: int, repetition: int) -> float:
    """From a prompt of fresh token ids to its first token [seconds]."""
    from minivllm.sampling_params import OutputKind, SamplingParams

    source = random.Random(f"prefill/{repetition}")
    prompt = [source.randrange(engine.client.model_vocab_size) for _ in range(tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
    started = time.perf_counter()
    engine.add_request(None, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - started


def mean_context(engine: LLMEngine) -> float:
    """Tokens that a running request has in the cache, on average."""
    running = engine_core(engine).scheduler.running
    return sum(request.num_computed_tokens for request in running) / max(1, len(running))


def decode_note(case: str, times: StepTimes, weights: int, kv: int, machine: Machine) -> str:
    """The bound of a step, what it is made of, and the share of it that was reached."""
    bound, step = (weights + kv) / machine.bandwidth, median(times.whole)
    return (
        f"{case}: {weights / 1e6:,.3g} MB of weights and {kv / 1e6:,.3g} MB of KV take, at "
        f"{machine.bandwidth / 1e9:.3g} GB/s, at least {1e3 * bound:.3g} ms; measured {1e3 * step:.3g} ms: "
        f"{bound / step:.0%} of the bound."
    )


def missing_note(times: StepTimes, weights: int, kv: int, machine: Machine, complete: bool) -> str:
    """Where the rest of a step goes. complete: parts end when their work is done, as on a CPU; on a GPU they
    only start it, so the time of kernels cannot be told apart here."""
    parts = {name: median(seconds) for name, seconds in times.parts.items()}
    step, attention = median(times.whole), parts.pop("attention")
    host = sum(parts.values())
    missing = (
        f"Missing are {1e3 * (step - (weights + kv) / machine.bandwidth):.3g} ms: {1e3 * host:.3g} on the "
        "host"
    )
    if not complete:
        return f"{missing} (schedule, prepare, output); the rest in kernels and between them: see --profile."
    over = attention - kv / machine.bandwidth
    rest = step - host - attention - weights / machine.bandwidth
    return (
        f"{missing} (schedule, prepare, output), {1e3 * over:.3g} in attention beyond reading KV, "
        f"{1e3 * rest:.3g} in "
        "layers, logits and sampling beyond reading weights."
    )
