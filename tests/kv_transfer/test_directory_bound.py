"""A directory of blocks stays below its bound, with any writers, and keeps the blocks that were used last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm.errors import ConfigError
from minivllm.kv_transfer import fingerprint as fingerprints
from minivllm.kv_transfer.connectors.directory_bound import DirectoryBound
from minivllm.kv_transfer.fingerprint import fingerprint
from tests.kv_transfer.test_connectors import GREEDY, PROMPTS, storage, transferred
from tests.parity_reference import run, tiny_llm

TinyModel = Callable[..., Path]


def block(root: Path, number: int, size: int = 100, model: str = "m") -> Path:
    """A block file, used at the time ``number`` [seconds]."""
    path = root / model / "rank0of1" / f"{number:064x}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))
    os.utime(path, (number, number))
    return path


def size_of(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*.safetensors"))


def test_what_was_used_longest_ago_goes_first_whichever_model_it_is_of(tmp_path: Path) -> None:
    paths = [block(tmp_path, number, model=f"m{number % 2}") for number in range(1, 11)]
    os.utime(paths[0], (99, 99))
    bound = DirectoryBound(tmp_path, 1000)
    assert bound.reserve(100)  # to 0.9 of the bound, with the new one
    assert [path.exists() for path in paths] == [True, False, False] + [True] * 7
    assert bound.reserve(100)
    assert sum(path.exists() for path in paths) == 8
    assert not bound.reserve(1001) and sum(path.exists() for path in paths) == 8


def test_nothing_but_block_files_is_counted_or_deleted(tmp_path: Path) -> None:
    old = block(tmp_path, 1)
    folder, large = old.parent, bytes(5000)
    foreign = [
        folder / "notes.txt",
        tmp_path / "m" / old.name,
        tmp_path / old.name,
        folder / "model.safetensors",
    ]
    for path in foreign:
        path.write_bytes(large)
        os.utime(path, (1, 1))
    outside = tmp_path / "outside"
    outside.write_bytes(large)
    link = folder / f"{5:064x}.safetensors"
    link.symlink_to(outside)
    being_written, left_behind = (folder / f".{number:064x}.safetensors.7.part" for number in (1, 2))
    being_written.write_bytes(bytes(100))
    long_ago = time.time() - 600
    os.utime(being_written, (long_ago, long_ago))
    os.utime(old, (long_ago + 1, long_ago + 1))
    left_behind.write_bytes(large)
    os.utime(left_behind, (1, 1))
    bound = DirectoryBound(tmp_path, 250)  # 200 are there: the block, and what is being written
    assert bound.reserve(50) and old.exists()
    assert bound.reserve(50) and not old.exists()
    assert (
        all(path.exists() for path in [*foreign, outside, link, being_written]) and not left_behind.exists()
    )


WRITER = """
import os, sys
from pathlib import Path
from minivllm.kv_transfer.connectors.directory_bound import DirectoryBound
root, number, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
bound, folder = DirectoryBound(root, 50_000), root / "m" / "rank0of1"
folder.mkdir(parents=True, exist_ok=True)
for index in range(count):
    if bound.reserve(1000):
        part = folder / f".{number * 1000 + index:064x}.safetensors.{os.getpid()}.part"
        part.write_bytes(bytes(1000))
        os.replace(part, folder / f"{number * 1000 + index:064x}.safetensors")
