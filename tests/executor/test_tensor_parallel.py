"""Several workers divide a model, in uneven parts too, and give the tokens of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.device.policy import DevicePolicy
from minivllm.distributed.segment import open_segment, segment_descriptors
from minivllm.distributed.shard import Shard
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.linear.choose import MethodChooser
from minivllm.linear.layer import Linear
from minivllm.simulation.ranks import virtual_llm
from tests.executor.small_engine import small_engine, worker_processes

# Three KV heads of two or more query heads, five units of the MLP, seven of the vocabulary,
# the last one smaller.
UNEVEN = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama with biases": ("llama-biases", UNEVEN),
    "llama, tied": ("llama-tied", UNEVEN),
    "qwen3, heads normalised": ("qwen3", {**UNEVEN, "head_dim": 16}),
    "gemma2, norms around, caps, windows": (
        "gemma2",
        {**UNEVEN, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "one KV head, replicated": (
        "llama",
        {**UNEVEN, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    ),
}
PREFIX = list(range(30, 80))
PROMPTS = [
    {"prompt_token_ids": tokens}
    for tokens in ([5, 6, 7], [*PREFIX, 9, 10], [*PREFIX, 11], list(range(90, 170)))
]


def arguments(model: Path, **more: Any) -> dict[str, Any]:
    """Prompts come in chunks, prefixes are found again, and there is no room for all,
    so that some are preempted."""
    return small_engine(model, **{"num_gpu_blocks_override": 14, "max_num_seqs": 4, **more})


def answers(llm: LLM, num_tokens: int = 24) -> list[Any]:
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, prompt_logprobs=1)
    seeded = SamplingParams(temperature=1.0, seed=3, max_tokens=num_tokens, ignore_eos=True, logprobs=2)
    outputs = llm.generate(PROMPTS, [greedy, greedy, seeded, greedy])
    return [output.outputs[0].token_ids for output in outputs]


def logprobs(llm: LLM) -> list[list[tuple[int, float]]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
    [output] = llm.generate([PROMPTS[1]], params)
    positions = output.outputs[0].logprobs or []
    return [[(token, one.logprob) for token, one in position.items()] for position in positions]


@pytest.mark.parametrize("name", MODELS)
def test_two_and_three_workers_give_the_tokens_of_one(tiny_model: Callable[..., Path], name: str) -> None:
    family, overrides = MODELS[name]
    model = tiny_model(family, **overrides)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm), [output.embedding for output in llm.embed(PROMPTS)]
        close = logprobs(llm)
        stats = llm.llm_engine.client.stats()
        assert (stats.num_preemptions > 0 or "windows" in name) and stats.prefix_cache_hit_tokens > 0
    for size, is_async in ((2, True), (3, False)):
        with virtual_llm(**arguments(model, tensor_parallel_size=size, async_scheduling=is_async)) as llm:
            assert answers(llm) == expected[0]
            for got, wanted in zip(llm.embed(PROMPTS), expected[1]):
                assert got.embedding == pytest.approx(wanted, abs=1e-4)
            for position, other in zip(logprobs(llm), close, strict=True):
                assert dict(position) == pytest.approx(dict(other), abs=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("split", ["column", "row"])
def test_rounded_weights_are_those_of_one_worker(quantization: str, split: Literal["column", "row"]) -> None:
    """Scales are found before inputs are divided."""
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(0))
    policy = DevicePolicy.of(torch.device("cpu"))

    def rows(shard: Shard) -> torch.Tensor:
        own = {"o_proj": shard.own(160 if split == "row" else 96, 32)}
        choose = MethodChooser(quantization, None, torch.bfloat16, policy)
        settings: Any = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "choose": choose}
        linear = Linear({"o_proj": 96}, 160, bias=False, split=split, shard=shard, own=own, **settings)
        linear.load("o_proj", "weight", weight.bfloat16())
        return linear.method.rows(torch.arange(linear.out_features), linear.tensors)

    parts = [rows(Shard(rank, 3)) for rank in range(3)]
    assert torch.equal(torch.cat(parts, 0 if split == "column" else 1), rows(Shard()))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_workers_divide_rounded_weights(tiny_model: Callable[..., Path], quantization: str) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    settings = {"dtype": "bfloat16", "quantization": quantization}
    with LLM(**arguments(model, **settings)) as llm:
        expected = logprobs(llm)
    with virtual_llm(**arguments(model, tensor_parallel_size=3, **settings)) as llm:
        got = logprobs(llm)
    # Sums are rounded to bfloat16 in other places.
    assert dict(got[0]) == pytest.approx(dict(expected[0]), abs=0.15)


def test_processes_give_the_very_bits_of_threads(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "verification_cost": 0.0}
    settings = arguments(model, dtype="bfloat16", tensor_parallel_size=2, speculative_config=drafts)
    with virtual_llm(**settings) as llm:
        expected = answers(llm), logprobs(llm)
    with LLM(**settings) as llm:
        call = llm.llm_engine.client.call
        assert (answers(llm), logprobs(llm)) == expected
        first, second = call("collective_rpc", "memory_bytes", [])
        assert first["weights"] != second["weights"]  # 2 + 1 KV heads
        call("sleep", 2)
        call("wake_up")
        call("update_weights", str(model))
        assert (answers(llm), logprobs(llm)) == expected
        workers = worker_processes()
        [pid] = [worker.pid for worker in workers if worker.cmdline()[-2] == "1"]
        assert len(workers) == 2
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="worker of rank 1 was killed by SIGKILL"):
            answers(llm)
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)


def test_communicators_add_in_order_of_rank(tmp_path: Path) -> None:
    """All kinds, with three ranks, tensors that cross in pieces, sums that are divided, and two dtypes."""
    segment = open_segment(3)
    descriptors = segment_descriptors(segment)
    command = [sys.executable, "-m", "tests.executor.communicator_process"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(segment[0]), json.dumps(segment[1]), str(tmp_path / "ranks")],
            pass_fds=descriptors,
        )
        for rank in range(3)
    ]
    assert [rank.wait(120) for rank in ranks] == [0, 0, 0]
    for descriptor in descriptors:
        os.close(descriptor)


@given(count=st.integers(0, 300), unit=st.integers(1, 70), size=st.integers(1, 9), last=st.booleans())
def test_ranges_cover_everything_in_whole_units(count: int, unit: int, size: int, last: bool) -> None:
    own = [Shard(rank, size).own(count, unit, last_get_more=last) for rank in range(size)]
    assert [place for part in own for place in range(part.start, part.stop)] == list(range(count))
    units = [-(-(part.stop - part.start) // unit) for part in own]
    assert max(units) - min(units) <= 1 and units == sorted(units, reverse=not last)
    assert all(part.start % unit == 0 for part in own if part.start < count)


@pytest.mark.parametrize(
    ("family", "overrides", "more", "message"),
    [
        ("llama", {}, {"tensor_parallel_size": 3}, "2 KV heads, which more workers can only share evenly"),
        (
            "llama-mha",
            {"num_attention_heads": 4},
            {"tensor_parallel_size": 4},
            "an MLP of 96 values, in units of 32: use 3",
        ),
        ("llama-mqa", {"intermediate_size": 512}, {"tensor_parallel_size": 5}, "has 4 query heads"),
        ("llama-mqa", {"vocab_size": 130}, {"tensor_parallel_size": 4, "load_format": "dummy"}, "96 values"),
        (
            "llama-mha",
            {"vocab_size": 130, "intermediate_size": 512},
            {"tensor_parallel_size": 4},
            "units of 64, which are 3",
        ),
        ("qwen3-moe", {}, {}, "experts of 32 values, in units of 32: use 1"),
        (
            "qwen2-moe",
            {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 24},
            {},
            "a shared MLP of 24",
        ),
        (
            "llama",
            {},
            {"model_impl": "transformers", "enable_expert_parallel": True},
            "workers divide every expert of a model that transformers computes",
        ),
        ("llama-mha", {}, {"quantization": "int4", "dtype": "bfloat16"}, "attention outputs in units of 16"),
        (
            "llama",
            {},
            {"kv_transfer_config": {"kv_connector": "tests.kv_transfer.own_connector:ShelfConnector"}},
            "moves the blocks of a single worker",
        ),
        ("llama", {}, {"distributed_executor_backend": "uni"}, "'uni' has a single worker"),
        ("llama", {}, {"tensor_parallel_size": 0}, "must be at least 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_anything_is_loaded(
    tiny_model: Callable[..., Path],
    family: str,
    overrides: dict[str, Any],
    more: dict[str, Any],
    message: str,
) -> None:
    given = arguments(tiny_model(family, **overrides), **{"tensor_parallel_size": 2, **more})
    with pytest.raises(ConfigError, match=message):
        LLM(**given)


@pytest.mark.slow
def test_compiled_workers_give_the_tokens_of_one_that_is_not(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm)
    with LLM(**arguments(model, enforce_eager=False, tensor_parallel_size=2)) as llm:
        assert answers(llm) == expected
        assert llm.llm_engine.client.call("num_recompilations") == 0
