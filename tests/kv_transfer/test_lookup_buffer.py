"""Blocks from one engine to another:
tokens are those of one engine, and whatever goes wrong is recomputed."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm import LLM
from minivllm.distributed.key_file import read_key
from minivllm.errors import ConfigError
from minivllm.kv_transfer.lookup import catalogue, lookup_connector
from minivllm.kv_transfer.lookup.gate import Gate
from minivllm.kv_transfer.lookup.handshake import Purpose
from minivllm.kv_transfer.lookup.lookup_server import MAX_CONNECTIONS
from minivllm.kv_transfer.lookup.pipe import MAX_MESSAGE_BYTES, Address, Block, News, Pipe
from minivllm.sampling_params import SamplingParams
from tests.kv_transfer.lookup_pair import (
    BadProducer,
    block_keys,
    consumer,
    producer,
    scheduler_side,
    unix,
    wait_for_blocks,
    wait_until,
)
from tests.kv_transfer.test_connectors import ASYNC, CHUNKS, GREEDY, LONG, NGRAM, PROMPTS, SEEDED, transferred
from tests.parity_reference import run, tiny_llm

TinyModel = Callable[..., Path]
FIRST = SamplingParams(temperature=0.0, max_tokens=1)
PROMPT = PROMPTS[2]
KEYS = block_keys(PROMPT)[: (len(PROMPT) - 1) // 8]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (catalogue, lookup_connector):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.05)


def tokens(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in run(llm, prompts, params)]


def prefill(llm: LLM, prompts: list[list[int]]) -> list[int]:
    """The first token of each."""
    return [one[0] for one in tokens(llm, prompts, FIRST)]


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32).hex().encode())
    path.chmod(0o600)
    return str(path)


@pytest.mark.parametrize(
    ("model", "settings"),
    [("llama", {}), ("llama", CHUNKS | ASYNC), ("llama", NGRAM), ("qwen2-window", {})],
    ids=["plain", "chunks-async", "drafts", "windows"],
)
def test_tokens_are_those_of_one_engine_and_the_first_one_is_the_producers(
    model: str, settings: dict[str, Any], tiny_model: TinyModel, tmp_path: Path, key_file: str
) -> None:
    path = tiny_model(model)
    with tiny_llm(path, **settings) as plain:
        expected = [tokens(plain, PROMPTS, params) for params in (GREEDY, SEEDED)]
    own, secret = unix(tmp_path), {"key_file": key_file}
    with (
        tiny_llm(path, kv_transfer_config=producer(own, **secret), **settings) as first,
        tiny_llm(path, kv_transfer_config=consumer(own, **secret), **settings) as second,
    ):
        began = prefill(first, PROMPTS)
        wait_for_blocks(second, [key for prompt in PROMPTS for key in block_keys(prompt)])
        for params, answers in zip((GREEDY, SEEDED), expected):
            assert second.reset_prefix_cache()
            outputs = run(second, PROMPTS, params)
            assert [list(output.outputs[0].token_ids) for output in outputs] == answers
            assert [output.num_cached_tokens for output in outputs] == [
                (len(prompt) - 1) // 8 * 8 for prompt in PROMPTS
            ]
        assert began == [answer[0] for answer in expected[0]]
        stats = transferred(second)
        assert stats.num_loaded_blocks > 0 and stats.num_failed_blocks == 0
        second.llm_engine.client.call("check_integrity")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
def test_blocks_come_over_tcp_and_tls_from_whom_the_consumer_trusts(
    tiny_model: TinyModel, tmp_path: Path, key_file: str
) -> None:
    path = tiny_model("llama")
    for name in ("own", "other"):
        command = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
        ]
        command += ["-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem", "-days", "2"]
        command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        own = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
        files = {"tls_certificate": f"{tmp_path}/own.pem", "tls_key": f"{tmp_path}/own.key"}
        with tiny_llm(path, kv_transfer_config=producer(own, key_file=key_file, **files)) as first:
            expected = tokens(first, [PROMPT])
            for authority, num_found in (("own", 32), ("other", 0), (None, 0)):
                trust = {} if authority is None else {"tls_authority": f"{tmp_path}/{authority}.pem"}
                config = consumer(own, key_file=key_file, **trust)
                with tiny_llm(path, kv_transfer_config=config) as second:
                    if num_found:
                        wait_for_blocks(second, KEYS)
                    else:
                        time.sleep(0.3)
                    [output] = run(second, [PROMPT], GREEDY)
                    assert [list(output.outputs[0].token_ids)] == expected, authority
                    assert output.num_cached_tokens == num_found, authority


def test_two_engines_that_are_both_find_each_others_blocks(tiny_model: TinyModel, tmp_path: Path) -> None:
    path, places = tiny_model("llama"), [unix(tmp_path, "a"), unix(tmp_path, "b")]

    def both(own: str, other: str) -> dict[str, Any]:
        extra = {"address": own, "peers": [other], "timeout": 2.0}
        return {"kv_connector": "LookupBufferConnector", "kv_connector_extra_config": extra}

    with (
        tiny_llm(path, kv_transfer_config=both(*places)) as one,
        tiny_llm(path, kv_transfer_config=both(*reversed(places))) as other,
    ):
        answers = tokens(one, [PROMPT])
        wait_for_blocks(other, KEYS)
        [output] = run(other, [PROMPT], GREEDY)
        assert [list(output.outputs[0].token_ids)] == answers and output.num_cached_tokens == 32
        mine = tokens(other, [PROMPTS[1]])
        wait_for_blocks(one, block_keys(PROMPTS[1]))
        [output] = run(one, [PROMPTS[1]], GREEDY)
        assert [list(output.outputs[0].token_ids)] == mine and output.num_cached_tokens == 24


def test_blocks_come_from_several_producers_also_for_one_prompt(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The second producer found nothing of the first one's, so both have the beginning;
    only one has the end."""
    path, places = tiny_model("llama"), [unix(tmp_path, "a"), unix(tmp_path, "b")]
    with (
        tiny_llm(path, kv_transfer_config=producer(places[0])) as one,
        tiny_llm(path, kv_transfer_config=producer(places[1])) as other,
        tiny_llm(path, kv_transfer_config=consumer(*places)) as asking,
        tiny_llm(path) as plain,
    ):
        prefill(one, [PROMPT[:17]])
        prefill(other, [PROMPT])
        wait_for_blocks(asking, KEYS)
        assert scheduler_side(asking).where(KEYS) == [0, 0, 1, 1]
        [output] = run(asking, [PROMPT], GREEDY)
        assert [list(output.outputs[0].token_ids)] == tokens(
            plain, [PROMPT]
        ) and output.num_cached_tokens == 32


