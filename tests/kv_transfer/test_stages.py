"""Stages of a pipeline each move the layers they have,
and a block is there when all workers of all stages have it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.kv_transfer.lookup.pipe import Address
from minivllm.simulation.ranks import virtual_llm
from tests.executor.test_pipeline_parallel import FAMILIES, FIVE
from tests.executor.test_tensor_parallel import PROMPTS, UNEVEN, arguments
from tests.kv_transfer.lookup_pair import block_keys, consumer, producer, scheduler_side, unix, wait_until
from tests.kv_transfer.test_connectors import OFFLOAD, storage, transferred
from tests.kv_transfer.test_many_workers import answers
from tests.kv_transfer.test_multi_connector import several

TinyModel = Callable[..., Path]
TWO, THREE = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3, "async_scheduling": True}
FOUR_WORKERS = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def five(tiny_model: TinyModel) -> Path:
    return tiny_model("llama-biases", **FIVE)


@pytest.fixture(scope="module")
def expected(five: Path) -> list[list[int]]:
    with LLM(**arguments(five)) as llm:
        return answers(llm, NUM_TOKENS)


@pytest.mark.parametrize(("tiers", "layout"), [("host", THREE), ("directory", TWO), ("both", FOUR_WORKERS)])
def test_what_comes_back_to_each_stage_gives_the_tokens_of_one_worker(
    five: Path, expected: list[list[int]], tmp_path: Path, tiers: str, layout: dict[str, Any]
) -> None:
    configs = {"host": OFFLOAD, "directory": storage(tmp_path), "both": several(OFFLOAD, storage(tmp_path))}
    given = arguments(five, kv_transfer_config=configs[tiers], num_gpu_blocks_override=10, **layout)
    with virtual_llm(**given) as llm:
        assert answers(llm, NUM_TOKENS) == expected
        for tier in llm.get_metrics().kv_transfer:
            # 3 KV heads of 16 values, K and V, float32, 5 layers, 16 tokens: of all workers together
            assert tier.block_bytes == 3 * 16 * 2 * 4 * 5 * 16
            assert tier.num_saved_blocks > 0 and tier.num_failed_blocks == 0
        assert sum(tier.num_loaded_blocks for tier in llm.get_metrics().kv_transfer) > 0
        llm.llm_engine.client.call("check_integrity")


@pytest.mark.parametrize("family", ["gemma3", pytest.param("deepseek-v2", marks=pytest.mark.slow)])
def test_a_stage_may_have_no_layer_of_a_group(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    given = arguments(tiny_model(family, **FAMILIES[family]), num_gpu_blocks_override=24)
    with LLM(**given) as llm:
        expected = answers(llm, 8)
    for _ in range(2):
        with virtual_llm(**given, kv_transfer_config=storage(tmp_path), pipeline_parallel_size=3) as llm:
            assert answers(llm, 8) == expected
            stats = transferred(llm)
            assert stats.num_failed_blocks == 0
            llm.llm_engine.client.call("check_integrity")
    assert stats.num_loaded_blocks > 0


def test_no_layout_ever_finds_what_another_one_saved(five: Path, tmp_path: Path) -> None:
    layouts: list[dict[str, Any]] = [{}, TWO, THREE, {"tensor_parallel_size": 2}, FOUR_WORKERS]
    tokens = []
    for num_known in (0, 4):
        for layout in layouts:
            with virtual_llm(**arguments(five, kv_transfer_config=storage(tmp_path), **layout)) as llm:
                [output] = llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
                assert output.num_cached_tokens == 16 * num_known, layout
                tokens.append(output.outputs[0].token_ids)
    assert tokens == tokens[:1] * len(tokens)
    assert len(list(tmp_path.iterdir())) == len(layouts)


def test_a_part_that_one_stage_has_damaged_fails_for_all(five: Path, tmp_path: Path) -> None:
    given = arguments(five, kv_transfer_config=storage(tmp_path), **TWO)
    prompt = PROMPTS[3]["prompt_token_ids"]
    with virtual_llm(**given) as llm:
        [first] = llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    damaged, lost = (next(tmp_path.rglob(f"rank1of2/{block_keys(prompt, 16)[n].hex()}*")) for n in (1, 3))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    lost.unlink()
    with virtual_llm(**given) as llm:
        [again] = llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
        stats = transferred(llm)
        assert (stats.hit_tokens, stats.num_loaded_blocks, stats.num_failed_blocks) == (48, 1, 2)
        assert again.num_cached_tokens == 16 and again.outputs[0].token_ids == first.outputs[0].token_ids
        llm.llm_engine.client.call("check_integrity")


@pytest.mark.parametrize("layout", [TWO, {"tensor_parallel_size": 2}], ids=["stages", "divided"])
def test_every_worker_takes_its_part_from_that_of_the_same_rank_in_another_engine(
    tiny_model: TinyModel, tmp_path: Path, layout: dict[str, Any]
) -> None:
    given, own, keys = arguments(tiny_model("llama-biases", **UNEVEN), **layout), unix(tmp_path), block_keys
    wanted = keys(PROMPTS[3]["prompt_token_ids"], 16)[:4]
    with (
        virtual_llm(**given, kv_transfer_config=producer(own)) as first,
        virtual_llm(**given, kv_transfer_config=consumer(own)) as second,
    ):
        [expected] = first.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
        side = scheduler_side(second)
        wait_until(lambda: all(side.holds(key) for key in wanted))
        [output] = second.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.num_cached_tokens == 64 and transferred(second).num_loaded_blocks == 4
        side._catalogue._producers[0][1].held.clear()  # the second worker's part has been dropped
        assert not any(side.holds(key) for key in wanted)
        second.llm_engine.client.call("check_integrity")
    assert not list(tmp_path.glob("kv*"))


def test_an_engine_with_another_layout_is_turned_away(
    tiny_model: TinyModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, own = tiny_model("llama-biases", **UNEVEN), unix(tmp_path)
    with (
        caplog.at_level(logging.WARNING),
        virtual_llm(**arguments(model, kv_transfer_config=producer(own), **TWO)),
        virtual_llm(**arguments(model, kv_transfer_config=consumer(own))),
    ):
        wait_until(lambda: "pipeline_parallel_size must be equal" in caplog.text)
    assert "it has another model, version or settings" in caplog.text


def test_the_workers_of_an_engine_listen_side_by_side() -> None:
    for text, beside in (
        ("unix:///run/kv", "unix:///run/kv.2"),
        ("tcp://host:7000", "tcp://host:7002"),
        ("tcp://[::1]:7000", "tcp://[::1]:7002"),
    ):
        address = Address.parse(text)
        assert address.beside(0) is address and address.beside(2) == Address.parse(beside)
    for text in ("unix:///" + "x" * 98, "tcp://host:65535"):
        with pytest.raises(ConfigError, match="is no address of a connector"):
            Address.parse(text).beside(1)
