"""Parts that all packages have in common, compiled once for all of a build, not once for each.

Every package is a shared object of three texts: kernels, what calls them, and PyTorch's interface to it. g++
took 190 of 310 s of processor time for the 18 packages of SmolLM2-135M: 120 s for callers and interfaces,
though they are not optimised much. Most of that is the interface, which is the same text in each package, and
``std::regex``, which parses the name of a device; most of the rest is reading headers. With the interface as
an object of its own and with precompiled headers a caller takes 1.5 s in place of 6.5, and kernels take 1.6 s
less each. The parts themselves take 20 s.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

logger = logging.getLogger(__name__)

FEWEST_PACKAGES = 4
"""Packages to be built for which the parts are worth their time."""
ROOM_BYTES = 2**30
"""Free room on disk that they are made with; precompiled headers are 300 MB."""

KERNEL_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
CALLER_HEADER = """\
#include <torch/csrc/inductor/aoti_include/common.h>
#include <torch/csrc/inductor/aoti_runtime/arrayref_tensor.h>
#include <torch/csrc/inductor/aoti_runtime/thread_local.h>
#include <torch/csrc/inductor/cpp_wrapper/device_internal/cpu.h>
"""
DECLARED = """
#include <torch/csrc/inductor/aoti_runtime/model.h>
#include <iostream>
namespace torch::aot_inductor { extern template class AOTInductorModelBase<AOTInductorModel>; }
"""
"""Stands in a package where the interface was."""
DEFINED = "\nnamespace torch::aot_inductor { template class AOTInductorModelBase<AOTInductorModel>; }\n"


class SharedParts:
    """The folder of one build: packages in the making, and the parts as soon as they are whole.

    As a context it makes the folder and deletes it at the end, and what builds left that were killed.
    """

    def __init__(self, directory: Path) -> None:
        """directory: where packages are kept."""
        self._directory = directory
        self.folder = directory

    def __enter__(self) -> SharedParts:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _alone_in(self._directory):
            for left in self._directory.glob("building-*"):
                with contextlib.suppress(OSError), (left / "lock").open("a") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its build is alive
                    shutil.rmtree(left, ignore_errors=True)
            self.folder = Path(tempfile.mkdtemp(prefix="building-", dir=self._directory))
            self._lock = (self.folder / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    @property
    def has_room(self) -> bool:
        return shutil.disk_usage(self.folder).free > ROOM_BYTES

    def make(self) -> None:
        """Compile the parts. Raises what the compiler raises; packages are built without a part then."""
        from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions, _is_gcc, get_cpp_compiler
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        options: dict[str, Any] = {"aot_mode": True, "device_type": "cpu", "vec_isa": pick_vec_isa()}

        def make_part(name: str, text: str, **more: Any) -> None:
            making = self.folder / f"making-{name}"
            making.mkdir()
            source = making / name
            source.write_text(text)
            build_option = CppTorchDeviceOptions(**options, **more)
            is_header = name.endswith(".h")
            where = {} if is_header else {"output_dir": str(making)}
            builder = CppBuilder(
                name=str(source) if is_header else source.stem,
                sources=str(source),
                BuildOption=build_option,
                **where,
            )
            builder.build()
            making.rename(self.folder / name.partition(".")[0])

        parts = [("interface.cpp", _interface() + DEFINED, {"compile_only": True, "min_optimize": True})]
        if _is_gcc(get_cpp_compiler()):  # others note where a header was
            header = {"precompiling": True}
            parts += [("kernel.h", KERNEL_HEADER, header)]
            parts += [("caller.h", CALLER_HEADER + DECLARED, {**header, "min_optimize": True})]
        with ThreadPoolExecutor() as pool:
            for made in [pool.submit(make_part, name, text, **more) for name, text, more in parts]:
                made.result()

    @contextmanager
    def used(self) -> Iterator[dict[str, Any]]:
        """Inductor makes use of the parts that there are; gives the options that it needs for that."""
        from torch._inductor import codecache, cpp_builder

        compile_all, flags_of = codecache.AotCodeCompiler.compile, cpp_builder._get_optimization_cflags
        libraries = os.pathsep.join(filter(None, [str(self.folder / "interface"), os.getenv("LIBRARY_PATH")]))

        def linked(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
            flags, linker_flags = flags_of(*args, **kwargs)
            return flags, [*linker_flags, "l:interface.o"]

        def compile_without(graph: Any, caller: str, kernels: str, *args: Any, **kwargs: Any) -> Any:
            text = _interface().split("\n", 1)[1].strip()
            if caller.count(text) != 1 or not (self.folder / "interface").is_dir():
                return compile_all(graph, caller, kernels, *args, **kwargs)
            with (
                patch.object(cpp_builder, "_get_optimization_cflags", linked),
                patch.dict(os.environ, {"LIBRARY_PATH": libraries}),
            ):
                return compile_all(graph, caller.replace(text, DECLARED), kernels, *args, **kwargs)

        def header(name: str, command: str, **options: Any) -> str:
            made = "caller" if options.get("min_optimize") else "kernel"
            return str(self.folder / made / f"{made}.h")

        has_headers = all((self.folder / name).is_dir() for name in ("caller", "kernel"))
        with (
            patch.object(codecache.AotCodeCompiler, "compile", compile_without),
            patch.object(codecache, "_precompile_header", header),
        ):
            yield {"aot_inductor.precompile_headers": has_headers}


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Other processes wait here: a folder that has no lock yet looks like one that was left. Where
    directories cannot be locked (some network file systems), none waits."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _interface() -> str:
    """PyTorch's text of the interface, after the header that callers begin with."""
    import torch._inductor.codegen as codegen

    text = (Path(codegen.__path__[0]) / "aoti_runtime" / "interface.cpp").read_text()
    return "#include <torch/csrc/inductor/aoti_include/cpu.h>\n" + text
