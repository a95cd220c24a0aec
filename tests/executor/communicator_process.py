"""One rank that exchanges tensors through shared memory and through gloo, and checks what arrives.

``python -m tests.executor.communicator_process RANK MEMORY EVENTS RENDEZVOUS``: EVENTS as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from minivllm.distributed.communicator import Communicator
from minivllm.distributed.gloo import GlooCommunicator
from minivllm.distributed.shared_memory import SharedMemoryCommunicator


def given(rank: int, round: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * round + rank)).to(dtype)


def check(communicator: Communicator) -> list[Tensor]:
    results = []
    size, rank = communicator.size, communicator.rank
    for round, (rows, dtype) in enumerate([(1, torch.float32), (700, torch.float32), (3, torch.bfloat16)] * 20):
        parts = [given(other, round, (rows, 576), dtype) for other in range(size)]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        total = communicator.all_reduce(parts[rank])
        assert torch.equal(total, expected.to(dtype)), (rank, round)
        widths = [64 * (1 + other) for other in range(size)]
        pieces = [part[:5, :width] for part, width in zip(parts, widths)]
        assert torch.equal(communicator.gather_columns(pieces[rank], widths), torch.cat(pieces, 1)), (rank, round)
        results.append(total)
    return results


def main() -> None:
    rank, memory, events = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    shared = check(SharedMemoryCommunicator(rank, memory, events))
    gloo = GlooCommunicator(rank, len(events), sys.argv[4])
    assert all(map(torch.equal, shared, check(gloo)))
    gloo.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
