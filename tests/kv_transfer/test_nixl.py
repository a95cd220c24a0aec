"""Blocks read out of another engine's memory: only what a lease vouches for after the read is believed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM
from minivllm.errors import ConfigError
from minivllm.kv_transfer.foreign import nixl_connector
from minivllm.kv_transfer.foreign.leased_blocks import LeasedBlocks
from minivllm.simulation.ranks import virtual_llm
from tests.kv_transfer import test_travelling_states as states
from tests.kv_transfer.lookup_pair import block_keys, unix, wait_for_blocks
from tests.kv_transfer.test_connectors import GREEDY, PROMPTS, transferred
from tests.parity_reference import run, tiny_llm, tiny_settings, tokens_of

TinyModel = Callable[..., Path]
PROMPT = PROMPTS[2]
KEYS = [bytes([number]) * 32 for number in range(9)]
needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="pip install 'minivllm[nixl]' brings NIXL.")


def filled(num_slots: int = 4, seconds: float = 60.0) -> LeasedBlocks:
    """Blocks 0 to 3."""
    blocks = LeasedBlocks(torch.zeros(num_slots, 16, dtype=torch.uint8), seconds)
    for key in KEYS[:num_slots]:
        data = blocks.take(key)
        assert data is not None
        data.fill_(key[0])
    blocks.publish(KEYS[:num_slots], lambda: None)
    return blocks


def test_what_is_leased_is_not_written_over_and_what_was_used_longest_ago_is() -> None:
    blocks = filled()
    number, addresses = blocks.lease(KEYS[:2])
    assert len(set(addresses)) == 2 and blocks.lease([KEYS[8]])[1] == []
    gone: list[bytes] = []
    blocks.subscribe(lambda came, went: gone.extend(went))
    assert blocks.take(KEYS[4]) is not None and blocks.take(KEYS[5]) is not None
    assert gone == KEYS[2:4]
    assert blocks.take(KEYS[6]) is None, "the others are leased, or being filled"
    assert blocks.confirm(number) and not blocks.confirm(number)
    assert blocks.take(KEYS[6]) is not None and gone == [*KEYS[2:4], KEYS[1]]


def test_a_lease_that_has_lapsed_is_not_confirmed() -> None:
    blocks = filled(seconds=0.02)
    number, _ = blocks.lease(KEYS[:4])
    time.sleep(0.03)
    assert blocks.take(KEYS[4]) is not None
    assert not blocks.confirm(number)


def test_of_what_is_asked_for_the_first_ones_that_are_ready_are_leased() -> None:
    blocks, waited = filled(), []
    data = blocks.take(KEYS[5])
    assert data is not None and blocks.take(KEYS[5]) is None
    assert len(blocks.lease([KEYS[1], KEYS[5], KEYS[2]])[1]) == 1, "nobody has filled it yet"
    blocks.publish([KEYS[5]], lambda: waited.append(True))
    assert len(blocks.lease([KEYS[1], KEYS[5], KEYS[2]])[1]) == 3 and waited == [True]


def config(role: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": extra}


@pytest.mark.skipif(find_spec("nixl") is not None, reason="NIXL is here.")
def test_without_the_package_a_sentence_says_what_to_install(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'minivllm\[nixl\]'"):
        tiny_llm(tiny_model("llama"), kv_transfer_config=config("kv_producer", address=unix(tmp_path)))


SCRIPT = """
import json, sys
from tests.kv_transfer.test_connectors import GREEDY
from tests.parity_reference import run, tiny_llm
from pathlib import Path
model, prompts, config = json.loads(sys.argv[1])
with tiny_llm(Path(model), kv_transfer_config=config) as llm:
    print(json.dumps([list(output.outputs[0].token_ids) for output in run(llm, prompts, GREEDY)]), flush=True)
    for line in sys.stdin:
        prompt = json.loads(line)
        print(json.dumps(list(run(llm, [prompt], GREEDY)[0].outputs[0].token_ids)), flush=True)
