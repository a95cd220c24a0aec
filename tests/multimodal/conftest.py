"""Tiny models that see, saved once for a session, and engines of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from minivllm import LLM
from minivllm.engine.core import EngineCore
from tests.multimodal.models import KINDS, WITH_EXPERTS, save

MakeEngine = Callable[..., Any]


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of model -> where it is saved."""
    return {kind: save(tmp_path_factory.mktemp(kind), kind) for kind in (*KINDS, *WITH_EXPERTS)}


@contextmanager
def engine(directory: Path, **changes: Any) -> Iterator[LLM]:
    """An uncompiled engine in this process; at its end nothing is left of any request."""
    settings = {
        "device": "cpu",
        "dtype": "float32",
        "enforce_eager": True,
        "num_gpu_blocks_override": 64,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_model_len": 512,
        **changes,
    }
    with LLM(str(directory), **settings) as llm:
        yield llm
        core = core_of(llm)
        while core.has_work():
            core.step()
        core.scheduler.check_integrity()
        if core.encodings is not None:
            assert core.encodings.num_held_pixels == 0
            assert core.encodings.num_bytes == core.executor.worker._images.num_bytes  # type: ignore[attr-defined]
            assert llm.llm_engine.images is not None and llm.llm_engine.images.num_kept == 0


def core_of(llm: LLM) -> EngineCore:
    return llm.llm_engine.client.core  # type: ignore[attr-defined,no-any-return]
