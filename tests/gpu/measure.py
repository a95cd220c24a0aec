"""Figures of one device: copy bandwidth, attention bandwidth, decode and prefill rates. Prints and writes JSON.

``python tests/gpu/measure.py`` on a CUDA device; ``--tiny --device cpu`` checks this script itself within a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import torch  # noqa: E402
from paged_case import decode_lists, make_case, reference  # noqa: E402

from kernels_triton_free.attention import paged_flex_attention  # noqa: E402

PACKAGES = ("torch", "triton", "transformers", "safetensors", "tokenizers", "numpy", "msgspec", "gguf", "typer")
REPEATS = 20
MODEL_SHAPE = {  # of a decoder with about a billion parameters
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TINY_SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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


def environment(device: torch.device) -> dict[str, Any]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    return {"versions": versions, "cuda": torch.version.cuda, "device": name, "command": " ".join(sys.argv)}


def copy_bandwidth(device: torch.device, tiny: bool) -> dict[str, float]:
    """Bytes read plus bytes written per second by a plain copy: the roof for everything bound by memory."""
    size = 2**24 if tiny else 2**31
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_per_call(lambda: target.copy_(source), device)
    return {"bytes": size, "gb_per_second": 2 * size / seconds / 1e9}


def decode_attention(device: torch.device, tiny: bool) -> list[dict[str, Any]]:
    """Compiled decode attention: KV bytes read per second, and its error against float64."""
    results = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"PARTITION_SIZE": 1} if device.type == "cpu" else None
    shapes = [(2, 100)] if tiny else [(1, 4096), (8, 4096), (64, 1024), (64, 4096), (256, 1024)]
    for head_dim, kv_heads, group in [(64, 2, 3)] if tiny else [(64, 3, 3), (64, 8, 4), (128, 8, 4), (128, 4, 7)]:
        torch._dynamo.reset()
        attention = torch.compile(
            partial(paged_flex_attention, scale=head_dim**-0.5, kernel_options=options), fullgraph=True, dynamic=False
        )
        for requests, length in shapes:
            padded = max(requests, 2)
            shape = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "dtype": dtype, "device": device}
            case = make_case([length] * requests, [1] * requests, **shape)
            lists, position = decode_lists(case, padded)
            if device.type == "cpu":
                # The CPU's template wants lists as wide as the cache, and both kinds of them.
                wide = torch.zeros(padded, 1, 1, len(case.k_cache), dtype=torch.int32)
                pages = wide.clone()
                pages[..., : lists.partial_pages.shape[-1]] = lists.partial_pages
                lists = lists._replace(
                    partial_pages=pages, full_count=torch.zeros_like(lists.partial_count), full_pages=wide
                )
            q = torch.zeros(padded, kv_heads, group, head_dim, dtype=dtype, device=device)
            q[:requests] = case.q
            call = partial(attention, q, case.k_cache, case.v_cache, lists, position, case.kv_position)
            error = (call()[:requests].double() - reference(case)).abs().max().item()
            seconds = seconds_per_call(call, device)
            read = 2 * requests * length * kv_heads * head_dim * dtype.itemsize
            results.append(
                {
                    "requests": requests,
                    "length": length,
                    "kv_heads": kv_heads,
                    "group": group,
                    "head_dim": head_dim,
                    "microseconds": seconds * 1e6,
                    "gb_per_second": read / seconds / 1e9,
                    "largest_error": error,
                }
            )
            print("decode attention", results[-1], flush=True)
    return results


def engine(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Start-up, prefill and decode rates of the whole engine on random weights, and recompilations."""
    from minivllm import LLM, SamplingParams

    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL_SHAPE | (TINY_SHAPE if tiny else {})))
        torch._dynamo.reset()
        started = time.perf_counter()
        llm = LLM(
            directory,
            load_format="dummy",
            device=device.type,
            dtype="float32" if device.type == "cpu" else "bfloat16",
            max_model_len=256 if tiny else 2048,
            max_num_seqs=8 if tiny else 256,
            kv_cache_memory_bytes=2**24 if tiny else 2**34,
            enable_prefix_caching=False,
        )
        results["startup_seconds"] = time.perf_counter() - started
        with llm:
            vocab = 512 if tiny else MODEL_SHAPE["vocab_size"]
            for batch in (1, 4) if tiny else (1, 8, 32, 128, 256):
                output_len, prompt_len = (8, 32) if tiny else (128, 512)
                prompts = [
                    {"prompt_token_ids": [(7 * i + 13 * j) % (vocab - 2) + 2 for j in range(prompt_len)]}
                    for i in range(batch)
                ]
                params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
                one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
                llm.generate(prompts[:1], params, use_tqdm=False)
                started = time.perf_counter()
                llm.generate(prompts, one, use_tqdm=False)
                prefill = time.perf_counter() - started
                started = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                decode = time.perf_counter() - started - prefill
                results[f"batch_{batch}"] = {
                    "prefill_tokens_per_second": batch * prompt_len / prefill,
                    "decode_tokens_per_second": batch * (output_len - 1) / decode if decode > 0 else None,
                    "decode_step_milliseconds": decode / (output_len - 1) * 1e3,
                }
                print("engine, batch", batch, results[f"batch_{batch}"], flush=True)
            results["recompilations"] = llm.llm_engine.client.core.num_recompilations()  # type: ignore[attr-defined]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to check the script")
    parser.add_argument("--out", type=Path, help="folder for measure.json (default: $OUT or tests/gpu/results)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here: give --device cpu --tiny to check this script.", file=sys.stderr)
        return 2
    device = torch.device(arguments.device)
    folder = arguments.out or Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    report = environment(device)
    print(json.dumps(report, indent=2), flush=True)
    failed = False
    for name, measurement in (
        ("copy_bandwidth", copy_bandwidth),
        ("decode_attention", decode_attention),
        ("engine", engine),
    ):
        try:
            report[name] = measurement(device, arguments.tiny)
        except Exception as error:  # one figure that cannot be had must not cost the others
            failed = True
            report[name] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name} failed: {report[name]['error'][:2000]}", file=sys.stderr, flush=True)
        (folder / "measure.json").write_text(json.dumps(report, indent=2))
    print(f"Written to {folder / 'measure.json'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
