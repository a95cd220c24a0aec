"""LoRA over a model that several workers divide: each has the part of A or B that goes with its own of the
layer, and only those of the layers of its stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.errors import RequestError
from minivllm.messages import LoRARequest
from minivllm.simulation.ranks import virtual_llm
from tests.executor.test_tensor_parallel import UNEVEN, arguments
from tests.lora.lora_adapters import random_matrices, write_adapter
from tests.lora.test_lora_parity import Adapters, assert_logprobs_equal_merged, mixed_adapters, run_mixed
from tests.parity_reference import random_prompts

FIVE = {**UNEVEN, "num_hidden_layers": 5}
SETTINGS = {
    "enable_lora": True,
    "max_loras": 6,
    "max_lora_rank": 64,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 40,
}


@pytest.mark.parametrize(
    ("family", "size"), [("llama-biases", 2), ("llama-biases", 3), ("qwen3", 2)], ids=lambda value: str(value)
)
def test_each_row_of_a_mixed_batch_equals_the_merged_model(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, size: int
) -> None:
    model = tiny_model(family, **UNEVEN)
    adapters = mixed_adapters(tmp_path, model)
    prompts = random_prompts((5, 17, 1, 33, 9, 12))
    with virtual_llm(**arguments(model, tensor_parallel_size=size, **SETTINGS)) as llm:
        outputs = run_mixed(llm, prompts, adapters, logprobs=0, prompt_logprobs=0)
        assert_logprobs_equal_merged(model, outputs, prompts, adapters)
        shapes = llm.llm_engine.client.call("collective_rpc", "adapter_shapes", [])
        assert shapes == [shapes[0]] * size  # of the whole model
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(adapters)


def of_one_layer(directory: Path, model: Path, layer: int, factor: float = 1.0) -> LoRARequest:
    """An adapter that other layers know nothing of."""
    matrices = random_matrices(model, 12, ("q_proj", "down_proj"), seed=layer)
    own = {name: tensor * factor for name, tensor in matrices.items() if f".layers.{layer}." in name}
    return LoRARequest(directory.name, lora_path=str(write_adapter(directory, own, r=12, lora_alpha=24)))


def sampled(llm: LLM, prompts: list[list[int]], adapters: Adapters) -> list[list[int]]:
    """Tokens drawn with a seed, in several steps of several requests."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], params, lora_request=adapters
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_stages_place_the_adapters_of_their_own_layers(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Three slots for seven adapters, which therefore come and go;
    two of them leave whole stages as they are."""
    model = tiny_model("llama-biases", **FIVE)
    adapters = [
        *mixed_adapters(tmp_path, model),
        *(of_one_layer(tmp_path / f"of-{i}", model, i) for i in (0, 4)),
    ]
    prompts = random_prompts((5, 17, 1, 33, 9, 12, 8, 20))
    few: dict[str, Any] = {**SETTINGS, "max_loras": 3, "max_cpu_loras": 4, "num_gpu_blocks_override": 14}
    with LLM(**arguments(model, **few)) as llm:
        expected = sampled(llm, prompts, adapters)
        [shapes] = llm.llm_engine.client.call("collective_rpc", "adapter_shapes", [])
    assert len(set(map(tuple, expected))) == len(adapters)
    layouts: list[dict[str, Any]] = [
        {"pipeline_parallel_size": 3, "async_scheduling": True},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    ]
    for layout in layouts:
        with virtual_llm(**arguments(model, **few, **layout)) as llm:
            assert sampled(llm, prompts, adapters) == expected
            outputs = run_mixed(llm, prompts, adapters, logprobs=0, prompt_logprobs=0)
            assert_logprobs_equal_merged(model, outputs, prompts, adapters)
            workers = llm.llm_engine.client.core.executor.workers  # type: ignore[attr-defined]
            assert llm.llm_engine.client.call("collective_rpc", "adapter_shapes", []) == [shapes] * len(
                workers
            )
            first, *others = [worker.adapters for worker in workers]
            assert len(first.names_in_slots) == 3
            assert all(other.names_in_slots == first.names_in_slots for other in others)
            kept = [set(worker.adapters._adapters["of-4"].modules) for worker in workers]
            assert not kept[0] and all(name.startswith("model.layers.4.") for name in kept[-1]) and kept[-1]


def test_an_adapter_that_one_stage_would_refuse_is_refused_by_all(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("llama-biases", **FIVE)
    broken = of_one_layer(tmp_path / "broken", model, 0, factor=float(torch.inf))
    with virtual_llm(**arguments(model, pipeline_parallel_size=2, **SETTINGS)) as llm:
        with pytest.raises(RequestError, match="not finite"):
            llm.llm_engine.client.call("add_lora", broken.name, broken.path)
        workers = llm.llm_engine.client.core.executor.workers  # type: ignore[attr-defined]
        assert not any(worker.adapters._adapters for worker in workers)


@pytest.mark.slow
def test_vectors_and_tokens_of_processes_are_those_of_one_worker(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    adapters = mixed_adapters(tmp_path, model)
    prompts = random_prompts((5, 17, 1, 33, 9, 12))
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]

    def answers(llm: LLM) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in run_mixed(llm, prompts, adapters)]

    with LLM(**arguments(model, **SETTINGS)) as llm:
        tokens = answers(llm)
        vectors = [output.embedding for output in llm.embed(asked, lora_request=adapters)]
    traces = tmp_path / "traces"
    with LLM(**arguments(model, tensor_parallel_size=2, profile=str(traces), **SETTINGS)) as llm:
        with pytest.raises(RequestError, match="must be a local directory"):
            llm.llm_engine.client.call("add_lora", "nothing", str(tmp_path / "nowhere"))
        assert answers(llm) == tokens
        memory = llm.get_metrics().worker_resident_bytes
        assert len(memory) == 2 and min(memory) > 30 * 2**20
        for got, wanted in zip(llm.embed(asked, lora_request=adapters), vectors, strict=True):
            assert got.embedding == pytest.approx(wanted, abs=1e-4)
        named = next(adapter for adapter in adapters if adapter is not None)
        name, path = llm.llm_engine.client.call("list_loras")[0]
        assert LoRARequest(name, lora_path=path) in adapters
        assert llm.llm_engine.client.call("remove_lora", named.name)
        assert answers(llm) == tokens  # read again
    [path] = traces.iterdir()
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    spans: dict[str, set[str]] = {}
    moments: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            spans.setdefault(names[event["pid"]], set()).add(event["name"])
            moments.setdefault(names[event["pid"]], []).append(event["ts"])
    workers = "worker of rank 0", "worker of rank 1"
    assert spans["engine core"] >= {"step", "schedule", "dispatch", "encode", "write", "wait"}
    for name in workers:
        assert spans[name] >= {"queries", "attention", "exchange", "sample"} and "schedule" not in spans[name]
        # On the clock of the engine core: within its steps.
        assert (
            min(moments["engine core"]) < min(moments[name])
            and max(moments[name]) < max(moments["engine core"]) + 1e6
        )
