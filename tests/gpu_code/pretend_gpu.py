"""A GPU that is not there: what PyTorch, Inductor and Triton ask of a device is answered without one.

Four replacements: ``torch.cuda`` says what the card is; FakeTensorMode makes tensors on it; Inductor computes
constants on a CPU and compiles in this process; Triton's driver knows the target, and launches nothing.
``pretend_gpu`` comes before anything is compiled, once per process, which is of no other use afterwards.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Card:
    """Properties of a CUDA device under PyTorch's names. By default those of an H200."""

    name: str = "NVIDIA H200"
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    total_memory: int = 150_110_011_392
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232_448
    shared_memory_per_multiprocessor: int = 233_472
    L2_cache_size: int = 62_914_560
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    uuid: str = "pretended"


def pretend_gpu(card: Card) -> None:
    """From now on this process has the card."""
    _answer_for_cuda(card)
    _make_fake_tensors_without_a_device()
    _fold_constants_on_a_cpu()
    _compile_in_this_process()
    _answer_for_triton(card)


def answers_of(card: Card) -> dict[str, Callable[..., Any]]:
    """What ``torch.cuda`` says where this card is there, by the names of its functions."""
    if torch.version.cuda is None:
        torch.version.cuda = "13.0"  # heuristics ask with which toolkit PyTorch was built
    state = torch.zeros(16, dtype=torch.uint8)
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: (card.major, card.minor),
        "get_device_name": lambda device=None: card.name,
        "get_arch_list": lambda: [f"sm_{card.major}{card.minor}"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: True,
        "mem_get_info": lambda device=None: (card.total_memory, card.total_memory),
        "memory_allocated": lambda device=None: 0,
        "get_rng_state": lambda device="cuda": state,
        "set_rng_state": lambda *args, **kwargs: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "_lazy_init": lambda: None,
    }


def _answer_for_cuda(card: Card) -> None:
    """Before torch._dynamo is imported, whose ``CudaInterface`` keeps some of these functions.
    A few it has anyway."""

    def raw_stream(device: int = 0) -> int:
        return 0

    answers = answers_of(card)
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_getCurrentRawStream = raw_stream  # imported by the modules that Inductor writes

    from torch._dynamo.device_interface import CudaInterface

    for name, answer in answers.items():
        public = name.removeprefix("_")
        if hasattr(CudaInterface, public) and public not in (
            "is_available",
            "get_rng_state",
            "set_rng_state",
        ):
            setattr(CudaInterface, public, staticmethod(answer))
    CudaInterface.get_raw_stream = staticmethod(raw_stream)


def _make_fake_tensors_without_a_device() -> None:
    """By the way that FakeTensorMode has for machines without CUDA,
    which it takes only where CUDA is not available."""
    from torch._subclasses import fake_tensor

    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)
    fake_tensor.init_gpu_context = lambda device: None
    folder = Path(torch.__file__).parent
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        register_device_guard(folder)


GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


def register_device_guard(folder: Path) -> None:
    """A PyTorch for CPUs has no guard of CUDA devices, which ``x[:, None]`` wants even of a fake x."""
    with tempfile.TemporaryDirectory() as scratch:
        source, library = Path(scratch) / "guard.cpp", Path(scratch) / "guard.so"
        source.write_text(GUARD)
        flags = ["-std=c++20", "-shared", "-fPIC", "-I", folder / "include", "-L", folder / "lib", "-lc10"]
        subprocess.run([os.environ.get("CXX", "g++"), source, "-o", library, *flags], check=True)
        ctypes.CDLL(str(library))


def _fold_constants_on_a_cpu() -> None:
    """Inductor computes what is constant in a graph with real tensors, on the device of the graph."""
    from torch._inductor.constant_folding import ConstantFolder
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if getattr(kwargs.get("device"), "type", None) == "cuda":
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)

    fold = ConstantFolder.run

    def fold_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return fold(self, *args, **kwargs)

    ConstantFolder.run = fold_on_cpu


def _compile_in_this_process() -> None:
    """Workers would not know the pretence. What comes from a cache would be loaded by the real driver, and
    the static launcher is C++ that wants a device."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    config.compile_threads = 1
    config.fx_graph_cache = config.autotune_local_cache = config.use_static_cuda_launcher = False
    functorch_config.enable_autograd_cache = False


def _answer_for_triton(card: Card) -> None:
    """Triton "loads" a kernel by reading what ptxas made of it, so that decisions by numbers of registers,
    Inductor's and Triton's, are those of the card."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    class Utils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {
                "max_shared_mem": card.shared_memory_per_block_optin,
                "max_num_regs": card.regs_per_multiprocessor,
                "multiprocessor_count": card.multi_processor_count,
                "warpSize": card.warp_size,
                "sm_clock_rate": 1_980_000,  # [kHz], as that of the memory
                "mem_clock_rate": 3_201_000,
                "mem_bus_width": 6144,
            }

        def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, ...]:
            """(module, function, registers of a thread, 4-byte words of its stack,
            most threads of a block)."""
            used = resources(cubin)
            return 1, 1, used["REG"], used["STACK"] // 4, card.max_threads_per_block

    class Driver(CudaDriver):
        """Of this class, since Inductor asks whether the active driver is one of CUDA's."""

        def __init__(self) -> None:
            self.utils = Utils()
            self.launcher_cls = lambda source, metadata: lambda *args, **kwargs: None
            self.get_device_capability = torch.cuda.get_device_capability
            self.get_current_stream = torch._C._cuda_getCurrentRawStream
            self.get_current_device, self.set_current_device = (
                torch.cuda.current_device,
                torch.cuda.set_device,
            )

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * card.major + card.minor, card.warp_size)

    triton.runtime.driver.set_active(Driver())


def resources(cubin: bytes) -> dict[str, int]:
    """REG: registers of a thread. STACK: bytes of its stack, where registers lie that are spilled."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", told)}
