"""The small uncompiled engine that workers of one model are tried with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil


def small_engine(model: Path, **more: Any) -> dict[str, Any]:
    """Engine arguments, in float32 on a CPU; ``more`` replace them.
    Prompts come in chunks of up to two blocks."""
    return {
        "model": str(model),
        "dtype": "float32",
        "device": "cpu",
        "enforce_eager": True,
        "compile_in_background": False,
        "max_model_len": 128,
        "block_size": 16,
        "max_num_batched_tokens": 32,
        **more,
    }


def command_of(process: psutil.Process) -> str:
    """What a process runs; "" if it has ended. Other tests may leave children of theirs to be waited for."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def worker_processes() -> list[psutil.Process]:
    """Children of this process that are workers."""
    return [
        one for one in psutil.Process().children() if "minivllm.executor.worker_process" in command_of(one)
    ]
