"""Memory shared by host and device: filled with numpy, read by the model at addresses that never change.

On a CPU both sides are the same memory and crossing costs nothing.
On another device only what changed crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def rounded_capacity(size: int) -> int:
    """The next power of two, at least 2. Capacities are constants of compiled code: rounded ones let code
    that is kept on disk serve other settings too."""
    return max(2, 1 << (size - 1).bit_length())


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """array on the device, without waiting for what the device is computing."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


class StagingBuffer:
    """Many small int32 arrays in one pinned host buffer that crosses to the device in a single copy per
    step.

    depth: steps that may be launched before the first of them has begun. Each has a host buffer, and they
    take turns; on a CPU, where the device's memory is the host's, there is one.
    """

    def __init__(self, fields: dict[str, tuple[int, ...]], device: torch.device, *, depth: int = 1) -> None:
        """fields: name -> shape. Each becomes a numpy view (``host[name]``, after ``begin``) and a tensor
        (``device[name]``)."""
        sizes = {name: int(np.prod(shape)) for name, shape in fields.items()}
        # Sixteen elements are one cache line:
        # no two fields share one, and every view is aligned for vector loads.
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name] = total
            total += -(-size // 16) * 16
        cuda = device.type == "cuda"
        self._hosts = [
            torch.zeros(total, dtype=torch.int32, pin_memory=cuda) for _ in range(depth if cuda else 1)
        ]
        self._device = torch.zeros(total, dtype=torch.int32, device=device) if cuda else self._hosts[0]
        self._copied = [torch.cuda.Event() for _ in self._hosts] if cuda else []
        self._turn = 0
        self._views: list[dict[str, np.ndarray]] = [{} for _ in self._hosts]
        self.device: dict[str, Tensor] = {}
        for name, shape in fields.items():
            part = slice(starts[name], starts[name] + sizes[name])
            for views, host in zip(self._views, self._hosts):
                views[name] = host.numpy()[part].reshape(shape)
            self.device[name] = self._device[part].view(shape)
        self.host = self._views[0]

    def begin(self) -> None:
        """To be called before writing: wait until the commit of this turn's buffer has left the host's side.

        A step that samples nothing leaves the host ahead of the device, whose copy may still be queued.
        """
        if self._copied:
            self._turn = (self._turn + 1) % len(self._hosts)
            self.host = self._views[self._turn]
            self._copied[self._turn].synchronize()

    def commit(self) -> None:
        """Make what was written on the host visible to the device."""
        if self._copied:
            self._device.copy_(self._hosts[self._turn], non_blocking=True)
            self._copied[self._turn].record()


class MirroredTable:
    """An int32 table [rows, columns] that lives on the device; writes on the host cross as differences."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        # numpy takes zeroed pages from the operating system lazily: rows that are never used cost no memory.
        self.host = np.zeros((rows, columns), dtype=np.int32)
        self._separate = device.type != "cpu"
        self.device = (
            torch.zeros(rows, columns, dtype=torch.int32, device=device)
            if self._separate
            else torch.from_numpy(self.host)
        )
        self._changed: list[np.ndarray] = []

    def write(self, row: int, start: int, values: np.ndarray | list[int]) -> None:
        """Set [row, start : start + len(values)]."""
        self.host[row, start : start + len(values)] = values
        if self._separate:
            first = row * self.host.shape[1] + start
            self._changed.append(np.arange(first, first + len(values)))

    def put(self, rows: np.ndarray, columns: np.ndarray, values: Tensor) -> None:
        """Set [rows[i], columns[i]] on the device to values [n] int64, which are there. The host's side is
        not updated: the caller writes the values to ``host`` when they are known."""
        if not self._separate:
            self.host[rows, columns] = values.numpy()
            return
        index = to_device(rows * self.host.shape[1] + columns, self.device.device)
        self.device.view(-1).index_copy_(0, index, values.to(torch.int32))

    def put_at(self, rows: Tensor, columns: Tensor, values: Tensor) -> None:
        """Set [rows[i], columns[i]] on the device to values[i], all int64 there, of shapes that broadcast."""
        places = rows * self.host.shape[1] + columns
        self.device.view(-1)[places.flatten()] = values.flatten().to(torch.int32)

    def flush(self) -> None:
        """Send what was written since the last flush: indices and values in one copy each."""
        if not self._changed:
            return
        index = np.concatenate(self._changed)
        # Read now: where a place was written twice, both entries carry the last value,
        # so their order does not matter.
        values = self.host.reshape(-1)[index]
        device = self.device.device
        self.device.view(-1).index_copy_(0, to_device(index, device), to_device(values, device))
        self._changed.clear()


class ReadBack:
    """Brings small tensors to the host beside the computation:
    on a stream of their own, into pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, tensor: Tensor) -> Callable[[], list[Any]]:
        """tensor [n] or [n, m] int, not to be overwritten.
        The returned function waits until it has arrived, and for nothing that was launched after it."""
        if self._stream is None:
            return tensor.tolist
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        # Its memory must not serve another tensor before the copy is done.
        tensor.record_stream(self._stream)

        def wait() -> list[Any]:
            copied.synchronize()
            return host.tolist()

        return wait
