"""How the worker processes of one host divide its GPUs: each sees only its own."""

from __future__ import annotations

import os

from minivllm.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> list[str]:
    """The GPUs of this process, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch  # slow

    names = os.environ.get(VISIBLE)
    if names is None:
        return [str(index) for index in range(torch.cuda.device_count())]
    return [name.strip() for name in names.split(",") if name.strip()][: torch.cuda.device_count()]


def own_gpu(place: int, num_processes: int) -> dict[str, str]:
    """Environment variables that give one of so many processes a GPU of its own; a single one keeps all."""
    return {} if num_processes == 1 else {VISIBLE: visible_gpus()[place]}


def check_gpus(num_workers: int, is_one_host: bool) -> None:
    """Raises ConfigError where so many workers cannot each have a GPU.
    is_one_host: and one engine starts them all."""
    if not is_one_host:
        raise ConfigError(
            f"{num_workers} workers divide a model on the GPUs of one host, started by minivllm itself: "
            "leave nnodes, "
            "distributed_executor_backend and enable_expert_parallel with data_parallel_size out, or use "
            "device='cpu'."
        )
    if num_workers > (found := len(visible_gpus())):
        raise ConfigError(
            f"tensor_parallel_size is {num_workers}, which takes a GPU for each worker, but PyTorch sees "
            f"{found} here: "
            f"use {found}, or device='cpu'."
        )
