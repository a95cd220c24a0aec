"""Tensors of the workers on the GPUs of one host, through torch.distributed and its NCCL backend.

What is exchanged never leaves the GPUs, and no worker waits for another one on the host: collectives are
launched like all other work, so CUDA graphs record them and replay them in their place.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minivllm.distributed.communicator import Communicator, add_up

LEAST_DIVIDED_BYTES = 2**18
"""From this size on, more than two ranks each add a part of a sum: gathering would bring size - 1 whole
tensors to every rank, and this brings less than two. The size is a guess that no GPU has confirmed."""


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""PyTorch 2.13 renamed it, and warns of the old name."""


class NcclCommunicator(Communicator):
    """rendezvous: path of an empty or missing file that all ranks, and no other processes, can write.
    device: of this rank. backend: "gloo" does the same on a CPU, for tests."""

    def __init__(
        self, rank: int, size: int, rendezvous: str, device: str = "cuda", backend: str = "nccl"
    ) -> None:
        self.rank = rank
        self.size = size
        self._device = torch.device(device)
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # the workers of one host; no other host can connect
        store = dist.FileStore(rendezvous, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        self.largest([0.0])  # NCCL connects at the first call, which must not be in a graph

    def exchange(self, x: Tensor) -> list[Tensor]:
        self.num_exchanges += 1
        mine = x.to(self._device).reshape(-1).view(torch.uint8)
        if len(mine) == 0:
            return [x] * self.size
        everything = mine.new_empty(self.size * len(mine))
        _all_gather(everything, mine)
        return [part.view(x.dtype).view(x.shape).to(x.device) for part in everything.view(self.size, -1)]

    def all_reduce(self, x: Tensor) -> Tensor:
        if self.size == 2 or x.nbytes < LEAST_DIVIDED_BYTES:
            return super().all_reduce(x)
        self.num_exchanges += 1
        own = -(-x.numel() // self.size)
        given = F.pad(x.reshape(-1), (0, own * self.size - x.numel()))
        parts = torch.empty_like(given)
        dist.all_to_all_single(parts, given)
        total = torch.empty_like(given)
        _all_gather(total, add_up(parts.view(self.size, own).unbind()))
        return total[: x.numel()].view(x.shape)

    def close(self) -> None:
        dist.destroy_process_group()
