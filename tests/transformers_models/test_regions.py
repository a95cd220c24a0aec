"""A model that is traced once and cut at attention computes what its own layers do, in few regions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minivllm.compilation.package_keys import region_key
from minivllm.compilation.regions import Region, flatten
from minivllm.models.model import TokenInputs, token_specs
from minivllm.specs.caches import LayerCache
from minivllm.transformers_models.describe.config import read_transformers_config
from minivllm.transformers_models.describe.names import iterate_parameters
from minivllm.transformers_models.model import TransformersModel
from tests.transformers_models.families import FAMILIES, save_model

CPU = torch.device("cpu")
TOKENS = 9

UNTRACED = {"llama4_text": "computes something else for other numbers of tokens"}
"""Rotary embeddings in complex numbers, for which PyTorch's shapes of tensors without contents are fixed."""

REGIONS = {
    "gemma4_text": (5, 5, 4),
    "glm4_moe": (4, 4, 4),
    "gpt_oss": (3, 3, 3),
    "llama": (3, 3, 3),
    "llama4_text": (0, 0, 0),
    "opt": (3, 3, 3),
    "smollm3": (3, 4, 3),
}
"""Regions of each configuration:
first, last, and one for every pair of neighbours that is unlike the others."""

QUICK = {*((family, 1) for family in REGIONS), ("opt", 2)}
"""The last one's head is narrower than its layers."""

CASES = [
    pytest.param(family, index, marks=() if (family, index) in QUICK else pytest.mark.slow)
    for family, configurations in FAMILIES.items()
    for index in range(len(configurations))
]


def load(directory: Path) -> TransformersModel:
    config = read_transformers_config(directory)
    model = TransformersModel(
        config, dtype=torch.float32, attention_dtype=torch.float32, device=CPU, max_model_len=64
    )
    model.load_weights(iterate_parameters(directory, model.names, None))
    return model


def cut_model(model: TransformersModel, compile_region: Callable[[Region], Callable]) -> None:
    caches = [spec.declare(2, 8, CPU) for spec in model.cache_specs]
    model.build_regions(compile_region, token_specs(CPU), caches)


def checked(region: Region) -> Callable:
    """The region's function, given tensors of no other shapes than it declares."""

    def run(*args: object) -> object:
        tensors: list[Tensor] = []
        flatten(args, tensors)
        region.check(tensors)
        return region.function(*args)

    return run


@torch.inference_mode()
def step(model: TransformersModel, count: int) -> list[Tensor]:
    """Everything that a step of so many tokens computes: queries, caches, logits, hidden states."""
    caches = [LayerCache(*torch.zeros(2, 2, 8, spec.kv_heads, spec.head_dim)) for spec in model.cache_specs]
    slots = torch.arange(count, dtype=torch.int32) + 3
    computed: list[Tensor] = []

    def attend(layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Of the tokens itself, so that nothing else than what the layer gave matters."""
        computed.extend((q.clone(), caches[layer].k.clone(), caches[layer].v.clone()))
        values = caches[layer].v.flatten(0, 1)[slots]
        return q * 0.1 + values[:, :, None] + (0 if sinks is None else sinks.mean())

    ids = torch.randperm(90, generator=torch.Generator().manual_seed(0))[:count].int()
    tokens = TokenInputs(torch.tensor([5, 0, 1, 2, 40, 7, 8, 9, 3], dtype=torch.int32)[:count])
    hidden = model.forward(ids, tokens, [cache.at(slots) for cache in caches], attend)
    rows = torch.arange(0, count, 4, dtype=torch.int32)
    return [*computed, model.logits(hidden, rows, tokens), model.hidden_states(hidden, rows, tokens)]


@pytest.mark.parametrize(("family", "index"), CASES)
def test_regions_compute_what_the_layers_do(
    family: str, index: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load(save_model(tmp_path, family, FAMILIES[family][index]))
    expected = {count: step(model, count) for count in (TOKENS, 1)}
    asked: dict[tuple[str, ...], Region] = {}

    def compile_region(region: Region) -> Callable:
        asked[region_key(region)] = region
        return checked(region)

    cut_model(model, compile_region)
    if family in UNTRACED:
        assert UNTRACED[family] in caplog.text and not asked
    else:
        assert {region.name for region in asked.values()} == {"first", "between", "last"}
        assert " at 0x" not in repr(list(asked))
    if family in REGIONS:
        assert len(asked) == REGIONS[family][index]
    for count, values in expected.items():
        for own, given in zip(values, step(model, count), strict=True):
            torch.testing.assert_close(given, own, atol=2e-5, rtol=1e-5)
