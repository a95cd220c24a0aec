"""Several connectors as one: hits are composed, saves go to all, and every tier is counted by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, EngineArgs, register_connector
from minivllm.errors import ConfigError
from minivllm.messages import KVTransferStats
from tests.kv_transfer.own_connector import ShelfConnector
from tests.kv_transfer.test_connectors import (
    GREEDY,
    OFFLOAD,
    PROMPTS,
    block_files,
    lives,
    plain_answers,
    storage,
)
from tests.parity_reference import run, tiny_llm

TinyModel = Callable[..., Path]
PROMPT = PROMPTS[2]
"""Four blocks that can be found."""
BLOCK_BYTES = 6144


def host(num_blocks: int) -> dict[str, Any]:
    return {**OFFLOAD, "kv_connector_extra_config": {"cpu_bytes_to_use": num_blocks * BLOCK_BYTES}}


def several(*connectors: dict[str, Any], **more: Any) -> dict[str, Any]:
    extra = {"connectors": list(connectors)}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra, **more}


def tiers(llm: LLM) -> dict[str, KVTransferStats]:
    return {stats.tier: stats for stats in llm.get_metrics().kv_transfer}


def blocks(llm: LLM) -> list[tuple[int, int, int]]:
    """Of every tier: hits, loaded, failed."""
    return [
        (stats.hit_tokens // 8, stats.num_loaded_blocks, stats.num_failed_blocks)
        for stats in llm.get_metrics().kv_transfer
    ]


def test_a_hit_begins_in_one_tier_and_goes_on_in_the_next(tiny_model: TinyModel, tmp_path: Path) -> None:
    config = several(host(2), storage(tmp_path))
    with tiny_llm(tiny_model("llama"), kv_transfer_config=config) as llm:
        [first] = run(llm, [PROMPT], GREEDY)
        forget(llm)
        [again] = run(llm, [PROMPT], GREEDY)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids and again.num_cached_tokens == 32
        (in_host, host_loaded, _), (in_files, files_loaded, _) = blocks(llm)
        assert in_host == host_loaded >= 1 and in_files == files_loaded >= 1 and in_host + in_files == 4
        found = tiers(llm)
        assert list(found) == ["OffloadingConnector", "SharedStorageConnector"]
        assert (
            found["OffloadingConnector"].num_saved_blocks
            > 0
            < found["SharedStorageConnector"].num_saved_blocks
        )
        assert (
            found["SharedStorageConnector"].num_loads == 1
            and found["SharedStorageConnector"].load_seconds > 0
        )
        assert llm.reset_prefix_cache()  # and what the host has, but not the files
        run(llm, [PROMPT], GREEDY)
        assert blocks(llm)[0][0] == in_host and blocks(llm)[1][0] == in_files + 4


def forget(llm: LLM) -> None:
    """What the device has, as if others had taken its blocks."""
    for pool in llm.llm_engine.client.core.scheduler.kv_cache_manager.pools:  # type: ignore[attr-defined]
        for block in list(pool.free_queue):
            pool.forget(block)


@pytest.mark.parametrize(("bad", "expected"), [(None, (2, 2)), (1, (1, 0)), (3, (2, 1))])
def test_a_piece_that_fails_keeps_what_lies_before_it(
    tiny_model: TinyModel, tmp_path: Path, bad: int | None, expected: tuple[int, int]
) -> None:
    """Two directories: the second one lacks the first two blocks, the first one the others."""
    one, two = tmp_path / "one", tmp_path / "two"
    model, config = tiny_model("llama"), several(storage(one), storage(two))
    with tiny_llm(model, kv_transfer_config=config) as llm:
        [first] = run(llm, [PROMPT], GREEDY)
    for path, kept in ((one, (0, 1)), (two, (2, 3))):
        for index, file in enumerate(block_files(path, PROMPT)):
            if index not in kept:
                file.unlink()
            elif index == bad:
                file.write_bytes(file.read_bytes()[:-1])
    with tiny_llm(model, kv_transfer_config={**config, "kv_role": "kv_consumer"}) as llm:
        [again] = run(llm, [PROMPT], GREEDY)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.num_cached_tokens == 8 * sum(expected)
        assert list(tiers(llm)) == ["SharedStorageConnector", "SharedStorageConnector 2"]
        assert [(loaded, failed) for _, loaded, failed in blocks(llm)] == [
            (expected[0], 2 - expected[0]),
            (expected[1], 2 - expected[1] if bad == 3 else 0),
        ]
        llm.llm_engine.client.call("check_integrity")


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 7}, {"async_scheduling": True}], ids=str)
def test_tokens_are_those_of_an_engine_without_a_connector(
    tiny_model: TinyModel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model, config = tiny_model("llama"), several(host(9), storage(tmp_path))
    expected = plain_answers(model, None)
    scarce = {"max_num_seqs": 4, "max_model_len": 72, "num_gpu_blocks_override": 1 + 12}
    with tiny_llm(model, kv_transfer_config=config, **scarce, **settings) as llm:
        answers = lives(llm, None, seed=1, num_aborts=4)
        assert answers == {name: expected[name] for name in answers} and len(answers) >= len(expected) - 4
        _, loaded, failed = map(sum, zip(*blocks(llm)))  # how much each tier still holds depends on the clock
        assert loaded > 0 and not failed
        llm.llm_engine.client.call("check_integrity")


def test_a_connector_of_ones_own_goes_to_another_process_by_its_path(tmp_path: Path) -> None:
    register_connector("shelf", ShelfConnector)
    config = several({"kv_connector": "shelf"}, storage(tmp_path))
    args = EngineArgs(model="m", kv_transfer_config=config).for_another_process()
    assert args.kv_transfer_config == several(
        {"kv_connector": "tests.kv_transfer.own_connector:ShelfConnector"}, storage(tmp_path)
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (several(), "is empty"),
        ({"kv_connector": "MultiConnector"}, "connectors"),
        (several(several(OFFLOAD)), "name its connectors in the one list"),
        (several({**OFFLOAD, "kv_load_failure_policy": "fail"}), "put it beside 'MultiConnector'"),
        (several({"kv_connector": "Nothing"}), "must be one of OffloadingConnector"),
        (several({}), "must be one of OffloadingConnector"),
        (several(OFFLOAD, kv_role="kv_consumer"), "keeps blocks for its own engine"),
        (several({"kv_connector": "SharedStorageConnector"}), "shared_storage_path"),
        (several(host(0)), "must be at least 1"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(tiny_model: TinyModel, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llm(tiny_model("llama"), kv_transfer_config=config)
