"""Tensors of workers that share a GPU, through host memory: NCCL refuses two ranks on one device.

Every exchange waits for the device and for the other workers on the host, and breaks CUDA graphs in two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minivllm.device.host_work import on_host
from minivllm.distributed.communicator import Communicator


class StagedCommunicator(Communicator):
    """host: exchanges tensors of a CPU."""

    def __init__(self, host: Communicator) -> None:
        self._host = host
        self.rank = host.rank
        self.size = host.size

    @property
    def num_exchanges(self) -> int:  # type: ignore[override]
        return self._host.num_exchanges

    def exchange(self, x: Tensor) -> list[Tensor]:
        if x.device.type == "cpu":
            return self._host.exchange(x)
        return list(on_host(lambda: torch.stack(self._host.exchange(x.cpu())).to(x.device)).unbind())

    def close(self) -> None:
        self._host.close()
