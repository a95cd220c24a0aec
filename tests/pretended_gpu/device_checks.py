"""What the pretended GPU refuses, and what it computes. Run under the plugin, by test_pretended_gpu.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.pretended_gpu.streams import RaceError, SynchronizationError


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    try:
        torch.cuda.synchronize()
    except RaceError:
        torch.cuda.synchronize()  # the next copies


def pinned(*values: float) -> Tensor:
    return torch.tensor(values).pin_memory()


def captured(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        try:
            step()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def test_tensors_say_they_are_on_the_gpu_and_hold_numbers() -> None:
    x = torch.arange(6, device="cuda").view(2, 3)
    assert x.is_cuda and x.device == torch.device("cuda", 0)
    assert (x.float() @ x.t().float()).tolist() == [[5, 14], [14, 50]]
    assert x[1].tolist() == [3, 4, 5] and x[:, None].shape == (2, 1, 3)
    x[0, 1:] = 7
    assert x.cpu().tolist() == [[0, 7, 7], [3, 4, 5]]
    with pytest.raises(TypeError, match="numpy"):
        x.numpy()


def test_tensors_of_two_devices_do_not_meet() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="cuda") + torch.ones(2)
    assert (torch.ones(2, device="cuda") + torch.tensor(1.0)).tolist() == [2, 2]


def test_threads_have_the_gpu_too() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(torch.ones(3, device="cuda").sum().item()))
    thread.start()
    thread.join()
    assert found == [3.0]


@pytest.mark.parametrize(
    "waits",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(x.int()),
        lambda x: torch.ones(3).to("cuda"),
        lambda x: torch.ones(3).to("cuda", non_blocking=True),  # not pinned
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: x[torch.tensor([0])],
    ],
)
def test_what_makes_the_host_wait_is_refused_where_it_must_not(waits: Callable[[Tensor], object]) -> None:
    x = torch.ones(3, device="cuda")
    waits(x)
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(SynchronizationError):
        waits(x)
    torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(SynchronizationError, match="while a stream is captured"):
        captured(lambda: waits(x))


def test_what_does_not_wait_is_let_through() -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    x += pinned(1, 2, 3).to("cuda", non_blocking=True)
    x[torch.arange(2, device="cuda")] = 0.0
    assert x.repeat_interleave(torch.ones(3, device="cuda").int(), output_size=3).shape == (3,)
    host = torch.empty(3, pin_memory=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [0, 0, 4]


def test_pinned_memory_that_is_written_too_early_is_a_race() -> None:
    host = pinned(1, 2)
    x = host.to("cuda", non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    host.zero_()
    assert x.tolist() == [1, 2], "the copy was over"
    y = host.to("cuda", non_blocking=True)
    host.fill_(5)
    with pytest.raises(RaceError, match="was written while"):
        y.tolist()


def test_results_that_are_read_too_early_are_garbage() -> None:
    x, host = torch.ones(2, device="cuda"), torch.zeros(2, pin_memory=True)
    host.copy_(x, non_blocking=True)
    assert host.tolist() not in ([1, 1], [0, 0])
    torch.cuda.synchronize()
    assert host.tolist() == [1, 1]


def test_what_another_stream_makes_is_waited_for() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(2, device="cuda")
    with torch.cuda.stream(side), pytest.raises(RaceError, match="has not waited"):
        x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
        event = torch.cuda.Event()
        event.record()
    with pytest.raises(RaceError, match="has not waited"):
        y + 1
    torch.cuda.current_stream().wait_event(event)
    assert (y + 1).tolist() == [3, 3]


def test_copies_of_other_streams_are_as_late_as_they_may_be() -> None:
    side, cache = torch.cuda.Stream(), torch.zeros(2, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cache.copy_(pinned(1, 2), non_blocking=True)
    assert cache.clone().tolist() not in ([0, 0], [1, 2])
    torch.cuda.current_stream().wait_stream(side)
    assert cache.tolist() == [1, 2]
    host = torch.zeros(2, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(cache, non_blocking=True)
    cache.zero_()
    with pytest.raises(RaceError, match="Memory of the device"):
        side.synchronize()


def test_graphs_compute_again_in_the_same_memory() -> None:
    x, out = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    kept: list[Tensor] = []

    def step() -> None:
        y = (x * 2).reshape(1, 2).t()
        kept.append(y.contiguous())
        out.add_(kept[0].flatten())

    graph = captured(step)
    address = kept[0].data_ptr()
    x.fill_(5)
    out.zero_()
    graph.replay()
    graph.replay()
    assert kept[0].flatten().tolist() == [10, 10] and out.tolist() == [20, 20]
    assert kept[0].data_ptr() == address


def test_empty_graphs_are_told_and_captures_want_a_stream() -> None:
    with pytest.warns(UserWarning, match="CUDA Graph is empty"):
        captured(lambda: None)
    with pytest.raises(RuntimeError, match="not the default one"):
        torch.cuda.CUDAGraph().capture_begin()


def test_processes_that_are_started_have_the_gpu() -> None:
    import subprocess
    import sys

    code = "import torch; print(torch.cuda.device_count(), torch.ones(3, device='cuda').sum().item())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["1", "3.0"]
