"""In a process that has this folder in PYTHONPATH, ``import torch`` brings a pretended GPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    """Of torch alone, and once."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        if "tests.pretended_gpu.install" in sys.modules:  # which imports torch, and is told to install
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_install(module: Any) -> None:
                execute(module)
                from tests.pretended_gpu.install import install

                install()

            spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
