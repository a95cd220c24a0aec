"""Layers that keep a state, and a connector:
a snapshot travels with the blocks in front of it, or nothing does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file

from minivllm import LLM, SamplingParams
from minivllm.config import KVTransferConfig
from minivllm.errors import ConfigError
from minivllm.kv_cache.blocks.hashing import state_name
from minivllm.kv_cache.specs import GroupSpec, one_group
from minivllm.kv_transfer.connector import BlockStore, KVConnectorScheduler, TransferContext
from minivllm.kv_transfer.inbox import KVConnectorOutput
from minivllm.kv_transfer.loads import Load
from minivllm.messages import BlockTransfer, ModelRunnerOutput, SchedulerOutput
from minivllm.simulation.ranks import virtual_llm
from minivllm.specs.caches import LayerCache
from tests.kv_transfer.lookup_pair import block_keys, consumer, producer, unix, wait_for_blocks
from tests.kv_transfer.test_connectors import OFFLOAD, OWN, storage, transferred
from tests.kv_transfer.test_lmcache import Server, lmcache
from tests.kv_transfer.test_multi_connector import forget, several
from tests.kv_transfer.test_shared_storage import SCRIPT
from tests.parity_reference import random_prompts, run, runner_of, tiny_llm, tokens_of
from tests.scheduler.test_state_groups import POISON, Life

TinyModel = Callable[..., Path]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = random_prompts((17, 25, 41, 12), seed=5)
PROMPTS += [PROMPTS[2][:24] + PROMPTS[3], PROMPTS[1] + PROMPTS[0]]
FAMILIES = ("granite-hybrid", "qwen3-next", "lfm2")


class Store(BlockStore):
    """Scheduler's side. Names stay known when what they name was lost, until a load fails."""

    def __init__(self, context: TransferContext) -> None:
        super().__init__(context)
        self.names: set[bytes] = set()

    def holds(self, key: bytes) -> bool:
        return key in self.names

    def update_connector_output(self, load: Load, num_valid_blocks: int) -> None:
        self.names.difference_update(load.keys[num_valid_blocks : num_valid_blocks + 1])
        state = self.state_of(load)
        if state is not None and num_valid_blocks < len(load.keys):
            self.names.discard(state)


class TravellingLife(Life):
    """States and blocks travel. What is loaded may be written at any time from the begin of its load on;
    what is free and unknown holds poison."""

    travels = True

    def make_connector(self) -> KVConnectorScheduler:
        spec = GroupSpec(kind="state", layers=(9,), block_size=self.block_size, block_bytes=1)
        groups = [one_group(1, self.block_size, 1)] * (len(self.manager.groups) - 1) + [spec]
        config = KVTransferConfig(kv_connector="simulated")
        self.store = Store(
            TransferContext(config=config, options=None, groups=groups, block_bytes=1, state_bytes=1)
        )
        self.kept: dict[bytes, tuple[int, ...]] = {}
        self.loads: list[BlockTransfer] = []
        self.num_loaded = self.num_failed = 0
        return self.store

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        metadata, contents = step.kv_connector_metadata, self.worker.contents
        for save in metadata.snapshots if metadata else ():
            for key, slot in zip(save.keys, save.block_ids[self.worker.group], strict=True):
                assert (
                    contents[slot] != POISON and self.kept.setdefault(key, contents[slot]) == contents[slot]
                )
                self.store.names.add(key)
        for load in metadata.loads if metadata else ():
            self.loads.append(load)
            slots = load.block_ids[self.worker.group]
            assert slots[0] and not any(slots[1:]), "the state comes first"
            contents[slots[0]] = POISON
        output = super().execute(step)
        for save in metadata.saves if metadata else ():
            assert not any(save.block_ids[self.worker.group]) and all(save.block_ids[0])
            self.store.names.update(save.keys)
        return output

    def happen(self, settles: bool) -> None:
        chance = self.random.random()
        if self.loads and (settles or chance < 0.3):
            load = self.loads.pop(self.random.randrange(len(self.loads)))
            num_good = self.random.choice([0, 1, len(load.keys), len(load.keys), len(load.keys)])
            if num_good and load.keys[0] in self.kept:
                self.worker.contents[load.block_ids[self.worker.group][0]] = self.kept[load.keys[0]]
            else:
                num_good = 1
            self.num_loaded, self.num_failed = (
                self.num_loaded + (num_good > 1),
                self.num_failed + (num_good == 1),
            )
            self.scheduler.update_connector_output(
                KVConnectorOutput(finished_recving={load.transfer_id: num_good - 1})
            )
        elif chance < 0.45:
            for pool in self.manager.pools:
                for block in list(pool.free_queue)[self.random.randint(0, 3) :]:
                    pool.forget(block)
        elif chance < 0.5:
            for key in self.random.sample(sorted(self.kept), len(self.kept) // 2):
                del self.kept[key]
        asked = {slot.block_id for _, slot in self.states.snapshots or ()}
        for block in self.states.pool.free_queue:
            if block.block_hash is None and block.block_id not in asked:
                self.worker.contents[block.block_id] = POISON


@pytest.mark.parametrize("seed", range(20))
def test_every_step_reads_the_state_of_the_tokens_before_it(seed: int) -> None:
    TravellingLife(Random(seed)).run_and_check(250)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 250))
