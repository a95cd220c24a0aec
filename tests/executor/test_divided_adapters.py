"""LoRA over a model that several workers divide: each has the part of A or B that goes with its own of the layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm import LLM
from minivllm.errors import RequestError
from minivllm.messages import LoRARequest
from tests.executor.test_tensor_parallel import UNEVEN, arguments
from tests.executor.virtual_shards import virtual_llm
from tests.lora.test_lora_parity import assert_logprobs_equal_merged, mixed_adapters, run_mixed
from tests.parity_reference import random_prompts

SETTINGS = {"enable_lora": True, "max_loras": 6, "max_lora_rank": 64, "max_num_seqs": 8, "num_gpu_blocks_override": 40}


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
        assert LoRARequest(*llm.llm_engine.client.call("list_loras")[0]) in adapters
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
            min(moments["engine core"]) < min(moments[name]) and max(moments[name]) < max(moments["engine core"]) + 1e6
        )
