"""How far fewer bits move the default model's predictions,
against transformers in float32 on a fixed text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_triton_free.linear import can_pack
from kernels_triton_free.packed.whole_numbers import can_multiply_whole_numbers
from kernels_triton_free.quantized_linear import can_multiply_int4
from minivllm import LLM
from minivllm.bench.accuracy.passages import PASSAGES
from tests.parity_reference import engine_logits, reference_logits

TEXT = PASSAGES[0]
needs_int4 = pytest.mark.skipif(not can_multiply_int4(), reason="this CPU has no 4-bit operator")
needs_bfloat16 = pytest.mark.skipif(
    not can_pack(torch.bfloat16), reason="this CPU does not multiply bfloat16"
)
BF16, INT8, INT4 = {"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}
LIMITS = [
    pytest.param({}, 1e-9, 1e-5, id="float32"),
    pytest.param({"kv_cache_dtype": "bfloat16"}, 2e-4, 3e-3, id="KV in bfloat16"),
    pytest.param(BF16, 3e-3, 5e-3, id="bfloat16", marks=needs_bfloat16),
    pytest.param(INT8, 8e-3, 3e-2, id="int8"),
    pytest.param(INT8 | BF16, 8e-3, 3e-2, id="int8 in bfloat16", marks=needs_bfloat16),
    pytest.param(INT4, 1e-9, 1e-5, id="int4", marks=needs_int4),
    pytest.param(INT4 | BF16, 3e-3, 1e-2, id="int4 in bfloat16", marks=[needs_int4, needs_bfloat16]),
]
"""Settings, and what is allowed: the mean KL divergence [nats per token], and of the perplexity's logarithm.
The file is Q4_1, whose values int4 keeps exactly, where no code is compiled; int8 rounds them once more."""


def token_ids(llm: LLM) -> list[int]:
    ids = llm.get_tokenizer().encode(TEXT)
    assert 180 < len(ids) < 250
    return list(ids)


def divergence(expected: Tensor, logits: Tensor) -> float:
    """The mean of KL(expected || logits) over the rows [nats]."""
    p, q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def log_perplexity(logits: Tensor, ids: Sequence[int]) -> float:
    return float(F.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))


def check(path: Path, max_kl: float, max_difference: float, **settings: Any) -> None:
    with LLM(
        str(path), max_model_len=512, compile_in_background=False, **{"dtype": "float32", **settings}
    ) as llm:
        ids = token_ids(llm)
        _, logits = engine_logits(llm, ids, max_tokens=1)
    expected = reference_logits(path.parent, ids, path.name)
    logits = logits[: len(ids)]
    kl, difference = divergence(expected, logits), log_perplexity(logits, ids) - log_perplexity(expected, ids)
    assert math.exp(log_perplexity(expected, ids)) < 30, "a text that the model can read"
    assert kl <= max_kl and abs(difference) <= max_difference, (kl, difference)


@pytest.mark.parametrize(("settings", "max_kl", "max_difference"), LIMITS)
def test_predictions_stay_near_those_of_float32(
    smollm2_path: Path, settings: dict[str, Any], max_kl: float, max_difference: float
) -> None:
    check(smollm2_path, max_kl, max_difference, enforce_eager=True, **settings)


@needs_int4
@needs_bfloat16
@pytest.mark.slow
def test_what_compiled_code_rounds_to_8_bits_moves_predictions_little(smollm2_path: Path) -> None:
    check(smollm2_path, 1.2e-2, 2e-2, **INT4, dtype="bfloat16")


@needs_int4
@pytest.mark.skipif(not can_multiply_whole_numbers(), reason="this CPU has more than AVX2, or less")
@pytest.mark.slow
def test_whole_numbers_of_compiled_code_move_predictions_little(smollm2_path: Path) -> None:
    check(smollm2_path, 5e-3, 2e-2, **INT4)
