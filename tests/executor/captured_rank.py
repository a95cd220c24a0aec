"""One of two ranks whose steps are recorded, collectives and all, and replayed:
what GPUs do with CUDA graphs and NCCL.

``python -m tests.executor.captured_rank RANK RENDEZVOUS MODEL MODE``: prints the tokens of its answers and
how many steps were replayed, as JSON. Both ranks decide alike: nothing here depends on time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import kernels_triton_free.attention
import minivllm.attention.tiles
from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.attention import FlexAttention
from minivllm.device.policy import DevicePolicy
from minivllm.distributed.lockstep import EngineSeat
from minivllm.distributed.nccl import NcclCommunicator
from minivllm.distributed.other_workers import OtherWorkers
from minivllm.engine.core import EngineCore
from minivllm.engine.resolve import resolve
from minivllm.engine_process.client import InProcessClient
from minivllm.executor.uniproc import UniProcExecutor
from minivllm.frontend.llm_engine import LLMEngine, load_model_tokenizer
from tests.attention.backends import CUDA_POLICY, listed_attention
from tutorials.recorded_graphs import RecordedGraphs

PROMPTS = [{"prompt_token_ids": list(range(3 + 5 * index, 9 + 12 * index))} for index in range(5)]
PARAMS = [
    SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=4 + index, ignore_eos=True)
    for index in range(5)
]
BACKEND = f"{FlexAttention.__module__}:{FlexAttention.__name__}"
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 24,
    "block_size": 16,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
}


class RankExecutor(UniProcExecutor):
    """The worker of one rank, as the only one of its engine."""

    communicator: NcclCommunicator

    def _meet_others(self, seat: EngineSeat | None) -> OtherWorkers:
        return OtherWorkers(communicator=self.communicator)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def main() -> None:
    rank, rendezvous, model, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
    for module in (kernels_triton_free.attention, minivllm.attention.tiles):
        module.paged_flex_attention = listed_attention  # type: ignore[attr-defined]
    DevicePolicy.of = lambda device: CUDA_POLICY  # type: ignore[method-assign,assignment,misc]
    args = EngineArgs(model=model, tensor_parallel_size=2, attention_backend=BACKEND, **SETTINGS)
    config, facts = resolve(args)
    RankExecutor.communicator = NcclCommunicator(rank, 2, rendezvous, device="cpu", backend="gloo")
    executor = RankExecutor(config, facts)
    client = InProcessClient(EngineCore(config, executor), facts.vocab_size, facts.eos_token_ids)
    with LLM(
        engine=LLMEngine(client, load_model_tokenizer(args, config.model_path, config.load_format))
    ) as llm:
        runner = executor.worker.runner
        with torch.inference_mode():
            runner.capture_graphs(mode, RecordedGraphs())  # type: ignore[arg-type]
        found = answers(llm)
        replays: dict[str, int] = {}
        assert runner.graphs is not None
        for choice, count in runner.graphs.num_replays.items():
            replays[choice.kind] = replays.get(choice.kind, 0) + count
        print(json.dumps({"tokens": found, "replays": replays}))
    RankExecutor.communicator.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
