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


TP2, PP2, DP2 = ({f"{name}_parallel_size": 2} for name in ("tensor", "pipeline", "data"))
DIVIDED: dict[str, dict[str, Any]] = {
    "tp2": TP2,
    "pp2": PP2,
    "dp2": DP2,
    "tp2-pp2": TP2 | PP2,
    "tp2-dp2": TP2 | DP2,
    "tp2-piecewise": TP2 | {"async_scheduling": False, "cudagraph_mode": "piecewise"},
    "pp2-drafts": PP2 | {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
}


def tokens_of(model: Path, count: int = 9, **settings: Any) -> list[list[int]]:
    from minivllm import LLM

    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    with LLM(str(model), **{**LIMITS, **settings}) as llm:
        return greedy(llm, random_prompts(count))


@pytest.fixture(scope="module")
def expected(config_directory: Path) -> list[list[int]]:
    return tokens_of(config_directory, enforce_eager=True, load_format="dummy", dtype="float32")


@pytest.mark.parametrize("divided", DIVIDED)
def test_workers_together_give_the_tokens_of_one(
    config_directory: Path, expected: list[list[int]], divided: str
) -> None:
    settings = {"load_format": "dummy", "dtype": "float32", **DIVIDED[divided]}
    assert tokens_of(config_directory, **settings) == expected


def test_workers_that_divide_the_experts_stay_close_to_one(tmp_path: Path) -> None:
    """In bfloat16 rounding may turn a near tie, after which texts differ: most first tokens must be the
    same."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 512}
    model = save_tiny_model(tmp_path, "qwen3-moe", sizes)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256}
    one = tokens_of(model, 16, **settings)
    two = tokens_of(model, 16, enable_expert_parallel=True, **TP2, **settings)
    assert sum(a[0] == b[0] for a, b in zip(one, two, strict=True)) >= 13
