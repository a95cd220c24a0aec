"""Figures of one device, one step per process: ``python tests/gpu/measure.py STEP --out FILE`` writes JSON.

run_steps.py runs all of them on a CUDA device; ``--tiny --device cpu`` checks the steps themselves.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402

from kernels_triton_free.attention import paged_flex_attention  # noqa: E402
from minivllm.bench.shapes.table import LLAMA_8B, QWEN3_600M  # noqa: E402
from minivllm.device.policy import DevicePolicy  # noqa: E402
from tests.gpu.paged_case import decode_lists, make_case, reference  # noqa: E402

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "tokenizers",
    "numpy",
    "msgspec",
    "gguf",
    "typer",
)
REPEATS = 20
Save = Callable[[Any], None]
"""Keeps what a step has found so far, in case it is stopped."""
TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def seconds_per_call(function: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of one call, the device's queue emptied before and after each."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        wait()
        started = time.perf_counter()
        function()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def seconds_on_device(calls: list[Callable[[], Any]], device: torch.device, repeats: int = REPEATS) -> float:
    """Median time of one of these calls, as a CUDA graph runs them one after the other: without what
    launching costs. On a CPU, of calling them."""
    if device.type != "cuda":
        return seconds_per_call(lambda: [call() for call in calls], device, repeats) / len(calls)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # which has made what the calls read
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for repeat in range(-3, repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if repeat >= 0:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times) / len(calls)


def environment(device: torch.device) -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    name = (
        torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    )
    return {"versions": versions, "cuda": torch.version.cuda, "device": name, "command": " ".join(sys.argv)}


def copy_bandwidth(device: torch.device, tiny: bool) -> dict[str, float]:
    """Bytes read plus bytes written per second by a plain copy, and bytes read by a sum, of random values:
    zeros are copied faster (on an H100 at 2.9 instead of 2.4 TB/s), but no weights are."""
    size = 2**24 if tiny else 2**31
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_on_device([lambda: target.copy_(source)], device)
    numbers = source.view(torch.bfloat16).nan_to_num_()
    reading = seconds_on_device([numbers.sum], device)
    return {
        "bytes": size,
        "gb_per_second": 2 * size / seconds / 1e9,
        "read_gb_per_second": size / reading / 1e9,
    }


def decode_attention(device: torch.device, tiny: bool, save: Save) -> list[dict[str, Any]]:
    """Compiled decode attention: KV bytes read per second, its share of a copy, and its error against
    float64; over pages in the dtype of the queries, and on a GPU in 8 bits. Several caches take turns, more
    than fit into what a GPU keeps of its memory at hand."""
    copied = copy_bandwidth(device, tiny)["gb_per_second"]
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16 if on_cuda else torch.float32
    heads = [(64, 2, 3)] if tiny else [(128, 8, 4), (64, 3, 3)]  # Llama-3.1-8B, SmolLM2-135M
    shapes = [(2, 100)] if tiny else [(1, 4096), (64, 2048), (256, 1024)]
    cache_dtypes = [dtype, torch.float8_e4m3fn, torch.float8_e5m2] if on_cuda else [dtype]
    results = []
    for (head_dim, kv_heads, group), cache_dtype in [(one, kind) for one in heads for kind in cache_dtypes]:
        torch._dynamo.reset()
        options: Any = DevicePolicy(type=device.type).kernel_options(64, head_dim, dtype, 1)
        bound = partial(paged_flex_attention, scale=head_dim**-0.5, kernel_options=options)
        attention = torch.compile(bound, fullgraph=True, dynamic=False)
        for requests, length in shapes:
            padded = requests if on_cuda else max(requests, 2)
            case = make_case(
                [length] * requests, [1] * requests, kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype,
                device=device, cache_dtype=cache_dtype,
            )  # fmt: skip
            lists, bounds = decode_lists(case, padded)
            if not on_cuda:
                # The CPU's template wants lists as wide as the cache, and both kinds of them.
                wide = torch.zeros(padded, 1, 1, len(case.k_cache), dtype=torch.int32)
                pages = wide.clone()
                pages[..., : lists.partial_blocks.shape[-1]] = lists.partial_blocks
                lists = lists._replace(
                    partial_blocks=pages, full_count=torch.zeros_like(lists.partial_count), full_blocks=wide
                )
            q = torch.zeros(padded, kv_heads, group, head_dim, dtype=dtype, device=device)
            q[:requests] = case.q
            call = partial(attention, q, case.k_cache, case.v_cache, lists, bounds, case.kv_position)
            error = (call()[:requests].double() - reference(case)).abs().max().item()
            size = case.k_cache.nbytes + case.v_cache.nbytes
            copies = [
                (case.k_cache.clone(), case.v_cache.clone()) for _ in range(min(32, 2**28 // size) * on_cuda)
            ]
            calls = [partial(attention, q, *one, lists, bounds, case.kv_position) for one in copies]
            seconds = seconds_on_device([call, *calls], device)
            read = 2 * requests * length * kv_heads * head_dim * cache_dtype.itemsize
            results.append(
                {
                    "requests": requests,
                    "length": length,
                    "kv_heads": kv_heads,
                    "group": group,
                    "head_dim": head_dim,
                    "cache_dtype": str(cache_dtype),
                    "microseconds": seconds * 1e6,
                    "gb_per_second": read / seconds / 1e9,
                    "share_of_copy": read / seconds / 1e9 / copied,
                    "largest_error": error,
                }
            )
            print("decode attention", results[-1], flush=True)
            save(results)
    return results


@contextmanager
def started(shape: Mapping[str, Any], device: torch.device, tiny: bool, **arguments: Any) -> Iterator[Any]:
    """An engine on random weights of this shape."""
    from minivllm.config import EngineArgs
    from minivllm.frontend.llm_engine import LLMEngine

    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps({**shape, **(TINY if tiny else {})}))
        defaults: dict[str, Any] = {
            "load_format": "dummy",
            "device": device.type,
            "dtype": "bfloat16" if device.type == "cuda" else "float32",
            "max_model_len": 256 if tiny else 4096,
            "max_num_seqs": 4 if tiny else 64,
            "enable_prefix_caching": False,
            "enforce_eager": device.type == "cpu",  # where only the steps themselves are tried
        }
        if tiny and "kv_cache_memory_bytes" not in arguments:
            defaults["num_gpu_blocks_override"] = 40
        with LLMEngine.from_args(EngineArgs(**(defaults | {"model": directory} | arguments))) as engine:
            yield engine


def decode_steps(engine: Any, batch: int, context: int, steps: int) -> list[float]:
    """Wall time of decode steps of ``batch`` requests after a few that settle [seconds];
    the engine is empty again."""
    from minivllm.bench.parts.parts import start_decoding, time_steps

    settling = 5
    start_decoding(engine, batch, context, steps + settling + 8)
    time_steps(engine, settling)
    times = time_steps(engine, steps).whole
    while engine.has_unfinished_requests():
        engine.step()
    return list(times)


def decode_figures(engine: Any, batch: int, context: int, steps: int, copied: float) -> dict[str, float]:
    """A decode step against reading weights and KV at the speed of a copy. copied: GB/s."""
    from minivllm.simulation import bounds

    decoder = engine.client.core.executor.worker.runner.model
    step = statistics.median(decode_steps(engine, batch, context, steps))
    read = bounds.weight_bytes(decoder, batch) + batch * context * bounds.kv_bytes_per_token(decoder)
    figures = {
        "step_milliseconds": step * 1e3,
        "tokens_per_second": batch / step,
        "gigabytes_read": read / 1e9,
        "share_of_copy_bandwidth": read / step / 1e9 / copied,
    }
    print(f"batch {batch}, context {context}:", figures, flush=True)
    return figures


def device_busy(engine: Any, batch: int, context: int, steps: int) -> dict[str, Any]:
    """What the device does in a decode step, by the profiler: milliseconds in which it runs kernels or
    copies, and in which of them. Nothing on a CPU."""
    if not torch.cuda.is_available():
        return {}
    from minivllm.bench.parts.parts import start_decoding, time_steps

    start_decoding(engine, batch, context, steps + 13)
    time_steps(engine, 5)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        time_steps(engine, steps)
        torch.cuda.synchronize()
    while engine.has_unfinished_requests():
        engine.step()
    kernels: dict[str, dict[str, float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernel = kernels.setdefault(event.name[:90], {"calls": 0, "microseconds": 0})
            kernel["calls"] += 1 / steps
            kernel["microseconds"] += event.time_range.elapsed_us() / steps
    longest = sorted(kernels.items(), key=lambda item: -item[1]["microseconds"])[:20]
    busy = sum(kernel["microseconds"] for kernel in kernels.values())
    return {"busy_milliseconds": busy / 1e3, "kernels": dict(longest)}


def llama_8b(device: torch.device, tiny: bool, save: Save) -> dict[str, Any]:
    """Llama-3.1-8B's shape: decode of 1 request and of 64 against a copy, prefill,
    host gap, recompilations."""
    from minivllm.bench.parts.parts import prefill_seconds
    from minivllm.simulation import bounds
    from minivllm.simulation.bounds import matmul_peak

    steps, context, prompt = (4, 20, 30) if tiny else (60, 512, 2048)
    began = time.perf_counter()
    with started(LLAMA_8B, device, tiny, kv_cache_memory_bytes=2**21 if tiny else 6 * 2**30) as engine:
        results: dict[str, Any] = {"startup_seconds": time.perf_counter() - began}
        results["copy_gb_per_second"] = copied = copy_bandwidth(device, tiny)["gb_per_second"]
        for batch in (1, 4) if tiny else (1, 8, 64):
            results[f"decode_batch_{batch}"] = decode_figures(engine, batch, context, steps, copied)
            save(results)
        results["device_busy"] = {batch: device_busy(engine, batch, context, 20) for batch in (1, 64)}
        save(results)
        seconds = statistics.median(
            [prefill_seconds(engine, prompt, repetition) for repetition in range(4)][1:]
        )
        core = engine.client.core
        flops = bounds.prefill_flops(core.executor.worker.runner.model.config, prompt)
        peak = matmul_peak(device, torch.bfloat16, 64 if tiny else 8192)
        results["prefill"] = {
            "tokens": prompt,
            "seconds": seconds,
            "share_of_matmul_peak": flops / seconds / peak,
        }
        results["recompilations"] = core.executor.num_recompilations()
    return results


def nano_256(device: torch.device, tiny: bool, save: Save) -> dict[str, Any]:
    """256 requests of 100 to 1024 random tokens, 100 to 1024 new ones each, all at once,
    on Qwen3-0.6B's shape."""
    from minivllm import LLM, SamplingParams

    choose = random.Random(0)
    count, low, high = (5, 5, 20) if tiny else (256, 100, 1024)
    prompts = [
        {"prompt_token_ids": [choose.randrange(4, 500) for _ in range(choose.randint(low, high))]}
        for _ in range(count)
    ]
    params = [
        SamplingParams(temperature=0.6, seed=index, max_tokens=choose.randint(low, high), ignore_eos=True)
        for index in range(count)
    ]
    memory = 2**21 if tiny else 24 * 2**30
    arguments = {"max_num_seqs": count, "kv_cache_memory_bytes": memory}
    called = time.perf_counter()
    with started(QWEN3_600M, device, tiny, **arguments) as engine, LLM(engine=engine) as llm:
        startup = time.perf_counter() - called
        llm.generate(prompts[0], SamplingParams(max_tokens=5), use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert tokens == sum(one.max_tokens or 0 for one in params)
        steps = {} if tiny else device_busy(engine, count, 600, 10)
        recompilations = engine.client.core.executor.num_recompilations()
    return {"output_tokens": tokens, "seconds": seconds, "output_tokens_per_second": tokens / seconds} | {
        "startup_seconds": startup,
        "recompilations": recompilations,
        "steps_of_all": steps,
    }


def variants(
    device: torch.device, tiny: bool, save: Save, changes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Decode of Qwen3-0.6B's shape with one argument changed at a time;
    a variant that fails costs only itself."""
    steps, context = (4, 20) if tiny else (60, 512)
    results: dict[str, Any] = {}
    for name, arguments in changes.items():
        try:
            with started(QWEN3_600M, device, tiny, **arguments) as engine:
                core, copied = engine.client.core, copy_bandwidth(device, tiny)["gb_per_second"]
                results[name] = {
                    f"batch_{batch}": decode_figures(engine, batch, context, steps, copied)
                    for batch in ((1,) if tiny else (1, 64))
                } | {
                    "kv_cache_blocks": core.executor.worker.runner.limits.groups[0].num_blocks,
                    "recompilations": core.executor.num_recompilations(),
                }
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(name, results[name], flush=True)
        save(results)
    return results


def graphs(device: torch.device, tiny: bool, save: Save) -> dict[str, Any]:
    """Full graphs, no graphs and uncompiled; and the next step scheduled while one runs, or not."""
    if device.type == "cpu":
        return variants(device, tiny, save, {"eager": {"enforce_eager": True}})
    return variants(
        device,
        tiny,
        save,
        {
            "full_and_piecewise": {},
            "compiled, no graphs": {"cudagraph_mode": "none"},
            "eager": {"enforce_eager": True},
            "full_and_piecewise, no async scheduling": {"async_scheduling": False},
        },
    )


def quantized(device: torch.device, tiny: bool, save: Save) -> dict[str, Any]:
    """Fewer bits for the weights."""
    kinds = ("int8",) if device.type == "cpu" else ("int8", "int4", "fp8")
    common: dict[str, Any] = {"kv_cache_memory_bytes": 2**21 if tiny else 6 * 2**30}
    return variants(
        device, tiny, save, {"none": common} | {kind: common | {"quantization": kind} for kind in kinds}
    )


def kv_dtypes(device: torch.device, tiny: bool, save: Save) -> dict[str, Any]:
    """Fewer bits for keys and values: how many blocks the same memory holds, and what a step takes."""
    names = ("float32", "bfloat16") if device.type == "cpu" else ("auto", "fp8_e4m3", "fp8_e5m2")
    common: dict[str, Any] = {
        "kv_cache_memory_bytes": 2**21 if tiny else 2**33,
        "num_gpu_blocks_override": None,
    }
    return variants(device, tiny, save, {name: common | {"kv_cache_dtype": name} for name in names})


def speculation(device: torch.device, tiny: bool, save: Save) -> dict[str, Any]:
    """Steps and time of a text that repeats itself, with n-gram drafts and without."""
    from minivllm import LLM, SamplingParams

    prompt = {"prompt_token_ids": [7, 8, 9, 10, 11] * 12}
    params = SamplingParams(temperature=0.0, max_tokens=20 if tiny else 256, ignore_eos=True)
    results: dict[str, Any] = {}
    for name, config in (("none", None), ("ngram", {"method": "ngram", "num_speculative_tokens": 5})):
        arguments = {"speculative_config": config, "async_scheduling": False}
        with started(QWEN3_600M, device, tiny, **arguments) as engine, LLM(engine=engine) as llm:
            llm.generate(prompt, params, use_tqdm=False)
            before, began = engine.stats().num_steps, time.perf_counter()
            [output] = llm.generate(prompt, params, use_tqdm=False)
            results[name] = {
                "seconds": time.perf_counter() - began,
                "steps": engine.stats().num_steps - before,
                "token_ids": list(output.outputs[0].token_ids),
                "recompilations": engine.client.core.executor.num_recompilations(),
            }
    tokens = [results[name].pop("token_ids") for name in ("none", "ngram")]
    results["tokens_in_common"] = sum(a == b for a, b in zip(*tokens)) / len(tokens[0])
    return results


STEPS: dict[str, Callable[[torch.device, bool, Save], Any]] = {
    "environment": lambda device, tiny, save: environment(device),
    "copy_bandwidth": lambda device, tiny, save: copy_bandwidth(device, tiny),
    "decode_attention": decode_attention,
    "llama_8b": llama_8b,
    "nano_256": nano_256,
    "graphs": graphs,
    "quantized": quantized,
    "kv_dtypes": kv_dtypes,
    "speculation": speculation,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check the steps")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here: give --device cpu --tiny to check the steps.", file=sys.stderr)
        return 2

    def save(found: Any) -> None:
        unfinished = arguments.out.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(found, indent=2))
        unfinished.replace(arguments.out)

    save(STEPS[arguments.step](torch.device(arguments.device), arguments.tiny, save))
    return 0


if __name__ == "__main__":
    sys.exit(main())
