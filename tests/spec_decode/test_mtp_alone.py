"""MTP heads of families whose models keep states, without an engine: keys, hidden states and logits of a whole
text are those of the formulas around a layer of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.checkpoints.checkpoint import iterate_weights
from minivllm.checkpoints.hf_config import read_decoder_config
from minivllm.compilation.regions import Size
from minivllm.linear.layer import never_quantized
from minivllm.models.decoder import Decoder
from minivllm.models.model import TokenInputs, token_specs
from minivllm.spec_decode.eagle.head import EagleHead
from minivllm.spec_decode.eagle.mtp import mtp_config, mtp_tensors
from minivllm.specs.attention import AttentionSpec
from minivllm.specs.caches import NO_CACHE, CacheSpec, LayerCache
from tests.parity_reference import random_prompts
from tests.spec_decode.mtp_heads import ReferenceMtp, with_random_head

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
BLOCK_SIZE = 8
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-next": {},
    "qwen3-next-biases": {},
    "qwen3.5": {},
    "qwen3.5-moe": {},
    "glm4-moe": {},
}


def loaded(directory: Path) -> EagleHead:
    """The head of the model in a directory, beside the model, uncompiled."""
    config = read_decoder_config(directory)
    target = Decoder(config, dtype=torch.float32, attention_dtype=torch.float32, device=CPU, max_model_len=64)
    target.load_weights(iterate_weights(directory, "auto", config, torch.float32))
    tensors = mtp_tensors(directory, config, "auto", 0)
    head = EagleHead(mtp_config(config), tensors, target, max_model_len=64, choose_method=never_quantized)
    head.load_weights(tensors.read(torch.float32))
    for model in (target, head):
        caches = [
            spec.declare(Size("blocks", 2), BLOCK_SIZE, CPU) if isinstance(spec, CacheSpec) else NO_CACHE
            for spec in model.cache_specs
        ]
        model.build_regions(lambda region: region.function, token_specs(CPU), caches)
    return head


@pytest.mark.parametrize("family", MODELS)
def test_a_head_computes_what_its_formulas_say(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    directory = with_random_head(tmp_path / "model", tiny_model(family, **MODELS[family]), seed=3)
    reference = ReferenceMtp(directory, tmp_path / "longer")
    head = loaded(directory)
    (text,) = random_prompts((37,))
    features = reference.features(text[:-1])
    count, num_blocks = len(features), 6
    slots = torch.randperm((num_blocks - 1) * BLOCK_SIZE)[:count].int() + BLOCK_SIZE
    (spec,) = head.cache_specs
    assert isinstance(spec, CacheSpec)
    k, v = (torch.zeros(num_blocks, *shape) for shape in spec.block_shapes(BLOCK_SIZE))
    kept = torch.zeros(num_blocks * BLOCK_SIZE, head.feature_size)
    kept[slots] = features
    (attention,) = head.attention_specs
    assert isinstance(attention, AttentionSpec)

    def attend(layer: int, q: Tensor, weights: Any = None) -> Tensor:
        """q [tokens, kv_heads, G, D], over what the head has written."""
        keys, values = (cache.flatten(0, 1)[slots] for cache in (k, v))
        scores = torch.einsum("qhgd,khd->hgqk", q, keys) * attention.scale
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        return torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), values).contiguous()

    tokens = TokenInputs(torch.arange(count, dtype=torch.int32))
    with torch.inference_mode():
        hidden = head.attended(
            torch.tensor(text[1:], dtype=torch.int32),
            tokens,
            LayerCache(k, v, slots),
            kept.view(num_blocks, BLOCK_SIZE, -1),
            attend,
        )
        logits, following = head.guess(hidden, torch.arange(count, dtype=torch.int32), tokens)
    expected = reference.step(text[1:], features)
    torch.testing.assert_close(following, expected, atol=1e-4, rtol=0)
    with torch.inference_mode():
        expected_logits = reference.target.lm_head(expected)
    torch.testing.assert_close(logits, expected_logits, atol=1e-3, rtol=1e-3)
    assert torch.equal(logits.argmax(-1), expected_logits.argmax(-1))