def test_a_consumer_may_have_other_tiers_besides(tiny_model: TinyModel, tmp_path: Path) -> None:
    """What it computed itself comes from its host memory, the rest from the producer, also for one prompt."""
    path, own = tiny_model("llama"), unix(tmp_path)
    tiers = [{"kv_connector": "OffloadingConnector"}, consumer(own)]
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": tiers}}
    with (
        tiny_llm(path, kv_transfer_config=producer(own)) as first,
        tiny_llm(path, num_gpu_blocks_override=17, kv_transfer_config=several) as second,
    ):
        [_, remote] = second.llm_engine.client.core._connector.tiers  # type: ignore[attr-defined]
        run(second, [PROMPT[:16]], FIRST)
        run(second, [LONG], GREEDY)  # takes all the blocks of the device
        expected = tokens(first, [PROMPT])
        wait_until(lambda: all(remote.holds(key) for key in KEYS))
        [output] = run(second, [PROMPT], GREEDY)
        assert [list(output.outputs[0].token_ids)] == expected and output.num_cached_tokens == 32
        stats = {one.tier: one.num_loaded_blocks for one in second.get_metrics().kv_transfer}
        assert stats == {"OffloadingConnector": 2, "LookupBufferConnector": 2}


def test_a_full_buffer_keeps_its_bound_and_the_beginning_of_what_came_last(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    own, path = unix(tmp_path), tiny_model("llama")
    with (
        tiny_llm(path, kv_transfer_config=producer(own, buffer_bytes=3 * 6144 + 100)) as first,
        tiny_llm(path, kv_transfer_config=consumer(own)) as second,
    ):
        expected = tokens(first, [PROMPT], GREEDY)
        prefill(first, [PROMPTS[0]])
        wait_for_blocks(second, block_keys(PROMPTS[0]))
        prefill(first, [PROMPTS[1]])
        wait_for_blocks(second, block_keys(PROMPTS[1]))
        wait_for_blocks(second, block_keys(PROMPTS[0]), are_there=False)
        assert first.reset_prefix_cache()
        prefill(first, [PROMPT])
        wait_for_blocks(second, KEYS[:3])
        [output] = run(second, [PROMPT], GREEDY)
        assert [list(output.outputs[0].token_ids)] == expected and output.num_cached_tokens == 24


def test_a_producer_that_ends_and_comes_back_is_found_again(tiny_model: TinyModel, tmp_path: Path) -> None:
    own, path = unix(tmp_path), tiny_model("llama")
    with tiny_llm(path, kv_transfer_config=consumer(own)) as second:
        for _ in range(2):
            with tiny_llm(path, kv_transfer_config=producer(own)) as first:
                expected = tokens(first, [PROMPT])
                wait_for_blocks(second, KEYS)
                assert second.reset_prefix_cache()
                [output] = run(second, [PROMPT], GREEDY)
                assert [list(output.outputs[0].token_ids)] == expected and output.num_cached_tokens == 32
            wait_for_blocks(second, KEYS, are_there=False)
            assert second.reset_prefix_cache()
            [output] = run(second, [PROMPT], GREEDY)
            assert [list(output.outputs[0].token_ids)] == expected and output.num_cached_tokens == 0
        assert transferred(second).num_failed_blocks == 0


def no_answer(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    time.sleep(0.5)


def drips(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    for key in keys:
        pipe.send_message(Block(key, block_bytes), time.monotonic() + 5)
        for _ in range(block_bytes):
            pipe.send(b"\0", time.monotonic() + 5)
            time.sleep(0.01)


def hangs_up(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    pipe.send_message(Block(keys[0], block_bytes), time.monotonic() + 5)
    pipe.send(b"\0" * (block_bytes // 2), time.monotonic() + 5)
    pipe.close()


def another_block(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    for key in reversed(keys):
        pipe.send_tensor(key, torch.zeros(block_bytes, dtype=torch.uint8), time.monotonic() + 5)


def too_large(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    for key in keys:
        pipe.send_tensor(key, torch.zeros(block_bytes + 1, dtype=torch.uint8), time.monotonic() + 5)


def oversized_frame(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    pipe.send(struct.pack("<I", MAX_MESSAGE_BYTES + 1) + b"\xff" * 1000, time.monotonic() + 5)


def garbage(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    pipe.send(struct.pack("<I", 100) + os.urandom(100), time.monotonic() + 5)


def another_message(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    pipe.send_message(News(came=keys), time.monotonic() + 5)


def all_missing(pipe: Pipe, keys: list[bytes], block_bytes: int) -> None:
    pipe.send_tensor(keys[0], None, time.monotonic() + 5)


BAD_ANSWERS = [
    no_answer,
    drips,
    hangs_up,
    another_block,
    too_large,
    oversized_frame,
    garbage,
    another_message,
    all_missing,
]


def test_whatever_a_producer_answers_the_rest_is_recomputed(tiny_model: TinyModel, tmp_path: Path) -> None:
    path = tiny_model("llama")
    with tiny_llm(path) as plain:
        [expected] = tokens(plain, [PROMPT])
    own, failed = unix(tmp_path), 0
    with tiny_llm(path, kv_transfer_config=consumer(own, timeout=0.2)) as second:
        for behave in BAD_ANSWERS:
            bad = BadProducer(second, own, [PROMPT], behave)
            wait_for_blocks(second, KEYS)
            [output] = run(second, [PROMPT], GREEDY)
            assert list(output.outputs[0].token_ids) == expected, behave.__name__
            assert output.num_cached_tokens == 0, behave.__name__
            failed += 4
            assert transferred(second).num_failed_blocks == failed, behave.__name__
            second.llm_engine.client.call("check_integrity")
            assert second.reset_prefix_cache()
            bad.close()
            wait_for_blocks(second, KEYS, are_there=False)


def test_of_several_loads_behind_a_slow_producer_all_end_at_their_deadline(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path, own = tiny_model("llama"), unix(tmp_path)
    with tiny_llm(path) as plain:
        expected = tokens(plain, PROMPTS)
    with tiny_llm(path, kv_transfer_config=consumer(own, timeout=0.5)) as second:
        bad = BadProducer(second, own, PROMPTS, no_answer)
        wait_for_blocks(second, [key for prompt in PROMPTS for key in block_keys(prompt)])
        start = time.monotonic()
        assert tokens(second, PROMPTS) == expected
        assert time.monotonic() - start < 0.5 * len(PROMPTS), "they would have waited one after the other"
        bad.close()


def test_a_handshake_that_fails_is_said_once_and_nothing_travels(
    tiny_model: TinyModel, tmp_path: Path, key_file: str, caplog: pytest.LogCaptureFixture
) -> None:
    other_key = tmp_path / "other"
    other_key.write_bytes(b"x" * 40)
    other_key.chmod(0o600)
    path, own = tiny_model("llama"), unix(tmp_path)
    with tiny_llm(path, kv_transfer_config=producer(own, key_file=key_file)) as first:
        expected = tokens(first, [PROMPT])
        strangers: dict[str, tuple[Path, dict[str, Any], dict[str, Any]]] = {
            "another key_file": (path, {"key_file": str(other_key)}, {}),
            "another key_file ": (path, {}, {}),
            "another model, version or settings": (tiny_model("mistral"), {"key_file": key_file}, {}),
            "another model, version or settings ": (path, {"key_file": key_file}, {"block_size": 16}),
            "another model, version or settings  ": (
                path,
                {"key_file": key_file},
                {"kv_cache_dtype": "bfloat16"},
            ),
        }
        for sentence, (model, extra, settings) in strangers.items():
            caplog.clear()
            config = consumer(own, **extra)
            with (
                caplog.at_level(logging.INFO),
                tiny_llm(model, kv_transfer_config=config, **settings) as second,
            ):
                wait_until(lambda: "turned away" in caplog.text)
                time.sleep(0.2)  # a few more attempts
                [output] = run(second, [PROMPT], GREEDY)
                assert output.num_cached_tokens == 0 and not scheduler_side(second).holds(KEYS[0])
                if model == path and not settings:
                    assert [list(output.outputs[0].token_ids)] == expected
            told = [one.message for one in caplog.records if "No blocks come" in one.message]
            assert len(told) == 1 and sentence.strip() in told[0]
            assert "Connected to" not in caplog.text


def test_strangers_cannot_disturb_a_producer(tiny_model: TinyModel, tmp_path: Path, key_file: str) -> None:
    """Garbage, silence, more connections than allowed, and messages of a consumer that has proved itself."""
    path, own = tiny_model("llama"), unix(tmp_path)
    place = own.removeprefix("unix://")
    with tiny_llm(path, kv_transfer_config=producer(own, key_file=key_file)) as first:
        expected = tokens(first, [PROMPT])
        for data in (
            b"GET / HTTP/1.1\r\n\r\n" * 50,
            os.urandom(5000),
            b"",
            struct.pack("<I", 2**32 - 1) * 100,
        ):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(place)
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(10)
                received = b""
                with contextlib.suppress(
                    ConnectionResetError
                ):  # it was hung up on while it was still talking
                    while piece := stranger.recv(4096):
                        received += piece
                assert len(received) <= 40 + 65, "nothing but the handshake"
        idle = [socket.socket(socket.AF_UNIX) for _ in range(MAX_CONNECTIONS + 20)]
        for one in idle:
            one.connect(place)
        for one in idle:
            one.close()
        with tiny_llm(path, kv_transfer_config=consumer(own, key_file=key_file)) as second:
            wait_for_blocks(second, KEYS)
            gate = Gate.of(scheduler_side(second).context, 0)
            for rude in (struct.pack("<I", MAX_MESSAGE_BYTES + 1), struct.pack("<I", 50) + os.urandom(50)):
                pipe = gate.connect(Address.parse(own), Purpose.BLOCKS, time.monotonic() + 5)
                pipe.send(rude, time.monotonic() + 5)
                with pytest.raises(OSError):
                    pipe.receive(1, time.monotonic() + 5)
                pipe.close()
            [output] = run(second, [PROMPT], GREEDY)
            assert [list(output.outputs[0].token_ids)] == expected and output.num_cached_tokens == 32
    assert not Path(place).exists()


def test_a_socket_that_a_killed_producer_left_behind_is_replaced_and_one_in_use_is_not(
    tmp_path: Path,
) -> None:
    address = Address.parse(unix(tmp_path))
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(address.path)
    listener = address.listen()
    assert Path(address.path).stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match=r"cannot listen at unix:.*choose another"):
        address.listen()
    listener.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (producer(""), "needs an 'address' to listen at as kv_producer"),
        (consumer(), "'peers' to ask as kv_consumer"),
        (producer("unix:///a", peers=["unix:///b"]), "needs an 'address'"),
        (producer("/tmp/socket"), "is no address of a connector"),
        (producer("unix:///" + "x" * 120), "at most 100 bytes"),
        (producer("tcp://127.0.0.1"), "is no address"),
        (producer("tcp://127.0.0.1:70000"), "is no address"),
        (producer("tcp://0.0.0.0:7000"), "is not on this host: give the connector a 'key_file'"),
        (consumer("tcp://engine.example:7000"), "is not on this host"),
        (producer("unix:///tmp/a", key_file="/nowhere/key"), "cannot be read"),
        (producer("unix:///tmp/a", tls_certificate="/nowhere/a"), "belong together"),
        (producer("unix:///tmp/a", tls_certificate="/nowhere/a", tls_key="/nowhere/b"), "TLS files"),
        (producer("unix:///tmp/a", timeout=0), "timeout"),
        (producer("unix:///tmp/a", buffer_bytes=10), "one block takes 6144"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_sentence(
    tiny_model: TinyModel, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llm(tiny_model("llama"), kv_transfer_config=config)


def test_a_key_that_others_can_read_or_that_is_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"x" * 64)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by other users: chmod 600"):
        read_key(str(path))
    path.chmod(0o600)
    assert read_key(str(path)) == b"x" * 64
    path.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match="has 5 bytes, but must have at least 32"):
        read_key(str(path))
