"""How much memory the cache may take, read from made-up system files; and tables mirrored on a device."""

from __future__ import annotations

import dataclasses
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.config import CacheConfig
from minivllm.device import buffers, memory
from minivllm.device.buffers import MirroredTable, StagingBuffer
from minivllm.device.freed_memory import resident_bytes
from minivllm.device.memory import (
    HUGE_PAGE_BYTES,
    LINE_BYTES,
    MAX_CPU_CACHE_BYTES,
    WeightMemory,
    cache_memory,
    free_cpu_memory,
    lazily_zeroed,
    touched_bytes,
)
from minivllm.kv_cache.specs import one_group
from minivllm.worker.loading.cache_size import size_groups
from tests.frontend.scripted_client import engine_config

GIB = 2**30


def write_system_files(root: Path, *, available: int | None = None, **group: str) -> Path:
    if available is not None:
        (root / "proc").mkdir()
        (root / "proc/meminfo").write_text(
            f"MemTotal: 99999999 kB\nMemAvailable:   {available // 1024} kB\nX: 1 kB\n"
        )
    if group:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        for name, text in group.items():
            (root / f"sys/fs/cgroup/memory.{name}").write_text(text)
    return root


def test_free_memory_is_what_the_system_calls_available(tmp_path: Path) -> None:
    assert free_cpu_memory(write_system_files(tmp_path, available=3 * GIB)) == 3 * GIB


def test_a_control_group_without_limit_changes_nothing(tmp_path: Path) -> None:
    root = write_system_files(tmp_path, available=3 * GIB, max="max\n", current=f"{2 * GIB}\n")
    assert free_cpu_memory(root) == 3 * GIB


def test_the_rest_of_a_control_groups_limit_counts_where_it_is_less(tmp_path: Path) -> None:
    root = write_system_files(tmp_path, available=30 * GIB, max=f"{4 * GIB}\n", current=f"{3 * GIB}\n")
    assert free_cpu_memory(root) == 1 * GIB


def test_cached_files_of_a_control_group_count_as_free(tmp_path: Path) -> None:
    root = write_system_files(
        tmp_path,
        available=30 * GIB,
        max=f"{4 * GIB}",
        current=f"{4 * GIB}",
        stat=f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n",
    )
    assert free_cpu_memory(root) == 2 * GIB


def test_a_control_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    root = write_system_files(tmp_path, available=30 * GIB, max=f"{GIB}", current=f"{2 * GIB}")
    assert free_cpu_memory(root) == 0


def test_without_system_files_half_of_the_physical_memory_counts(tmp_path: Path) -> None:
    assert free_cpu_memory(tmp_path) > 0


@pytest.mark.parametrize(
    ("free", "utilization", "expected"),
    [(2 * GIB, 0.5, GIB), (100 * GIB, 0.5, MAX_CPU_CACHE_BYTES), (0, 0.5, 0), (2 * GIB, 1.0, 2 * GIB)],
)
def test_the_cache_on_a_cpu_takes_a_share_of_free_memory_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch, free: int, utilization: float, expected: int
) -> None:
    monkeypatch.setattr(memory, "free_cpu_memory", lambda: free)

    def profile() -> None:
        raise AssertionError("a CPU is not profiled")

    assert cache_memory(torch.device("cpu"), utilization, profile) == expected