"""


def test_several_processes_stay_below_it_together(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number), "150"]) for number in range(3)]
    largest = 0
    while any(writer.poll() is None for writer in writers):
        sizes = []
        for path in tmp_path.rglob("*"):
            try:
                sizes.append(path.stat().st_size * path.is_file())
            except FileNotFoundError:
                continue
        largest = max(largest, sum(sizes))
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    # Looking through a directory is no snapshot: what is deleted and what comes meanwhile may both be seen.
    assert 40_000 < size_of(tmp_path) <= 50_000 and largest <= 60_000


def test_a_count_that_is_wrong_is_set_right(tmp_path: Path) -> None:
    """By a process that died before it wrote, by hand, or by one without a bound."""
    (tmp_path / ".bytes").write_bytes(b"nonsense" * 3)
    bound = DirectoryBound(tmp_path, 1000)
    assert all(bound.reserve(100) for _ in range(10))  # counted, and never written
    kept = block(tmp_path, 1)
    assert bound.reserve(100) and kept.exists()
    (tmp_path / ".bytes").unlink()
    assert bound.reserve(100) and kept.exists()
    for number in range(2, 30):
        block(tmp_path, number)
    assert DirectoryBound(tmp_path, 1000).reserve(100) and size_of(tmp_path) <= 900


def test_ten_thousand_blocks_are_looked_through_in_a_second(tmp_path: Path) -> None:
    folder = block(tmp_path, 1).parent
    for number in range(10_000):
        (folder / f"{number:064x}.safetensors").touch()
    started = time.process_time()
    assert DirectoryBound(tmp_path, 1000).reserve(10)
    assert time.process_time() - started < 1.0


def test_an_engine_keeps_the_bound_and_finds_what_is_left(tiny_model: TinyModel, tmp_path: Path) -> None:
    model, config = tiny_model("llama"), storage(tmp_path)
    config["kv_connector_extra_config"]["max_bytes"] = 60_000
    answers, last = [], PROMPTS[2][::-1]
    for _ in range(2):
        with tiny_llm(model, kv_transfer_config=config) as llm:
            prompts = [*PROMPTS, last]
            answers.append([run(llm, [prompt], GREEDY)[0].outputs[0].token_ids for prompt in prompts])
            stats = transferred(llm)
            assert stats.num_saved_blocks * stats.block_bytes > 60_000 or len(answers) == 2
            llm.llm_engine.client.call("check_integrity")
    assert answers[0] == answers[1]
    assert 30_000 < size_of(tmp_path) <= 60_000
    with tiny_llm(model, kv_transfer_config=config) as llm:
        assert run(llm, [last], GREEDY)[0].num_cached_tokens == 32


@pytest.mark.parametrize(
    ("max_bytes", "message"), [(0, "at least 1"), (100, "one block of 8 tokens takes 6144")]
)
def test_a_bound_without_room_for_a_block_is_refused(
    tiny_model: TinyModel, tmp_path: Path, max_bytes: int, message: str
) -> None:
    config = storage(tmp_path)
    config["kv_connector_extra_config"]["max_bytes"] = max_bytes
    with pytest.raises(ConfigError, match=message):
        tiny_llm(tiny_model("llama"), kv_transfer_config=config)


@pytest.fixture
def model_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a model, all of them old enough to be remembered."""
    monkeypatch.setenv("MINIVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fingerprints, "MIN_AGE_SECONDS", -1.0)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes(os.urandom(1000))
    return model


def test_files_are_read_once_and_again_when_they_have_changed(
    model_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    file_digest = fingerprints.hashlib.file_digest
    monkeypatch.setattr(fingerprints.hashlib, "file_digest", lambda *a: read.append(a) or file_digest(*a))
    first = fingerprint("s", str(model_files))
    assert len(read) == 2 and fingerprint("s", str(model_files)) == first and len(read) == 2
    weights = model_files / "model.safetensors"
    before, data = weights.stat(), bytearray(weights.read_bytes())
    data[500] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time, another bit
    other = fingerprint("s", str(model_files))
    assert other != first and len(read) == 3
    data[500] ^= 1
    weights.write_bytes(data)
    assert fingerprint("s", str(model_files)) == first and fingerprint("t", str(model_files)) != first
    known = tmp_path / "home" / "file_digests.json"
    assert known.stat().st_mode & 0o077 == 0
    known.write_text("{broken")
    assert fingerprint("s", str(model_files)) == first


def test_files_that_changed_a_moment_ago_are_not_remembered(
    model_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "MIN_AGE_SECONDS", 60.0)
    fingerprint("", str(model_files))
    assert not (tmp_path / "home" / "file_digests.json").exists()
