"""The choices for each device, as messages and tests can ask for them without having the device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.device.policy import DevicePolicy
from tests.attention.backends import CPU_POLICY, CUDA_POLICY

BF16, FP32 = torch.bfloat16, torch.float32


def test_a_cpu_attends_in_the_dtype_of_its_cache_and_a_gpu_in_that_of_the_weights() -> None:
    assert CPU_POLICY.attention_dtype(BF16, FP32) == FP32
    assert CUDA_POLICY.attention_dtype(BF16, torch.float8_e5m2) == BF16


def test_only_a_cpu_with_products_of_bfloat16_computes_prompts_in_it() -> None:
    policies = DevicePolicy(type="cpu"), DevicePolicy(type="cpu", multiplies_bfloat16=True), CUDA_POLICY
    assert [policy.prompt_attention_dtype(BF16) for policy in policies] == [FP32, BF16, BF16]
    assert [policy.prompt_attention_dtype(torch.float16) for policy in policies] == [
        FP32,
        FP32,
        torch.float16,
    ]


@given(st.integers(1, 600))
def test_decode_batches_of_a_gpu_hold_every_batch_and_waste_less_than_half(max_num_seqs: int) -> None:
    batches = CUDA_POLICY.decode_batches(max_num_seqs)
    assert batches == sorted(set(batches)) and batches[-1] == max_num_seqs
    for size in range(1, max_num_seqs + 1):
        assert next(batch for batch in batches if batch >= size) < 2 * size
    assert CPU_POLICY.decode_batches(max_num_seqs) == []


def test_a_tile_of_a_prompt_has_the_rows_that_the_kernel_wants() -> None:
    plain, fast = DevicePolicy(type="cpu"), DevicePolicy(type="cpu", multiplies_bfloat16=True)
    for policy, dtype in ((plain, FP32), (fast, FP32)):
        assert [policy.query_tile_size(group, dtype) * group for group in (1, 2)] == [64, 64]
    assert [fast.query_tile_size(group, BF16) * group for group in (1, 2)] == [64, 128]
    assert CUDA_POLICY.query_tile_size(1, BF16) == CUDA_POLICY.query_tile_size(8, BF16) == 128
    assert [policy.keys_together(BF16) for policy in (plain, fast, CUDA_POLICY)] == [1, 128, 1]
    assert fast.keys_together(FP32) == 1


def test_the_policy_of_this_machine_is_that_of_its_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda is_there=is_there: is_there)
        policy = DevicePolicy.of(torch.device("cpu"))
        assert policy.on_cpu and policy.multiplies_bfloat16 == is_there