def test_every_step_reads_the_state_of_the_tokens_before_it_for_long(seed: int) -> None:
    TravellingLife(Random(seed)).run_and_check(2000)


def test_such_lives_meet_loads_failures_and_preempted_requests() -> None:
    lives = [TravellingLife(Random(seed)).run_and_check(250) for seed in range(20, 32)]
    assert sum(life.num_loaded for life in lives) > 20 and sum(life.num_failed for life in lives) > 10
    assert sum(life.scheduler.stats().num_preemptions for life in lives) > 5
    assert sum(life.num_hit_tokens for life in lives) > 100


@torch.inference_mode()
def poison(llm: LLM) -> None:
    """Slots of states hold no numbers, but for the null slot, which holds zeros, and the one for padding."""
    for cache in runner_of(llm).paged_model.caches:
        for tensor in () if isinstance(cache, LayerCache) else cache:
            tensor[1:-1] = float("nan")


@pytest.mark.parametrize("tier", ["host", "directory"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_evicted_comes_back_with_its_state(
    tiny_model: TinyModel, tmp_path: Path, family: str, tier: str
) -> None:
    model = tiny_model(family)
    with tiny_llm(model) as llm:
        expected = tokens_of(run(llm, PROMPTS, GREEDY))
    config = OFFLOAD if tier == "host" else storage(tmp_path)
    settings = {"max_num_seqs": 3, "num_gpu_blocks_override": 64, "max_num_batched_tokens": 21}
    with tiny_llm(model, kv_transfer_config=config, async_scheduling=tier == "host", **settings) as llm:
        poison(llm)
        assert tokens_of(run(llm, PROMPTS, GREEDY)) == expected
        forget(llm)
        outputs = run(llm, PROMPTS, GREEDY)
        assert tokens_of(outputs) == expected
        stats = transferred(llm)
        assert stats.num_loaded_blocks > 0 and stats.num_failed_blocks == 0
        assert outputs[2].num_cached_tokens == 40, "the last full block of the prompt"
        llm.llm_engine.client.call("check_integrity")


def test_another_engine_goes_on_from_what_this_one_saved(tiny_model: TinyModel, tmp_path: Path) -> None:
    """A second turn, from the state at the end of the first one;
    keys and values without that state are of no use."""
    model, config = tiny_model("granite-hybrid"), storage(tmp_path)
    with tiny_llm(model, kv_transfer_config=config, num_gpu_blocks_override=1 + 16) as llm:
        assert llm.llm_engine.client.core.scheduler.kv_cache_manager.pools[-1].num_blocks == 1 + 2  # type: ignore[attr-defined]
        [first] = run(llm, [PROMPTS[2]], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        # Of 49 tokens 48 are computed. Their state is saved with a step that writes into both of the two
        # slots.
        run(llm, [PROMPTS[3], PROMPTS[0]], GREEDY)
    turn = PROMPTS[2] + list(first.outputs[0].token_ids) + PROMPTS[3]
    with tiny_llm(model) as llm:
        expected = tokens_of(run(llm, [turn], GREEDY))
    names = block_keys(turn)
    for length in (48, 40, 0):
        with tiny_llm(model, kv_transfer_config={**config, "kv_role": "kv_consumer"}) as llm:
            poison(llm)
            [output] = run(llm, [turn], GREEDY)
            assert tokens_of([output]) == expected
            assert output.num_cached_tokens == length == 8 * transferred(llm).num_loaded_blocks
        if length:
            next(tmp_path.rglob(f"{state_name(names[length // 8 - 1]).hex()}.safetensors")).unlink()


def prompt_names(prompt: list[int]) -> list[bytes]:
    """What another engine needs to begin with the last token of a prompt:
    its blocks and the state behind them."""
    names = block_keys(prompt)[: (len(prompt) - 1) // 8]
    return [*names, state_name(names[-1])]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_engine_goes_on_from_the_states_of_a_prefill_engine(
    tiny_model: TinyModel, tmp_path: Path, family: str
) -> None:
    model, first_token = tiny_model(family), SamplingParams(temperature=0.0, max_tokens=1)
    with tiny_llm(model) as llm:
        expected = tokens_of(run(llm, PROMPTS, GREEDY))
    with (
        tiny_llm(model, kv_transfer_config=producer(unix(tmp_path)), max_num_batched_tokens=21) as first,
        tiny_llm(model, kv_transfer_config=consumer(unix(tmp_path)), async_scheduling=True) as second,
    ):
        poison(second)
        began = tokens_of(run(first, PROMPTS, first_token))
        assert began == [answer[:1] for answer in expected]
        wait_for_blocks(second, [name for prompt in PROMPTS for name in prompt_names(prompt)])
        outputs = run(second, PROMPTS, GREEDY)
        assert tokens_of(outputs) == expected
        assert [output.num_cached_tokens for output in outputs] == [
            (len(prompt) - 1) // 8 * 8 for prompt in PROMPTS
        ]
        stats = transferred(second)
        assert stats.num_loaded_blocks > 0 and stats.num_failed_blocks == 0
        second.llm_engine.client.call("check_integrity")


def test_a_state_that_a_prefill_engine_has_dropped_is_recomputed(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The consumer has heard of it, and of the blocks; what it gets is nothing."""
    model, prompt = tiny_model("granite-hybrid"), PROMPTS[2]
    with (
        tiny_llm(model, kv_transfer_config=producer(unix(tmp_path))) as first,
        tiny_llm(model, kv_transfer_config=consumer(unix(tmp_path))) as second,
    ):
        poison(second)
        expected = tokens_of(run(first, [prompt], GREEDY))
        wait_for_blocks(second, prompt_names(prompt))
        buffer = first.llm_engine.client.core.executor._worker._connector._buffer  # type: ignore[attr-defined]
        buffer._fresh.pop(state_name(block_keys(prompt)[4]))
        [output] = run(second, [prompt], GREEDY)
        assert tokens_of([output]) == expected and output.num_cached_tokens == 0
        assert transferred(second).num_failed_blocks == 5
        second.llm_engine.client.call("check_integrity")


def test_states_come_back_from_the_server_of_lmcache(tiny_model: TinyModel) -> None:
    model, server, prompt = tiny_model("granite-hybrid"), Server(), PROMPTS[2]
    try:
        for num_found in (0, 40, 0):
            with tiny_llm(model, kv_transfer_config=lmcache(server.url)) as llm:
                poison(llm)
                [output] = run(llm, [prompt], GREEDY)
                assert output.num_cached_tokens == num_found
                llm.llm_engine.client.call("check_integrity")
            with tiny_llm(model) as llm:
                assert tokens_of(run(llm, [prompt], GREEDY)) == tokens_of([output])
            if num_found:
                del server.kept[
                    next(name for name in server.kept if state_name(block_keys(prompt)[4]).hex() in name)
                ]
    finally:
        server.close()


@pytest.mark.slow
def test_another_process_goes_on_from_a_state_that_this_one_saved(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model = tiny_model("qwen3-next")
    with tiny_llm(model, kv_transfer_config=storage(tmp_path)) as llm:
        [first] = run(llm, [PROMPTS[2]], GREEDY)
    command = [sys.executable, "-c", SCRIPT, json.dumps([str(model), PROMPTS[2], storage(tmp_path)])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert json.loads(result.stdout) == [list(first.outputs[0].token_ids), 40]


def test_a_file_of_a_state_has_its_tensors_and_a_damaged_one_is_written_anew(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, prompt = tiny_model("granite-hybrid"), PROMPTS[2]
    with tiny_llm(model, kv_transfer_config=storage(tmp_path)) as llm:
        [first] = run(llm, [prompt], GREEDY)
        kept = [tensor.shape[1:] for cache in runner_of(llm).paged_model.caches for tensor in cache]
    [path] = tmp_path.rglob(f"{state_name(block_keys(prompt)[4]).hex()}.safetensors")
    with safetensors.safe_open(path, "pt") as file:
        shapes = [torch.Size(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
    assert shapes and all(shape in kept for shape in shapes)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with tiny_llm(model, kv_transfer_config=storage(tmp_path)) as llm:
        for num_found in (0, 40):
            [again] = run(llm, [prompt], GREEDY)
            assert tokens_of([again]) == tokens_of([first]) and again.num_cached_tokens == num_found
            assert llm.reset_prefix_cache()
    assert path.read_bytes() == good


def test_a_preempted_request_comes_back_with_its_state(tiny_model: TinyModel) -> None:
    prompts, params = (
        [PROMPTS[2], PROMPTS[1]],
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    )
    results = []
    for config in (None, OFFLOAD):
        settings = {"num_gpu_blocks_override": 14, "max_model_len": 88, "kv_transfer_config": config}
        with tiny_llm(tiny_model("granite-hybrid"), **settings) as llm:
            results.append((tokens_of(run(llm, prompts, params)), llm.get_metrics()))
    (plain, without), (tokens, with_host) = results
    assert tokens == plain and without.num_preemptions > 0 and with_host.num_preemptions > 0
    assert with_host.num_computed_tokens <= without.num_computed_tokens


def test_every_weights_find_their_own_states_and_no_others(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The last state of an answer is saved with the step that comes next,
    which must have the same weights."""
    model, other, turns = tiny_model("granite-hybrid"), tmp_path / "other", []
    shutil.copytree(model, other)
    weights = load_file(model / "model.safetensors")
    save_file({name: 0.9 * tensor for name, tensor in weights.items()}, other / "model.safetensors")
    with tiny_llm(model, kv_transfer_config=several(OFFLOAD, storage(tmp_path / "blocks"))) as llm:
        [first] = run(llm, [PROMPTS[2]], GREEDY)
        turn = PROMPTS[2] + list(first.outputs[0].token_ids)
        for path, num_found in ((other, 0), (model, 48)):
            llm.update_weights(str(path))
            outputs = run(llm, [turn], GREEDY)
            assert outputs[0].num_cached_tokens == num_found
            turns.append((path, tokens_of(outputs)))
    assert turns[0][1] != turns[1][1]
    for path, tokens in turns:
        with tiny_llm(path) as llm:
            assert tokens_of(run(llm, [turn], GREEDY)) == tokens


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}], ids=str)
def test_every_worker_moves_its_part_of_a_state(
    tiny_model: TinyModel, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Of three stages two have no layer that attends."""
    model = tiny_model("granite-hybrid")
    given = {"model": str(model), "dtype": "float32", "device": "cpu", "enforce_eager": True, "block_size": 8}
    given |= {
        "max_model_len": 128,
        "max_num_seqs": 3,
        "num_gpu_blocks_override": 64,
        "max_num_batched_tokens": 24,
    }
    with LLM(**given) as llm:
        expected = tokens_of(run(llm, PROMPTS, GREEDY))
    with virtual_llm(**given, **layout, kv_transfer_config=several(OFFLOAD, storage(tmp_path))) as llm:
        assert tokens_of(run(llm, PROMPTS, GREEDY)) == expected
        forget(llm)
        assert tokens_of(run(llm, PROMPTS, GREEDY)) == expected
        in_host, in_files = llm.get_metrics().kv_transfer
        assert in_host.num_loaded_blocks + in_files.num_loaded_blocks > 0
        assert in_host.num_failed_blocks == in_files.num_failed_blocks == 0
        llm.llm_engine.client.call("check_integrity")
    with virtual_llm(**given, **layout, kv_transfer_config=storage(tmp_path)) as llm:
        outputs = run(llm, [PROMPTS[2]], GREEDY)
        assert tokens_of(outputs) == expected[2:3] and outputs[0].num_cached_tokens == 40


def small_host(num_bytes: int) -> dict[str, Any]:
    return {**OFFLOAD, "kv_connector_extra_config": {"cpu_bytes_to_use": num_bytes}}


def cases(path: Path) -> Sequence[tuple[dict[str, Any], str]]:
    bounded = {"shared_storage_path": str(path), "max_bytes": 100}
    return [
        (OWN, "moves blocks of keys and values, but layers of this model keep a state"),
        (several(OFFLOAD, OWN), "tests.kv_transfer.own_connector:ShelfConnector moves blocks"),
        (producer(unix(path), buffer_bytes=2000), "and one state"),
        (small_host(2000), "of which half is for states, but one state takes"),
        ({"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": bounded}, "one state takes"),
    ]


def test_what_cannot_move_states_is_refused_with_a_sentence(tiny_model: TinyModel, tmp_path: Path) -> None:
    for config, message in cases(tmp_path):
        with pytest.raises(ConfigError, match=message):
            tiny_llm(tiny_model("granite-hybrid"), kv_transfer_config=config)
