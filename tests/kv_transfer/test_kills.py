"""An engine is killed with -9 at a named moment of a transfer:
the one that is left answers as if it had been alone.

The engine that dies is a process of its own.
A function of it is replaced by its death, at the first or a later call.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from minivllm import LLM
from tests.kv_transfer.lookup_pair import consumer, producer, through_nixl, unix, wait_until
from tests.kv_transfer.test_connectors import GREEDY, PROMPTS, storage
from tests.kv_transfer.test_lmcache import Server, lmcache, server
from tests.kv_transfer.test_lookup_buffer import quick_retries
from tests.kv_transfer.test_nixl import needs_nixl
from tests.parity_reference import run, tiny_llm, tokens_of

__all__ = ["quick_retries", "server"]

TinyModel = Callable[..., Path]
PROMPT = PROMPTS[2]
KEPT = 32
"""Its tokens in full blocks."""

SCRIPT = """
import importlib, json, os, signal, sys
from pathlib import Path
from tests.kv_transfer.test_connectors import GREEDY
from tests.parity_reference import run, tiny_llm
model, config, place, calls, prompt = json.loads(sys.argv[1])
module, _, path = place.partition(":")
owner, (*holders, name) = importlib.import_module(module), path.split(".")
for holder in holders:
    owner = getattr(owner, holder)
original, left = getattr(owner, name), [calls]
def dies(*args, **settings):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args, **settings)
with tiny_llm(Path(model), kv_transfer_config=config) as llm:
    setattr(owner, name, dies)
    print("ready", flush=True)
    for _ in sys.stdin:
        assert llm.reset_prefix_cache()
        [output] = run(llm, [prompt], GREEDY)
        print(output.num_cached_tokens, flush=True)
"""
_WORKER, _PIPE = "minivllm.kv_transfer.connectors.worker_side:", "minivllm.kv_transfer.lookup.pipe:Pipe."


@dataclass(frozen=True)
class Death:
    """In a call of a function, after so many that are survived."""

    moment: str
    place: str
    calls: int = 0


SAVING = [
    Death("a step has filled a block", f"{_WORKER}KVConnectorWorker._save"),
    Death("half of a block is copied", f"{_WORKER}_copy", 2),
]
PRODUCER = [
    *SAVING,
    Death("blocks come into the buffer", "minivllm.kv_transfer.lookup.lookup_buffer:LookupBuffer.insert"),
    Death("consumers have been told", "minivllm.kv_transfer.lookup.lookup_server:PendingNews.take"),
    Death("a consumer has asked", "minivllm.kv_transfer.lookup.lookup_buffer:LookupBuffer.drop_select"),
    Death("one block has been sent", f"{_PIPE}send_tensor", 1),
]
CONSUMER = [
    Death("it asks", "minivllm.kv_transfer.lookup.lookup_connector:LookupBufferWorker._ask"),
    Death("a block is half there", f"{_PIPE}receive_tensor", 1),
    Death("it writes into its cache", f"{_WORKER}CacheBlocks.write", 1),
    Death("it reports", f"{_WORKER}KVConnectorOutput"),
]
DIRECTORY = [
    *SAVING,
    Death("a file is written under another name", "os:replace"),
    Death("two files are there", "os:replace", 2),
]
READER = [
    Death("it opens a file", "minivllm.kv_transfer.connectors.shared_storage:SharedStorageWorker.load_block"),
    Death("it writes into its cache", f"{_WORKER}CacheBlocks.write", 1),
]
_CLIENT = "minivllm.kv_transfer.foreign.lmcache_client:Client."
STORE = [*SAVING, Death("it sends a block", f"{_PIPE}send", 3), Death("it asks for a block", f"{_CLIENT}get")]
LEASES = [
    *SAVING,
    Death("a consumer asks for a lease", "minivllm.kv_transfer.foreign.leased_blocks:LeasedBlocks.lease"),
    Death("a consumer has read", "minivllm.kv_transfer.foreign.leased_blocks:LeasedBlocks.confirm"),
]
READS = [
    Death("it fetches", "minivllm.kv_transfer.foreign.nixl_connector:NixlWorker._fetch"),
    Death("it reads", "minivllm.kv_transfer.foreign.nixl_connector:NixlWorker._read"),
    Death("it writes into its cache", f"{_WORKER}CacheBlocks.write", 1),
]


Pair = Callable[[Path], list[dict[str, Any]]]


def pipes(path: Path) -> list[dict[str, Any]]:
    return [producer(unix(path)), consumer(unix(path))]


def in_place(path: Path) -> list[dict[str, Any]]:
    return through_nixl(producer(unix(path), lease_seconds=1.0), consumer(unix(path)))


def named(cases: list[Death]) -> Any:
    return pytest.mark.parametrize("death", cases, ids=lambda death: death.moment)


def by_pair(through_pipes: list[Death], through_nixl: list[Death]) -> Any:
    """Deaths of one side of a pair."""
    return pytest.mark.parametrize(
        ("pair", "death"),
        [
            *(pytest.param(pipes, death, id=death.moment) for death in through_pipes),
            *(
                pytest.param(in_place, death, id=f"NIXL, {death.moment}", marks=needs_nixl)
                for death in through_nixl
            ),
        ],
    )


@pytest.fixture(scope="module")
def expected(tiny_model: TinyModel) -> list[int]:
    with tiny_llm(tiny_model("llama")) as llm:
        return tokens_of(run(llm, [PROMPT], GREEDY))[0]


class Doomed:
    """An engine that dies in a moment."""

    def __init__(self, model: Path, config: dict[str, Any], death: Death) -> None:
        given = json.dumps([str(model), config, death.place, death.calls, PROMPT])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"

    def answer(self) -> int | None:
        """Tokens of the prompt that it found; None if it died meanwhile."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        return int(line) if line else None

    def answer_until_it_dies(self) -> None:
        wait_until(lambda: self.answer() is None, 60)
        self.check_killed()

    def check_killed(self) -> None:
        assert self.process.wait(30) == -9, "it should have died in that moment"


