"""Blocks in LMCache's server: other engines find them, and whatever goes wrong is recomputed in time.

The server here is a few lines of our own with the same messages. Where LMCACHE_PYTHON names a Python that can
import lmcache, its own server is tried as well.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM
from minivllm.errors import ConfigError
from minivllm.kv_transfer.foreign import lmcache_client, lmcache_connector
from minivllm.kv_transfer.foreign.lmcache_client import REPLY, REQUEST, SEAL_BYTES
from minivllm.simulation.ranks import virtual_llm
from tests.executor.test_tensor_parallel import PROMPTS as DIVIDED_PROMPTS
from tests.executor.test_tensor_parallel import UNEVEN, arguments
from tests.kv_transfer.lookup_pair import block_keys, wait_until
from tests.kv_transfer.test_connectors import ASYNC, CHUNKS, GREEDY, OFFLOAD, PROMPTS, transferred
from tests.kv_transfer.test_many_workers import answers
from tests.kv_transfer.test_multi_connector import several
from tests.parity_reference import run, tiny_llm, tokens_of

TinyModel = Callable[..., Path]
PROMPT = PROMPTS[2]
NUM_BLOCKS = (len(PROMPT) - 1) // 8


class Server:
    """LMCache's, in short. kept: by name.
    behave: called with each name that is asked for; may raise to hang up."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.behave: Callable[[str], None] = lambda name: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"lm://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as incoming:
            try:
                while request := incoming.read(REQUEST.size):
                    command, num_bytes, kind, dtype, _, size, *_, name = REQUEST.unpack(request)
                    name = name.decode().rstrip()
                    model, world, rank, block, values = name.split("@")
                    assert (kind, dtype, size, values) == (4, 6, num_bytes, "uint8") and int(rank) < int(
                        world
                    )
                    assert model.startswith("minivllm-") and int(block, 16) >= 0
                    self.behave(name)
                    if command == 1:
                        self.kept[name] = incoming.read(num_bytes)
                        continue
                    found = self.kept.get(name)
                    data = found if found is not None and command == 2 else b""
                    code = 400 if found is None else 200
                    connection.sendall(REPLY.pack(code, len(data), kind, dtype, size, 0, 0, 0, 0) + data)
            except (OSError, AssertionError):
                pass

    def close(self) -> None:
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(lmcache_client, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(lmcache_connector, "KNOWN_SECONDS", 0.0)
    monkeypatch.setattr(lmcache_connector, "LOOKUP_SECONDS", 20.0)
    server = Server()
    yield server
    server.close()


def lmcache(url: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": "LMCacheConnector", "kv_connector_extra_config": {"url": url, **more}}


def answer(llm: LLM) -> tuple[list[int], int]:
    [output] = run(llm, [PROMPT], GREEDY)
    llm.llm_engine.client.call("check_integrity")
    return list(output.outputs[0].token_ids), output.num_cached_tokens


@pytest.fixture
def plain(tiny_model: TinyModel) -> list[int]:
    with tiny_llm(tiny_model("llama")) as llm:
        return answer(llm)[0]


@pytest.mark.parametrize("model", ["llama", "qwen2-window"])
def test_tokens_are_those_of_one_engine_and_another_one_finds_the_blocks(
    tiny_model: TinyModel, server: Server, model: str
) -> None:
    path = tiny_model(model)
    with tiny_llm(path) as llm:
        expected = tokens_of(run(llm, PROMPTS, GREEDY))
    for settings in ({}, CHUNKS | ASYNC):
        with tiny_llm(path, kv_transfer_config=lmcache(server.url), **settings) as llm:
            outputs = run(llm, PROMPTS, GREEDY)
            assert tokens_of(outputs) == expected
            stats = transferred(llm)
            assert stats.num_failed_blocks == 0
    assert stats.num_loaded_blocks > 0
    assert [output.num_cached_tokens for output in outputs] == [
        (len(prompt) - 1) // 8 * 8 for prompt in PROMPTS
    ]


def test_weights_of_another_model_have_other_names(
    tiny_model: TinyModel, server: Server, plain: list[int]
) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=lmcache(server.url)) as llm:
        assert answer(llm) == (plain, 0)
        llm.update_weights(str(tiny_model("llama")))
        assert answer(llm) == (plain, 8 * NUM_BLOCKS)
    with tiny_llm(tiny_model("mistral"), kv_transfer_config=lmcache(server.url)) as llm:
        assert answer(llm)[1] == 0
    assert len({name.split("@")[0] for name in server.kept}) == 2


def spoil(server: Server, index: int, change: Callable[[bytes], bytes]) -> None:
    """Change what is kept of a block of the prompt."""
    [name] = [name for name in server.kept if block_keys(PROMPT)[index].hex() in name]
    server.kept[name] = change(server.kept[name])


def test_a_block_under_the_name_of_another_one_is_not_believed(
    tiny_model: TinyModel, server: Server, plain: list[int]
) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=lmcache(server.url)) as llm:
        answer(llm)
    first = next(data for name, data in server.kept.items() if block_keys(PROMPT)[0].hex() in name)
    spoil(server, 2, lambda data: first)
    with tiny_llm(tiny_model("llama"), kv_transfer_config=lmcache(server.url)) as llm:
        assert answer(llm) == (plain, 16)


