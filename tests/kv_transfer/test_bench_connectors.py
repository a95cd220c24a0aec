"""How fast what connectors keep comes back (--benchmark-only):
TTFT against computing, compiled, in one engine.

    python -m pytest -n 0 --benchmark-only tests/kv_transfer/test_bench_connectors.py

A model of SmolLM2-135M's shape with random weights. Engines answer in turn with the same prompts. One
computes; the others have forgotten on the device what they or their producer have computed before, and bring
it. Bytes per second are those of the loads, beside a plain copy in memory. LMCache needs a server:
``LMCACHE_URL=lm://host:port``.

Without --benchmark-only a tiny model does the same once, eager, and nothing is timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.simulation.bounds import copy_bandwidth
from tests.kv_transfer.lookup_pair import consumer, producer, through_nixl, unix, wait_until
from tests.kv_transfer.test_connectors import OFFLOAD, storage
from tests.kv_transfer.test_lmcache import lmcache
from tests.model_families import save_tiny_model

SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8256,
}
FIRST = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
ROUNDS = 3


def configurations(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By name: that of one engine, or of a producer and a consumer."""
    found = {
        "host memory": [OFFLOAD],
        "directory": [storage(path / "directory")],
        "pipes": [producer(unix(path)), consumer(unix(path), timeout=60.0)],
    }
    if find_spec("nixl") is not None:
        address = unix(path, "nixl")
        found["NIXL"] = through_nixl(producer(address), consumer(address, timeout=60.0))
    if "LMCACHE_URL" in os.environ:
        found["LMCache"] = [lmcache(os.environ["LMCACHE_URL"])]
    return found


def seconds_to_first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """(TTFT, prompt tokens that were not computed)."""
    started = time.perf_counter()
    [output] = llm.generate({"prompt_token_ids": prompt}, FIRST, use_tqdm=False)
    return time.perf_counter() - started, output.num_cached_tokens


def forget(llm: LLM) -> None:
    """On the device alone."""
    assert llm.llm_engine.client.core.scheduler.kv_cache_manager.reset_prefix_cache()  # type: ignore[attr-defined]


def test_bench_what_comes_back(
    benchmark: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_model: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_timed = request.config.getoption("benchmark_only")
    if is_timed:
        path = save_tiny_model(tmp_path / "model", "llama", SMOLLM2, dtype="bfloat16")
        lengths, size = (256, 2048, 8192), 64
        settings: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 8256,
            "num_gpu_blocks_override": 300,
        }
    else:
        path, lengths, size = tiny_model("llama"), (24, 48), 8
        settings = {
            "dtype": "float32",
            "max_model_len": 64,
            "enforce_eager": True,
            "num_gpu_blocks_override": 40,
        }
    prompts = {length: Random(length).choices(range(3, 200), k=length) for length in lengths}
    seconds: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:

        def start(config: dict[str, Any] | None) -> LLM:
            return stack.enter_context(
                LLM(str(path), block_size=size, max_num_seqs=4, kv_transfer_config=config, **settings)
            )

        engines = {
            name: [start(config) for config in pair] for name, pair in configurations(tmp_path).items()
        }
        plain = start(None)
        for prompt in prompts.values():
            seconds_to_first_token(plain, prompt)
            for own in engines.values():
                seconds_to_first_token(own[0], prompt)
        for name, own in engines.items():  # what is on its way is announced

            def is_there(llm: LLM = own[-1]) -> bool:
                forget(llm)
                return all(
                    seconds_to_first_token(llm, prompts[n])[1] == (n - 1) // size * size for n in lengths
                )

            try:
                wait_until(is_there, 120)
            except AssertionError:
                pytest.fail(f"{name} never had all blocks of all prompts")

        def compare() -> None:
            for length, prompt in prompts.items():
                forget(plain)
                seconds.setdefault(("computed", length), []).append(seconds_to_first_token(plain, prompt)[0])
                for name, own in engines.items():
                    forget(own[-1])
                    spent, found = seconds_to_first_token(own[-1], prompt)
                    assert found == (length - 1) // size * size, name
                    seconds.setdefault((name, length), []).append(spent)

        benchmark.pedantic(compare, rounds=ROUNDS if is_timed else 1)
        tiers = {name: own[-1].get_metrics().kv_transfer[0] for name, own in engines.items()}
    medians = {place: statistics.median(values) for place, values in seconds.items()}
    copied = (
        copy_bandwidth(torch.device("cpu"), 2**28) / 2e9 if is_timed else 1.0
    )  # it counts reading and writing
    with capsys.disabled():
        for name, tier in tiers.items() if is_timed else ():
            speed = tier.num_loaded_blocks * tier.block_bytes / tier.load_seconds / 1e9
            times = ", ".join(
                f"{n}: {1e3 * medians[name, n]:.0f} against {1e3 * medians['computed', n]:.0f} ms"
                f" ({medians['computed', n] / medians[name, n]:.1f} x)"
                for n in lengths
            )
            print(f"\n{name}: {times}; loads {speed:.2f} GB/s, {speed / copied:.0%} of a copy", end="")
            benchmark.extra_info[name] = {"gigabytes_per_second": speed, "share_of_copy": speed / copied} | {
                str(n): medians[name, n] for n in lengths
            }
