"""Versions, devices, memory, directories, and the defaults that follow from them."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from minivllm import __version__
from minivllm.cli.terminal.terminal_text import format_bytes
from minivllm.hub.home import home_directory

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "gguf", "ray", "nixl")
_CPU_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "avx512_vnni",
    "amx_bf16",
    "amx_int8",
    "amx_tile",
)


def collect() -> dict[str, Any]:
    """Everything ``env`` shows, as plain values; sizes in bytes."""
    from minivllm.startup.openmp import choose_wait_policy

    choose_wait_policy()  # before torch is imported, as an engine does
    return {
        "versions": {"minivllm": __version__, "python": platform.python_version(), **_package_versions()},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory": _memory(),
        "cuda_devices": _cuda_devices(),
        "cpp_compiler": _cpp_compiler(),
        "defaults": _defaults(),
        "directories": _directories(),
    }


def _cpp_compiler() -> str | None:
    """Path of the C++ compiler that torch.compile uses on a CPU."""
    from minivllm.compilation.inductor_options import find_cpp_compiler

    name = find_cpp_compiler()
    return name and shutil.which(name)


def _defaults() -> dict[str, dict[str, str]]:
    """The default settings of an engine on this machine: ``{setting: {"value", "why"}}``."""
    import torch

    from minivllm.compilation.compiler import cannot_compile_reason
    from minivllm.device.memory import MAX_CPU_CACHE_BYTES
    from minivllm.device.policy import DevicePolicy
    from minivllm.engine.resolve import (
        DEFAULT_BLOCK_SIZE,
        DEFAULTS,
        resolve_cache_dtype,
        resolve_device,
        resolve_dtype,
    )
    from minivllm.startup.openmp import wait_policy

    device = resolve_device("auto")
    policy = DevicePolicy.of(torch.device(device))
    dtype, why_dtype = resolve_dtype("auto", "bfloat16", device)
    cache_dtype, why_cache_dtype = resolve_cache_dtype("auto", dtype, device, policy.capability)
    if cache_dtype == "float32":
        why_cache_dtype += "; --kv-cache-dtype bfloat16 takes half the memory"
    elif device == "cuda":
        why_cache_dtype += "; --kv-cache-dtype fp8_e4m3 takes half the memory"
    limits = DEFAULTS[device]
    if device == "cuda":
        why_device, share = "PyTorch sees a CUDA device", "of the device's memory"
    else:
        why_device = "PyTorch sees no CUDA device"
        share = f"of the free memory, at most {format_bytes(MAX_CPU_CACHE_BYTES)}"
    reason = cannot_compile_reason(torch.device(device))
    if reason is None:
        kernels = (
            "FlexAttention for prompts, loops over strips for single tokens and short chunks"
            if policy.on_cpu
            else "FlexAttention"
        )
        attention = {"value": f"compiled: {kernels}", "why": "torch.compile works here; latents are gathered"}
    else:
        attention = {"value": "gather and SDPA, uncompiled", "why": reason}
    return {
        "device": {"value": device, "why": why_device},
        "dtype": {"value": dtype, "why": f"for a checkpoint saved in bfloat16: {why_dtype}"},
        "kv_cache_dtype": {"value": cache_dtype, "why": why_cache_dtype},
        "attention": attention,
        "kv_cache": {
            "value": f"{limits.memory_utilization:.0%} {share}",
            "why": "unless it is sized explicitly",
        },
        "block_size": {"value": str(DEFAULT_BLOCK_SIZE), "why": "tokens per KV block"},
        "max_num_seqs": {"value": str(limits.max_num_seqs), "why": "requests that run at the same time"},
        "max_num_batched_tokens": {
            "value": str(limits.max_num_batched_tokens),
            "why": "token budget of one step; a server takes less",
        },
        "threads": {"value": str(torch.get_num_threads()), "why": f"of OpenMP; {wait_policy()}"},
    }


def _package_versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpu() -> dict[str, Any]:
    """Model, usable cores, and the instructions that decide how fast low-precision matrix products are."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "usable_cores": usable, "flags": [flag for flag in _CPU_FLAGS if flag in flags]}


def _memory() -> dict[str, int | None]:
    """Physical and available memory [bytes]; None where the system does not tell."""
    memory: dict[str, int | None] = {"total": None, "available": None}
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                memory["total" if name == "MemTotal" else "available"] = int(rest.split()[0]) * 1024
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory["total"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return memory


def _cuda_devices() -> list[dict[str, Any]]:
    """Name, compute capability and memory [bytes] of every CUDA device."""
    import torch

    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "memory": properties.total_memory,
            }
        )
    return devices


def _directories() -> dict[str, str]:
    """Where downloads, compiled code and the chat history are kept."""
    import torch

    from minivllm.compilation.compiler import cache_directory, packages_directory
    from minivllm.device.policy import DevicePolicy
    from minivllm.engine.resolve import resolve_device
    from minivllm.hub.fetch import model_cache

    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    hugging_face = os.environ.get("HF_HUB_CACHE") or str(
        Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface") / "hub"
    )
    policy = DevicePolicy.of(torch.device(resolve_device("auto")))
    return {
        "models": str(model_cache()),
        "compiled_code": str(packages_directory() if policy.keeps_packages else cache_directory()),
        "hugging_face": os.path.expanduser(hugging_face),
        "chat_history": str(default_history_path()),
    }


def default_history_path() -> Path:
    """Where messages typed earlier are kept:
    $MINIVLLM_HOME, else where the XDG base directories put state."""
    if os.environ.get("MINIVLLM_HOME"):
        return home_directory() / "chat_history"
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "minivllm" / "chat_history"
