"""Engines with a connector say what engines without one say, and compute less."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from minivllm import LLM, LoRARequest, SamplingParams, register_connector
from minivllm.errors import ConfigError, RequestError
from minivllm.kv_cache.blocks.hashing import hash_block
from minivllm.messages import KVTransferStats, SchedulerStats
from minivllm.metrics.prometheus import ServerMetrics
from tests.kv_transfer import own_connector
from tests.kv_transfer.own_connector import ShelfConnector
from tests.lora.lora_adapters import random_adapter
from tests.parity_reference import random_prompts, run, tiny_llm

TinyModel = Callable[..., Path]

OFFLOAD: dict[str, Any] = {"kv_connector": "OffloadingConnector"}
OWN: dict[str, Any] = {"kv_connector": "tests.kv_transfer.own_connector:ShelfConnector"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
_WORDS = random_prompts((17, 25, 33, 12), seed=5)
PROMPTS = [*_WORDS, _WORDS[0] * 2, _WORDS[2][:24] + _WORDS[3], _WORDS[1] + _WORDS[1]]

LONG = PROMPTS[1] + PROMPTS[2] * 2 + PROMPTS[1]
"""With its answer as long as a request can be."""


def storage(path: Path, **more: Any) -> dict[str, Any]:
    extra = {"shared_storage_path": str(path)}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra, **more}


def block_files(path: Path, prompt: list[int]) -> list[Path]:
    """The files of a prompt's blocks, in the order of the blocks."""
    keys = [b""]
    for start in range(0, len(prompt) // 8 * 8, 8):
        keys.append(hash_block(keys[-1], prompt[start : start + 8]))
    return [next(path.rglob(f"{key.hex()}.safetensors")) for key in keys[1:]]


def transferred(llm: LLM) -> KVTransferStats:
    [stats] = llm.get_metrics().kv_transfer
    return stats


@pytest.fixture(autouse=True)
def empty_shelf() -> Iterator[None]:
    own_connector.SHELF.clear()
    yield
    own_connector.SHELF.clear()


@dataclass(frozen=True)
class Row:
    """Features that are on together. settings: of the engine, with a connector besides."""

    connector: str
    model: str = "llama"
    settings: dict[str, Any] = field(default_factory=dict)
    uses_adapters: bool = False

    def __str__(self) -> str:
        return "-".join(
            [self.connector, self.model, *self.settings, *(["adapters"] if self.uses_adapters else [])]
        )


NGRAM = {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "verification_cost": 0.0}}
CHUNKS, ASYNC, PROCESS = {"max_num_batched_tokens": 7}, {"async_scheduling": True}, {"multiprocess": True}
SCARCE = {"num_gpu_blocks_override": 1 + 12}
ROWS = [
    Row("host", settings=CHUNKS | SCARCE),
    Row("host", settings=ASYNC | SCARCE | {"scheduling_policy": "priority"}),
    Row("host", settings=NGRAM | SCARCE),
    Row("host", settings=CHUNKS | ASYNC | SCARCE | {"enable_lora": True, "max_loras": 1}, uses_adapters=True),
    Row("host", model="qwen2-window", settings=CHUNKS | {"num_gpu_blocks_override": 1 + 14}),
    Row("directory", settings=CHUNKS | ASYNC | SCARCE),
    Row("directory", settings=NGRAM | PROCESS),
    Row("directory", model="qwen2-window", settings=ASYNC),
    Row("own", settings=CHUNKS | SCARCE),
]


