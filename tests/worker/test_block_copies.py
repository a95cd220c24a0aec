"""Blocks of the KV cache are copied whole, whatever their layout,
before anything in a step writes into the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels_triton_free.strips.layout import strip_shapes
from minivllm import LLM
from minivllm.batch.layer_caches import copy_blocks
from minivllm.messages import BlockCopy, KVConnectorMetadata, SchedulerOutput
from tests.parity_reference import random_prompts, tiny_llm

TinyModel = Callable[..., Path]
K_STRIPS, V_STRIPS = strip_shapes(64, 2, 32, torch.bfloat16)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((8, 2, 16), torch.float32),
        ((8, 2, 16), torch.float8_e4m3fn),
        ((8, 2, 16), torch.float8_e5m2),
        ((8, 1, 0), torch.float32),
        (K_STRIPS, torch.bfloat16),
        (V_STRIPS, torch.bfloat16),
    ],
    ids=[
        "plain",
        "8 bits, finer",
        "8 bits, coarser",
        "values that the keys hold",
        "strips of K",
        "strips of V",
    ],
)
def test_whole_blocks_are_copied_bit_by_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """All sources are read before any target is written: block 3 is both."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn((6, *shape), generator=generator).to(dtype)
    cache = before.clone()
    copy_blocks([cache], np.array([3, 1, 1]), np.array([5, 3, 4]))
    expected = before[[0, 1, 2, 1, 1, 3]]
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_a_step_saves_snapshots_then_copies_then_begins_loads_and_then_computes(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config={"kv_connector": "OffloadingConnector"}) as llm:
        worker = worker_of(llm)
        calls: list[str] = []
        for owner, name in (
            (worker._connector, "save_snapshots"),
            (worker.runner, "copy_blocks"),
            (worker._connector, "start_load_kv"),
            (worker.runner, "launch"),
            (worker._connector, "wait_for_save"),
        ):
            original = getattr(owner, name)
            monkeypatch.setattr(owner, name, recorder(calls, name, original))
        copies = [BlockCopy(group=0, source=1, target=2)]
        worker.execute(SchedulerOutput(block_copies=copies, kv_connector_metadata=KVConnectorMetadata()))
        assert calls == ["save_snapshots", "copy_blocks", "start_load_kv", "launch", "wait_for_save"]


def recorder(calls: list[str], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        calls.append(name)
        return original(*args)

    return call


def worker_of(llm: LLM) -> Any:
    return llm.llm_engine.client.core.executor.worker  # type: ignore[attr-defined]


def test_every_layer_of_a_group_has_the_copy_and_layers_of_other_groups_have_not(
    tiny_model: TinyModel,
) -> None:
    model = tiny_model("qwen2-window", num_hidden_layers=4, sliding_window=16)
    with tiny_llm(model) as llm:
        llm.generate([{"prompt_token_ids": random_prompts((60,))[0]}], use_tqdm=False)
        runner = worker_of(llm).runner
        before = [[tensor.clone() for tensor in cache[:2]] for cache in runner.paged_model.caches]
        with torch.inference_mode():
            runner.copy_blocks(
                [BlockCopy(group=1, source=1, target=7), BlockCopy(group=1, source=2, target=9)]
            )
        for layer, (cache, old) in enumerate(zip(runner.paged_model.caches, before)):
            is_copied = layer in runner.limits.groups[1].layers
            for tensor, its_old in zip(cache[:2], old):
                expected = its_old.clone()
                if is_copied:
                    expected[[7, 9]] = its_old[[1, 2]]
                assert torch.equal(tensor, expected) and its_old[1].any()
