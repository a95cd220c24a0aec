"""Streams and events that are as late as CUDA may be.

A copy between host and device is over only when the host or a stream waits for it. Until then the pinned memory that it
reads must stay as it is, the memory that it writes holds garbage, and what it reads on the device must not
change. A GPU with little work is early, and hides these mistakes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GARBAGE = 0x5B
"""Every byte of memory that a copy has not arrived in yet."""


class RaceError(AssertionError):
    """Something was read before it was there, or written while it was still read."""


class SynchronizationError(RuntimeError):
    """The host waits for the device where it must not."""


@dataclass
class _Copy:
    """A copy that was launched. check: raises RaceError if what it reads has changed. deliver: writes what is
    still garbage. Both come once, with the first wait."""

    position: int
    check: Callable[[], None]
    deliver: Callable[[], None]


class Stream:
    """Work in order. ``position``: pieces of work that were launched."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = torch.device("cuda", 0)
        self.cuda_stream = id(self)
        self.position = 0
        self._copies: list[_Copy] = []
        self._waits: list[tuple[int, Stream, int]] = []
        self._known: dict[Stream, int] = {}
        with _lock:
            _every_stream.append(self)

    def launch(self, check: Callable[[], None], deliver: Callable[[], None]) -> None:
        with _lock:
            self.position += 1
            self._copies.append(_Copy(self.position, check, deliver))

    def launch_work(self) -> int:
        """A kernel: what was copied before, on this stream, has arrived for it. Returns its position."""
        with _lock:
            if self is not _default_stream:
                self.finish(self.position, by_host=False)
            self.position += 1
            return self.position

    def finish(self, position: int | None = None, by_host: bool = True) -> None:
        """All work up to this position (None: all) is over, for those who wait now.
        by_host: what it waits for, on other streams, is over too."""
        with _lock:
            last = self.position if position is None else position
            while self._copies and self._copies[0].position <= last:
                copy = self._copies.pop(0)
                with torch.inference_mode():  # which its tensors may come from
                    copy.check()
                    copy.deliver()
            if by_host:
                while self._waits and self._waits[0][0] <= last:
                    _, other, until = self._waits.pop(0)
                    other.finish(until)
                _known_to_host[self] = max(last, _known_to_host.get(self, 0))

    def knows(self, other: Stream, position: int) -> bool:
        """Whether work of another stream, up to this position, is over before what this one launches next."""
        known = max(self._known.get(other, 0), _known_to_host.get(other, 0))
        return other is self or position <= known

    def wait_for(self, other: Stream, position: int) -> None:
        if other is self:
            return
        with _lock:
            other.finish(position, by_host=False)
            self._known[other] = max(position, self._known.get(other, 0))
            for third, known in other._known.items():
                self._known[third] = max(known, self._known.get(third, 0))
            self._waits.append((self.position, other, position))

    def wait_stream(self, other: Stream) -> None:
        self.wait_for(other, other.position)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.wait_for(event.stream, event.position)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        check_not_capturing("Stream.synchronize")
        self.finish()

    def query(self) -> bool:
        self.finish()
        return True

    def __enter__(self) -> Stream:
        _streams_of_thread().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _streams_of_thread().pop()


_lock = threading.RLock()
_every_stream: list[Stream] = []
_known_to_host: dict[Stream, int] = {}
_default_stream = Stream()
_local = threading.local()


class Event:
    """A place in a stream."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, **_: Any) -> None:
        self.stream: Stream | None = None
        self.position = 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current_stream()
        self.position = self.stream.position

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        check_not_capturing("Event.synchronize")
        if self.stream is not None:
            self.stream.finish(self.position)

    def query(self) -> bool:
        if self.stream is not None:
            self.stream.finish(self.position)
        return True

    def elapsed_time(self, end: Event) -> float:
        return 1.0


def current_stream(device: Any = None) -> Stream:
    return _streams_of_thread()[-1]


def default_stream(device: Any = None) -> Stream:
    return _default_stream


def stream_context(stream: Stream | None) -> Stream:
    """``torch.cuda.stream``"""
    return stream or current_stream()


def synchronize(device: Any = None) -> None:
    check_not_capturing("torch.cuda.synchronize")
    with _lock:
        for stream in list(_every_stream):
            stream.finish()


def _streams_of_thread() -> list[Stream]:
    if not hasattr(_local, "streams"):
        _local.streams = [_default_stream]
    return _local.streams


# -- what makes the host wait ----------------------------------------------------------------------

_debug_mode = "default"


def set_sync_debug_mode(mode: int | str) -> None:
    """As ``torch.cuda.set_sync_debug_mode``: an operator that waits is an error in mode "error"."""
    global _debug_mode
    _debug_mode = ("default", "warn", "error")[mode] if isinstance(mode, int) else mode


def get_sync_debug_mode() -> int:
    return ("default", "warn", "error").index(_debug_mode)


def wait_for_device(what: str) -> None:
    """The host waits, in the midst of an operator, for what the current stream has launched."""
    check_not_capturing(what)
    if _debug_mode == "error":
        raise SynchronizationError(f"{what} makes the host wait for the device.")
    current_stream().finish()


def capture_of_thread() -> Any:
    """The CUDAGraph that this thread captures, or None."""
    return getattr(_local, "capture", None)


def set_capture(graph: Any) -> None:
    _local.capture = graph


def check_not_capturing(what: str) -> None:
    if capture_of_thread() is not None:
        raise SynchronizationError(f"{what} is not permitted while a stream is captured.")


# -- copies between host and device ----------------------------------------------------------------


def launch_copy_to_device(pinned: Tensor, target: Tensor) -> None:
    """pinned: the host's memory. target: the CPU tensor with the device's memory, still as it was. On the
    default stream, where all kernels come, it arrives at once: nothing could see that it did not."""
    snapshot, stream = pinned.clone(), current_stream()
    if stream is _default_stream:
        target.copy_(pinned)
    else:
        fill_with_garbage(target)

    def check() -> None:
        if not _same(pinned, snapshot):
            raise RaceError(
                f"Pinned memory {list(pinned.shape)} was written while a copy to the device could still read it."
            )

    def deliver() -> None:
        if stream is not _default_stream:
            target.copy_(snapshot)

    stream.launch(check, deliver)


def launch_copy_to_host(pinned: Tensor, source: Tensor) -> None:
    """source: the CPU tensor with the device's memory."""
    snapshot, stream = source.clone(), current_stream()
    fill_with_garbage(pinned)

    def check() -> None:
        if stream is not _default_stream and not _same(source, snapshot):
            raise RaceError(
                f"Memory of the device {list(source.shape)} was written while a copy to the host could still "
                "read it."
            )

    def deliver() -> None:
        pinned.copy_(snapshot)

    stream.launch(check, deliver)


def fill_with_garbage(tensor: Tensor) -> None:
    tensor.copy_(
        torch.full([tensor.nbytes], GARBAGE, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
    )


def _same(a: Tensor, b: Tensor) -> bool:
    """Bit by bit."""
    copies = (t.clone(memory_format=torch.contiguous_format) for t in (a, b))
    return torch.equal(*(t.view(-1).view(torch.uint8) for t in copies))