def swap(data: bytes) -> bytes:
    return data[SEAL_BYTES:][:SEAL_BYTES] + data[:SEAL_BYTES] + data[2 * SEAL_BYTES :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "of the seal": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "another order": swap,
    "short": lambda data: data[:-1],
    "empty": lambda data: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_the_block_is_recomputed_and_written_anew(
    tiny_model: TinyModel, server: Server, plain: list[int], damage: str
) -> None:
    model, config = tiny_model("llama"), lmcache(server.url)
    with tiny_llm(model, kv_transfer_config=config) as llm:
        answer(llm)
    spoil(server, 1, DAMAGES[damage])
    for num_found in (8, 8 * NUM_BLOCKS):
        with tiny_llm(model, kv_transfer_config=config) as llm:
            assert answer(llm) == (plain, num_found)


def test_blocks_that_were_sealed_with_another_key_are_not_believed(
    tiny_model: TinyModel, server: Server, plain: list[int], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    for number, num_found in ((0, 0), (0, 8 * NUM_BLOCKS), (1, 0)):
        path = tmp_path / str(number)
        path.write_text(str(number) * 64)
        path.chmod(0o600)
        with tiny_llm(model, kv_transfer_config=lmcache(server.url, key_file=str(path))) as llm:
            assert answer(llm) == (plain, num_found)


def test_a_server_that_hangs_hangs_up_or_is_not_there_delays_an_answer_and_no_more(
    tiny_model: TinyModel,
    server: Server,
    plain: list[int],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    with tiny_llm(model, kv_transfer_config=lmcache(server.url)) as llm:
        assert answer(llm) == (plain, 0)
    over = threading.Event()

    def hang_up(name: str) -> None:
        raise ConnectionError

    def hang(name: str) -> None:
        over.wait(20)

    monkeypatch.setattr(lmcache_connector, "LOOKUP_SECONDS", 0.1)
    for behave in (hang_up, hang):
        server.behave, started = behave, time.monotonic()
        with tiny_llm(model, kv_transfer_config=lmcache(server.url, timeout=0.3)) as llm:
            assert answer(llm) == (plain, 0)
        assert time.monotonic() - started < 5
    over.set()
    server.behave = lambda name: None
    monkeypatch.setattr(lmcache_connector, "LOOKUP_SECONDS", 20.0)
    with tiny_llm(model, kv_transfer_config=lmcache(server.url)) as llm:
        assert answer(llm) == (plain, 8 * NUM_BLOCKS)
        server.close()
        assert llm.reset_prefix_cache()
        time.sleep(0.1)
        assert answer(llm) == (plain, 0)
    assert 1 <= caplog.text.count("has failed") <= 8


def test_while_a_server_hangs_others_go_on_and_nobody_polls(
    tiny_model: TinyModel, server: Server, plain: list[int]
) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=lmcache(server.url)) as llm:
        expected = [*tokens_of(run(llm, [PROMPTS[3]], GREEDY)), plain]
        assert answer(llm)[0] == plain and llm.reset_prefix_cache()
        wait_until(lambda: len(server.kept) > NUM_BLOCKS)
        over = threading.Event()
        hang: Callable[[str], Any] = lambda name: over.wait(60)  # noqa: E731
        server.behave = hang
        engine, num_steps = llm.llm_engine, 0
        answers: dict[str, list[int]] = {}

        def step() -> None:
            answers.update(
                {one.request_id: list(one.outputs[0].token_ids) for one in engine.step() if one.finished}
            )

        engine.add_request("writes", {"prompt_token_ids": PROMPTS[3][:5]}, GREEDY)
        step()
        engine.add_request("asks", {"prompt_token_ids": PROMPT}, GREEDY)
        while engine.has_unfinished_requests() and "writes" not in answers:
            step()
        assert not over.is_set() and list(answers) == ["writes"]
        threading.Timer(0.5, over.set).start()
        while engine.has_unfinished_requests():
            step()
            num_steps += 1
        assert answers["asks"] == expected[1] and num_steps <= 12 + 5, (
            "a step for each token, and a few around the load"
        )
        assert transferred(llm).num_loaded_blocks == NUM_BLOCKS
        server.behave = hang
        assert llm.reset_prefix_cache()
        over.clear()
        engine.add_request("leaves", {"prompt_token_ids": PROMPT}, GREEDY)
        engine.abort_request(["leaves"])
        assert not engine.has_unfinished_requests()
        over.set()


def test_one_that_dies_in_the_middle_of_a_load_leaves_what_came(
    tiny_model: TinyModel, server: Server, plain: list[int]
) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=lmcache(server.url)) as llm:
        answer(llm)
        # A block that is saved later would be counted below.
        wait_until(lambda: len(server.kept) >= (len(PROMPT) + len(plain) - 1) // 8)
        asked: list[str] = []

        def behave(name: str) -> None:
            asked.append(name)
            if len(asked) == NUM_BLOCKS + 3:  # all are asked about, and then for
                raise ConnectionError

        assert llm.reset_prefix_cache()
        server.behave = behave
        assert answer(llm) == (plain, 16)
        assert transferred(llm).num_failed_blocks == NUM_BLOCKS - 2


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_every_worker_has_its_own_part_and_another_tier_may_come_first(
    tiny_model: TinyModel, server: Server, layout: str
) -> None:
    model = tiny_model("llama-biases", **UNEVEN)
    with LLM(**arguments(model)) as llm:
        expected = answers(llm, num_tokens=4)
    given = arguments(model, **{layout: 2})
    with virtual_llm(**given, kv_transfer_config=several(OFFLOAD, lmcache(server.url))) as llm:
        assert answers(llm, num_tokens=4) == expected
    by_rank = [{name.split("@")[3] for name in server.kept if f"@2@{rank}@" in name} for rank in (0, 1)]
    assert by_rank[0] == by_rank[1] and len(server.kept) == 2 * len(by_rank[0]) > 8
    with virtual_llm(**given, kv_transfer_config=lmcache(server.url)) as llm:
        [output] = llm.generate([DIVIDED_PROMPTS[3]], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 64
        server.kept.pop(
            next(name for name in server.kept if f"@2@1@{block_keys(prompt(), 16)[1].hex()}" in name)
        )
        assert llm.reset_prefix_cache()
        [output] = llm.generate([DIVIDED_PROMPTS[3]], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 16, "one rank lacks the second block"


def prompt() -> list[int]:
    return DIVIDED_PROMPTS[3]["prompt_token_ids"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "url"),
        ({"url": "http://127.0.0.1:1"}, "is no address of an LMCache server: write lm://host:port"),
        ({"url": "lm://127.0.0.1"}, "is no address of an LMCache server"),
        ({"url": "lm:///run/socket"}, "is no address of an LMCache server"),
        ({"url": "lm://cache.example:7000"}, "is not on this host: give LMCacheConnector a 'key_file'"),
        ({"url": "lm://127.0.0.1:7000", "key_file": "/nowhere"}, "cannot be read"),
        ({"url": "lm://127.0.0.1:7000", "timeout": 0}, "timeout"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(
    tiny_model: TinyModel, extra: dict[str, Any], message: str
) -> None:
    config = {"kv_connector": "LMCacheConnector", "kv_connector_extra_config": extra}
    with pytest.raises(ConfigError, match=message):
        tiny_llm(tiny_model("llama"), kv_transfer_config=config)


def test_the_length_of_a_block_is_that_of_its_contents_and_the_seal(
    tiny_model: TinyModel, server: Server
) -> None:
    with tiny_llm(tiny_model("llama"), kv_transfer_config=lmcache(server.url)) as llm:
        answer(llm)
        size = transferred(llm).block_bytes
    assert {len(data) for data in server.kept.values()} == {size + SEAL_BYTES}


@pytest.mark.skipif(
    "LMCACHE_PYTHON" not in os.environ, reason="needs LMCACHE_PYTHON, a Python that has lmcache"
)
def test_lmcaches_own_server_keeps_blocks_for_another_engine(
    tiny_model: TinyModel, plain: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    command = [os.environ["LMCACHE_PYTHON"], "-m", "lmcache.v1.server", "127.0.0.1", str(port)]
    process = subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listens, seconds=60)
        config = lmcache(f"lm://127.0.0.1:{port}")
        with caplog.at_level(logging.WARNING):
            for num_found in (0, 8 * NUM_BLOCKS):
                with tiny_llm(tiny_model("llama"), kv_transfer_config=config) as llm:
                    assert answer(llm) == (plain, num_found)
        assert "has failed" not in caplog.text
        with virtual_llm(
            **arguments(tiny_model("llama"), tensor_parallel_size=2, kv_transfer_config=config)
        ) as llm:
            tokens = answers(llm, num_tokens=4)
            assert llm.reset_prefix_cache() and answers(llm, num_tokens=4) == tokens
            assert transferred(llm).num_loaded_blocks > 0 and transferred(llm).num_failed_blocks == 0
    finally:
        process.kill()
        process.wait()
