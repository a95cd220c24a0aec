"""Keys and values that leave a CUDA device for host memory or a directory, and come back while steps run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_cuda_engine import config_directory, make_llm, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device here"),
]
pytest.importorskip("msgspec", reason="the engine needs msgspec, which is not installed")
assert config_directory  # a fixture

SCARCE = {
    "num_gpu_blocks_override": 24,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 192,
}


def answers(llm: Any, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
    from minivllm import SamplingParams

    settings = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, settings, use_tqdm=False)]


@pytest.mark.parametrize("connector", ["OffloadingConnector", "SharedStorageConnector"])
@pytest.mark.parametrize("is_async", [False, True], ids=["", "async"])
def test_blocks_that_went_and_came_back_change_no_token(
    config_directory: Path, tmp_path: Path, connector: str, is_async: bool
) -> None:
    """Prompts take turns in a cache that holds few of them, and some come again, alone and together."""
    torch.set_float32_matmul_precision("highest")
    first = random_prompts(8)
    prompts = first + first[::-1] + [{"prompt_token_ids": [*p["prompt_token_ids"][:-3], 7]} for p in first]
    with make_llm(config_directory, dtype="float32", enforce_eager=True) as llm:
        expected = answers(llm, prompts)
    config: dict[str, Any] = {"kv_connector": connector}
    if connector == "SharedStorageConnector":
        config["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    settings = {**SCARCE, "dtype": "float32", "async_scheduling": is_async, "kv_transfer_config": config}
    with make_llm(config_directory, **settings) as llm:
        assert answers(llm, prompts) == expected
        assert answers(llm, prompts[::3]) == expected[::3]
        [stats] = llm.get_metrics().kv_transfer
    assert stats.num_loaded_blocks > 0 and stats.num_saved_blocks > 0