@pytest.mark.parametrize(
    ("free", "why"),
    [
        (GIB, "a share of 0.5 of the free memory, at most 4 GiB"),
        (100 * GIB, "all that max_num_seqs requests of max_model_len tokens can use"),
    ],
)
def test_the_size_of_the_cache_is_told_with_what_bounds_it(free: int, why: str) -> None:
    config = dataclasses.replace(engine_config(), cache=CacheConfig(block_size=16, memory_utilization=0.5))
    groups, told = size_groups(config, [one_group(1, 16, block_bytes=GIB // 8)], lambda: free)
    assert told == why
    limits = config.scheduler
    enough = limits.max_num_seqs * -(-limits.max_model_len // 16)
    assert (groups[0].num_blocks < enough) == (free == GIB)


def separate_table(rows: int, columns: int) -> MirroredTable:
    """A table whose device side is memory of its own, as on a GPU."""
    table = MirroredTable(rows, columns, torch.device("cpu"))
    table.device = torch.zeros(rows, columns, dtype=torch.int32)
    table._separate = True
    return table


def test_on_a_cpu_both_sides_of_a_table_are_the_same_memory() -> None:
    table = MirroredTable(3, 4, torch.device("cpu"))
    table.write(1, 2, [7, 8])
    assert table.device.tolist() == [[0, 0, 0, 0], [0, 0, 7, 8], [0, 0, 0, 0]]


def test_a_separate_table_sees_writes_at_the_next_flush_and_only_those() -> None:
    table = separate_table(3, 4)
    table.write(1, 2, [7, 8])
    assert table.device.sum() == 0
    table.flush()
    assert table.device.tolist() == [[0, 0, 0, 0], [0, 0, 7, 8], [0, 0, 0, 0]]
    table.device.zero_()
    table.flush()
    assert table.device.sum() == 0, "what crossed once does not cross again"


def test_what_is_put_on_the_device_stays_there_and_the_host_learns_it_later() -> None:
    table = separate_table(3, 4)
    table.write(0, 0, [1, 2])
    table.flush()
    table.put(np.array([0, 2]), np.array([2, 3]), torch.tensor([7, 8]))
    assert table.device.tolist() == [[1, 2, 7, 0], [0, 0, 0, 0], [0, 0, 0, 8]]
    assert table.host.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    table.write(0, 3, [9])
    table.flush()
    assert table.device.tolist() == [[1, 2, 7, 9], [0, 0, 0, 0], [0, 0, 0, 8]], "only differences cross"
    shared = MirroredTable(3, 4, torch.device("cpu"))
    shared.put(np.array([0, 2]), np.array([2, 3]), torch.tensor([7, 8]))
    assert shared.device.tolist() == shared.host.tolist() == [[0, 0, 7, 0], [0, 0, 0, 0], [0, 0, 0, 8]]


def test_random_overlapping_writes_leave_the_last_value_whatever_the_order_of_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    table = separate_table(5, 9)
    sent: list[torch.Tensor] = []
    original = buffers.to_device

    def remember(array: np.ndarray, device: torch.device) -> torch.Tensor:
        sent.append(original(array, device))
        return sent[-1]

    monkeypatch.setattr(buffers, "to_device", remember)
    for _ in range(50):
        sent.clear()
        for _ in range(rng.integers(0, 8)):
            row, start = int(rng.integers(5)), int(rng.integers(9))
            length = int(rng.integers(1, 10 - start))
            table.write(row, start, rng.integers(1, 1000, length).astype(np.int32))
        table.flush()
        assert np.array_equal(table.device.numpy(), table.host)
        if sent:
            places, values = sent[0].tolist(), sent[1].tolist()
            assert len(set(zip(places, values))) == len(set(places)), (
                "a place that is sent twice carries one value"
            )


def test_fields_of_a_staging_buffer_do_not_overlap_and_reach_the_device() -> None:
    buffer = StagingBuffer({"a": (3,), "b": (2, 5), "c": (17,)}, torch.device("cpu"))
    for value, name in enumerate(("a", "b", "c"), 1):
        buffer.begin()
        buffer.host[name][...] = value
    buffer.commit()
    for value, (name, shape) in enumerate({"a": (3,), "b": (2, 5), "c": (17,)}.items(), 1):
        assert buffer.device[name].shape == shape and bool((buffer.device[name] == value).all())
        assert buffer.device[name].data_ptr() % 64 == buffer.device["a"].data_ptr() % 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lazily_zeroed_memory_is_zero_writable_and_its_own(dtype: torch.dtype) -> None:
    first, second = (lazily_zeroed((3, 5, 7), dtype) for _ in range(2))
    assert first.shape == (3, 5, 7) and first.dtype == dtype and first.is_contiguous()
    assert not first.any()
    first.fill_(2)
    assert bool((first == 2).all()) and not second.any()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is known to tell")
def test_touched_memory_is_what_was_written() -> None:
    tensor = lazily_zeroed((64 * 2**20,), torch.uint8)
    huge = 2 * 2**20  # bytes that one write may touch
    assert touched_bytes(tensor) == 0
    tensor[5] = 1
    assert 0 < touched_bytes(tensor) <= huge
    tensor[: 32 * 2**20] = 1
    assert 32 * 2**20 <= touched_bytes(tensor) <= 32 * 2**20 + huge
    assert touched_bytes(tensor[: 2**20]) == 2**20
    assert touched_bytes(torch.empty(0)) == 0


def huge_bytes_at(address: int) -> int:
    """What the system says about the mapping that holds the address, in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            start, end = (int(part, 16) for part in fields[0].split("-"))
            inside = start <= address < end
        elif inside and fields[0] == "AnonHugePages:":
            return int(fields[1]) * 1024
    raise AssertionError("no mapping holds the address")


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="only Linux tells how memory is mapped")
def test_weights_lie_in_huge_pages() -> None:
    weights = WeightMemory()
    copies = [weights.copy(torch.arange(3 * HUGE_PAGE_BYTES // 8) + i) for i in range(4)]
    written = lazily_zeroed((8 * HUGE_PAGE_BYTES,), torch.uint8).fill_(1)
    if huge_bytes_at(written.data_ptr() + 4 * HUGE_PAGE_BYTES) == 0:
        pytest.skip("this system has no huge pages to give")
    assert huge_bytes_at(copies[0].data_ptr()) >= 11 * HUGE_PAGE_BYTES
    for i, copy in enumerate(copies):
        torch.testing.assert_close(copy, torch.arange(3 * HUGE_PAGE_BYTES // 8) + i, rtol=0, atol=0)


SHAPES = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=3), min_size=1, max_size=12)


@given(SHAPES, st.sampled_from([torch.int8, torch.bfloat16, torch.float64]), st.booleans())
def test_copies_of_weights_are_theirs_alone(
    shapes: list[list[int]], dtype: torch.dtype, is_transposed: bool
) -> None:
    weights, generator = WeightMemory(), torch.Generator().manual_seed(0)
    with mock.patch.object(memory, "CHUNK_BYTES", 2**20):
        originals, copies = [], []
        for shape in shapes:
            original = torch.randint(-99, 99, shape, generator=generator).to(dtype)
            original = original.mT if is_transposed and len(shape) > 1 else original
            original.mark = len(originals)  # type: ignore[attr-defined]
            originals.append(original)
            copies.append(weights.copy(original))
    for place, (original, copy) in enumerate(zip(originals, copies)):
        assert torch.equal(original, copy) and copy.is_contiguous() and copy.mark == place  # type: ignore[attr-defined]
        assert copy.data_ptr() % LINE_BYTES == 0 or copy.nbytes < mmap.PAGESIZE
        copy.fill_(7)
    assert all(bool((copy == 7).all()) for copy in copies)


def test_threads_that_load_at_once_share_no_memory() -> None:
    weights = WeightMemory()

    def copies(number: int) -> list[torch.Tensor]:
        return [weights.copy(torch.full((5000,), number)) for _ in range(200)]

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(copies, range(4))):
            assert all(bool((copy == number).all()) for copy in found)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is known to tell")
def test_memory_goes_with_the_last_weight_in_it() -> None:
    weights = WeightMemory()
    copies = [weights.copy(torch.ones(20 * 2**20, dtype=torch.uint8)) for _ in range(6)]
    process = resident_bytes(os.getpid())
    last = copies[-1]
    del copies  # two chunks of three
    assert process - resident_bytes(os.getpid()) >= 55 * 2**20
    # Of a page each: a temporary tensor of all of them might stay in the process.
    assert bool((last[::4096] == 1).all())
    del last
    assert process - resident_bytes(os.getpid()) >= 115 * 2**20
