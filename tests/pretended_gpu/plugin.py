"""``pytest -p tests.pretended_gpu.plugin``: the tests of this run have the pretended GPU.

PRETENDED_GPU_FOR_ALL: so have engines that ask for a CPU, and engines that ask for uncompiled code get graphs.
"""

from __future__ import annotations

import os
from typing import Any

from tests.pretended_gpu.install import install

install()


def _move_to_gpu() -> None:
    from minivllm.config.engine_args import EngineArgs

    prepare = EngineArgs.__post_init__

    def move(self: Any) -> None:
        if self.device == "cpu":
            object.__setattr__(self, "device", "cuda")
        if self.enforce_eager:
            object.__setattr__(self, "enforce_eager", False)
        if self.async_scheduling is None:  # tests count tokens and steps
            object.__setattr__(self, "async_scheduling", False)
        prepare(self)

    EngineArgs.__post_init__ = move  # type: ignore[method-assign]


if os.environ.get("PRETENDED_GPU_FOR_ALL"):
    _move_to_gpu()
