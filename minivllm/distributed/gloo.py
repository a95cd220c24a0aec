"""Tensors of the workers through torch.distributed and its gloo backend: sockets instead of shared memory."""

from __future__ import annotations

import os
import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm.distributed.communicator import Communicator


class GlooCommunicator(Communicator):
    """rendezvous: path of an empty or missing file that all ranks, and no other processes, can write; None if
    torchrun has started the ranks, whose processes may already have a process group."""

    def __init__(self, rank: int, size: int, rendezvous: str | None = None) -> None:
        self.rank = rank
        self.size = size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the workers of one host
        is_ours = rendezvous is not None or not dist.is_initialized()
        if rendezvous is not None:
            store = dist.FileStore(rendezvous, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        elif is_ours:
            dist.init_process_group("gloo")
        self._membership = _Membership(
            is_ours, None if rendezvous is not None else dist.new_group(backend="gloo")
        )
        # gloo's threads give tensors back to Python, and a process that ends meanwhile dies of it.
        self._leave = weakref.finalize(self, self._membership.leave)

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self._membership.group

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.num_exchanges += 1
        mine = x.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self._group)
        return [part.view(x.dtype).view(x.shape) for part in parts]

    def broadcast(self, record: bytes | None) -> bytes:
        """What rank 0 gives, on all ranks. record: None on the others."""
        length = torch.tensor([len(record or b"")])
        dist.broadcast(length, 0, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        if record:
            data = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        return data.numpy().tobytes()

    def gather(self, record: bytes) -> list[bytes]:
        """What all ranks give, in order of rank, on all of them."""
        lengths = [int(length) for length in self.exchange(torch.tensor([len(record)]))]
        padded = bytearray(record.ljust(max(lengths)))
        parts = self.exchange(torch.frombuffer(padded, dtype=torch.uint8))
        return [part.numpy().tobytes()[:length] for part, length in zip(parts, lengths)]

    def close(self) -> None:
        self._leave()


class _Membership:
    """In the default process group, or in a separate one. is_ours: the default group was made here."""

    def __init__(self, is_ours: bool, group: dist.ProcessGroup | None) -> None:
        self._is_ours = is_ours
        self.group = group

    def leave(self) -> None:
        """Drop the last reference to the group, so that its threads end."""
        group, self.group = self.group, None
        if dist.is_initialized():
            dist.destroy_process_group(None if self._is_ours else group)
