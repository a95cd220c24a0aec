"""One rank that exchanges tensors through shared memory, through gloo, and as GPUs do (here by gloo too),
and checks what arrives.

``python -m tests.executor.communicator_process RANK MEMORY EVENTS RENDEZVOUS``: EVENTS as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from minivllm.distributed.communicator import Communicator
from minivllm.distributed.gloo import GlooCommunicator
from minivllm.distributed.nccl import NcclCommunicator
from minivllm.distributed.shared_memory import SharedMemoryCommunicator


def given(rank: int, round: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * round + rank)).to(dtype)


def check(communicator: Communicator) -> list[Tensor]:
    results = []
    size, rank = communicator.size, communicator.rank
    shapes = [((1, 576), torch.float32), ((700, 577), torch.float32), ((3, 576), torch.bfloat16)]
    for round, (shape, dtype) in enumerate(shapes * 20):
        parts = [given(other, round, shape, dtype) for other in range(size)]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        total = communicator.all_reduce(parts[rank])
        assert torch.equal(total, expected.to(dtype)), (rank, round)
        widths = [64 * (1 + other) for other in range(size)]
        pieces = [part[:5, :width] for part, width in zip(parts, widths)]
        assert torch.equal(communicator.gather_columns(pieces[rank], widths), torch.cat(pieces, 1)), (
            rank,
            round,
        )
        results.append(total)
    return results


def main() -> None:
    rank, memory, events = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    shared = check(SharedMemoryCommunicator(rank, memory, events))
    gloo = GlooCommunicator(rank, len(events), sys.argv[4])
    assert all(map(torch.equal, shared, check(gloo)))
    gloo.close()
    as_on_gpus = NcclCommunicator(rank, len(events), f"{sys.argv[4]}-gpus", device="cpu", backend="gloo")
    assert all(map(torch.equal, shared, check(as_on_gpus)))
    assert torch.equal(as_on_gpus.exchange(torch.empty(0, 3))[0], torch.empty(0, 3))
    assert as_on_gpus.first_text("" if rank == 0 else f"rank {rank}") == "rank 1"
    as_on_gpus.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
