"""Several workers and engines on CUDA devices, on one if there are no more, where they exchange tensors through
host memory: the tokens of a single worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_cuda_engine import config_directory, greedy, random_prompts
from tests.model_families import save_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here"),
]
pytest.importorskip("msgspec", reason="the engine needs msgspec, which is not installed")
assert config_directory  # a fixture

LIMITS = {
    "device": "cuda",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 200,
}


def tokens_of(model: Path, count: int = 9, **settings: Any) -> list[list[int]]:
    from minivllm import LLM

    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    with LLM(str(model), **{**LIMITS, **settings}) as llm:
        return greedy(llm, random_prompts(count))


@pytest.mark.parametrize(
    "divided",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_scheduling": False, "cudagraph_mode": "piecewise"},
    ],
    ids=lambda divided: ",".join(f"{name}={value}" for name, value in divided.items()),
)
def test_workers_together_give_the_tokens_of_one(config_directory: Path, divided: dict[str, Any]) -> None:
    common: dict[str, Any] = {"load_format": "dummy", "dtype": "float32"}
    expected = tokens_of(config_directory, enforce_eager=True, **common)
    assert tokens_of(config_directory, **common, **divided) == expected


def test_drafts_are_verified_at_the_end_of_a_pipeline(config_directory: Path) -> None:
    common: dict[str, Any] = {"load_format": "dummy", "dtype": "float32"}
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    expected = tokens_of(config_directory, enforce_eager=True, **common)
    assert tokens_of(config_directory, pipeline_parallel_size=2, **common, **drafts) == expected


def test_workers_that_divide_the_experts_stay_close_to_one(tmp_path: Path) -> None:
    """In bfloat16 rounding may turn a near tie, after which texts differ: most first tokens must be the
    same."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 512}
    model = save_tiny_model(tmp_path, "qwen3-moe", sizes)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}
    one = tokens_of(model, 16, **settings)
    two = tokens_of(model, 16, tensor_parallel_size=2, enable_expert_parallel=True, **settings)
    assert sum(a[0] == b[0] for a, b in zip(one, two, strict=True)) >= 13
