"""Norms of the residual stream: all are made by ``make_norm``, and one from outside is as good as the built-in one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm.errors import ConfigError
from minivllm.models import norms
from minivllm.models.norms import AddNorm, RmsNorm, make_norm, register_norm
from minivllm.models.reference import reference
from minivllm.models.reference.reference import reference_forward
from minivllm.specs.layers import NormPlace, NormSpec
from tests.models.test_decoder_regions import (
    PLAIN,
    new_caches,
    new_decoder,
    random_weights,
    run_chunk,
    with_layers,
)


@dataclass(frozen=True)
class CenteredNorm:
    """LayerNorm without a bias."""

    eps: float

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, None, self.eps)


@pytest.fixture
def centered(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A norm that is registered from outside, for one test."""
    monkeypatch.setattr(norms, "_NORMS", dict(norms._NORMS))
    register_norm("centered", CenteredNorm)
    return "centered"


@pytest.mark.parametrize("place", ["before", "after", "both"])
@torch.inference_mode()
def test_a_decoder_computes_with_a_norm_from_outside(
    centered: str, place: NormPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every place where a layer has norms, and after the last layer; judged by plain PyTorch in float64."""
    config = with_layers(norms=NormSpec(eps=1e-5, place=place, kind=centered))
    weights, token_ids = random_weights(config), [4, 8, 15, 16, 23, 42]

    def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        middle = x - x.mean(-1, keepdim=True)
        return middle / torch.sqrt(middle.square().mean(-1, keepdim=True) + eps) * weight

    doubled = {name: tensor.double() for name, tensor in weights.items()}
    with_rms = reference_forward(config, doubled, token_ids)
    monkeypatch.setattr(reference, "norm", layer_norm)
    expected = reference_forward(config, doubled, token_ids)
    assert (expected - with_rms).abs().max() > 0.01, "the norms differ here"
    logits = run_chunk(new_decoder(config, weights), new_caches(config), token_ids, 0, [7, 2, 9, 4])
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_no_norm_takes_a_name_that_is_taken(centered: str) -> None:
    for kind in ("rms", centered):
        with pytest.raises(ConfigError, match="already"):
            register_norm(kind, CenteredNorm)


def test_a_norm_that_is_unknown_is_refused_with_those_there_are() -> None:
    config = replace(PLAIN, layers=(replace(PLAIN.layers[0], norms=NormSpec(eps=1e-5, kind="centred")),))
    with pytest.raises(ConfigError, match=r"no norm 'centred', but there are rms"):
        new_decoder(config, random_weights(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_added_norm_gives_the_norm_of_the_sum_and_the_sum_and_leaves_its_inputs(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, stream = (torch.randn(7, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.rand(96, generator=generator).to(dtype)
    before = x.clone(), stream.clone()
    normed, total = AddNorm(make_norm("rms", 1e-6))(x, stream, weight)
    assert torch.equal(x, before[0]) and torch.equal(stream, before[1])
    assert torch.equal(total, before[1] + before[0])
    wide = total.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=tolerance)


def test_codes_of_equal_norms_are_equal_and_those_of_others_are_not() -> None:
    """Their repr is the key of compiled code."""
    assert repr(AddNorm(RmsNorm(1e-5))) == repr(AddNorm(make_norm("rms", 1e-5)))
    assert len({repr(AddNorm(norm)) for norm in (RmsNorm(1e-5), RmsNorm(1e-6), CenteredNorm(1e-5))}) == 3
