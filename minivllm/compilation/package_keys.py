"""Keys: what compiled code is found by. Equal keys mean equal code.

The key of a region's code is made of

    its name                for people
    its inputs              dtype, device, layout and shape of each; "*" stands for a size that varies
    its constants           their repr, so that every field of every Code counts
    classes and functions   the module and qualified name of each one in its function and its constants
    source outside          of those among them that lie outside ``source_folders``: plug-ins, a user's model,
                            tests. It is the text of their modules, and of the modules that those use from
                            the same package or folder

and, the same for all regions of an engine, of the environment:

    source inside           the digest of all files in ``source_folders``
    options                 what ``inductor_options.py`` sets, and the variables TORCHINDUCTOR_*
    versions                of PyTorch, and the name of the C++ compiler
    machine                 architecture and features of the CPU, and the number of threads

``region_key`` is the first four: equal regions of one engine share their code. ``package_key`` is all of it,
hashed into the name of a file.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch

import kernels_triton_free
import minivllm
from minivllm.compilation import inductor_options
from minivllm.compilation.regions import Region

PACKAGES_WITH_REGION_CODE = (
    "linear",
    "models",
    "program",
    "spec_decode/eagle",
    "specs",
    "transformers_models",
    "weights",
)
"""Folders of minivllm whose sources the code of regions is made from."""


def source_folders() -> list[Path]:
    """Those of minivllm whose code is compiled, and kernels_triton_free."""
    assert kernels_triton_free.__file__ is not None and minivllm.__file__ is not None
    home = Path(minivllm.__file__).parent
    return [
        Path(kernels_triton_free.__file__).parent,
        *(home / name for name in PACKAGES_WITH_REGION_CODE),
    ]


def region_key(region: Region) -> tuple[str, ...]:
    """All that the code of a region depends on, but for sources and environment."""
    named = (f"{one.__module__}:{one.__qualname__}" for one in _definitions(region))
    inputs = (spec.describe() for _, spec in region.tensors())
    return region.name, repr(region.constants), " ".join(sorted(named)), *inputs


def package_key(region: Region) -> str:
    """Names the code of one region on one machine."""
    sources = sorted({_source_outside(one) for one in _definitions(region)})
    parts = [*region_key(region), *sources, *environment()]
    return f"{region.name.replace(' ', '_')}-{hash_of(chr(0).join(parts).encode())}"


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _definitions(region: Region) -> set[Any]:
    """Classes and functions that a region is made of: in fields of dataclasses, collections, and arguments of
    partials."""
    found = set[Any]()
    waiting: list[Any] = [region.function]
    if region.constants is not region.function:
        waiting.append(region.constants)
    while waiting:
        value: Any = waiting.pop()
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is functools.partial:
            waiting += [value.func, *value.args, *value.keywords.items()]
        elif kind is MethodType:
            waiting += [value.__func__, type(value.__self__)]
        elif kind is FunctionType:
            found.add(value)
        elif isinstance(value, type):
            found.update(one for one in value.__mro__ if one.__module__ != "builtins")
        elif isinstance(value, Mapping):
            waiting += [*value.items(), kind]
        elif isinstance(value, tuple | list | set | frozenset):
            waiting += [*value, kind]
        else:
            waiting.append(kind)
            if is_dataclass(value):
                waiting += [getattr(value, field.name) for field in fields(value)]
    return found


_PLAIN = frozenset({int, float, bool, str, NoneType, torch.dtype})


def _source_outside(one: Any) -> str:
    """A digest of the module of a class or function, if ``environment`` does not hold it; else empty.
    Code without a file, such as that of a notebook, counts by its bytecode."""
    module = sys.modules.get(one.__module__)
    file = getattr(module, "__file__", None)
    if module is None or file is None:
        return "" if _is_library(module) else hash_of("\n".join(_bytecode(one)).encode())
    if _is_inside(file):
        return ""
    found, waiting = dict[str, bytes](), [module]
    while waiting:
        at = waiting.pop()
        path = str(getattr(at, "__file__", None))
        if path in found or _is_inside(path) or _is_library(at) or not path.endswith(".py"):
            continue
        found[path] = Path(path).read_bytes()
        used = {getattr(value, "__module__", None) for value in vars(at).values()}
        used |= {value.__name__ for value in vars(at).values() if isinstance(value, ModuleType)}
        near = [sys.modules[one] for one in used if isinstance(one, str) and one in sys.modules]
        waiting += [one for one in near if _are_neighbours(module, one)]
    return hash_of(b"\0".join(text for _, text in sorted(found.items()))) if found else ""


def _are_neighbours(module: ModuleType, other: ModuleType) -> bool:
    """Of one package, or modules without a package in one folder."""
    top, other_top = module.__name__.partition("."), other.__name__.partition(".")
    if top[1]:
        return other_top[0] == top[0]
    folders = {os.path.dirname(str(getattr(one, "__file__", one))) for one in (module, other)}
    return not other_top[1] and len(folders) == 1


def _is_library(module: ModuleType | None) -> bool:
    """PyTorch, whose version counts, and Python itself."""
    top = "" if module is None else module.__name__.partition(".")[0]
    return top == "torch" or (top in sys.stdlib_module_names and top != "__main__")


@functools.cache
def _is_inside(file: str) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in source_folders())


def _bytecode(one: Any) -> Iterator[str]:
    """What a function, or the functions of a class, do, without addresses or lines."""
    if isinstance(one, type):
        for name, value in sorted(vars(one).items()):
            if isinstance(value, FunctionType):
                yield name
                yield from _bytecode(value)
        return
    code = one.__code__ if isinstance(one, FunctionType) else one
    if isinstance(code, CodeType):
        yield f"{code.co_code.hex()} {code.co_names}"
        for constant in code.co_consts:
            yield from _bytecode(constant) if isinstance(constant, CodeType) else (repr(constant),)


@functools.cache
def _digest_inside() -> str:
    digest = hashlib.sha256()
    for folder in source_folders():
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def environment() -> tuple[str, ...]:
    """Everything the generated code depends on besides the region itself and sources outside."""
    settings = sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith("TORCHINDUCTOR_")
    )
    return (
        _digest_inside(),
        torch.__version__,
        platform.machine(),
        _cpu_features(),
        str(torch.get_num_threads()),
        *inductor_options.described(),
        *(setting for setting in settings if "CACHE" not in setting),
    )


@functools.cache
def _cpu_features() -> str:
    """Inductor compiles for the very CPU it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