@pytest.fixture(scope="module")
def adapter(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> LoRARequest:
    return random_adapter(tmp_path_factory.mktemp("adapters") / "adapter", tiny_model("llama"), rank=8)


def lives(llm: LLM, adapter: LoRARequest | None, seed: int, num_aborts: int) -> dict[str, list[int]]:
    """Every prompt greedy and seeded, with and without a salt and an adapter, in a random order;
    some are aborted."""
    random, engine, answers = Random(seed), llm.llm_engine, {}
    adapted, num_prompts = ((0,), len(PROMPTS)) if adapter is None else ((0, 1), 3)
    wanted = list(itertools.product(range(num_prompts), (0, 1), (None, "tenant"), adapted))
    random.shuffle(wanted)
    doomed = set(random.sample(range(len(wanted)), num_aborts))
    for number, (p, s, salt, a) in enumerate(wanted):
        prompt: dict[str, Any] = {"prompt_token_ids": PROMPTS[p], "cache_salt": salt}
        name = f"{p} {s} {salt} {a}"
        engine.add_request(name, prompt, (GREEDY, SEEDED)[s], lora=adapter if a else None)
        for _ in range(random.randint(0, 5)):
            for output in engine.step():
                if output.finished:
                    answers[output.request_id] = list(output.outputs[0].token_ids)
        if number in doomed:
            engine.abort_request([name])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    return answers


_ANSWERS: dict[tuple[str, bool], dict[str, list[int]]] = {}


def plain_answers(model: Path, adapter: LoRARequest | None) -> dict[str, list[int]]:
    """Of an engine without a connector, with enough of everything and without aborts."""
    key = (str(model), adapter is not None)
    if key not in _ANSWERS:
        settings = {"enable_lora": True} if adapter is not None else {}
        with tiny_llm(model, **settings) as llm:
            _ANSWERS[key] = lives(llm, adapter, seed=0, num_aborts=0)
    return _ANSWERS[key]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_tokens_are_those_of_an_engine_without_a_connector(
    row: Row, tiny_model: TinyModel, tmp_path: Path, adapter: LoRARequest
) -> None:
    model, wanted = tiny_model(row.model), adapter if row.uses_adapters else None
    expected = plain_answers(model, wanted)
    config = {"host": OFFLOAD, "directory": storage(tmp_path), "own": OWN}[row.connector]
    with tiny_llm(model, max_num_seqs=4, max_model_len=72, kv_transfer_config=config, **row.settings) as llm:
        for seed in (1, 2):
            answers = lives(llm, wanted, seed, num_aborts=4)
            assert len(answers) >= len(expected) - 4
            assert answers == {name: expected[name] for name in answers}
            if row.connector == "host":
                continue
            assert llm.reset_prefix_cache()
        stats = transferred(llm)
        assert stats.num_loaded_blocks > 0 and stats.num_failed_blocks == 0
        llm.llm_engine.client.call("check_integrity")


def test_what_the_device_forgot_comes_back_from_host_memory(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("llama"), num_gpu_blocks_override=17, kv_transfer_config=OFFLOAD) as llm:
        [first] = run(llm, [PROMPTS[2]], GREEDY)
        run(llm, [LONG], GREEDY)  # takes all the blocks of the device
        computed = llm.get_metrics().num_computed_tokens
        [again] = run(llm, [PROMPTS[2]], GREEDY)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.num_cached_tokens == 32 and transferred(llm).hit_tokens == 32
        assert llm.get_metrics().num_computed_tokens - computed == 33 - 32 + 12 - 1


def test_a_preempted_request_comes_back_from_host_memory(tiny_model: TinyModel) -> None:
    """Both answers grow until one has to go; what it had is not computed again."""
    prompts, params = (
        [PROMPTS[2], PROMPTS[1]],
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    )
    results = []
    for config in (None, OFFLOAD):
        with tiny_llm(
            tiny_model("llama"), num_gpu_blocks_override=14, max_model_len=80, kv_transfer_config=config
        ) as llm:
            outputs = run(llm, prompts, params)
            results.append(([o.outputs[0].token_ids for o in outputs], llm.get_metrics()))
    (plain, without), (tokens, with_host) = results
    assert tokens == plain and without.num_preemptions > 0 and with_host.num_preemptions > 0
    assert with_host.kv_transfer[0].hit_tokens > 0
    assert with_host.num_computed_tokens < without.num_computed_tokens


def test_host_memory_is_bounded_and_keeps_what_was_used_last(tiny_model: TinyModel) -> None:
    config = {**OFFLOAD, "kv_connector_extra_config": {"cpu_bytes_to_use": 6144 * 5 + 6143}}
    with tiny_llm(tiny_model("llama"), num_gpu_blocks_override=17, kv_transfer_config=config) as llm:
        assert transferred(llm).block_bytes == 6144
        run(llm, [PROMPTS[2]], GREEDY)
        run(llm, [LONG], GREEDY)
        run(llm, [PROMPTS[2]], GREEDY)
        assert transferred(llm).hit_tokens == 0  # five places, all taken by what came between


def test_a_finished_load_wakes_the_core_and_nobody_polls(tiny_model: TinyModel) -> None:
    config = {**OWN, "kv_connector_extra_config": {"delay": 0.2}}
    with tiny_llm(tiny_model("llama"), kv_transfer_config=config) as llm:
        run(llm, [PROMPTS[2]], GREEDY)
        assert llm.reset_prefix_cache()
        core, steps = llm.llm_engine.client.core, []  # type: ignore[attr-defined]
        step = core.step
        core.step = lambda: steps.append(time.monotonic()) or step()
        [output] = run(llm, [PROMPTS[2]], GREEDY)
        assert output.num_cached_tokens == 32
        assert len(steps) <= 12 + 4, "a step for each token, and a few around the load of 0.8 s"


def test_what_does_not_arrive_is_recomputed_or_fails_as_the_policy_says(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The second of four blocks is broken: the first one is kept."""
    model = tiny_model("llama")
    with tiny_llm(model, kv_transfer_config=storage(tmp_path)) as llm:
        [expected] = run(llm, [PROMPTS[2]], GREEDY)
    second = block_files(tmp_path, PROMPTS[2])[1]
    for policy in ("fail", "recompute"):
        config = storage(tmp_path, kv_role="kv_consumer", kv_load_failure_policy=policy)
        second.write_bytes(second.read_bytes()[:-1])
        with tiny_llm(model, kv_transfer_config=config) as llm:
            [output] = run(llm, [PROMPTS[2]], GREEDY)
            stats = transferred(llm)
            assert (stats.num_loaded_blocks, stats.num_failed_blocks) == (1, 3)
            if policy == "fail":
                assert output.error is not None and "kv_load_failure_policy" in output.error
            else:
                assert output.outputs[0].token_ids == expected.outputs[0].token_ids
                assert output.num_cached_tokens == 8
            assert llm.reset_prefix_cache()


def test_a_connector_of_ones_own_is_registered_by_name(tiny_model: TinyModel) -> None:
    register_connector("shelf", ShelfConnector)
    with tiny_llm(tiny_model("llama"), kv_transfer_config={"kv_connector": "shelf"}) as llm:
        [first] = run(llm, [PROMPTS[2]], GREEDY)
        assert llm.reset_prefix_cache()
        [again] = run(llm, [PROMPTS[2]], GREEDY)
        assert again.num_cached_tokens == 32 and again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_sleeping_engine_gives_its_cache_back_and_travels_again_when_awake(tiny_model: TinyModel) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=OWN) as llm:
        [first] = run(llm, [PROMPTS[2]], GREEDY)
        llm.sleep(level=1)
        assert llm.collective_rpc("memory_bytes")[0]["kv_cache"] == 0
        llm.wake_up()
        [again] = run(llm, [PROMPTS[2]], GREEDY)
        assert again.num_cached_tokens == 32 and again.outputs[0].token_ids == first.outputs[0].token_ids
        with pytest.raises(RequestError, match="New weights do not go with"):
            llm.llm_engine.client.call("update_weights", "anywhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("host", "must be a dictionary"),
        ({}, "must be one of OffloadingConnector, SharedStorageConnector, LookupBufferConnector"),
        ({**OFFLOAD, "kv_rank": 0}, "has a key 'kv_rank'"),
        ({**OFFLOAD, "kv_role": "producer"}, "must be one of kv_producer, kv_consumer, kv_both"),
        ({**OFFLOAD, "kv_role": "kv_producer"}, "keeps blocks for its own engine"),
        ({**OFFLOAD, "kv_load_failure_policy": "retry"}, "must be one of recompute, fail"),
        ({**OFFLOAD, "kv_connector_extra_config": {"bytes": 1}}, "may hold: cpu_bytes_to_use"),
        (
            {**OFFLOAD, "kv_connector_extra_config": {"cpu_bytes_to_use": 10}},
            "one block of 8 tokens takes 6144",
        ),
        ({"kv_connector": "SharedStorageConnector"}, "shared_storage_path"),
        ({"kv_connector": "tests.kv_transfer.own_connector:SHELF"}, "subclass of minivllm.KVConnector"),
        ({"kv_connector": "nowhere:Nothing"}, "cannot be imported"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(tiny_model: TinyModel, config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llm(tiny_model("llama"), kv_transfer_config=config)


def test_a_connector_wants_the_prefix_cache(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="needs enable_prefix_caching"):
        tiny_llm(tiny_model("llama"), kv_transfer_config=OFFLOAD, enable_prefix_caching=False)


def test_transfers_are_spans_of_a_trace_and_loads_are_seen_in_steps(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = {**storage(tmp_path / "blocks"), "kv_role": "kv_both"}
    with tiny_llm(tiny_model("llama"), kv_transfer_config=config, profile=str(tmp_path / "traces")) as llm:
        run(llm, [PROMPTS[2]], GREEDY)
        assert llm.reset_prefix_cache()
        engine = llm.llm_engine
        engine.add_request("short", {"prompt_token_ids": PROMPTS[3]}, GREEDY)
        engine.step()
        engine.add_request("loads", {"prompt_token_ids": PROMPTS[2]}, GREEDY)
        while engine.has_unfinished_requests():
            engine.step()
        steps = engine.client.call("recent_steps", 0)
    assert any(step.loading and step.num_scheduled_tokens for step in steps)
    [file] = (tmp_path / "traces").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    spans = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert spans.count("load_kv") == 1 and spans.count("save_kv") > 1 and spans.count("write_kv") > 1


def test_metrics_say_what_travelled_by_tier() -> None:
    metrics = ServerMetrics()
    assert b"kv_transfer" not in metrics.exposition()
    host = KVTransferStats(
        tier="OffloadingConnector",
        block_bytes=100,
        hit_tokens=64,
        num_loaded_blocks=3,
        num_saved_blocks=5,
        num_failed_blocks=1,
        num_loads=4,
        loads_within=[(0.001, 1), (0.1, 3)],
        load_seconds=2.5,
    )
    tiers = [host, msgspec.structs.replace(host, tier="files", num_loads=9)]
    metrics.look_at_engines([SchedulerStats(kv_transfer=tiers)], [0])
    text = metrics.exposition().decode()
    for line in ("hit_tokens_total", "loaded_bytes_total", "saved_blocks_total", "failed_blocks_total"):
        assert f'minivllm_kv_transfer_{line}{{engine="0",tier="OffloadingConnector"}}' in text
        assert f'minivllm_kv_transfer_{line}{{engine="0",tier="files"}}' in text
    assert 'loaded_bytes_total{engine="0",tier="OffloadingConnector"} 300.0' in text
    for line in (
        'bucket{engine="0",le="0.1",tier="files"} 3.0',
        'bucket{engine="0",le="+Inf",tier="files"} 9.0',
        'sum{engine="0",tier="files"} 2.5',
    ):
        assert f"minivllm_kv_transfer_load_seconds_{line}" in text