@contextmanager
def doomed(model: Path, config: dict[str, Any], death: Death) -> Iterator[Doomed]:
    one = Doomed(model, config, death)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait()


def answer(llm: LLM, expected: list[int]) -> int:
    """Tokens that were found; the answer is checked, and that no block is lost."""
    [output] = run(llm, [PROMPT], GREEDY)
    assert list(output.outputs[0].token_ids) == expected
    llm.llm_engine.client.call("check_integrity")
    return output.num_cached_tokens


def forgotten(llm: LLM, expected: list[int]) -> int:
    assert llm.reset_prefix_cache()
    return answer(llm, expected)


@pytest.mark.slow
@by_pair(PRODUCER, LEASES)
def test_a_consumer_outlives_its_producer_and_finds_the_next_one(
    tiny_model: TinyModel, tmp_path: Path, expected: list[int], pair: Pair, death: Death
) -> None:
    model, (produces, consumes) = tiny_model("llama"), pair(tmp_path)
    with tiny_llm(model, kv_transfer_config=consumes) as llm:
        with doomed(model, produces, death) as one:
            one.answer()
            # It is asked until it has died of that; what did not come is recomputed.
            wait_until(lambda: forgotten(llm, expected) >= 0 and one.process.poll() is not None, 60)
            one.check_killed()
        assert forgotten(llm, expected) == 0, "nobody is there"
        with tiny_llm(model, kv_transfer_config=produces) as another:
            assert answer(another, expected) == 0
            wait_until(lambda: forgotten(llm, expected) == KEPT, 60)


@pytest.mark.slow
@by_pair(CONSUMER, READS)
def test_a_producer_outlives_its_consumer_and_serves_the_next_one(
    tiny_model: TinyModel, tmp_path: Path, expected: list[int], pair: Pair, death: Death
) -> None:
    """No connection is left."""
    model, (produces, consumes) = tiny_model("llama"), pair(tmp_path)
    with tiny_llm(model, kv_transfer_config=produces) as llm:
        assert answer(llm, expected) == 0
        before = len(psutil.Process().net_connections("unix"))
        with doomed(model, consumes, death) as one:
            one.answer_until_it_dies()
        wait_until(lambda: len(psutil.Process().net_connections("unix")) <= before)
        assert answer(llm, expected) == KEPT
        with tiny_llm(model, kv_transfer_config=consumes) as another:
            wait_until(lambda: forgotten(another, expected) == KEPT, 60)


def check_store(model: Path, config: dict[str, Any], death: Death, expected: list[int]) -> None:
    """Two engines come after the one that died:
    the first finds what is whole, the second finds everything."""
    with doomed(model, config, death) as one:
        one.answer_until_it_dies()
    found = []
    for _ in range(2):
        with tiny_llm(model, kv_transfer_config=config) as llm:
            found.append(answer(llm, expected))
            wait_until(lambda llm=llm: forgotten(llm, expected) == KEPT, 60)  # type: ignore[misc]
    assert found[1] == KEPT and found[0] % 8 == 0


@pytest.mark.slow
@named(DIRECTORY)
def test_a_directory_outlives_who_writes(
    tiny_model: TinyModel, tmp_path: Path, expected: list[int], death: Death
) -> None:
    check_store(tiny_model("llama"), storage(tmp_path), death, expected)


@pytest.mark.slow
@named(READER)
def test_a_directory_outlives_who_reads(
    tiny_model: TinyModel, tmp_path: Path, expected: list[int], death: Death
) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=storage(tmp_path)) as llm:
        assert answer(llm, expected) == 0
    check_store(tiny_model("llama"), storage(tmp_path), death, expected)


@pytest.mark.slow
@named(STORE)
def test_the_server_of_lmcache_outlives_an_engine(
    tiny_model: TinyModel, server: Server, expected: list[int], death: Death
) -> None:
    if "asks" in death.moment:
        with tiny_llm(tiny_model("llama"), kv_transfer_config=lmcache(server.url)) as llm:
            assert answer(llm, expected) == 0
    check_store(tiny_model("llama"), lmcache(server.url), death, expected)
