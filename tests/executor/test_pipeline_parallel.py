"""The layers of a model are dealt out to stages,
which compute side by side and give the tokens of one worker."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.distributed.link import NUM_PLACES, PLACE_BYTES, Link, StageLinks, open_link
from minivllm.distributed.stage import Stage, divide_layers
from minivllm.errors import ConfigError, EngineDeadError
from minivllm.sampling_params import StructuredOutputs
from minivllm.simulation.ranks import virtual_llm
from tests.executor.small_engine import worker_processes
from tests.executor.test_tensor_parallel import PROMPTS, UNEVEN, answers, arguments
from tests.gguf_models import write_gguf
from tests.lora.lora_adapters import random_adapter
from tests.lora.test_lora_parity import run_mixed
from tests.parity_reference import random_prompts

FIVE = {**UNEVEN, "num_hidden_layers": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    # Stages whose layers are all of one group, while others have two.
    "gemma3": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "qwen3-next": {},
    "granite-hybrid": {},
    "qwen3-moe": {},
    "deepseek-v2": {},
    "llama-tied": FIVE,
}


def words(llm: LLM) -> list[Any]:
    """Answers that a grammar allows, with tokens that are bound to come and so are drafts, beside others."""
    grammar = StructuredOutputs(json={"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}})
    masked = SamplingParams(max_tokens=24, seed=1, structured_outputs=grammar)
    penalised = SamplingParams(
        max_tokens=16, seed=2, presence_penalty=0.7, repetition_penalty=1.2, min_tokens=9
    )
    outputs = llm.generate(["a colour", "a colour", PROMPTS[1], "a"], [masked, penalised, penalised, masked])
    return [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]


def test_stages_give_the_tokens_of_one_worker(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama-biases", **FIVE)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm), words(llm)
        vectors = [output.embedding for output in llm.embed(PROMPTS)]
        stats = llm.llm_engine.client.stats()
        assert stats.num_preemptions > 0 and stats.prefix_cache_hit_tokens > 0
    layouts: Sequence[dict[str, Any]] = [
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 3, "async_scheduling": True},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": True},
    ]
    for layout in layouts:
        with virtual_llm(**arguments(model, **layout)) as llm:
            assert (answers(llm), words(llm)) == expected, layout
            for got, wanted in zip(llm.embed(PROMPTS), vectors):
                assert got.embedding == pytest.approx(wanted, abs=1e-4)
            assert llm.llm_engine.client.stats().num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_is_a_range_of_layers_of_any_family(tiny_model: Callable[..., Path], family: str) -> None:
    model = tiny_model(family, **FAMILIES[family])
    given = arguments(model, num_gpu_blocks_override=24)
    with LLM(**given) as llm:
        expected = answers(llm, 8)
    with virtual_llm(**given, pipeline_parallel_size=3) as llm:
        assert answers(llm, 8) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gpt-oss", "mixtral", "deepseek-v3", "lfm2", "gemma2", "olmo2", "phi3", "glm4-moe"]
)
def test_two_stages_of_more_families(tiny_model: Callable[..., Path], family: str) -> None:
    given = arguments(tiny_model(family), num_gpu_blocks_override=24)
    with LLM(**given) as llm:
        expected = answers(llm)
    with virtual_llm(**given, pipeline_parallel_size=2, async_scheduling=True) as llm:
        assert answers(llm) == expected


def test_stages_of_quantised_models(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Blocks of a file, and weights that are rounded here; embedding and head share theirs, at both ends."""
    model = tiny_model("llama-tied", **FIVE)
    write_gguf(model, tmp_path / "model.gguf", "llama", {"mlp": "Q8_0", "self_attn": "Q4_0"})
    tokens = [1] * 4, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for source, quantization in ((tmp_path / "model.gguf", None), (model, "int8")):
        given = arguments(source, quantization=quantization, tokenizer=str(model))
        with LLM(**given) as llm:
            expected = llm.generate([{"prompt_token_ids": tokens[0]}], tokens[1])[0].outputs[0].token_ids
        with virtual_llm(**given, pipeline_parallel_size=2) as llm:
            assert (
                llm.generate([{"prompt_token_ids": tokens[0]}], tokens[1])[0].outputs[0].token_ids == expected
            )


def test_stages_in_processes(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model("llama-biases", **FIVE)
    adapters = [
        None,
        random_adapter(tmp_path / "all", model),
        random_adapter(tmp_path / "q", model, layers=["q_proj"]),
    ]

    def adapted(llm: LLM) -> list[Any]:
        outputs = run_mixed(llm, random_prompts((9, 9, 9)), adapters)
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(**arguments(model, enable_lora=True)) as llm:
        expected = answers(llm), words(llm), adapted(llm)
        whole = llm.llm_engine.client.call("collective_rpc", "memory_bytes", [])[0]
    drafts = {"method": "ngram", "prompt_lookup_min": 1, "verification_cost": 0.0}
    settings = {"enable_lora": True, "speculative_config": drafts, "pipeline_parallel_size": 2}
    with LLM(**arguments(model, **settings)) as llm:
        call = llm.llm_engine.client.call
        assert (answers(llm), words(llm), adapted(llm)) == expected
        assert call("remove_lora", "all")
        assert adapted(llm) == expected[2]  # read again
        assert llm.get_metrics().num_draft_tokens > 0
        parts = call("collective_rpc", "memory_bytes", [])
        assert sum(part["weights"] for part in parts) == whole["weights"]
        assert sum(part["kv_cache"] for part in parts) == whole["kv_cache"]
        assert all(0 < part["weights"] < 0.7 * whole["weights"] for part in parts)
        call("sleep", 2)
        call("wake_up")
        call("update_weights", str(model))
        assert answers(llm) == expected[0]
        workers = worker_processes()
        [pid] = [worker.pid for worker in workers if worker.cmdline()[-2] == "0"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker of rank 0 \(stage 0\) was killed by SIGKILL"):
            answers(llm)
    assert not any(psutil.pid_exists(worker.pid) for worker in workers)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"disable_custom_all_reduce": True}, {"enforce_eager": False}])
