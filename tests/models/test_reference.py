"""The plain forward pass equals transformers' in float32,
and the engine's over blocks equals the plain one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.models.reference import reference_forward
from tests.model_families import FAMILIES
from tests.parity_reference import MAX_MODEL_LEN, engine_logits, random_prompts, reference_logits, tiny_llm


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_transformers_the_plain_pass_and_the_engine_say_the_same(
    tiny_model: Callable[..., Path], family: str
) -> None:
    directory = tiny_model(family)
    config = read_decoder_config(directory, "auto")
    weights: dict[str, Tensor] = {}
    for name, tensor in iterate_weights(directory, "auto", config, torch.float32):
        assert isinstance(tensor, Tensor)
        weights[name] = tensor.clone()  # it lies in a mapped file
    (prompt,) = random_prompts((70,), vocab_size=config.vocab_size)
    with tiny_llm(directory, max_num_batched_tokens=32) as llm:
        completion, logits = engine_logits(llm, prompt, max_tokens=8)
    text = prompt + completion[:-1]
    plain = reference_forward(config, weights, text, MAX_MODEL_LEN)
    torch.testing.assert_close(plain, reference_logits(directory, text), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)
