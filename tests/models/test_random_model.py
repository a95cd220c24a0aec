"""Random models to measure with: of the size that is asked for, in bfloat16, and read by the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.specs.layers import MoeSpec
from tests.random_model import main


def test_a_random_model_has_the_size_that_is_asked_for(tmp_path: Path) -> None:
    main(["qwen3-moe", str(tmp_path), "num_experts=5", "hidden_size=32", "mlp_only_layers=[]"])
    config = read_decoder_config(tmp_path)
    assert config.hidden_size == 32 and config.dtype == "bfloat16"
    assert all(isinstance(layer.mlp, MoeSpec) and layer.mlp.num_experts == 5 for layer in config.layers)
    assert sum(1 for _ in iterate_weights(tmp_path, "auto", config, torch.bfloat16)) > 4 * 5 * 3


def test_an_unknown_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="is 'qwen9', but must be one of llama"):
        main(["qwen9", str(tmp_path)])