"""


@pytest.fixture
def producer(tiny_model: TinyModel, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int], str]]:
    """An engine in another process, which has answered the prompt: process, tokens, address."""
    extra = {"address": unix(tmp_path), "buffer_bytes": 8 * 6144, "lease_seconds": 1.0}
    given = json.dumps([str(tiny_model("llama")), [PROMPT], config("kv_producer", **extra)])
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline()), extra["address"]
    finally:
        process.kill()
        process.wait()


def consume(llm: LLM, keys: list[bytes]) -> tuple[list[int], int]:
    wait_for_blocks(llm, keys)
    [output] = run(llm, [PROMPT], GREEDY)
    llm.llm_engine.client.call("check_integrity")
    return list(output.outputs[0].token_ids), output.num_cached_tokens


@needs_nixl
def test_a_consumer_reads_what_a_producer_in_another_process_has(
    producer: tuple[Any, list[list[int]], str], tiny_model: TinyModel
) -> None:
    process, [tokens], address = producer
    with tiny_llm(tiny_model("llama"), kv_transfer_config=config("kv_consumer", peers=[address])) as llm:
        assert consume(llm, block_keys(PROMPT)) == (tokens, 32)
        stats = transferred(llm)
        assert (stats.num_loaded_blocks, stats.num_failed_blocks) == (4, 0)
        assert llm.reset_prefix_cache()
        assert consume(llm, block_keys(PROMPT)) == (tokens, 32)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert llm.reset_prefix_cache()
        [output] = run(llm, [PROMPT], GREEDY)
        assert list(output.outputs[0].token_ids) == tokens


@needs_nixl
def test_what_was_read_after_its_lease_has_lapsed_is_computed_anew(
    producer: tuple[Any, list[list[int]], str], tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer is held up in between, and the producer puts other blocks where it reads."""
    process, [tokens], address = producer
    read = nixl_connector.NixlWorker._read

    def read_late(self: Any, *arguments: Any) -> None:
        time.sleep(1.1)
        process.stdin.write(json.dumps(PROMPT[::-1] * 2) + "\n")
        process.stdin.flush()
        process.stdout.readline()
        read(self, *arguments)

    monkeypatch.setattr(nixl_connector.NixlWorker, "_read", read_late)
    with tiny_llm(
        tiny_model("llama"), kv_transfer_config=config("kv_consumer", peers=[address], timeout=60)
    ) as llm:
        assert consume(llm, block_keys(PROMPT)) == (tokens, 0)
        assert transferred(llm).num_loaded_blocks == 0 and transferred(llm).num_failed_blocks == 4


@needs_nixl
@pytest.mark.parametrize("layout", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}], ids=str)
@pytest.mark.parametrize("family", ["llama", "granite-hybrid", "lfm2"])
def test_every_worker_reads_its_part_of_blocks_and_states(
    tiny_model: TinyModel, tmp_path: Path, family: str, layout: dict[str, Any]
) -> None:
    """Of three stages of granite-hybrid two have no layer that attends."""
    overrides = {"num_hidden_layers": 3} if family == "llama" else {}
    model, make = tiny_model(family, **overrides), virtual_llm if layout else LLM
    with tiny_llm(model) as llm:
        expected = tokens_of(run(llm, states.PROMPTS, GREEDY))
    producer, consumer = (
        config("kv_producer", address=unix(tmp_path)),
        config("kv_consumer", peers=[unix(tmp_path)]),
    )
    with (
        make(**tiny_settings(model, **layout, kv_transfer_config=producer)) as first,
        make(**tiny_settings(model, **layout, kv_transfer_config=consumer)) as second,
    ):
        assert tokens_of(run(first, states.PROMPTS, GREEDY)) == expected
        names = block_keys if family == "llama" else states.prompt_names
        for prompt in states.PROMPTS:
            wait_for_blocks(second, names(prompt)[: (len(prompt) - 1) // 8 + (family != "llama")])
        outputs = run(second, states.PROMPTS, GREEDY)
        assert tokens_of(outputs) == expected and transferred(second).num_failed_blocks == 0
        assert [one.num_cached_tokens for one in outputs] == [
            (len(one) - 1) // 8 * 8 for one in states.PROMPTS
        ]
        second.llm_engine.client.call("check_integrity")
