"""Regions compiled ahead of time (AOTInductor) and kept on disk,
so that the next start loads them in milliseconds.

Against torch.compile this saves two things on a CPU: a start needs neither Dynamo nor Inductor, and a call
goes straight into C++ instead of through guards. What a package was built for is in its file name (see
package_keys.py); so is the hash of the file itself, which makes a damaged package count as
absent.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.compilation.compiler import (
    RegionCompiler,
    cache_directory,
    only_marked_sizes_are_dynamic,
    packages_directory,
    prepare_inductor,
)
from minivllm.compilation.inductor_options import FIXED_ROWS_OPTIONS, PACKAGE_OPTIONS
from minivllm.compilation.package_keys import hash_of, package_key
from minivllm.compilation.packaged.package_builds import Child, PackageBuilds, can_fork
from minivllm.compilation.packaged.shared_parts import FEWEST_PACKAGES, SharedParts
from minivllm.compilation.regions import MAX_SIZE, Region, TensorSpec, filled, flatten
from minivllm.compilation.row_counts import CodeByRows, RowCounts
from minivllm.hub.fetch import exclusive

logger = logging.getLogger(__name__)

PACKAGE_NAME = "region"
"""What packages are called inside."""


class PackagedRegionCompiler(RegionCompiler):
    """Hands out regions that run from packages on disk, and builds the packages that are missing.

    What a region is compiled from is its declaration, so it is known at once whether its package is there. A
    region that cannot be packaged is compiled by torch.compile, with a warning. Where everything is found,
    neither Dynamo nor Inductor is imported.
    """

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(enabled=True, single_rows=True)
        self._directory = directory or packages_directory()
        self._regions: dict[str, _PackagedRegion] = {}
        self._packages: dict[Callable, list[_PackagedRegion]] = {}
        """What was handed out -> its packages for several rows, one and a few."""
        self._child: Child | None = None
        self._settle = functools.partial(settle_child, torch.get_num_threads())

    def __call__(self, region: Region) -> Callable:
        made = super().__call__(region)
        for packaged in self._packages[made]:
            if not packaged.is_ready:  # when it is asked for again, it may have been built meanwhile
                packaged.load(self._directory)
        return made

    def _make(self, region: Region) -> Callable:
        several = self._packaged(region)
        if not region.has_code_for("single"):
            self._packages[several] = [several]
            return several
        single, few = self._packaged(region.fixed("single")), None
        counts = tuple(region.counts("few").get(place) for place in range(len(region.inputs)))
        if region.has_code_for("few"):
            few = self._packaged(region.fixed("few"))
            self.rows = RowCounts(few=next(filter(None, counts)))
        made = CodeByRows(several, single, few, counts)
        self._packages[made] = [several, single] if few is None else [several, single, few]
        return made

    def _packaged(self, region: Region) -> _PackagedRegion:
        key = package_key(region)
        return self._regions.setdefault(key, _PackagedRegion(region, key, self._build))

    @property
    def is_complete(self) -> bool:
        return not self._missing

    @property
    def _missing(self) -> list[_PackagedRegion]:
        return [packaged for packaged in self._regions.values() if not packaged.is_ready]

    @property
    def num_regions(self) -> int:
        return len(self._regions)

    def num_built(self) -> int:
        return sum(
            packaged.is_ready or any(self._directory.glob(f"{key}-*.pt2"))
            for key, packaged in self._regions.items()
        )

    def build(self) -> None:
        missing = self._missing
        if missing:
            # A warning reaches standard error in a program that has not set up logging.
            logger.warning(
                "Compiling the model for this machine, %d regions. This takes some minutes, once: later "
                "starts find "
                "them in %s.",
                len(missing),
                self._directory,
            )
            self._build(missing)

    def _build(self, missing: list[_PackagedRegion]) -> None:
        self._build_packages(missing)
        for packaged in missing:
            if not packaged.load(self._directory):
                logger.warning(
                    "The region %r cannot be packaged; torch.compile takes over.", packaged.region.name
                )
                packaged.take(super()._make(packaged.region))

    def _build_packages(self, missing: list[_PackagedRegion]) -> None:
        """Export them one after the other, while another process compiles what all have in common; then
        compile what was exported, in as many processes as there are cores."""
        with SharedParts(self._directory) as shared:
            parts, builds = PackageBuilds(self._settle, "set of shared parts"), PackageBuilds(self._settle)
            prepare_inductor()
            if can_fork() and len(missing) >= FEWEST_PACKAGES and shared.has_room:
                parts.start("what all regions have in common", shared.make)
            programs = list(self._exported(missing))
            parts.wait()
            _try_instructions()
            for packaged, program in programs:
                name = packaged.region.name
                logger.info("Compiling %s …", name)
                build = functools.partial(build_package, program, self._directory, packaged, shared)
                builds.start(name, build)
            builds.wait()

    @staticmethod
    def _exported(
        missing: list[_PackagedRegion],
    ) -> Iterator[tuple[_PackagedRegion, torch.export.ExportedProgram]]:
        examples: dict[tuple[TensorSpec, int], Tensor] = {}
        for packaged in missing:
            region = packaged.region
            started = time.perf_counter()
            try:
                program = export_region(region, examples)
            except Exception as error:
                # Export has no one exception type for what it does not support.
                logger.warning("The region %r cannot be exported: %s", region.name, error)
                continue
            logger.debug("Exported %s in %.1f s.", region.name, time.perf_counter() - started)
            yield packaged, program

    def build_in_background(self) -> bool:
        if not can_fork():
            return False
        missing = self._missing

        def build() -> None:
            self._settle()
            self._build_packages(missing)

        self._child = Child(build, in_background=True)
        return True

    @property
    def is_building(self) -> bool:
        return self._child is not None and self._child.is_running()

    def leave_builds(self) -> None:
        if self._child is not None and self.is_building:
            self._child.release()
            self._child = None


class _PackagedRegion:
    """One region, whose package is loaded or missing."""

    def __init__(self, region: Region, key: str, build: Callable[[list[_PackagedRegion]], None]) -> None:
        """build: what a call does first if the package is missing."""
        self.region = region
        self.key = key
        self._build = build
        self._loaded: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        self._function: Callable | None = None
        self._package: Callable[[list[Tensor]], Sequence[Tensor]] | None = None
        """What is loaded, once the first arguments have been looked at:
        a package checks nothing when it is called."""
        self._run = self.bound()

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def bound(self, *last: Any) -> Callable:
        """The region with its last arguments, of which nothing is left to be done in a call.

        Python that runs between two regions is slow, since the weights that go through the CPU's caches drive
        out all that it needs: to flatten the 21 tensors of a layer of SmolLM2-135M took 12 us there, and 21
        like them 4 us over and over again (two cores of Zen 3).
        """
        own: list[Tensor] = []
        flatten(last, own)

        def run(*args: Any) -> Any:
            package = self._package
            if package is None:
                return self._run_otherwise(*args, *last)
            tensors: list[Tensor] = []
            flatten(args, tensors)
            tensors += own
            out = package(tensors)
            return out[0] if len(out) == 1 else out

        return run

    @property
    def is_ready(self) -> bool:
        return self._loaded is not None or self._function is not None

    def take(self, function: Callable) -> None:
        """Call this in place of a package."""
        self._function = function

    def load(self, directory: Path) -> bool:
        """Take the package of this key from the disk; False if there is no sound one."""
        package = find_package(directory, self.key)
        if package is None:
            return False
        try:
            loader = torch._C._aoti.AOTIModelPackageLoader(str(package), "model", True, 1, -1)
        except RuntimeError as error:
            logger.warning("The package %s does not load and is built again: %s", package, error)
            package.unlink(missing_ok=True)
            return False
        _delete_unpacked()
        self._loaded = loader.boxed_run
        return True

    def _run_otherwise(self, *args: Any) -> Any:
        """The first call, and every one where there is no package."""
        if self._function is None:
            tensors: list[Tensor] = []
            flatten(args, tensors)
            self.region.check(tensors)
            if not self.is_ready:
                self._build([self])
        if self._function is not None:
            return self._function(*args)
        assert self._loaded is not None
        self._package = self._loaded
        return self._run(*args)


def export_region(
    region: Region, examples: dict[tuple[TensorSpec, int], Tensor]
) -> torch.export.ExportedProgram:
    """The region as a graph of a flat list of tensors. Raises whatever tracing raises.

    examples: inputs of regions that were exported before, by their specs and how many equal ones came before
    them, to which those of this region are added.
    """
    from torch.export import Dim, export

    function, inputs = region.function, tuple(region.inputs.values())

    class Traced(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Any:
            return function(*filled(inputs, iter(tensors)))

    tensors, shapes = [], []
    seen: Counter[TensorSpec] = Counter()
    with _tracing(), only_marked_sizes_are_dynamic():
        for _, spec in region.tensors():
            place = spec, seen[spec]
            seen[spec] += 1
            if place not in examples:
                examples[place] = spec.example()
            tensors.append(examples[place])
            shapes.append({dim: Dim.AUTO(min=2, max=MAX_SIZE) for dim in spec.dynamic} or None)
        program = export(Traced(), tuple(tensors), dynamic_shapes=(tuple(shapes),), strict=False)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, (name, spec) in zip(nodes, region.tensors(), strict=True):
        for dim in spec.dynamic:
            size = node.meta["val"].shape[dim]
            # A package checks nothing when it is called, so its code must serve every size there can be.
            allowed = None if isinstance(size, int) else program.range_constraints.get(size.node.expr)
            if allowed is None or allowed.lower > 2 or allowed.upper < MAX_SIZE:
                raise RuntimeError(f"tracing restricted dimension {dim} of {name} to {allowed or size}")
    return program


def settle_child(threads: int) -> None:
    """OpenMP's threads do not survive a fork, so a child may not start a parallel region; the code that it
    generates is for as many threads as the parent has."""
    from torch._inductor import config

    torch.set_num_threads(1)
    config.cpp.threads = threads


def build_package(
    program: torch.export.ExportedProgram, directory: Path, packaged: _PackagedRegion, shared: SharedParts
) -> None:
    """Compile the program and put its package in place, whole or not at all.
    Raises what the compiler raises."""
    from torch._inductor import aoti_compile_and_package

    key, has_fixed_rows = packaged.key, packaged.region.rows is not None
    options = {**PACKAGE_OPTIONS, **(FIXED_ROWS_OPTIONS if has_fixed_rows else {})}
    lock = directory / f"{key}.lock"
    with exclusive(lock):
        # A process that waited for the lock finds what the other one built meanwhile.
        if find_package(directory, key) is None:
            with (
                tempfile.TemporaryDirectory(dir=shared.folder) as scratch,
                _tracing(),
                _generated_code_in(scratch),
                shared.used() as more,
            ):
                path = Path(scratch) / f"{PACKAGE_NAME}.pt2"
                aoti_compile_and_package(
                    program, package_path=str(path), inductor_configs={**options, **more}
                )
                os.replace(path, directory / f"{key}-{hash_of(path.read_bytes())}.pt2")
        # A third process may hold a new file of this name then: it builds an equally good package.
        lock.unlink(missing_ok=True)


@contextmanager
def _tracing() -> Iterator[None]:
    """Export and Inductor want ordinary tensors, and warn of what PyTorch does to itself."""
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _try_instructions() -> None:
    """Inductor compiles and loads a file for each set of vector instructions, once a process:
    children inherit it.

    Where that cannot be written, a child tries again, and its failure leaves the region to torch.compile.
    """
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    with contextlib.suppress(OSError):
        pick_vec_isa()


@contextmanager
def _generated_code_in(directory: str) -> Iterator[None]:
    """Inductor names what it generates by its content, and reads it back to pack it. In a shared folder, the
    build of another region with equal code writes the same files meanwhile: a package was found with a file
    still empty."""
    shared = cache_directory()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
    try:
        yield
    finally:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(shared)


def find_package(directory: Path, key: str) -> Path | None:
    """The package of this key. One whose content is not what its name says is deleted."""
    for path in sorted(directory.glob(f"{key}-*.pt2")):
        try:
            if path.stem.rpartition("-")[2] == hash_of(path.read_bytes()):
                return path
            logger.warning("The package %s is damaged and is built again.", path)
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("The package %s cannot be used: %s", path, error)
    return None


def _delete_unpacked() -> None:
    """Delete the files that PyTorch unpacked of packages that are loaded by now.

    PyTorch deletes them when it drops a package, which no process comes to at its end:
    every start would leave
    20 megabytes behind. A file whose code is mapped may be deleted: the code remains.
    """
    with contextlib.suppress(OSError):
        for path in re.findall(
            rf"(/.*/aotinductor_[^/]*)/{PACKAGE_NAME}/", Path("/proc/self/maps").read_text()
        ):
            shutil.rmtree(path, ignore_errors=True)
