"""Compiling regions: one place that decides between compiled and eager,
reports progress and counts recompilations."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.compilation.inductor_options import OPTIONS, find_cpp_compiler
from minivllm.compilation.package_keys import region_key
from minivllm.compilation.regions import MAX_SIZE, Region, Size, flatten
from minivllm.compilation.row_counts import CodeByRows, RowCounts
from minivllm.hub.home import home_directory
from minivllm.plugins.plugin import import_object
from minivllm.plugins.points import CODE_GENERATORS

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 64 * 2**20
"""Room on disk for the compiled code of one engine, and for what the C++ compiler writes on the way."""


def cache_directory() -> Path:
    """Where compiled code is kept between runs: TORCHINDUCTOR_CACHE_DIR, or a folder below MINIVLLM_HOME.

    Inductor writes its own default into that variable as soon as it is used: a folder in the system's folder
    for files that programs throw away. The user did not choose it, and other users can write there: no place
    for code to load.
    """
    home = home_directory()
    chosen = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or home / "inductor")
    is_default = chosen.parent == Path(tempfile.gettempdir()) and chosen.name.startswith("torchinductor_")
    return home / "inductor" if is_default else chosen


def packages_directory() -> Path:
    """Where packages of regions are kept:
    below MINIVLLM_HOME, or in TORCHINDUCTOR_CACHE_DIR, beside Inductor's files.

    Never beside that folder, where the user may not be the only one who writes.
    """
    home, cache = home_directory(), cache_directory()
    return (home if cache == home / "inductor" else cache) / "regions"


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


class RegionCompiler:
    """Hands out regions, compiled by torch.compile or as they are.

    most: name of a Size -> the largest that it gets here. Compiled code then need not be ready for more: it
    counts elements in 32 bits where no tensor can have too many for that. single_rows: a region that declares
    it has code of its own for a single row.
    After ``freeze`` every further compilation is counted and logged, because serving then stutters for
    seconds. Dynamo and Inductor are imported with the first compilation: a process that finds everything
    packaged needs neither.
    """

    def __init__(
        self, enabled: bool, most: Mapping[str, int] | None = None, single_rows: bool = False
    ) -> None:
        self.enabled = enabled
        self._most = most or {}
        self._single_rows = single_rows
        self.rows = RowCounts(fewest=2 if enabled and not single_rows else 1)
        self.num_recompilations = 0
        self._frozen = False
        self._made: dict[tuple[object, ...], Callable] = {}
        if enabled:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_directory())

    def __call__(self, region: Region) -> Callable:
        """What to call in place of the region's function. Equal regions share one."""
        if not self.enabled:
            return region.function
        key = region_key(region)
        if key not in self._made:
            self._made[key] = self._make(region)
        return self._made[key]

    def _make(self, region: Region) -> Callable:
        """torch.compile compiles a region with its first call."""
        several = self._compiled(region)
        if not self._single_rows or not region.has_code_for("single"):
            return several
        return CodeByRows(several, self._compiled(region.fixed("single")), None, [None] * len(region.inputs))

    def _compiled(self, region: Region) -> Callable:
        compiled = torch.compile(_own_code(region), fullgraph=True, backend=self._compile_graph)
        first = True

        def run(*args: Any) -> Any:
            nonlocal first
            if not first:
                return compiled(*args)
            first = False
            tensors: list[Tensor] = []
            flatten(args, tensors)
            region.check(tensors, layout=False)
            for (_, spec), tensor in zip(region.tensors(), tensors):
                for dim in spec.dynamic:
                    size = spec.shape[dim]
                    assert isinstance(size, Size)
                    torch._dynamo.mark_dynamic(tensor, dim, min=2, max=self._most.get(size.name, MAX_SIZE))
            started = time.perf_counter()
            logger.info("Compiling %s …", region.name)
            prepare_inductor()
            with only_marked_sizes_are_dynamic(), bounds_in_cache_keys(self._most):
                result = compiled(*args)
            logger.info("Compiled %s in %.1f s.", region.name, time.perf_counter() - started)
            return result

        return run

    @property
    def is_complete(self) -> bool:
        """Whether all regions that were handed out can be called, or only compile when they are called."""
        return True

    def build(self) -> None:
        """Make ``is_complete`` true, however long it takes."""

    def num_built(self) -> int:
        """How many of ``num_regions`` have their code, on disk or loaded."""
        return self.num_regions

    @property
    def num_regions(self) -> int:
        """Regions that ``is_complete`` speaks of."""
        return 0

    def build_in_background(self) -> bool:
        """Build in another process, at a low priority; False where that is not possible."""
        return False

    @property
    def is_building(self) -> bool:
        """True while that process is at work.
        Regions that are asked for again afterwards have what it built."""
        return False

    def leave_builds(self) -> None:
        """Let that process finish, even without this one."""

    def freeze(self) -> None:
        """Warm-up is over: from here on nothing should compile."""
        self._frozen = True

    def _compile_graph(self, graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        """Inductor, as the backend of all regions of this engine,
        so that their compilations can be counted."""
        if self._frozen:
            self.num_recompilations += 1
            logger.warning(
                "A region is compiled again after warm-up (%d so far): a shape or dtype that warm-up did not "
                "cover.",
                self.num_recompilations,
            )
        return compile_fx(graph, example_inputs)


def compile_fx(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
    """Inductor. It is not asked for less exact products of float32:
    those are routers, whose choices would change."""
    from torch._inductor.compile_fx import compile_fx as inductor

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
        compiled: Any = inductor(graph, example_inputs)
    return compiled


def prepare_inductor() -> None:
    """Name the C++ compiler: Inductor itself only looks for $CXX, or else for one fixed name per platform."""
    from torch._inductor import config

    for generator in CODE_GENERATORS:
        import_object("a code generator", generator)()
    for name, value in OPTIONS.items():
        setattr(config, name, value)
    compiler = find_cpp_compiler()
    if compiler is not None and compiler not in config.cpp.cxx:
        config.cpp.cxx = (compiler,)  # type: ignore[assignment]


@contextmanager
def only_marked_sizes_are_dynamic() -> Iterator[None]:
    """Sizes that happen to be equal are not taken for one and the same (duck shaping), and sizes that differ
    from what another engine of this process had are not made dynamic by themselves: FlexAttention cannot be
    compiled so."""
    import torch.fx.experimental._config

    with (
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        torch._dynamo.config.patch(automatic_dynamic_shapes=False),
    ):
        yield


@contextmanager
def bounds_in_cache_keys(most: Mapping[str, int]) -> Iterator[None]:
    """Inductor's cache on disk finds code whatever the bounds of its sizes were, and then tells Dynamo that
    the sizes of this engine have the bounds of that one, which is an error where they are smaller."""
    import torch.compiler.config

    with torch.compiler.config.patch(cache_key_tag=repr(sorted(most.items()))):  # type: ignore[attr-defined]
        yield


def _own_code(region: Region) -> Callable:
    """The region's function behind a code object of its own.

    Dynamo keeps compiled graphs per code object and searches them one by one at every call; regions that
    share code would be in each other's way, count against one recompilation limit and be taken for changing
    shapes of one thing.
    """
    function = region.function

    def call(*args: Any) -> Any:
        return function(*args)

    code = call.__code__.replace(co_name=region.name.replace(" ", "_"))
    return types.FunctionType(code, call.__globals__, region.name, None, call.__closure__)
