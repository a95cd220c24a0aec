"""Kernel options of decode attention: which ones reach FlexAttention for a device and a shape, and from where."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.attention import FlexAttention
from minivllm.attention.decode_options import CHOICES, DecodeOptions, TunedCase, add_to_table, read_table, table_path
from minivllm.compilation.regions import Region
from tests.attention.backends import CUDA_POLICY, new_context
from tests.attention.random_batches import BatchShape, new_batch

GPU = "NVIDIA Made-up 9000"
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path))


def tuned(batch_kv_heads: int, options: dict[str, int], **changes: Any) -> TunedCase:
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "head_dim": 128,
        "group": 4,
        "context": 4096,
        "page_size": 64,
        "gb_per_second": 3000.0,
        "untuned_gb_per_second": 2000.0,
    }
    return TunedCase(batch_kv_heads=batch_kv_heads, options=options, **values | changes)


def options_that_reach_flex_attention(options: DecodeOptions, batches: list[int], kv_heads: int) -> dict[str, Any]:
    """Region -> kernel_options of the paged_flex_attention in it, of a backend for a CUDA device."""
    found: dict[str, Any] = {}
    depends_on: dict[str, str] = {}

    def compile_region(region: Region) -> Callable:
        assert isinstance(region.function, partial)
        found[region.name] = region.function.keywords["kernel_options"]
        depends_on[region.name] = repr(region.constants)
        return region.function

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeOptions, "of", lambda device: options)
        shape = BatchShape(max_num_seqs=max(batches), block_size=64)
        FlexAttention(
            new_context(
                new_batch(shape),
                shape,
                [None],
                kv_heads=kv_heads,
                head_dim=128,
                cache_dtype=BF16,
                verify_size=4,
                compile_region=compile_region,
                policy=CUDA_POLICY,
            )
        )
    assert all(repr(value) in depends_on[name] for name, value in found.items()), "compiled code depends on them"
    return found


def test_each_decode_batch_gets_the_options_tuned_nearest_to_it() -> None:
    few, many = {"SPLIT_KV": 32, "num_warps": 4}, {"BLOCK_N": 32, "SPLIT_KV": 1}
    add_to_table(GPU, [tuned(8, few), tuned(512, many)])
    found = options_that_reach_flex_attention(DecodeOptions.of_gpu(GPU), [2, 8, 16, 64], kv_heads=8)
    assert found["decode attention of 2"] == found["decode attention of 8"] == few, "16 and 64: nearer to 8 than to 512"
    assert found["decode attention of 16"] == found["decode attention of 64"] == many, "128 and 512: nearer to 512"
    assert found["verify attention"] is found["prompt attention"] is None, "other kernels have other options"


def test_a_device_that_was_never_tuned_gets_what_pytorch_chooses() -> None:
    found = options_that_reach_flex_attention(DecodeOptions.of_gpu(GPU), [2], kv_heads=8)
    assert found["decode attention of 2"] is None
    assert DecodeOptions.of(torch.device("cpu")).choose(batch_kv_heads=2, head_dim=64, dtype=BF16, block_size=64) == {}


def test_what_was_tuned_for_other_heads_dtypes_or_pages_is_not_used() -> None:
    add_to_table(GPU, [tuned(8, {"BLOCK_N": 64})])
    choose = partial(DecodeOptions.of_gpu(GPU).choose, batch_kv_heads=8)
    assert choose(head_dim=128, dtype=BF16, block_size=64) == {"BLOCK_N": 64}
    assert choose(head_dim=128, dtype=BF16, block_size=256) == {"BLOCK_N": 64}
    assert choose(head_dim=64, dtype=BF16, block_size=64) == {}
    assert choose(head_dim=128, dtype=torch.float32, block_size=64) == {}
    assert choose(head_dim=128, dtype=BF16, block_size=32) == {}, "a block would reach into the next page"


@given(st.lists(st.integers(1, 4096), min_size=1, max_size=6, unique=True), st.integers(1, 4096))
def test_nearest_is_by_ratio(sizes: list[int], wanted: int) -> None:
    cases = tuple(tuned(size, {"SPLIT_KV": 1, "num_warps": index}) for index, size in enumerate(sizes))
    chosen = DecodeOptions("", cases).choose(batch_kv_heads=wanted, head_dim=128, dtype=BF16, block_size=64)
    distance = abs(math.log(sizes[chosen["num_warps"]] / wanted))
    assert all(distance <= abs(math.log(size / wanted)) + 1e-12 for size in sizes)


def test_of_equally_near_cases_the_longest_context_counts() -> None:
    cases = tuple(
        tuned(8, {"SPLIT_KV": split}, context=context) for split, context in ((2, 512), (16, 8192), (4, 1024))
    )
    chosen = DecodeOptions("", cases).choose(batch_kv_heads=8, head_dim=128, dtype=BF16, block_size=64)
    assert chosen == {"SPLIT_KV": 16}


def test_a_second_tuning_replaces_the_same_shapes_and_keeps_the_others() -> None:
    add_to_table(GPU, [tuned(8, {"SPLIT_KV": 2}), tuned(16, {"SPLIT_KV": 4})])
    path = add_to_table(GPU, [tuned(8, {"SPLIT_KV": 8}), tuned(8, {"SPLIT_KV": 1}, head_dim=64)])
    table = read_table(GPU)
    assert table is not None and table.device == GPU and table.torch == torch.__version__
    assert [(case.head_dim, case.batch_kv_heads, case.options) for case in table.cases] == [
        (128, 8, {"SPLIT_KV": 8}),
        (128, 16, {"SPLIT_KV": 4}),
        (64, 8, {"SPLIT_KV": 1}),
    ]
    assert [file.name for file in path.parent.iterdir()] == ["NVIDIA_Made-up_9000.json"], "nothing half-written is left"


def test_a_table_that_cannot_be_replaced_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    path = add_to_table(GPU, [tuned(8, {"SPLIT_KV": 2})])
    before = path.read_bytes()

    def fail(source: object, target: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        add_to_table(GPU, [tuned(8, {"SPLIT_KV": 4})])
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "truncated": lambda table: json.dumps(table)[:-20],
    "no object": lambda table: [],
    "older schema": lambda table: table | {"schema_version": 1},
    "another device": lambda table: table | {"device": "NVIDIA Other"},
    "negative head_dim": lambda table: table | {"cases": [table["cases"][0] | {"head_dim": -64}]},
    "unknown option": lambda table: table | {"cases": [table["cases"][0] | {"options": {"PRESCALE_QK": 1}}]},
    "impossible value": lambda table: table | {"cases": [table["cases"][0] | {"options": {"BLOCK_N": 7}}]},
    "text as a value": lambda table: table | {"cases": [table["cases"][0] | {"options": {"BLOCK_N": "64"}}]},
    "not UTF-8": lambda table: b"\xff\xfe",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_table_is_a_warning_and_the_defaults(
    damage: Callable[[dict[str, Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    path = add_to_table(GPU, [tuned(8, {name: values[0] for name, values in CHOICES.items()})])
    damaged = damage(json.loads(path.read_bytes()))
    path.write_bytes(
        damaged
        if isinstance(damaged, bytes)
        else (damaged if isinstance(damaged, str) else json.dumps(damaged)).encode()
    )
    with caplog.at_level(logging.WARNING):
        options = DecodeOptions.of_gpu(GPU)
    assert options.cases == ()
    [record] = caplog.records
    assert str(path) in record.getMessage() and "bench attention --tune" in record.getMessage()


def test_no_table_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_table(GPU) is None and not caplog.records


def test_env_tells_where_the_options_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm.cli.engine.env import collect

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shown = collect()["defaults"]["decode_options"]
    assert shown["value"] == "PyTorch's own" and shown["why"].startswith(f"not tuned on {GPU}: bench attention --tune")
    add_to_table(GPU, [tuned(8, {"SPLIT_KV": 2})])
    shown = collect()["defaults"]["decode_options"]
    assert shown["value"] == "tuned"
    assert shown["why"] == f"1 cases tuned on {GPU} with torch {torch.__version__}, in {table_path(GPU)}"