def test_divided_stages_in_processes(tiny_model: Callable[..., Path], more: dict[str, Any]) -> None:
    model = tiny_model("llama-biases", **FIVE)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm)
    layout = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "async_scheduling": True}
    with LLM(**arguments(model, **{**layout, **more})) as llm:
        assert answers(llm) == expected
        assert llm.llm_engine.client.call("num_recompilations") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama-biases", {"speculative_config": {"method": "ngram"}}),
        ("qwen3-next", {}),
        ("qwen3-next", {"compile_in_background": True}),
    ],
)
def test_compiled_stages_give_the_tokens_of_one_that_is_not(
    tiny_model: Callable[..., Path], family: str, more: dict[str, Any]
) -> None:
    model = tiny_model(family)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm)
    with LLM(**arguments(model, enforce_eager=False, pipeline_parallel_size=2, **more)) as llm:
        assert answers(llm) == expected
        assert llm.llm_engine.client.call("num_recompilations") == 0


@given(costs=st.lists(st.integers(1, 50), min_size=1, max_size=9), data=st.data())
def test_the_dearest_stage_costs_as_little_as_it_can(costs: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(costs)))
    stages = divide_layers(costs, size)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert len(stages) == size and all(stages)

    def dearest(borders: Sequence[int]) -> int:
        ends = [0, *borders, len(costs)]
        return max(sum(costs[start:stop]) for start, stop in pairwise(ends))

    best = min(map(dearest, combinations(range(1, len(costs)), size - 1)))
    assert dearest([stage.start for stage in stages[1:]]) == best


def test_the_head_counts_as_layers_of_the_last_stage() -> None:
    assert divide_layers([10] * 29 + [90], 2) == [range(19), range(19, 30)]


@settings(max_examples=25)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 50), st.integers(PLACE_BYTES - 9, 3 * PLACE_BYTES)), max_size=8)
)
def test_a_link_brings_every_record_in_order(sizes: list[int]) -> None:
    records = [bytes([index % 256]) * size for index, size in enumerate(sizes, 1)]
    descriptors = open_link()
    sender, receiver = Link(descriptors), Link(descriptors)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: [receiver.receive() for _ in records])
        for record in records:
            sender.send(record)
        assert received.result(30) == records
    for descriptor in descriptors:
        os.close(descriptor)


def test_as_many_records_as_places_wait_for_their_receiver() -> None:
    descriptors = open_link()
    sender, receiver = Link(descriptors), Link(descriptors)
    for index in range(NUM_PLACES):
        sender.send(bytes([index]))
    with ThreadPoolExecutor(1) as pool:
        one_more = pool.submit(sender.send, b"one more")
        assert not one_more.done()
        assert [receiver.receive() for _ in range(NUM_PLACES)] == [
            bytes([index]) for index in range(NUM_PLACES)
        ]
        one_more.result(30)
    assert receiver.receive() == b"one more"
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_arrives_as_it_was_sent(dtype: torch.dtype) -> None:
    descriptors = open_link()
    first, second = Stage(0, 2, StageLinks(sink=descriptors)), Stage(1, 2, StageLinks(source=descriptors))
    x = torch.randn(7, 48).to(dtype)
    first.send(x.T)
    assert torch.equal(second.receive((48, 7), dtype), x.T)
    first.send(x)
    with pytest.raises(RuntimeError):
        second.receive((8, 48), dtype)
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("llama", {"pipeline_parallel_size": 4}, "has 3 layers, and every stage needs one: use 3 or less"),
        (
            "llama",
            {"kv_transfer_config": {"kv_connector": "tests.kv_transfer.own_connector:ShelfConnector"}},
            "moves the blocks of a single worker, but there are 2",
        ),
        ("llama", {"distributed_executor_backend": "uni"}, "'uni' has a single worker"),
        ("llama", {"pipeline_parallel_size": 0}, "must be at least 1"),
        ("gemma4-small", {}, "read keys, values or embeddings that the first stage has"),
        ("llama", {"tensor_parallel_size": 3}, "2 KV heads, which more workers can only share evenly"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused_before_anything_is_loaded(
    tiny_model: Callable[..., Path], family: str, more: dict[str, Any], message: str
) -> None:
    given = arguments(tiny_model(family), **{"pipeline_parallel_size": 2, **more})
    with pytest.raises(ConfigError, match=message):
        LLM(**given)
