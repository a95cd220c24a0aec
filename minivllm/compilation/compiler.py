"""Compiling regions: one place that decides between compiled and eager, reports progress and counts recompilations."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels_triton_free.inductor import patch_inductor

logger = logging.getLogger(__name__)

MAX_ROWS = 65536
MIN_FREE_BYTES = 64 * 2**20
"""Room on disk for the compiled code of one engine, and for what the C++ compiler writes on the way."""


def cache_directory() -> Path:
    """Where compiled code is kept between runs: TORCHINDUCTOR_CACHE_DIR, or a folder below MINIVLLM_HOME."""
    home = Path(os.environ.get("MINIVLLM_HOME") or Path.home() / ".cache" / "minivllm")
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or home / "inductor")


def cannot_compile_reason(device: torch.device) -> str | None:
    """Why torch.compile cannot work here, or None if it can. Makes the directory for compiled code."""
    if device.type != "cuda" and find_cpp_compiler() is None:
        return (
            "no C++ compiler (g++ or clang++) was found, which torch.compile needs on a CPU; "
            "install one, or name one in CXX"
        )
    directory = cache_directory()
    advice = "set MINIVLLM_HOME to a directory that can hold it"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        return f"compiled code cannot be kept in {directory} ({error.strerror or error}); {advice}"
    if free < MIN_FREE_BYTES:
        return (
            f"compiled code needs {MIN_FREE_BYTES // 2**20} MiB, but only {free // 2**20} MiB are free for "
            f"{directory}; {advice}"
        )
    return None


def find_cpp_compiler() -> str | None:
    """The C++ compiler to use: $CXX if it is there, else g++, clang++ or c++, else None."""
    candidates = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return next((name for name in candidates if name and shutil.which(name)), None)


class RegionsMissing(Exception):
    """A region was called that is to be built in the background."""


class RegionCompiler:
    """Hands out regions, compiled by torch.compile or as they are.

    After ``freeze`` every further compilation is counted and logged, because serving then stutters for seconds.
    Dynamo and Inductor are imported with the first compilation: a process that finds everything packaged needs neither.
    """

    def __init__(self, enabled: bool, device: torch.device | None = None) -> None:
        self.enabled = enabled
        self._dynamic_pages = device is None or device.type == "cpu"
        self.num_recompilations = 0
        self._frozen = False
        if enabled:
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory()))

    def __call__(
        self,
        name: str,
        function: Callable,
        rows: Sequence[int],
        widths: Sequence[int] = (),
        caches: Sequence[int] = (),
        *,
        constants: object,
    ) -> Callable:
        """The function to call in place of ``function``.

        rows: positions of the arguments whose tensors, nested ones too, have a dynamic first dimension of at least 2.
        widths: positions of those whose tensors of more than one dimension have a dynamic last one as well.
        caches: positions of KV caches, whose number of pages is dynamic on a CPU: it follows from the free memory, and
        compiled code that is kept on disk should serve the next start. All other dimensions are constants.
        constants: everything besides its tensors that the function depends on, with a repr that tells it apart: what is
        kept on disk is found by it.
        """
        if not self.enabled:
            return function
        compiled = torch.compile(_own_code(name, function), fullgraph=True, backend=self._compile_graph)
        first = True

        def region(*args: Any) -> Any:
            nonlocal first
            if not first:
                return compiled(*args)
            first = False
            dynamic = [*rows, *caches] if self._dynamic_pages else rows
            mark_dynamic([args[index] for index in dynamic], [args[index] for index in widths])
            started = time.perf_counter()
            logger.info("Compiling %s …", name)
            prepare_inductor()
            with only_marked_sizes_are_dynamic():
                result = compiled(*args)
            logger.info("Compiled %s in %.1f s.", name, time.perf_counter() - started)
            return result

        return region

    @property
    def min_rows(self) -> int:
        """Fewest rows that regions take: what torch.compile takes for dynamic cannot be one."""
        return 2 if self.enabled else 1

    @property
    def makes_up_results(self) -> bool:
        """True while regions stand in for what is being built aside, always with the shapes of their first call."""
        return False

    def build_in_background(self, call_regions: Callable[[], None]) -> None:
        """Have another process build what RegionsMissing was raised for, at the lowest priority.

        call_regions: calls all of them, in that process.
        """
        raise RegionsMissing

    @property
    def is_building(self) -> bool:
        """True while that process is at work."""
        return False

    def leave_builds(self) -> None:
        """Let that process finish, even without this one."""

    def finish_builds(self) -> bool:
        """Wait for regions that are being built aside; True if there were any, whose results so far were made up."""
        return False

    def freeze(self) -> None:
        """Warm-up is over: from here on nothing should compile."""
        self._frozen = True

    def _compile_graph(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """Inductor, as the backend of all regions of this engine, so that their compilations can be counted."""
        if self._frozen:
            self.num_recompilations += 1
            logger.warning(
                "A region is compiled again after warm-up (%d so far): a shape or dtype that warm-up did not cover.",
                self.num_recompilations,
            )
        return compile_fx(graph, example_inputs)


def compile_fx(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
    """Inductor."""
    from torch._inductor.compile_fx import compile_fx as inductor

    compiled: Any = inductor(graph, example_inputs)
    return compiled


def prepare_inductor() -> None:
    """Name the C++ compiler: Inductor itself only looks for $CXX, or else for one fixed name per platform."""
    from torch._inductor import config

    patch_inductor()
    compiler = find_cpp_compiler()
    if compiler is not None and compiler not in config.cpp.cxx:
        config.cpp.cxx = (compiler,)  # type: ignore[assignment]


@contextmanager
def only_marked_sizes_are_dynamic() -> Iterator[None]:
    """Sizes that happen to be equal are not taken for one and the same (duck shaping), and sizes that differ from what
    another engine of this process had are not made dynamic by themselves: FlexAttention cannot be compiled so."""
    import torch.fx.experimental._config

    with (
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),
    ):
        yield


def _own_code(name: str, function: Callable) -> Callable:
    """function behind a code object of its own.

    Dynamo keeps compiled graphs per code object and searches them one by one at every call; regions that share code
    would be in each other's way, count against one recompilation limit and be taken for changing shapes of one thing.
    """

    def region(*args: Any) -> Any:
        return function(*args)

    code = region.__code__.replace(co_name=name.replace(" ", "_"))
    return types.FunctionType(code, region.__globals__, name, None, region.__closure__)


def mark_dynamic(rows: Any, widths: Any) -> None:
    """Declare dimensions dynamic: the first of every tensor in rows, the last of every wide tensor in widths."""
    from torch.utils._pytree import tree_iter

    for tensor in tree_iter(rows):
        if isinstance(tensor, Tensor):
            torch._dynamo.mark_dynamic(tensor, 0, min=2, max=MAX_ROWS)
    for tensor in tree_iter(widths):
        if isinstance(tensor, Tensor) and tensor.dim() > 1 and tensor.shape[-1] > 1:
            torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1, min=2, max=MAX_ROWS)
