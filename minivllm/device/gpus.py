"""How the engines and workers of one host divide its GPUs: each process sees only those that it uses."""

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


def gpu_of_worker(place: int, num_workers: int) -> dict[str, str]:
    """Environment variables that give one of an engine's workers its GPU, by its place on this host; a single
    one keeps all. Where there are fewer GPUs than workers, some share one."""
    gpus = visible_gpus()
    return {} if num_workers == 1 or not gpus else {VISIBLE: gpus[place % len(gpus)]}


def gpus_of_engine(number: int, num_workers: int) -> dict[str, str]:
    """Environment variables that give one of several engines the GPUs of its workers. Before CUDA is
    initialised in its process."""
    gpus = visible_gpus()
    places = range(number * num_workers, (number + 1) * num_workers)
    return {VISIBLE: ",".join(dict.fromkeys(gpus[place % len(gpus)] for place in places))} if gpus else {}


def take_gpus(number: int, num_engines: int, num_workers: int, is_sized: bool) -> None:
    """Let this process see only the GPUs of its engine, before it uses any; nothing where there are none.
    number: among the engines. num_workers: of each. is_sized: see ``check_gpus``. Raises ConfigError."""
    if visible_gpus():
        check_gpus(num_engines * num_workers, is_one_host=True, is_sized=is_sized)
        os.environ.update(gpus_of_engine(number, num_workers))


def workers_share_gpus(num_workers: int) -> bool:
    """Whether an engine's workers cannot have a GPU each, for which NCCL has no use."""
    return num_workers > len(visible_gpus())


def check_gpus(num_workers: int, is_one_host: bool, is_sized: bool) -> None:
    """Raises ConfigError where workers, those of all engines, cannot have or share the GPUs here.

    is_one_host: one command starts them all. is_sized: it is said how large the cache of each is.
    """
    if not is_one_host:
        raise ConfigError(
            f"{num_workers} workers divide a model on the GPUs of one host, started by minivllm itself: "
            "leave nnodes, "
            "distributed_executor_backend and enable_expert_parallel with data_parallel_size out, or use "
            "device='cpu'."
        )
    if num_workers > (found := len(visible_gpus())) and not is_sized:
        raise ConfigError(
            f"{num_workers} workers (tensor_parallel_size x pipeline_parallel_size x data_parallel_size) "
            f"would take a GPU each, but PyTorch sees {found} here: use {found} or less. To let several "
            "share one, which is slower than a single one, say how large the KV cache of each is with "
            "kv_cache_memory_bytes or num_gpu_blocks_override."
        )
