"""Regions compiled ahead of time (AOTInductor) and kept on disk, so that the next start loads them in milliseconds.

Against torch.compile this saves two things on a CPU: a start needs neither Dynamo nor Inductor, and a call goes
straight into C++ instead of through guards. What a package was built for is in its file name, a hash of everything its
code depends on; so is the hash of the file itself, which makes a damaged package count as absent.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import kernels_triton_free
import minivllm
from minivllm.compilation.compiler import (
    MAX_ROWS,
    RegionCompiler,
    RegionsMissing,
    cache_directory,
    only_marked_sizes_are_dynamic,
    prepare_inductor,
)
from minivllm.compilation.package_builds import Child, PackageBuilds, can_fork
from minivllm.hub.file_lock import exclusive

logger = logging.getLogger(__name__)

WhenMissing = Literal["build", "raise"]

ROOMS_WITH_REGION_CODE = ("models", "quantization", "lora", "spec_decode")


class PackagedRegionCompiler(RegionCompiler):
    """Hands out regions that run from packages on disk, and builds the packages that are missing.

    The first call of a region decides. If there is no package, one is built aside, and until ``finish_builds`` the
    region returns zeros of the right shapes: a warm-up step then needs every region once, builds them side by side, and
    runs again. A region that cannot be packaged is compiled by torch.compile, with a warning.

    In the background a child process does all that, at a low priority: Dynamo and Inductor are imported there
    only, and a region without a package raises RegionsMissing here until that process is over.
    """

    def __init__(self, device: torch.device, directory: Path | None = None, *, in_background: bool = False) -> None:
        """in_background: requests are served by other means meanwhile."""
        super().__init__(enabled=True, device=device)
        self._directory = directory or cache_directory().parent / "regions"
        self._builds = PackageBuilds(functools.partial(settle_child, torch.get_num_threads()))
        self._when_missing: WhenMissing = "raise" if in_background and can_fork() else "build"
        self._is_announced = False
        self._regions: list[_PackagedRegion] = []
        self._child: Child | None = None

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
        several = self._package(name, function, rows, widths, caches, constants)
        if not rows:
            return several
        # A single row, decode with batch size 1, gets code of its own: without loops over rows, and without threads
        # for what is too small for them.
        single = self._package(f"{name} of one row", function, (), widths, caches, constants)
        first = rows[0]

        def region(*args: Any) -> Any:
            return (single if args[first].shape[0] == 1 else several)(*args)

        return region

    def _package(
        self,
        name: str,
        function: Callable,
        rows: Sequence[int],
        widths: Sequence[int],
        caches: Sequence[int],
        constants: object,
    ) -> _PackagedRegion:
        def compile_instead() -> Callable:
            return super(PackagedRegionCompiler, self).__call__(
                name, function, rows, widths, caches, constants=constants
            )

        region = _PackagedRegion(
            name, function, rows, widths, caches, constants, self._directory, self._start_build, compile_instead
        )
        region.when_missing = self._when_missing
        self._regions.append(region)
        return region

    @property
    def min_rows(self) -> int:
        return 1

    @property
    def makes_up_results(self) -> bool:
        return any(region.is_stand_in for region in self._regions)

    def finish_builds(self) -> bool:
        self._builds.wait()
        return sum(region.take_in_build() for region in self._regions) > 0

    def build_in_background(self, call_regions: Callable[[], None]) -> None:
        def trace_and_build() -> None:
            # Nothing compiled is run here: see settle_child.
            torch.set_num_threads(1)
            self._is_announced = True
            for region in self._regions:
                region.forget()
                region.when_missing = "build"
                region.may_load = False
            call_regions()
            self._builds.wait()

        self._child = Child(trace_and_build, in_background=True)
        self._when_missing = "build"
        for region in self._regions:
            region.when_missing = "build"

    @property
    def is_building(self) -> bool:
        return self._child is not None and self._child.is_running()

    def leave_builds(self) -> None:
        if self._child is not None and self.is_building:
            self._child.release()
            self._child = None

    def _start_build(self, name: str, build: Callable[[], None]) -> None:
        if not self._is_announced:
            self._is_announced = True
            logger.warning(
                "Compiling the model for this machine, %d regions at most. This takes a minute or two, once: later "
                "starts find them in %s.",
                len(self._regions),
                self._directory,
            )
        self._builds.start(name, build)


class _PackagedRegion:
    """One region: found on disk, being built, or loaded."""

    def __init__(
        self,
        name: str,
        function: Callable,
        rows: Sequence[int],
        widths: Sequence[int],
        caches: Sequence[int],
        constants: object,
        directory: Path,
        start_build: Callable[[str, Callable[[], None]], None],
        compile_instead: Callable[[], Callable],
    ) -> None:
        self._name, self._function, self._constants = name, function, constants
        self._rows, self._widths = {*rows, *caches}, set(widths)
        self._directory, self._start_build, self._compile_instead = directory, start_build, compile_instead
        self.when_missing: WhenMissing = "build"
        self.may_load = True
        self.forget()

    def forget(self) -> None:
        """As before the first call."""
        self._run: Callable | None = None
        self._key = ""
        self._placeholders: list[Tensor] = []

    def __call__(self, *args: Any) -> Any:
        if self._run is not None:
            return self._run(*args)
        if not self._key:
            self._key = package_key(self._name, self._constants, self._described(args))
            if self.may_load and self._load():
                return self(*args)
            if self.when_missing == "raise":
                self.forget()
                raise RegionsMissing
            self._build(args)
        if self._run is not None:
            return self._run(*args)
        return self._placeholders[0] if len(self._placeholders) == 1 else tuple(self._placeholders)

    @property
    def is_stand_in(self) -> bool:
        """True from its first call until it is built."""
        return self._run is None and bool(self._key)

    def take_in_build(self) -> bool:
        """Load what was built for this region, if anything was; torch.compile takes over if that failed."""
        if self._run is not None or not self._key:
            return False
        if not self._load():
            logger.warning("The region %r cannot be packaged; torch.compile takes over.", self._name)
            self._run = self._compile_instead()
        self._placeholders = []
        return True

    def _load(self) -> bool:
        """Take the package of this key from the disk; False if there is no sound one."""
        package = find_package(self._directory, self._key)
        if package is None:
            return False
        try:
            loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1)
        except RuntimeError as error:
            logger.warning("The package %s does not load and is built again: %s", package, error)
            package.unlink(missing_ok=True)
            return False
        run = loader.boxed_run

        def region(*args: Any) -> Any:
            tensors: list[Tensor] = []
            _flatten(args, tensors)
            out = run(tensors)
            return out[0] if len(out) == 1 else out

        self._run = region
        return True

    def _build(self, args: tuple) -> None:
        started = time.perf_counter()
        try:
            program = self._export(args)
        except Exception as error:
            # Export has no one exception type for what it does not support.
            logger.warning("The region %r cannot be exported (%s); torch.compile takes over.", self._name, error)
            self._run = self._compile_instead()
            return
        self._placeholders = _placeholder_outputs(program)
        logger.info("Compiling %s …", self._name)
        prepare_inductor()
        self._start_build(self._name, functools.partial(build_package, program, self._directory, self._key))
        logger.debug("Exported %s in %.1f s.", self._name, time.perf_counter() - started)

    def _described(self, args: tuple) -> list[str]:
        """What the generated code takes for granted of each tensor: all but the dynamic sizes."""
        described = []
        for tensor, dynamic in self._tensors(args):
            sizes = ["*" if dim in dynamic else str(size) for dim, size in enumerate(tensor.shape)]
            layout = str(tensor.layout) if tensor.is_mkldnn else f"contiguous={tensor.is_contiguous()}"
            described.append(f"{tensor.dtype} {tensor.device.type} [{','.join(sizes)}] {layout}")
        return described

    def _tensors(self, args: tuple) -> Iterator[tuple[Tensor, set[int]]]:
        """Every tensor of the arguments in order, with its dynamic dimensions."""
        for index, arg in enumerate(args):
            tensors: list[Tensor] = []
            _flatten((arg,), tensors)
            for tensor in tensors:
                dynamic = {0} if index in self._rows else set()
                if index in self._widths and tensor.dim() > 1 and tensor.shape[-1] > 1:
                    dynamic.add(tensor.dim() - 1)
                yield tensor, dynamic

    def _export(self, args: tuple) -> torch.export.ExportedProgram:
        """The region as a graph of a flat list of tensors. Raises whatever tracing raises."""
        from torch.export import Dim, export

        function = self._function

        class Region(torch.nn.Module):
            def forward(self, *tensors: Tensor) -> Any:
                return function(*_rebuild(args, iter(tensors)))

        tensors, shapes = [], []
        for tensor, dynamic in self._tensors(args):
            tensors.append(tensor)
            shapes.append({dim: Dim.AUTO(min=2, max=MAX_ROWS) for dim in dynamic} or None)
        with _tracing(), only_marked_sizes_are_dynamic():
            program = export(Region(), tuple(tensors), dynamic_shapes=(tuple(shapes),), strict=False)
        inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
        for node, shape in zip(inputs, shapes, strict=True):
            for dim in shape or ():
                size = node.meta["val"].shape[dim]
                # A package checks nothing when it is called, so its code must serve every size there can be.
                allowed = None if isinstance(size, int) else program.range_constraints.get(size.node.expr)
                if allowed is None or allowed.lower > 2 or allowed.upper < MAX_ROWS:
                    raise RuntimeError(f"tracing restricted dimension {dim} of {node.name} to {allowed or size}")
        return program


def settle_child(threads: int) -> None:
    """OpenMP's threads do not survive a fork, so a child may not start a parallel region; the code that it generates is
    for as many threads as the parent has."""
    from torch._inductor import config

    torch.set_num_threads(1)
    config.cpp.threads = threads


def build_package(program: torch.export.ExportedProgram, directory: Path, key: str) -> None:
    """Compile the program and put its package in place, whole or not at all. Raises what the compiler raises."""
    from torch._inductor import aoti_compile_and_package

    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = directory / f"{key}.lock"
    with exclusive(lock):
        # Whoever waited for the lock finds what the other process built meanwhile.
        if find_package(directory, key) is None:
            with tempfile.TemporaryDirectory(dir=directory) as scratch, _tracing():
                path = Path(scratch) / "region.pt2"
                aoti_compile_and_package(
                    program,
                    package_path=str(path),
                    # A precompiled header takes longer than it saves: all builds would wait for it, one core at work.
                    inductor_configs={"aot_inductor.precompile_headers": False},
                )
                os.replace(path, directory / f"{key}-{_hash_of(path.read_bytes())}.pt2")
        # A third process may hold a new file of this name then: it builds an equally good package.
        lock.unlink(missing_ok=True)


@contextmanager
def _tracing() -> Iterator[None]:
    """Export and Inductor want ordinary tensors, and warn of what PyTorch does to itself."""
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def find_package(directory: Path, key: str) -> Path | None:
    """The package of this key. One whose content is not what its name says is deleted."""
    for path in sorted(directory.glob(f"{key}-*.pt2")):
        try:
            if path.stem.rpartition("-")[2] == _hash_of(path.read_bytes()):
                return path
            logger.warning("The package %s is damaged and is built again.", path)
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("The package %s cannot be used: %s", path, error)
    return None


def package_key(name: str, constants: object, tensors: list[str]) -> str:
    """Names the code of one region on one machine: equal keys mean equal code."""
    parts = [name, repr(constants), *tensors, *_environment()]
    return f"{name.replace(' ', '_')}-{_hash_of(chr(0).join(parts).encode())}"


@functools.cache
def _environment() -> tuple[str, ...]:
    """Everything the generated code depends on besides the region itself."""
    digest = hashlib.sha256()
    assert kernels_triton_free.__file__ is not None and minivllm.__file__ is not None
    home = Path(minivllm.__file__).parent
    folders = [Path(kernels_triton_free.__file__).parent, *(home / room for room in ROOMS_WITH_REGION_CODE)]
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("TORCHINDUCTOR_"))
    return (
        digest.hexdigest(),
        torch.__version__,
        platform.machine(),
        _cpu_features(),
        str(torch.get_num_threads()),
        *(setting for setting in settings if "CACHE" not in setting),
    )


def _cpu_features() -> str:
    """Inductor compiles for the very CPU it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _flatten(value: tuple, tensors: list[Tensor]) -> None:
    """Append the tensors of nested tuples, in order."""
    for item in value:
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, tuple):
            _flatten(item, tensors)


def _rebuild(template: Any, tensors: Iterator[Tensor]) -> Any:
    """Inverse of _flatten: template with its tensors replaced, in order."""
    if isinstance(template, Tensor):
        return next(tensors)
    if not isinstance(template, tuple):
        return template
    items = [_rebuild(item, tensors) for item in template]
    return type(template)(*items) if hasattr(template, "_fields") else tuple(items)


def _placeholder_outputs(program: torch.export.ExportedProgram) -> list[Tensor]:
    """Zeros of the shapes that the region returns for the arguments it was traced with."""
    wanted = set(program.graph_signature.user_outputs)
    outputs = next(node for node in program.graph.nodes if node.op == "output").args[0]
    zeros = []
    for output in outputs:
        if output.name in wanted:
            value = output.meta["val"]
            sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
            zeros.append(torch.zeros(sizes, dtype=value.dtype, device=value.device))
    return zeros
